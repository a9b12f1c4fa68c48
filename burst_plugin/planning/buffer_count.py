"""How many buffers a schedule needs, found by going through it as the executor does. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from burst_plugin.schedule.schedule import RankSchedule, Schedule, Transfer
from burst_plugin.topology import Topology, Traffic

__all__ = ["Held", "as_many_buffers", "most_held"]


class Held(NamedTuple):
    """Buffers that a rank holds at once, beside its own tensors: operands of blocks, and sums of blocks.

    With the heads in parts, a block is one part of a rank's.
    """

    operands: int
    sums: int


def most_held(schedule: Schedule) -> Held:
    """The most of either that any rank holds at once; the two need not be at the same time."""
    counts = [
        held for rank in range(schedule.ranks) for held in _Books(schedule.of_rank(rank), schedule.reduces).held()
    ]
    return Held(max(held.operands for held in counts), max(held.sums for held in counts))


def as_many_buffers(topology: Topology) -> Topology:
    """Return the smallest cluster in which schedules need as many buffers as on this one, every block being needed.

    From a few nodes and ranks per node on the number of buffers no longer grows, but counting them takes time that
    grows with the third power of the number of ranks.
    """
    return Topology(min(topology.nodes, 4), min(topology.ranks_per_node, 6))


class _Books:
    """What one rank has leased: the bookkeeping of `executor.RingPass`, without its tensors."""

    def __init__(self, schedule: RankSchedule, reduces: bool) -> None:
        self._schedule, self._reduces = schedule, reduces
        self._blocks: set[int] = set()  # operands that are here, or on their way here
        self._bags: set[int] = set()  # blocks whose sums are here
        self._extra = dict.fromkeys(Traffic, 0)  # sums on their way, and operands of which only rows are sent
        self._until: dict[int, list[Traffic]] = {}  # of those that are sent, by the step at which they have left

    def held(self) -> Iterator[Held]:
        """After everything that leases a buffer."""
        for number, step in enumerate(self._schedule.steps):
            for traffic in self._until.pop(number, ()):
                self._extra[traffic] -= 1
            for t in step.due:
                if t.dst == self._schedule.rank and t.traffic is Traffic.REDUCE:
                    self._arrive(t.block)
            self._blocks.difference_update(step.drop)
            for t in step.issue:
                self._post(t)
                yield self._now()
            if step.visit is not None and self._reduces and not self._schedule.is_own(step.visit):
                self._bags.add(step.visit)
                yield self._now()
        yield self._now()

    def _arrive(self, block: int) -> None:
        """Sums: either they are what this rank has of the block from now on, or they are added to that."""
        self._extra[Traffic.REDUCE] -= 1
        if not self._schedule.is_own(block):
            self._bags.add(block)

    def _post(self, t: Transfer) -> None:
        if t.traffic is Traffic.GATHER and (t.rows is None or not self._schedule.is_own(t.block)):
            self._blocks.add(t.block)
            return
        self._extra[t.traffic] += 1
        if t.src == self._schedule.rank:
            self._bags.discard(t.block)
            self._until.setdefault(t.due, []).append(t.traffic)

    def _now(self) -> Held:
        operands = len(self._blocks) + self._extra[Traffic.GATHER]
        return Held(operands, len(self._bags) + self._extra[Traffic.REDUCE])
