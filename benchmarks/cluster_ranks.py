"""What every rank of an emulated cluster does: all contenders in turn, timed from a start agreed on."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import CONTENDERS, Case, Contender, Session, Slept
from benchmarks.contenders.burst import Burst
from benchmarks.memory import keep_freed_memory
from benchmarks.trials import TRIALS, chosen, hopeful
from burst_plugin.planning.planner import Links, plans
from burst_plugin.topology import Topology
from burst_plugin.types import DIRECTIONS
from tests.support.netns import interface_bytes

__all__ = ["Setting", "Work", "measure_in_rank", "visit_seconds"]

PAYLOAD = 1448 / 1514  # of a packet of 1500 bytes in an Ethernet frame
INTRA_BYTES_PER_S = 1e9  # about what gloo moves between namespaces of one machine
LEAD_S = 0.1  # by which a start is agreed on beforehand


@dataclass(frozen=True)
class Setting:
    """One emulated cluster."""

    nodes: int
    ranks_per_node: int
    rate_mbit: float
    nic: str = "rank"
    latency_ms: float = 0.0

    @property
    def topology(self) -> Topology:
        """Nodes and ranks."""
        return Topology(self.nodes, self.ranks_per_node)

    def is_of(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of a result is of this cluster."""
        return all(row[name] == value for name, value in asdict(self).items())

    @property
    def links(self) -> Links:
        """What the links carry at best: a NIC its rate, less what TCP, IP and Ethernet add to every packet."""
        return Links(INTRA_BYTES_PER_S, self.rate_mbit * 1e6 / 8 * PAYLOAD, self.nic)


@dataclass(frozen=True)
class Work:
    """What every rank runs on one cluster."""

    cases: tuple[Case, ...]
    slept: Slept | None
    names: tuple[str, ...]
    absent: Mapping[str, str]  # why, by name: asked once, before there are ranks
    rounds: int
    timeout_s: float
    parts: Mapping[tuple[Case, int], int | tuple[int, int]]  # by the planner, for heads exchanged by so many ranks


def _settle_memory() -> None:
    """Keep out of the times what no contender has a part in, and GPUs do not know.

    Python's collector would look through all imported libraries in the middle of a pass, for 0.1 s.
    """
    gc.collect()
    gc.freeze()
    keep_freed_memory()


def _defer_transfers() -> None:
    """Let the threads that move data have the processors only when no rank wants them.

    On a cluster copy engines and NICs move data, not what launches kernels; here both share a few processors, and a
    rank that has to wait for one of them before it may begin to sleep holds up all others. The lowest priority would
    not do: who has it still finishes its slice, of a millisecond or more. For all contenders alike.
    """
    main = threading.get_native_id()
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != main:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


@dataclass
class Entry:
    """One contender and its times so far, seconds, by direction."""

    contender: Contender
    session: Session
    times: dict[str, list[float]] = field(default_factory=lambda: {direction: [] for direction in DIRECTIONS})
    nic_bytes: dict[str, int] = field(default_factory=dict)
    groups: frozenset[dist.ProcessGroup] = frozenset()  # that it made

    def forget_times(self) -> None:
        """All turns so far were trials."""
        for times in self.times.values():
            times.clear()

    def close(self) -> None:
        """Destroy its groups: each has a thread that wakes up a hundred times a second, though nothing is sent.

        Hundreds of them would take from everyone what processors there are.
        """
        for group in self.groups:
            dist.destroy_process_group(group)

    @property
    def typical_s(self) -> float:
        """Of a forward and a backward pass: the sum of their medians, by which contenders are compared too."""
        return sum(median(times) for times in self.times.values())


def measure_in_rank(rank: int, setting: Setting, work: Work) -> list[tuple[Case, Links, dict[str, Any]]]:
    """What this rank measured; times are the same on every rank."""
    _settle_memory()
    found: list[tuple[Case, Links, dict[str, Any]]] = []
    for case in work.cases:
        found += [(case, setting.links, measured) for measured in _measure(case, work)]
        gc.collect()  # what is in cycles may hold groups that are destroyed
    return found


def _measure(case: Case, work: Work) -> list[dict[str, Any]]:
    """What this rank measured of all contenders on one case."""
    inputs = _inputs(case)
    found: list[dict[str, Any]] = []
    entries = []
    for name in work.names:
        kept, refused = _best(name, case, work, inputs)
        gc.collect()
        if kept is None:
            found.append({"contender": name, **refused})
        else:
            entries.append((name, kept))
            kept.forget_times()
    for number in range(work.rounds):  # in another order every time, the same on all ranks
        for _, entry in Random(number).sample(entries, len(entries)):
            _take_turn(entry, inputs)
    for name, entry in entries:
        entry.close()
        strategy = getattr(entry.contender, "strategy", None)
        measured = {"times": entry.times, "nic_bytes": entry.nic_bytes, "strategy": strategy}
        found.append({"contender": name, "configuration": entry.contender.name, **measured})
    return found


