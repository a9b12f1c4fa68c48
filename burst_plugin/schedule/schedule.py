"""A schedule as data: visits and transfers, and what can be asked of them. Pure Python, without torch.

A *block* is what one rank holds of the moving side; that rank is its *owner*. At every step each rank *visits* one
block: it works on that block and its own local side. Operands are sent ahead of the work (*gather*); partial results
follow one step behind and end at the owner (*reduce*).

A block has the number of its owner. Cut into `parts`, by heads, part p of the block of rank r has the number
`r + p * ranks` and takes the same way as the whole block, one part behind the other, or ways of their own, all at
once (`Schedule.in_parts`).

A rank's work on its own block may be split: the *tail* is left for the last step, while the final reduce hops bring
partial results from other ranks (`Schedule.with_tail`).

Time: a transfer with `issue=s, due=d` is posted before the work of step s and waited for before the work of step d,
so that it overlaps with steps s .. d-1. What a rank computes at step s can be sent from step s+1 on.

`schedule.parts` cuts a schedule into parts, `schedule.validation` checks it, `schedule.drawing` draws it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from burst_plugin.schedule.drawing import draw
from burst_plugin.schedule.parts import in_parts
from burst_plugin.schedule.validation import ScheduleError, validate
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import Rows, row_count

__all__ = ["RankSchedule", "Required", "Schedule", "ScheduleError", "Step", "Transfer"]

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
    """What one rank does at one step, in this order: wait for `due`, post `issue`, work on `visit` if any."""

    visit: int | None
    due: tuple[Transfer, ...]
    issue: tuple[Transfer, ...]
    drop: tuple[int, ...]  # blocks: from this step on this rank neither reads nor sends their operands
    is_tail: bool = False  # whether the visit is the tail of the rank's work on its own block


class RankSchedule(NamedTuple):
    """A schedule as one rank sees it; `name` and `tail_share` are those of the whole schedule."""

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
        """Return, by block that this rank receives, the rows that it receives, None for all."""
        arrivals = (t for step in self.steps for t in step.due if t.dst == self.rank)
        return {t.block: t.rows for t in arrivals if t.traffic is Traffic.GATHER}


@dataclass(frozen=True)
class Schedule:
    """Visits and transfers of all ranks: `visits[rank][step]` is the block visited, None for no visit.

    reduces: whether partial results are sent to their owners.
    by_link: whether transfers over both links are under way at the same time and take different numbers of steps, so
        that each link needs communicators of its own.
    phases: the first step of each group of visits that `in_parts` repeats for every part before it goes on to the
        next group: an inner ring, or a single step.
    parts: into how many parts blocks are cut.
    tail_share: the share of the work on its own block that every rank leaves for the last step; 0 if there is none.
    ring_of_part: if parts take different ways: the ranks in the order of a part's ring, by which each takes the place
        of the one with the number of its position; ranks of a node stay on it.
    """

    name: str
    topology: Topology
    visits: tuple[tuple[int | None, ...], ...]
    gather: tuple[Transfer, ...]
    reduce: tuple[Transfer, ...]
    reduces: bool = True
    by_link: bool = False
    phases: tuple[int, ...] = (0,)
    parts: int = 1
    tail_share: float = 0.0
    ring_of_part: Callable[[Topology, int], Sequence[int]] | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.topology.ranks

    def owner(self, block: int) -> int:
        """Return the rank that owns a block, or a part of one."""
        return block % self.ranks

    def block(self, owner: int, part: int) -> int:
        """Return the number of a part of a rank's block."""
        return owner + part * self.ranks

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Return all transfers, gather before reduce."""
        return (*self.gather, *self.reduce)

    def hops(self, rank: int) -> dict[Link, dict[Traffic, int]]:
        """Return how many blocks `rank` sends, by link and traffic."""
        sent = Counter((t.link, t.traffic) for t in self.transfers if t.src == rank)
        return {link: {traffic: sent[link, traffic] for traffic in Traffic} for link in Link}

    def tail_visits(self, rank: int) -> list[bool]:
        """Return for each step of a rank whether its visit is a tail: another visit of a block visited before."""
        visited: set[int] = set()
        tails = []
        for block in self.visits[rank]:
            tails.append(block in visited)
            if block is not None:
                visited.add(block)
        return tails

    def work(self, rank: int) -> list[float]:
        """Return the work of every step of a rank, as a share of the work on a whole block."""
        shares = []
        for block, is_tail in zip(self.visits[rank], self.tail_visits(rank), strict=True):
            if block is None:
                share = 0.0
            elif self.owner(block) != rank:
                share = 1.0
            else:
                share = self.tail_share if is_tail else 1.0 - self.tail_share
            shares.append(share / self.parts)
        return shares

    def of_rank(self, rank: int) -> RankSchedule:
        """Return the part of one rank: its visits, and the transfers that it sends or receives, step by step."""
        own = [t for t in self.transfers if rank in (t.src, t.dst)]
        visits, tails = list(self.visits[rank]), self.tail_visits(rank)
        visit_steps = len(visits)
        count = max([visit_steps + 1, *(t.due + 1 for t in own)])
        visits += [None] * (count - visit_steps)
        tails += [False] * (count - visit_steps)
        due: list[list[Transfer]] = [[] for _ in range(count)]
        issue: list[list[Transfer]] = [[] for _ in range(count)]
        for t in own:
            issue[t.issue].append(t)
            due[t.due].append(t)
        for transfers in issue:  # one order on every rank, by communicator; what is due first goes first
            transfers.sort(key=lambda t: (t.due, t.traffic, t.link))
        drop: list[list[int]] = [[] for _ in range(count)]
        for block, step in self._drop_steps(rank).items():
            drop[step].append(block)
        steps = tuple(
            Step(visits[step], tuple(due[step]), tuple(issue[step]), tuple(drop[step]), tails[step])
            for step in range(count)
        )
        return RankSchedule(self.name, rank, self.ranks, steps, visit_steps, self.by_link, self.tail_share)

    def _drop_steps(self, rank: int) -> dict[int, int]:
        """Return by block the step from which on a rank neither reads nor sends its operands any more."""
        drop_at = {}
        for step, block in enumerate(self.visits[rank]):
            if block is not None and self.owner(block) != rank:
                drop_at[block] = step + 1
        for t in self.gather:
            if t.src == rank and (t.rows is None or self.owner(t.block) != rank):
                drop_at[t.block] = max(drop_at.get(t.block, 0), t.due)
        return drop_at

    def with_tail(self, final_link: Link) -> Schedule:
        """Return the schedule with a last step at which every rank works on the tail of its own block, visited first.

            before       | a   b   c   d              waits  | for d, one hop from its owner
            with a tail  | a/  b   c   d   /a                | for nothing: d is sent meanwhile

        All transfers that are still under way then are waited for that much less. The tail is as long as the final
        reduce hop, over `final_link`, may take. Inside one node, or where nothing is reduced, there is none.
        """
        if self.topology.nodes == 1 or not self.reduces:
            return self
        visits = tuple((*visits, visits[0]) for visits in self.visits)
        return replace(self, visits=visits, tail_share=0.5 if final_link is Link.INTER else 0.25)

    def in_parts(self, parts: int) -> Schedule:
        """Return the schedule for blocks cut into `parts`; see `schedule.parts`."""
        return in_parts(self, parts)

    def pruned(self, required: Required | None) -> Schedule:
        """Return the schedule without visits that are not required, and without transfers that only served those.

        A schedule is cut into parts first: in the rings of its parts different visits and transfers may be left.
        """
        if required is None:
            return self
        visits = tuple(
            tuple(None if block is None or self.owner(block) not in required[rank] else block for block in visits)
            for rank, visits in enumerate(self.visits)
        )
        used_gather, used_reduce = set[int](), set[int]()  # numbers of transfers
        for (rank, owners), part in product(enumerate(required), range(self.parts)):
            for block in (self.block(owner, part) for owner in owners):
                # back along the hops from the owner, and on along those to it, to known ones
                number = self._arriving.get((rank, block))
                while number is not None and number not in used_gather:
                    used_gather.add(number)
                    number = self._arriving.get((self.gather[number].src, block))
                number = self._leaving.get((rank, block))
                while number is not None and number not in used_reduce:
                    used_reduce.add(number)
                    number = self._leaving.get((self.reduce[number].dst, block))
        gather = tuple(self.gather[number] for number in sorted(used_gather))
        reduce = tuple(self.reduce[number] for number in sorted(used_reduce))
        return replace(self, visits=visits, gather=gather, reduce=reduce, ring_of_part=None)

    @cached_property
    def _arriving(self) -> dict[tuple[int, int], int]:
        """Return by rank and block the number of the one transfer that brings the rank the block's operands."""
        return {(t.dst, t.block): number for number, t in enumerate(self.gather)}

    @cached_property
    def _leaving(self) -> dict[tuple[int, int], int]:
        """Return by rank and block the number of the one transfer that takes the partial results from the rank."""
        return {(t.src, t.block): number for number, t in enumerate(self.reduce)}

    def most_rows_moved(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return the most rows that any rank sends or receives to gather blocks of these lengths, (inter, intra).

        The scarcer link comes first, so that tuples compare by it.
        """
        moved: Counter[tuple[str, int, Link]] = Counter()
        for t in self.gather:
            rows = lengths[self.owner(t.block)] if t.rows is None else row_count(t.rows)
            moved["out", t.src, t.link] += rows
            moved["in", t.dst, t.link] += rows
        most = dict.fromkeys(Link, 0)
        for (_, _, link), rows in moved.items():
            most[link] = max(most[link], rows)
        return most[Link.INTER], most[Link.INTRA]

    def validate(self, required: Required | None = None) -> Schedule:
        """Check that the schedule is exact, and return it. Raise ScheduleError if not; see `schedule.validation`."""
        validate(self, required)
        return self

    def format(self) -> str:
        """Return the schedule as a grid of text; see `schedule.drawing`."""
        return draw(self)
