"""A schedule as data: visits and transfers, and what can be asked of them.

Pure Python, no torch. A *block* is one rank's share of whatever travels; `owner` is the rank that it belongs
to. At every step each rank *visits* one block, that is, works on it together with what it has at home.
Operands move ahead of the work (*gather*), sums follow one step behind and end at the owner (*reduce*).

Time: a transfer with `issue=s, due=d` is posted before the work of step s and waited for before the work of
step d; it has the steps s .. d-1 to hide behind. What a rank computes at step s can leave from step s+1 on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from burst_plugin.topology import Link, Topology, Traffic

__all__ = ["Needs", "RankPlan", "Rows", "Schedule", "ScheduleError", "Step", "Transfer"]


class ScheduleError(ValueError):
    """A schedule that would lose, repeat or read ahead of data."""


Rows = tuple[tuple[int, int], ...]  # (start, stop) of rows of a block, ascending
# needs[rank][owner]: the rows of a block that a rank works on (None: all); owners it needs nothing of are left out.
Needs = Sequence[Mapping[int, Rows | None]]


class Transfer(NamedTuple):
    """One block (gather) or one sum (reduce) of `owner` going from `src` to `dst`; all its rows, or `rows` only."""

    owner: int
    src: int
    dst: int
    link: Link
    issue: int
    due: int
    rows: Rows | None = None


class Step(NamedTuple):
    """What one rank does at one step, in this order: wait for `due`, post `issue`, work on `visit`, if on any."""

    visit: int | None
    due: tuple[tuple[Traffic, Transfer], ...]
    issue: tuple[tuple[Traffic, Transfer], ...]
    drop: tuple[int, ...]  # owners whose operands nobody needs here from this step on


class RankPlan(NamedTuple):
    """A schedule as one rank sees it."""

    rank: int
    steps: tuple[Step, ...]
    visit_steps: int  # how many steps there are visits at; those after them bring sums home
    separate_links: bool

    @property
    def sends(self) -> Iterator[tuple[Traffic, Transfer]]:
        """What this rank sends."""
        return (pair for step in self.steps for pair in step.issue if pair[1].src == self.rank)

    @property
    def rows(self) -> dict[int, Rows | None]:
        """The rows of which blocks come here; None for all."""
        arrivals = (pair for step in self.steps for pair in step.due if pair[1].dst == self.rank)
        return {t.owner: t.rows for traffic, t in arrivals if traffic is Traffic.GATHER}


@dataclass(frozen=True)
class Schedule:
    """Visits and transfers of all ranks: `visits[rank][step]` is the owner of the block visited, None for no visit.

    `reduces` is whether sums are brought home; `separate_links` whether transfers on both links are under way at
    once for unlike times, so that each link needs communicators of its own.
    """

    name: str
    topology: Topology
    visits: tuple[tuple[int | None, ...], ...]
    gather: tuple[Transfer, ...]
    reduce: tuple[Transfer, ...]
    reduces: bool = True
    separate_links: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.topology.ranks

    def transfers(self, traffic: Traffic) -> tuple[Transfer, ...]:
        """The gather or the reduce transfers."""
        return self.gather if traffic is Traffic.GATHER else self.reduce

    def hops(self, rank: int) -> dict[Link, dict[Traffic, int]]:
        """How many blocks `rank` sends, by link and traffic."""
        return {
            link: {
                traffic: sum(t.src == rank and t.link is link for t in self.transfers(traffic)) for traffic in Traffic
            }
            for link in Link
        }

    def plan(self, rank: int) -> RankPlan:
        """The part of `rank`: its visits, and the transfers in which it takes part, step by step."""
        mine = [(kind, t) for kind in Traffic for t in self.transfers(kind) if rank in (t.src, t.dst)]
        last = max([len(self.visits[rank]) + 1, *(t.due + 1 for _, t in mine)])
        due: list[list[tuple[Traffic, Transfer]]] = [[] for _ in range(last)]
        issue: list[list[tuple[Traffic, Transfer]]] = [[] for _ in range(last)]
        needed = {owner: step + 1 for step, owner in enumerate(self.visits[rank]) if owner is not None}
        for kind, t in mine:
            issue[t.issue].append((kind, t))
            due[t.due].append((kind, t))
            if kind is Traffic.GATHER and t.src == rank and t.rows is None:
                needed[t.owner] = max(needed.get(t.owner, 0), t.due)
        visits = [*self.visits[rank], *[None] * (last - len(self.visits[rank]))]
        drop = [tuple(o for o, end in needed.items() if end == step) for step in range(last)]
        for transfers in issue:  # one order on every rank: ring by ring, what is due first before the rest
            transfers.sort(key=lambda pair: (pair[1].due, pair[0], pair[1].link))
        steps = tuple(Step(visits[s], tuple(due[s]), tuple(issue[s]), drop[s]) for s in range(last))
        return RankPlan(rank, steps, len(self.visits[rank]), self.separate_links)

    def pruned(self, needs: Needs | None) -> Schedule:
        """Without the visits that `needs` leaves out, and without what then travels in vain; for None, unchanged."""
        if needs is None:
            return self
        visits = tuple(
            tuple(owner if owner in needs[rank] else None for owner in visits)
            for rank, visits in enumerate(self.visits)
        )
        useful = {(rank, owner) for rank, found in enumerate(visits) for owner in found if owner is not None}
        at = {(rank, owner): step for rank, found in enumerate(visits) for step, owner in enumerate(found)}
        gather, reduce = [], []
        for t in sorted(self.gather, key=lambda t: -t.due):
            if (t.dst, t.owner) in useful:
                gather.append(t)
                useful.add((t.src, t.owner))
        summed: dict[tuple[int, int | None], int] = {key: step + 1 for key, step in at.items()}
        for t in sorted(self.reduce, key=lambda t: (t.issue, t.due)):
            if summed.get((t.src, t.owner), t.issue + 1) <= t.issue:
                reduce.append(t)
                summed[t.dst, t.owner] = min(t.due, summed.get((t.dst, t.owner), t.due))
        return replace(self, visits=visits, gather=tuple(gather), reduce=tuple(reduce))

    def load(self, lengths: Sequence[int]) -> tuple[int, int]:
        """The most rows that any rank sends to gather blocks of these lengths: (between nodes, inside a node)."""
        sent: Counter[tuple[int, Link]] = Counter()
        for t in self.gather:
            rows = lengths[t.owner] if t.rows is None else sum(stop - start for start, stop in t.rows)
            sent[t.src, t.link] += rows
        inter, intra = (max((n for (_, link), n in sent.items() if link is of), default=0) for of in reversed(Link))
        return inter, intra

    def validate(self, needs: Needs | None = None) -> Schedule:
        """Check that the schedule is exact, and return it.

        Each block visits each rank once, or each that `needs` it, with the rows needed; links are as the topology
        says; nothing is worked on or sent before it is there, and nothing is sent to a rank that has it; every
        contribution reaches its owner once.
        Raises ScheduleError naming the first rank, step and block for which this fails.
        """
        for rank, visits in enumerate(self.visits):
            wanted = range(self.ranks) if needs is None else needs[rank]
            if sorted(owner for owner in visits if owner is not None) != sorted(wanted):
                raise ScheduleError(f"{self.name}: rank {rank} does not visit every block exactly once: {visits}")
        for t in (*self.gather, *self.reduce):
            if t.src == t.dst or t.issue >= t.due or t.link is not self.topology.link(t.src, t.dst):
                raise ScheduleError(f"{self.name}: impossible transfer {t}")
            if t.rows is not None and (needs is None or self._rows_needed(t, needs) != t.rows):
                raise ScheduleError(f"{self.name}: not the rows that are needed: {t}")
        self._validate_gather()
        self._validate_reduce()
        return self

    def _rows_needed(self, t: Transfer, needs: Needs) -> Rows | None:
        return needs[t.src if t.dst == t.owner else t.dst].get(t.owner)

    def _validate_gather(self) -> None:
        held_from = {(rank, rank): 0 for rank in range(self.ranks)}
        for t in sorted(self.gather, key=lambda t: (t.issue, t.due)):
            if held_from.get((t.src, t.owner), t.issue + 1) > t.issue:
                raise ScheduleError(f"{self.name}: rank {t.src} sends block {t.owner} before it has it: {t}")
            if (t.dst, t.owner) in held_from:
                raise ScheduleError(f"{self.name}: rank {t.dst} is sent block {t.owner} twice: {t}")
            held_from[t.dst, t.owner] = t.due
        for rank, visits in enumerate(self.visits):
            for step, owner in enumerate(visits):
                if owner is not None and held_from.get((rank, owner), step + 1) > step:
                    raise ScheduleError(f"{self.name}: rank {rank} visits block {owner} at step {step} without it")

    def _validate_reduce(self) -> None:
        """Follow the sums; a set of contributing ranks is one integer, a bit per rank."""
        if not self.reduces:
            return
        bags: Counter[tuple[int, int]] = Counter()
        expected: Counter[int] = Counter()
        events: list[tuple[int, int, Transfer | tuple[int, int]]] = []
        for rank, visits in enumerate(self.visits):
            events += [(step + 1, 0, (rank, owner)) for step, owner in enumerate(visits) if owner is not None]
            for owner in visits:
                if owner is not None:
                    expected[owner] |= 1 << rank
        for t in self.reduce:
            events += [(t.due, 1, t), (t.issue, 2, t)]
        cargo: dict[Transfer, int] = {}
        for _, kind, what in sorted(events, key=lambda event: event[:2]):
            if isinstance(what, Transfer):
                here = (what.dst if kind == 1 else what.src, what.owner)
                if kind == 2:
                    cargo[what] = bags.pop(here, 0)
                    if not cargo[what]:
                        raise ScheduleError(f"{self.name}: rank {what.src} has no sum to send: {what}")
                    continue
                piece = cargo[what]
            else:
                here, piece = what, 1 << what[0]
            if bags[here] & piece:
                raise ScheduleError(f"{self.name}: a contribution to block {here[1]} is counted twice: {what}")
            bags[here] |= piece
        for (rank, owner), piece in bags.items():
            if rank != owner or piece != expected[owner]:
                raise ScheduleError(f"{self.name}: the sum of block {owner} ends incomplete at rank {rank}")

    def format(self) -> str:
        """The schedule as a grid: rows are ranks, columns steps, `*` a block that came from another node."""
        crossed = {(t.dst, t.owner) for t in self.gather if t.link is Link.INTER}
        width = len(str(self.ranks)) + 2
        lines = [f"{self.name}, {self.topology}"]
        for rank, visits in enumerate(self.visits):
            cells = [f"{'*' if (rank, o) in crossed else ''}{'.' if o is None else o}".rjust(width) for o in visits]
            nodes = [self.topology.node(rank if owner is None else owner) for owner in visits]
            for step in range(len(visits) - 1, 0, -1):  # a bar where the visits turn to another node's blocks
                if nodes[step] != nodes[step - 1]:
                    cells.insert(step, " |")
            node = f"node {self.topology.node(rank)}" if self.topology.local_rank(rank) == 0 else ""
            lines.append(f"{node:<9}rank {rank:<{width}}|" + "".join(cells))
        for traffic in Traffic:
            sent = Counter((t.src, t.link) for t in self.transfers(traffic))
            most = [max((n for (_, link), n in sent.items() if link is kind), default=0) for kind in Link]
            lines.append(f"{traffic.value}: a rank sends at most {most[0]} blocks intra-node, {most[1]} inter-node")
        return "\n".join(lines)
