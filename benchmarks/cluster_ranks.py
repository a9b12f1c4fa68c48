"""What every rank of an emulated cluster does: all contenders by turns, timed from a start that all agree on."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention_ranks import Whole, World
from benchmarks.contenders import Case, Contender, Session, Slept
from benchmarks.contenders.protocol import Able, best_of
from benchmarks.memory import keep_freed_memory
from burst_plugin.types import DIRECTIONS
from tests.support.netns import interface_bytes

LEAD_S = 0.1  # time between agreeing on a start and the start


@dataclass
class Entry:
    """One configuration, ready to be timed; seconds of its turns and bytes at the busiest NIC by direction."""

    contender: Contender
    session: Session
    times: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    nic_bytes: dict[str, int] = field(default_factory=dict)
    groups: frozenset[dist.ProcessGroup] = frozenset()  # that it made

    def close(self) -> None:
        """Destroy its groups: each has a thread that wakes up a hundred times a second, though nothing is sent."""
        self.session.close()
        for group in self.groups & _groups():
            dist.destroy_process_group(group)

    @property
    def typical_s(self) -> float:
        return sum(median(times) for times in self.times.values())


Measured = tuple[Contender, dict[str, list[float]], dict[str, int]]  # a configuration, its times, bytes at the NIC


def measure_in_rank(rank: int, case: Case, able: Able, slept: Slept | None, rounds: int) -> dict[str, Measured]:
    """Measure the best of every contender's configurations on one case; times are the same on every rank."""
    gc.collect()
    gc.freeze()  # or the collector would look through all imported libraries in the middle of a pass, for 0.1 s
    keep_freed_memory()
    inputs = _inputs(case)
    entries = {}
    for name, configurations in able.items():
        entries[name] = _best(configurations, case, slept, inputs)
        gc.collect()  # what is in cycles may hold groups that are destroyed
    for number in range(rounds):  # in another order every time, the same on all ranks
        for entry in Random(number).sample([*entries.values()], len(entries)):
            take_turn(entry, inputs, count=number == 0)
    for entry in entries.values():
        entry.close()
    return {name: (entry.contender, entry.times, entry.nic_bytes) for name, entry in entries.items()}


def defer_transfers() -> None:
    """Let the threads that move data have the processors only when no rank wants them; for all contenders.

    On a cluster copy engines and NICs move data; here a rank that waits for a processor before it may begin to sleep
    holds up all others. The lowest priority would not do: such a thread still finishes its slice of a millisecond.
    """
    main = threading.get_native_id()
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != main:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _best(configurations: Sequence[Contender], case: Case, slept: Slept | None, inputs: Sequence[Tensor]) -> Entry:
    """Return the fastest configuration of a contender in a few turns, under the conditions that will be timed."""
    prepared = []
    for contender in configurations:
        known = _groups()
        entry = Entry(contender, contender.prepare(case, slept))
        take_turn(entry, inputs)  # which opens its connections
        entry.times.clear()
        entry.groups = _groups() - known
        prepared.append(entry)
    if slept is not None:
        defer_transfers()
    kept = prepared[0] if len(prepared) == 1 else best_of(prepared, lambda entry: take_turn(entry, inputs))
    kept.times.clear()
    return kept


def _groups() -> frozenset[dist.ProcessGroup]:
    """Return all process groups of this rank."""
    return frozenset(dist.distributed_c10d._world.pg_map)


def take_turn(entry: Entry, inputs: Sequence[Tensor], count: bool = False) -> None:
    """Time one forward and one backward pass and, if asked, count the bytes at the busiest NIC."""
    *qkv, dout = inputs
    passes: dict[str, Callable[[], Any]] = {"forward": partial(entry.session.attend, *qkv)}
    for direction in DIRECTIONS:
        _, before = interface_bytes()
        seconds, found = timed(passes[direction])
        if count:
            _, after = interface_bytes()
            entry.nic_bytes[direction] = int(_most(after - before))
        entry.times[direction].append(seconds)
        passes["backward"] = partial(torch.autograd.grad, found, qkv, dout)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds from an agreed start until the last rank is done; all processes have the same clock."""
    start_s = _agreed_start()
    time.sleep(max(0.0, start_s - time.perf_counter()))
    found = work()
    end_s = time.perf_counter()
    return _most(end_s) - start_s, found


def _agreed_start() -> float:
    """Return a time that is soon, but of which every rank has heard by then."""
    lead_s = LEAD_S
    while True:
        start = torch.tensor([time.perf_counter() + lead_s], dtype=torch.float64)
        dist.broadcast(start, 0)
        if _most(time.perf_counter() + lead_s / 2 - start.item()) < 0:
            return start.item()
        lead_s *= 2


def _most(x: float) -> float:
    """Return the largest number of all ranks."""
    return World(torch.device("cpu"), size=dist.get_world_size()).most(x)


def _inputs(case: Case) -> tuple[Tensor, ...]:
    """Draw q, k, v, dout."""
    shape = (case.batch, case.seq, case.q_heads, case.kv_heads, case.head_dim)
    q, k, v, dout = Whole.draw(shape, case.dtype, torch.device("cpu"))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout
