"""What a rank of `bench attention` does: time contenders and the kernel on one rank by turns.

In every round each entry runs once, forward and backward, in another order every round, so that whatever the machine
does, it does to all of them. All ranks begin an entry together, and the slowest one's time counts. Before that, of a
contender's configurations the fastest is chosen, in trials that are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.contenders import Case, Contender
from benchmarks.contenders.protocol import best_of
from benchmarks.memory import PeakMemory
from benchmarks.one_rank import Gradients, Whole, fastest, synchronize
from benchmarks.stubs import InProcessRing, NullTransport, without_transfers
from burst_plugin import Topology
from burst_plugin.kernels import Queries

KERNEL, KERNEL_ALONE = "one-rank kernel", "one-rank kernel, alone"
SILENT = ", no transfers"  # at the end of an entry's name


@dataclass
class Times:
    """Seconds of the slowest rank in every round."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class World:
    """The processes that measure together: the default process group, or this one alone if `size` is 1."""

    device: torch.device
    rank: int = 0
    size: int = 1

    def meet(self) -> None:
        """Wait for all ranks."""
        synchronize(self.device)
        if self.size > 1:
            dist.barrier()
            synchronize(self.device)

    def most(self, number: float) -> float:
        """Return the largest number of all ranks."""
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()


@dataclass
class Entry:
    """Something to time: `backward` is given what `forward` returns. `ranks` run it (all if None)."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    ranks: Sequence[int] | None = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    times: Times = field(default_factory=Times)

    def take_turn(self, world: World) -> None:
        """Time both passes; collective."""
        forward_s = both_s = 0.0
        runs = self.ranks is None or world.rank in self.ranks
        with self.within() if runs else nullcontext():
            world.meet()
            if runs:
                start = time.perf_counter()
                saved = self.forward()
                synchronize(world.device)
                forward_s = time.perf_counter() - start
                self.backward(saved)
                synchronize(world.device)
                both_s = time.perf_counter() - start
        slowest_s = (forward_s, both_s - forward_s, both_s)
        for times, seconds in zip(vars(self.times).values(), slowest_s, strict=True):
            times.append(world.most(seconds))

    @property
    def typical_s(self) -> float:
        """Median of both passes together."""
        return median(self.times.both_s)


@dataclass(frozen=True)
class Measured:
    """What one process found: times are those of the slowest rank, memory is that of this one."""

    kernel: str
    times: dict[str, Times]
    peaks: dict[str, int | None]
    errors: dict[str, float]


class Ready(NamedTuple):
    """A contender to be timed; `whole` puts its results together (collective), `rank_states` are those of a ring."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    whole: Callable[[Any, Any], Gradients]
    rank_states: tuple[Any, ...] = ()


def measure(
    world: World, case: Case, able: Mapping[str, Sequence[Contender]], count: int, virtual: bool = False
) -> Measured:
    """Measure the best configuration of every contender in one rank; collective.

    If `virtual`, rings have all ranks in this process, which is `case.ranks` times as much work.
    """
    shape = (case.batch, case.ranks * case.seq, case.q_heads, case.kv_heads, case.head_dim)
    whole = Whole.draw(shape, case.dtype, world.device)
    kernel = fastest(whole, case.causal, world.most)
    expected = kernel.backward(whole, kernel.forward(whole))
    # With all ranks at work a core's clock and its share of the memory's bandwidth are the same as in the ring.
    entries = [Entry(KERNEL, partial(kernel.forward, whole), partial(kernel.backward, whole))]
    entries += [replace(entries[0], name=KERNEL_ALONE, ranks=(0,), times=Times())] if world.size > 1 else []
    peaks, errors = {}, {}
    for configurations in able.values():
        tried, silent = [], {}
        for each in configurations:
            with PeakMemory(world.device) as peak:
                ready = (_virtual_ready if virtual else _ready)(each, case, whole)
                saved = ready.forward()
                grads = ready.backward(saved)
            peaks[each.name], errors[each.name] = peak.nbytes, largest_error(ready.whole(saved, grads), expected)
            del saved, grads
            tried.append(Entry(each.name, ready.forward, ready.backward))
            if ready.rank_states:
                nulls = [NullTransport() for _ in ready.rank_states]
                within = partial(without_transfers, ready.rank_states, nulls)
                silent[each.name] = Entry(each.name + SILENT, ready.forward, ready.backward, within=within)
        best = best_of(tried, lambda entry: entry.take_turn(world))
        entries += [best, *(entry for name, entry in silent.items() if name == best.name)]
    return Measured(kernel.name, rounds(entries, world, count), peaks, errors)


def group_rank(rank: int, case: Case, able: Mapping[str, Sequence[Contender]], count: int) -> Measured:
    """Measure in a rank of the default process group."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return measure(World(device, rank, case.ranks), case, able, count)


def rounds(entries: Sequence[Entry], world: World, count: int) -> dict[str, Times]:
    """Time the entries `count` times, after a round that warms up; collective."""
    for number in range(count + 1):
        for entry in Random(number).sample(entries, len(entries)):
            if number < 2:
                entry.times = Times()  # what came before was a trial
            entry.take_turn(world)
    return {entry.name: entry.times for entry in entries}


def largest_error(found: Gradients, expected: Gradients) -> float:
    """Return the largest error of out, dq, dk, dv: the 2-norm of the difference over that of what was expected.

    NaN if any of them has one. In float32, which is exact enough to tell errors of any type that is measured.
    """
    pairs = zip(found, expected, strict=True)
    errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in pairs]
    return float(torch.stack(errors).amax().item())  # unlike Python's `max`, it passes on NaN


def _ready(contender: Contender, case: Case, whole: Whole) -> Ready:
    session = contender.prepare(case, None)
    q, k, v, dout = (session.shard(x) for x in whole)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return Ready(
        lambda: session.attend(*leaves),
        lambda out: torch.autograd.grad(out, leaves, dout),
        lambda out, grads: Gradients(*(session.unshard(x) for x in (out, *grads))),
        () if session.cp is None else (session.cp.rank_state,),
    )


def _virtual_ready(contender: Contender, case: Case, whole: Whole) -> Ready:
    strategy = contender.strategy  # type: ignore[attr-defined]
    ring = InProcessRing(Topology(case.nodes, case.ranks_per_node), strategy, whole[:3], case.mask)
    douts, dtype = ring.shards(whole.dout), whole.q.dtype

    def forward() -> tuple[Any, list[Queries]]:
        call_id, done = ring.forward()
        each = zip(ring.inputs, douts, done, strict=True)
        return call_id, [Queries(own.q, dout, found.out.to(dtype), found.lse) for own, dout, found in each]

    def backward(saved: tuple[Any, list[Queries]]) -> list[Any]:
        return [tuple(x.to(dtype) for x in grads[:3]) for grads in ring.backward(*saved)]

    def gather(saved: tuple[Any, list[Queries]], grads: list[Any]) -> Gradients:
        columns = ([queries.out for queries in saved[1]], *zip(*grads, strict=True))
        return Gradients(*map(ring.unshard, columns))

    return Ready(forward, backward, gather, ring.rank_states)
