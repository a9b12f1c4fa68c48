"""A schedule as data: visits and transfers, and what can be asked of them.

Pure Python, without torch. A *block* is one rank's share of whatever travels; the rank that it belongs to is its
*owner*. At every step each rank *visits* one block, that is, works on it together with what it has at home.
Operands move ahead of the work (*gather*), sums follow one step behind and end at the owner (*reduce*).

Blocks have the numbers of their owners. In `parts`, each is cut into as many, by heads: part p of the block of rank
r has the number `r + p * ranks` and takes the way of the whole, one behind the other (`Schedule.in_parts`).

A rank may work on its own block in two *turns*, the second of them at the last step, while sums that others made are
on their way home (`Schedule.keeping`).

Time: a transfer with `issue=s, due=d` is posted before the work of step s and waited for before the work of
step d; it has the steps s .. d-1 to hide behind. What a rank computes at step s can leave from step s+1 on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import Rows, union

__all__ = ["RankSchedule", "Required", "Schedule", "ScheduleError", "Step", "Transfer"]


class ScheduleError(ValueError):
    """A schedule that would lose, repeat or read ahead of data."""


_NEVER = 1 << 62  # a step that does not come

# required[rank][owner]: the rows of a block that a rank works on (None: all). Others are absent.
Required = Sequence[Mapping[int, Rows | None]]


class Transfer(NamedTuple):
    """One block (gather) or the sums of one (reduce) going from `src` to `dst`; all its rows, or `rows` only."""

    traffic: Traffic
    block: int
    src: int
    dst: int
    link: Link
    issue: int
    due: int
    rows: Rows | None = None


class Step(NamedTuple):
    """What one rank does at one step, in this order: wait for `due`, post `issue`, work on `visit`, if on any."""

    visit: int | None
    due: tuple[Transfer, ...]
    issue: tuple[Transfer, ...]
    drop: tuple[int, ...]  # blocks whose operands nobody needs here from this step on
    turn: int = 0  # how often the block was visited before


class RankSchedule(NamedTuple):
    """A schedule as one rank sees it; `name` and `kept` are those of the whole."""

    name: str
    rank: int
    ranks: int
    steps: tuple[Step, ...]
    visit_steps: int  # how many steps there are visits at; those after them bring sums home
    by_link: bool
    kept: float

    def owner(self, block: int) -> int:
        """The rank whose block, or part of one, this is."""
        return block % self.ranks

    def part(self, block: int) -> int:
        """Which part of its owner's block this is; 0 if blocks are whole."""
        return block // self.ranks

    def is_own(self, block: int) -> bool:
        """Whether it is this rank's."""
        return self.owner(block) == self.rank

    @property
    def sends(self) -> Iterator[Transfer]:
        """What this rank sends."""
        return (t for step in self.steps for t in step.issue if t.src == self.rank)

    @property
    def rows(self) -> dict[int, Rows | None]:
        """By block that comes here: which of its rows do; None for all."""
        arrivals = (t for step in self.steps for t in step.due if t.dst == self.rank)
        return {t.block: t.rows for t in arrivals if t.traffic is Traffic.GATHER}


