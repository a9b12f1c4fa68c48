"""What a schedule is made of: transfers, the steps of one rank, and the rows that ranks require of each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from burst_plugin.topology import Link, Traffic
from burst_plugin.types import Rows

# required[rank][owner]: the rows of the owner's block that the rank works on, None for all; other owners are absent.
Required = Sequence[Mapping[int, Rows | None]]


class Transfer(NamedTuple):
    """One block (gather), or partial results of one (reduce), sent from `src` to `dst`: all rows, or only `rows`."""

    traffic: Traffic
    block: int
    src: int
    dst: int
    link: Link
    issue: int
    due: int
    rows: Rows | None = None


class Step(NamedTuple):
    """What a rank does at a step: wait for transfers `due`, post transfers `issue`, work on block `visit`, if any."""

    visit: int | None
    due: tuple[Transfer, ...]
    issue: tuple[Transfer, ...]
    drop: tuple[int, ...]  # blocks: from this step on this rank neither reads nor sends their operands
    is_tail: bool = False  # whether the visit is the tail of the rank's work on its own block


class RankSchedule(NamedTuple):
    """A schedule as one rank sees it; `name` and `tail_share` describe the whole schedule."""

    name: str
    rank: int
    ranks: int
    steps: tuple[Step, ...]
    visit_steps: int  # number of steps with visits; those after them are final reduce hops
    by_link: bool
    tail_share: float

    def owner(self, block: int) -> int:
        """Return the rank that owns a block, or a part of one."""
        return block % self.ranks

    def part(self, block: int) -> int:
        """Return which part of its owner's block this is; 0 if blocks are whole."""
        return block // self.ranks

    def is_own(self, block: int) -> bool:
        """Return whether this rank owns the block."""
        return self.owner(block) == self.rank

    @property
    def sends(self) -> Iterator[Transfer]:
        """Return the transfers that this rank sends."""
        return (t for step in self.steps for t in step.issue if t.src == self.rank)

    @property
    def rows(self) -> dict[int, Rows | None]:
        """Return the rows that this rank receives of each block that it receives, by block; None for all rows."""
        arrivals = (t for step in self.steps for t in step.due if t.dst == self.rank)
        return {t.block: t.rows for t in arrivals if t.traffic is Traffic.GATHER}