def _best(name: str, case: Case, work: Work, inputs: Sequence[Tensor]) -> tuple[Entry | None, dict[str, str]]:
    """The fastest configuration of a contender in a few turns, after one that opens connections; or why none.

    They take turns as contenders do, under the same conditions.
    """
    contender = next(c for c in CONTENDERS if c.name == name)
    if name in work.absent:
        return None, {"absent": work.absent[name]}
    configurations = [_planned(each, case, work.parts) for each in contender.configurations(case)]
    if not configurations:
        return None, {"refused": contender.refuse(case) or "no configuration can do this case"}
    prepared = [_prepared(each, case, work, inputs) for each in configurations]
    entries = {entry.contender.name: entry for entry in prepared}
    if work.slept is not None:
        _defer_transfers()
    for turn in range(TRIALS):
        for entry in entries.values():
            _take_turn(entry, inputs, count=turn == 0)
        typical_s = {name: entry.typical_s for name, entry in entries.items()}
        entries = {name: entries[name] for name in hopeful(typical_s)}
        if len(entries) == 1:
            break
    kept = entries[chosen(typical_s)]
    for entry in prepared:
        if entry is not kept:
            entry.close()
    return kept, {}


def _prepared(contender: Contender, case: Case, work: Work, inputs: Sequence[Tensor]) -> Entry:
    """A contender that has opened its connections, in a turn that does not count."""
    known = _groups()
    entry = Entry(contender, contender.prepare(case, work.slept))
    _take_turn(entry, inputs)
    entry.forget_times()
    entry.groups = _groups() - known
    return entry


def _groups() -> frozenset[dist.ProcessGroup]:
    """All process groups of this rank, whoever made them."""
    return frozenset(dist.distributed_c10d._world.pg_map)


def parts_by_degree(case: Case, slept: Slept, links: Links) -> dict[int, int | tuple[int, int]]:
    """The number of parts that the planner gives on these links, by how many ranks exchange heads."""
    found = plans(Topology(case.nodes, case.ranks_per_node), case.shapes, visit_seconds(case, slept), links)
    return {each.strategy.ulysses_degree: each.strategy.parts for each in reversed(found)}  # the best last


def _planned(contender: Contender, case: Case, parts: Mapping[tuple[Case, int], int | tuple[int, int]]) -> Contender:
    """A contender with a planner, ours, with its number of parts, if one was made; keys and values travel forward."""
    if not isinstance(contender, Burst) or not contender.several:
        return contender
    strategy = contender.strategy
    own = parts.get((case, strategy.ulysses_degree), strategy.parts)
    return replace(contender, strategy=replace(strategy, parts=own))


def _take_turn(entry: Entry, inputs: Sequence[Tensor], count: bool = False) -> None:
    """One forward and one backward pass, timed, and if asked the bytes at the busiest NIC."""
    *qkv, dout = inputs
    passes: dict[str, Callable[[], Any]] = {"forward": partial(entry.session.attend, *qkv)}
    for direction in DIRECTIONS:
        _, before = interface_bytes()
        seconds, found = _timed(passes[direction])
        if count:
            _, after = interface_bytes()
            entry.nic_bytes[direction] = int(_most(after - before))
        entry.times[direction].append(seconds)
        passes["backward"] = partial(torch.autograd.grad, found, qkv, dout)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds from a start agreed on by all ranks until the last one is done; the clock is one for all processes."""
    start_s = _agreed_start()
    time.sleep(max(0.0, start_s - time.perf_counter()))
    found = work()
    end_s = time.perf_counter()
    return _most(end_s) - start_s, found


def _agreed_start() -> float:
    """A time soon enough ahead that every rank has heard of it by then."""
    lead_s = LEAD_S
    while True:
        start = torch.tensor([time.perf_counter() + lead_s], dtype=torch.float64)
        dist.broadcast(start, 0)
        if _most(time.perf_counter() + lead_s / 2 - start.item()) < 0:
            return start.item()
        lead_s *= 2


def _most(x: float) -> float:
    """The largest of all ranks."""
    found = torch.tensor([x], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _inputs(case: Case) -> tuple[Tensor, ...]:
    """q, k, v, dout of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    heads = (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads)
    shapes = [(case.batch, case.seq, n, case.head_dim) for n in heads]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def visit_seconds(case: Case, slept: Slept) -> tuple[float, float]:
    """What is slept per visit, forward and backward: half of a full visit for causal masks."""
    share = 0.5 if case.causal else 1.0
    return slept.forward_s * share, slept.backward_s * share