@dataclass(frozen=True)
class Schedule:
    """Visits and transfers of all ranks: `visits[rank][step]` is the block visited, None for no visit.

    `reduces` is whether sums are brought home; `by_link` whether transfers on both links are under way at
    once, and take unlike numbers of steps, so that each link needs communicators of its own; `phases` the first steps
    of groups of visits, which `in_parts` repeats for each part before it goes on (an inner ring; or every step);
    `parts` how many parts blocks are cut into; `kept` the share of the work on its own
    block that every rank keeps for a second visit, 0 if there is none.
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
    kept: float = 0.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.topology.ranks

    def owner(self, block: int) -> int:
        """The rank whose block, or part of one, this is."""
        return block % self.ranks

    def block(self, owner: int, part: int) -> int:
        """The number of a part of a rank's block."""
        return owner + part * self.ranks

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All of them, gather before reduce."""
        return (*self.gather, *self.reduce)

    def hops(self, rank: int) -> dict[Link, dict[Traffic, int]]:
        """How many blocks `rank` sends, by link and traffic."""
        sent = Counter((t.link, t.traffic) for t in self.transfers if t.src == rank)
        return {link: {traffic: sent[link, traffic] for traffic in Traffic} for link in Link}

    def turns(self, rank: int) -> list[int]:
        """How often the block of each visit was visited before: 0, and 1 for what was kept of its own block."""
        seen: Counter[int | None] = Counter()
        turns = []
        for block in self.visits[rank]:
            turns.append(0 if block is None else seen[block])
            seen[block] += 1
        return turns

    def work(self, rank: int) -> list[float]:
        """How much of a whole block's work there is at every step."""
        shares = (1.0 - self.kept, self.kept)
        return [
            0.0 if block is None else (shares[turn] if self.owner(block) == rank else 1.0) / self.parts
            for block, turn in zip(self.visits[rank], self.turns(rank), strict=True)
        ]

    def of_rank(self, rank: int) -> RankSchedule:
        """The part of `rank`: its visits, and the transfers in which it takes part, step by step."""
        mine = [t for t in self.transfers if rank in (t.src, t.dst)]
        last = max([len(self.visits[rank]) + 1, *(t.due + 1 for t in mine)])
        due: list[list[Transfer]] = [[] for _ in range(last)]
        issue: list[list[Transfer]] = [[] for _ in range(last)]
        needed = {b: s + 1 for s, b in enumerate(self.visits[rank]) if b is not None and self.owner(b) != rank}
        for t in mine:
            issue[t.issue].append(t)
            due[t.due].append(t)
            if t.traffic is Traffic.GATHER and t.src == rank and (t.rows is None or self.owner(t.block) != rank):
                needed[t.block] = max(needed.get(t.block, 0), t.due)
        rest = last - len(self.visits[rank])
        visits, turns = [*self.visits[rank], *[None] * rest], [*self.turns(rank), *[0] * rest]
        drop = [tuple(b for b, end in needed.items() if end == step) for step in range(last)]
        for transfers in issue:  # one order on every rank: ring by ring, what is due first before the rest
            transfers.sort(key=lambda t: (t.due, t.traffic, t.link))
        steps = tuple(Step(visits[s], tuple(due[s]), tuple(issue[s]), drop[s], turns[s]) for s in range(last))
        return RankSchedule(self.name, rank, self.ranks, steps, len(self.visits[rank]), self.by_link, self.kept)

    def keeping(self, share: float) -> Schedule:
        """With a last step at which every rank works on what it kept of its own block, which is visited first.

            sums of    | a   b   c   d              waits  | of d, one hop from home
            keeping    | a/  b   c   d   /a                | nothing: they travel meanwhile

        Whatever is still under way is that much less waited for; a `share` of 0, or nothing to bring home, changes
        nothing.
        """
        if not share or not self.reduces or self.ranks == 1:
            return self
        return replace(self, visits=tuple((*visits, visits[0]) for visits in self.visits), kept=share)

    def in_parts(self, parts: int) -> Schedule:
        """The same for blocks cut into `parts`, which take turns in every phase; steps are as much shorter.

        Two parts, and a phase of two visits (`a` before: the second part of block a):

            steps of the whole    | 0       1       | 2       3       |
            visits                | a       b       | c       d       |
            in two parts          | a   b   a'  b'  | c   d   c'  d'  |

        What crosses between nodes goes out part by part, so that links are never idle while they are what everybody
        waits for, and what comes last is worked on in 1 / parts of the time.
        """
        if parts == 1:
            return self
        last = max([len(self.visits[0]), *(t.due for t in self.transfers)]) + 1
        bounds = [*self.phases, len(self.visits[0]), last + 1]
        at = [
            (parts * start, stop - start, step - start)
            for start, stop in pairwise(bounds)
            for step in range(start, stop)
        ]

        def when(step: int, part: int) -> int:
            before, length, offset = at[step]
            return before + part * length + offset

        def moved(t: Transfer, part: int, behind: int) -> Transfer:
            """Operands are there before the work of a step, sums (`behind` 1) after it."""
            issue, due = (when(step - behind, part) + behind for step in (t.issue, t.due))
            return t._replace(block=self.block(t.block, part), issue=issue, due=due)

        visits: list[list[int | None]] = [[None] * (parts * len(self.visits[0])) for _ in self.visits]
        for split, whole in zip(visits, self.visits, strict=True):
            for step, block in enumerate(whole):
                for part in range(parts):
                    split[when(step, part)] = None if block is None else self.block(block, part)
        return replace(
            self,
            parts=parts,
            phases=tuple(when(start, 0) for start in self.phases),
            visits=tuple(map(tuple, visits)),
            gather=tuple(moved(t, part, 0) for t in self.gather for part in range(parts)),
            reduce=tuple(moved(t, part, 1) for t in self.reduce for part in range(parts)),
        )

    def pruned(self, required: Required | None) -> Schedule:
        """Without the visits that `required` leaves out, or what then travels for nobody; for None, unchanged."""
        if required is None:
            return self
        visits = tuple(
            tuple(block if block in required[rank] else None for block in visits)
            for rank, visits in enumerate(self.visits)
        )
        gathered, reduced = set[int](), set[int]()  # numbers of transfers
        for rank, owners in enumerate(required):
            for block in owners:  # from its owner to the rank, and back, as far as others do not need it anyway
                number = self._arriving.get((rank, block))
                while number is not None and number not in gathered:
                    gathered.add(number)
                    number = self._arriving.get((self.gather[number].src, block))
                number = self._leaving.get((rank, block))
                while number is not None and number not in reduced:
                    reduced.add(number)
                    number = self._leaving.get((self.reduce[number].dst, block))
        gather = tuple(self.gather[number] for number in sorted(gathered))
        reduce = tuple(self.reduce[number] for number in sorted(reduced))
        return replace(self, visits=visits, gather=gather, reduce=reduce)

    @cached_property
    def _arriving(self) -> dict[tuple[int, int], int]:
        """By rank and block: the number of the one transfer that brings it its operands."""
        return {(t.dst, t.block): number for number, t in enumerate(self.gather)}

    @cached_property
    def _leaving(self) -> dict[tuple[int, int], int]:
        """By rank and block: the number of the one transfer that takes its sums on."""
        return {(t.src, t.block): number for number, t in enumerate(self.reduce)}

    def most_rows_moved(self, lengths: Sequence[int]) -> tuple[int, int]:
        """The most rows that a rank sends, or receives, to gather blocks of these lengths: (inter, intra) nodes."""
        moved: Counter[tuple[str, int, Link]] = Counter()
        for t in self.gather:
            rows = lengths[t.block] if t.rows is None else sum(stop - start for start, stop in t.rows)
            moved["out", t.src, t.link] += rows
            moved["in", t.dst, t.link] += rows
        inter, intra = (
            max((rows for (*_, of), rows in moved.items() if of is link), default=0)
            for link in (Link.INTER, Link.INTRA)
        )
        return inter, intra  # compared in this order: the scarcer link first

    def validate(self, required: Required | None = None) -> Schedule:
        """Check that the schedule is exact, and return it.

        Each rank visits every block, or each that is `required`, once, and its own a second time if some of that work
        is `kept` for the end; the rows needed arrive; links are as the topology says; nothing is worked on or sent
        before it is there, and nothing is sent to a rank that has it; every contribution reaches its owner once.
        Raises ScheduleError naming the first rank, step and block for which this fails.
        """
        for rank, visits in enumerate(self.visits):
            owners = range(self.ranks) if required is None else required[rank]
            wanted = [self.block(owner, part) for part in range(self.parts) for owner in owners]
            wanted += [block for block in wanted if self.kept and self.owner(block) == rank]
            if sorted(block for block in visits if block is not None) != sorted(wanted):
                raise ScheduleError(f"{self.name}: rank {rank} does not visit every block exactly once: {visits}")
        kinds = [Traffic.GATHER] * len(self.gather) + [Traffic.REDUCE] * len(self.reduce)
        for kind, t in zip(kinds, self.transfers, strict=True):
            if (
                t.traffic is not kind
                or t.src == t.dst
                or t.issue >= t.due
                or t.link is not self.topology.link(t.src, t.dst)
            ):
                raise ScheduleError(f"{self.name}: impossible transfer {t}")
            counterparts = self.topology.local_rank(t.src) == self.topology.local_rank(t.dst)
            if self.by_link and t.link is Link.INTER and not counterparts:
                raise ScheduleError(f"{self.name}: no communicator for {t}: by link, only counterparts have one")
            if t.rows is not None and (required is None or self._rows_needed(t, required) != t.rows):
                raise ScheduleError(f"{self.name}: not the rows that are needed: {t}")
        self._validate_gather()
        self._validate_reduce()
        return self

    def _rows_needed(self, t: Transfer, required: Required) -> Rows | None:
        """What the rank required, inside the owner's node; elsewhere what ranks of that node do."""
        owner, rank = self.owner(t.block), t.dst if t.traffic is Traffic.GATHER else t.src
        if self.topology.link(owner, rank) is Link.INTRA:
            return required[rank].get(owner)
        return union(required[peer][owner] for peer in self.topology.node_peers(rank) if owner in required[peer])

    def _validate_gather(self) -> None:
        held_from = {(self.owner(block), block): 0 for block in range(self.ranks * self.parts)}
        for t in sorted(self.gather, key=lambda t: (t.issue, t.due)):
            if held_from.get((t.src, t.block), _NEVER) > t.issue:
                raise ScheduleError(f"{self.name}: rank {t.src} sends block {t.block} before it has it: {t}")
            if (t.dst, t.block) in held_from:
                raise ScheduleError(f"{self.name}: rank {t.dst} is sent block {t.block} twice: {t}")
            held_from[t.dst, t.block] = t.due
        for rank, visits in enumerate(self.visits):
            for step, block in enumerate(visits):
                if block is not None and held_from.get((rank, block), _NEVER) > step:
                    raise ScheduleError(f"{self.name}: rank {rank} visits block {block} at step {step} without it")

    def _validate_reduce(self) -> None:
        """Follow the sums; a set of contributions is one integer, a bit per rank and turn."""
        if not self.reduces:
            return
        expected: Counter[int] = Counter()
        added = defaultdict[int, list[tuple[int, int, int]]](list)  # by step: rank, block, contributions
        leaving = defaultdict[int, list[Transfer]](list)  # by step, after what is added
        for rank, visits in enumerate(self.visits):
            for step, (block, turn) in enumerate(zip(visits, self.turns(rank), strict=True)):
                if block is not None:
                    bit = 1 << (rank + turn * self.ranks)
                    added[step + 1].append((rank, block, bit))
                    expected[block] |= bit
        for t in self.reduce:
            leaving[t.issue].append(t)
        held: dict[tuple[int, int], int] = {}  # by rank and block
        for step in sorted({*added, *leaving, *(t.due for t in self.reduce)}):
            for rank, block, contributions in added[step]:
                there = held.get((rank, block), 0)
                if there & contributions:
                    raise ScheduleError(
                        f"{self.name}: a contribution to block {block} is counted twice, at rank {rank}, step {step}"
                    )
                held[rank, block] = there | contributions
            for t in leaving[step]:
                if (t.src, t.block) not in held:
                    raise ScheduleError(f"{self.name}: rank {t.src} has no sum to send: {t}")
                added[t.due].append((t.dst, t.block, held.pop((t.src, t.block))))
        for (rank, block), contributions in held.items():
            if rank != self.owner(block) or contributions != expected[block]:
                raise ScheduleError(f"{self.name}: the sum of block {block} ends incomplete at rank {rank}")

    def _cell(self, rank: int, block: int | None, turn: int, crossed: bool) -> str:
        if block is None:
            return "."
        if self.kept and self.owner(block) == rank:
            return f"/{block}" if turn else f"{block}/"
        return f"{'*' if crossed else ''}{block}"

    def format(self) -> str:
        """The schedule as a grid: rows are ranks, columns steps, `*` a block that came from another node.

        `0/` and `/0` are the two turns of a rank on its own block; a bar is where its visits turn to another node's.
        """
        crossed = {(t.dst, t.block) for t in self.gather if t.link is Link.INTER}
        digits = len(str(self.ranks * self.parts - 1))
        steps = "".join(f"  {step:>{digits + 1}}" for step in range(len(self.visits[0])))
        lines = [f"{self.name}, {self.topology}", f"{'step':>{14 + digits}}{steps}"]
        for rank, visits in enumerate(self.visits):
            nodes = [self.topology.node(rank if block is None else self.owner(block)) for block in visits]
            cells = [
                (" |" if step and nodes[step] != nodes[step - 1] else "  ")
                + self._cell(rank, block, turn, (rank, block) in crossed).rjust(digits + 1)
                for step, (block, turn) in enumerate(zip(visits, self.turns(rank), strict=True))
            ]
            node = f"node {self.topology.node(rank)}" if self.topology.local_rank(rank) == 0 else ""
            lines.append(f"{node:<9}rank {rank:<{digits}}" + "".join(cells))
        for traffic in Traffic:
            sent = Counter((t.src, t.link) for t in self.transfers if t.traffic is traffic)
            most = [max((n for (_, link), n in sent.items() if link is kind), default=0) for kind in Link]
            lines.append(f"{traffic.value}: a rank sends at most {most[0]} blocks intra-node, {most[1]} inter-node")
        return "\n".join(lines)
