"""The elements of a schedule: transfers, the steps of one rank, and the rows that ranks require of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from burst_plugin.topology import Link, Traffic
from burst_plugin.types import Rows

# required[rank][owner]: the rows of the owner's block that the rank works on, None for all; other owners are absent.
Required = Sequence[Mapping[int, Rows | None]]


class Transfer(NamedTuple):
    """The way of one block (gather), or of partial results of one (reduce), from rank `src` to `dst` over `link`.

    block: the number of the block, or of a part of it, as the schedule counts them.
    issue, due: it is posted before the work of step `issue`, and waited for before the work of step `due`.
    rows: the rows of the block that are sent; None for all.
    """

    traffic: Traffic
    block: int
    src: int
    dst: int
    link: Link
    issue: int
    due: int
    rows: Rows | None = None


class Step(NamedTuple):
    """The actions of a rank at one step: wait for transfers `due`, post transfers `issue`, work on block `visit`.

    visit: the number of the block; None for no visit.
    drop: the blocks whose operands this rank neither reads nor sends from this step on.
    is_tail: whether the visit is the rest of the work on the rank's own block, which it began in an earlier visit.
    """

    visit: int | None
    due: tuple[Transfer, ...]
    issue: tuple[Transfer, ...]
    drop: tuple[int, ...]
    is_tail: bool = False


class RankSchedule(NamedTuple):
    """One rank's part of a schedule, step by step.

    name: of the whole schedule.
    rank, ranks: this rank, and the number of all.
    by_link: whether each link needs communicators of its own.
    tail_share: the share of the work on its own block that a rank leaves for the last step; 0 if there is none.
    """

    name: str
    rank: int
    ranks: int
    steps: tuple[Step, ...]
    by_link: bool
    tail_share: float

    def owner(self, block: int) -> int:
        """Return the rank that owns the block with this number, or this part of a block."""
        return block % self.ranks

    def part(self, block: int) -> int:
        """Return which part of its owner's block has the number `block`; 0 if blocks are whole."""
        return block // self.ranks

    def is_own(self, block: int) -> bool:
        """Return whether this rank owns the block."""
        return self.owner(block) == self.rank

    @property
    def rows(self) -> dict[int, Rows | None]:
        """Return the rows that this rank receives of each block that it receives, by block; None for all rows."""
        arrivals = (t for step in self.steps for t in step.due if t.dst == self.rank)
        return {t.block: t.rows for t in arrivals if t.traffic is Traffic.GATHER}
