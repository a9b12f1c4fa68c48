"""Timing of several ways to do one attention by turns, so that whatever the machine does, it does to all of them.

In every round each entry runs once, forward and backward, and the order is another in every round. All ranks begin an
entry together, and the slowest one's time counts. The first rounds are trials, which are not counted: by them, of the
configurations of a contender, the fastest is chosen, and the others leave.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.one_rank import Gradients, OneRank, Whole, synchronize
from benchmarks.trials import TRIALS, chosen, hopeful

__all__ = ["KERNEL", "KERNEL_ALONE", "Entry", "Group", "OneProcess", "Times", "World", "kernel_entries", "rounds"]


class World(Protocol):
    """The processes that measure together."""

    rank: int
    size: int

    def meet(self) -> None:
        """Go on when all are here."""
        ...

    def most(self, number: float) -> float:
        """The largest of all ranks'."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """There are no others."""

    rank: int = 0
    size: int = 1

    def meet(self) -> None:
        """See `World.meet`."""

    def most(self, number: float) -> float:
        """See `World.most`."""
        return number


@dataclass(frozen=True)
class Group:
    """The default process group."""

    rank: int
    size: int
    device: torch.device

    def meet(self) -> None:
        """See `World.meet`."""
        synchronize(self.device)
        dist.barrier()
        synchronize(self.device)

    def most(self, number: float) -> float:
        """See `World.most`."""
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found.item())


@dataclass(frozen=True)
class Entry:
    """Something to time: `forward` returns what `backward` needs. `within` is entered for both.

    On ranks other than `ranks` it does nothing; None is all. `contender` is whose `configuration` it runs, if it is
    anyone's: as it is if the entry has its name, else without something.
    """

    name: str
    forward: Callable[[], Any]
    backward: Callable[[Any], object]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ranks: tuple[int, ...] | None = None
    contender: str = ""
    configuration: str = ""


@dataclass
class Times:
    """Seconds of an entry, one per round, of the slowest rank."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)

    def fields(self) -> dict[str, float]:
        """Medians, least and most."""
        found = {}
        for name in ("forward_s", "backward_s", "both_s"):
            times = getattr(self, name)
            found |= {name: median(times), f"{name}_min": min(times), f"{name}_max": max(times)}
        return found


KERNEL, KERNEL_ALONE = "one-rank kernel", "one-rank kernel, alone"


def kernel_entries(kernel: OneRank, whole: Whole, ranks: int) -> list[Entry]:
    """The kernel on the whole sequence, as many copies at once as there are ranks; and one copy alone, on rank 0.

    The copies are the measure: with all ranks at work a core's clock and its share of the memory's bandwidth are the
    same as in the ring.
    """

    def forward() -> object:
        return kernel.forward(whole)

    def backward(saved: object) -> Gradients:
        return kernel.backward(whole, saved)

    copies = Entry(KERNEL, forward, backward)
    return [copies, Entry(KERNEL_ALONE, forward, backward, ranks=(0,))] if ranks > 1 else [copies]


def rounds(entries: Sequence[Entry], world: World, device: torch.device, count: int) -> dict[str, Times]:
    """Time what is kept of the entries `count` times, after the trials; collective.

    In another order every round, the same on all ranks: what ran before leaves caches and clocks behind.
    """
    entries = _kept(entries, world, device)
    found = {entry.name: Times() for entry in entries}
    for number in range(1, count + 1):
        for name, slowest in _round(entries, world, device, number).items():
            for times, seconds in zip(vars(found[name]).values(), slowest, strict=True):
                times.append(seconds)
    return found


def _round(
    entries: Sequence[Entry], world: World, device: torch.device, number: int
) -> dict[str, tuple[float, float, float]]:
    """Seconds of the slowest rank by entry: forward, backward, both."""
    found = {}
    for entry in Random(number).sample(entries, len(entries)):
        forward_s, both_s = _timed(entry, world, device)
        found[entry.name] = world.most(forward_s), world.most(both_s - forward_s), world.most(both_s)
    return found


def _kept(entries: Sequence[Entry], world: World, device: torch.device) -> list[Entry]:
    """Of every contender what runs its fastest configuration, and what is nobody's.

    All run in the first trial, which warms them up; in later ones the configurations of those who still have several.
    """
    own: defaultdict[str, list[str]] = defaultdict(list)  # configurations that may be the fastest, by contender
    for entry in entries:
        if entry.contender and entry.name == entry.configuration:
            own[entry.contender].append(entry.name)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    tried = list(entries)
    for turn in range(TRIALS):
        for name, (_, _, both_s) in _round(tried, world, device, -turn).items():
            seconds[name].append(both_s)
        typical_s = {each: {name: median(seconds[name]) for name in names} for each, names in own.items()}
        own.update({each: hopeful(times) for each, times in typical_s.items()})
        undecided = {name for names in own.values() if len(names) > 1 for name in names}
        tried = [entry for entry in entries if entry.name in undecided]
        if not tried:
            break
    kept = {contender: chosen(times) for contender, times in typical_s.items()}
    return [entry for entry in entries if entry.configuration == kept.get(entry.contender, "")]


def _timed(entry: Entry, world: World, device: torch.device) -> tuple[float, float]:
    """Seconds of the forward pass, and of both, on this rank."""
    if entry.ranks is not None and world.rank not in entry.ranks:
        world.meet()
        return 0.0, 0.0
    with entry.within():
        world.meet()
        start = time.perf_counter()
        saved = entry.forward()
        synchronize(device)
        middle = time.perf_counter()
        entry.backward(saved)
        synchronize(device)
        return middle - start, time.perf_counter() - start
