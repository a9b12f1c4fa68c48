"""Ring schedules as data: who visits which block when, and what travels over which link meanwhile.

Pure Python, no torch. A *block* is one rank's share of whatever travels; `owner` is the rank that it belongs
to. At every step each rank *visits* one block, that is, works on it together with what it has at home.
Operands move ahead of the work (*gather*), sums follow one step behind and end at the owner (*reduce*).

Time: a transfer with `issue=s, due=d` is posted before the work of step s and waited for before the work of
step d; it has the steps s .. d-1 to hide behind. What a rank computes at step s can leave from step s+1 on.

`flat_ring`, 4 ranks; rows are ranks, columns steps, entries the owner of the block visited:

              step 0  1  2  3
    node 0  rank 0  0  3  2  1       gather: every block moves to the next rank at every step
            rank 1  1  0  3  2       reduce: starts at owner+1, one step behind, ends at the owner
            rank 2  2  1  0  3
            rank 3  3  2  1  0

`two_level_ring`, 2 nodes x 2 ranks; `*` marks a block that came from another node:

    nothing reduced    step 0  1 | 2  3      inside a node the flat ring, over NVLink;
            node 0   rank 0  0  1 |*2  3      meanwhile the block held at the start of each inner ring
                     rank 1  1  0 |*3  2      crosses to the next node, with the whole inner ring to hide
            node 1   rank 2  2  3 |*0  1      behind
                     rank 3  3  2 |*1  0

    sums reduced       step 0 | 1  2 | 3      half of the work inside the home node waits until the end: what
            node 0   rank 0  0 |*2  3 | 1     other nodes summed up crosses on its way home meanwhile
                     rank 1  1 |*3  2 | 0
            node 1   rank 2  2 |*0  1 | 3
                     rank 3  3 |*1  0 | 2

`direct`, 4 ranks and a window, so that a rank needs something of the rank before it only; `.` is no visit:

              step 0  1
    node 0  rank 0  0  .       every owner sends to every rank that needs something of its block just the rows that
            rank 1  1  0       it needs, and gets back the sums of those rows: bytes are exactly the need, but
            rank 2  2  1       nothing is passed on, so that what many ranks of a node need crosses many times
            rank 3  3  2

Sources: RingAttention (arXiv 2310.01889); the two-level ring of BurstAttention (2403.09347, section 3.1)
and LoongTrain's double ring (2406.18485, section 4.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from burst_plugin.topology import Link, Topology, Traffic

__all__ = [
    "SCHEDULES",
    "Needs",
    "RankPlan",
    "Rows",
    "Schedule",
    "ScheduleError",
    "Step",
    "Transfer",
    "direct",
    "flat_ring",
    "two_level_ring",
]


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


def flat_ring(topology: Topology, reduces: bool = True, needs: Needs | None = None) -> Schedule:
    """One ring over all ranks, whatever joins them (drawn at the top of this file).

    Gather and reduce are `ranks - 1` hops per block each. Without `reduces` nothing is summed on the way.
    """
    ranks = topology.ranks

    def hop(owner: int, distance: int, issue: int) -> Transfer:
        src, dst = (owner + distance) % ranks, (owner + distance + 1) % ranks
        return Transfer(owner, src, dst, topology.link(src, dst), issue, issue + 1)

    return Schedule(
        name="flat_ring",
        topology=topology,
        visits=tuple(tuple((rank - step) % ranks for step in range(ranks)) for rank in range(ranks)),
        gather=tuple(hop(b, d, d) for b in range(ranks) for d in range(ranks - 1)),
        reduce=tuple(hop(b, d, d + 1) for b in range(ranks) for d in range(1, ranks)) if reduces else (),
        reduces=reduces,
    ).pruned(needs)


def two_level_ring(topology: Topology, reduces: bool = True, needs: Needs | None = None) -> Schedule:
    """A ring inside every node, and a ring of nodes around it (drawn at the top of this file).

    With n nodes of w ranks, rank (o, i) visits block ((o-j) mod n, (i-t) mod w) at outer step j, inner step t.
    Where sums are reduced, the second half of the visits inside the home node (j = 0) is kept for the end.

    Gather: per rank n(w-1) hops inside nodes and n-1 between them; a block crosses while the node that it leaves
    is working around its inner ring. Reduce: the same counts. A node sums up its contributions to a block around
    the inner ring; from the rank where that ends one running sum goes on to the next node, to be added there, and
    so on until it is home, all of it behind work but for one hop inside the home node.
    """
    n, w = topology.nodes, topology.ranks_per_node
    head = -(-w // 2) if reduces and n > 1 else w  # visits in the home node that come first
    tail = head + (n - 1) * w  # step at which the others begin
    at = topology.rank

    def when(outer: int, t: int) -> int:
        """The step of a visit."""
        if outer:
            return head + (outer - 1) * w + t
        return t if t < head else tail + t - head

    def gather(node: int, i: int) -> Iterator[Transfer]:
        for outer in range(n):
            here = node + outer
            for t in range(1, w):
                due = when(outer, t)
                yield Transfer(at(node, i), at(here, i + t - 1), at(here, i + t), Link.INTRA, due - 1, due)
            if outer < n - 1:
                issue, due = when(outer, 0), when(outer + 1, 0)
                yield Transfer(at(node, i), at(here, i), at(here + 1, i), Link.INTER, issue, due)

    def reduce(node: int, i: int) -> Iterator[Transfer]:
        for outer in range(n):
            here = node + outer
            for t in range(1 if outer else 2, w):
                issue = when(outer, t)
                yield Transfer(at(node, i), at(here, i + t - 1), at(here, i + t), Link.INTRA, issue, issue + 1)
            if outer:
                issue, last = when(outer, w - 1) + 1, when((outer + 1) % n, w - 1) + 1
                due = max(last, issue + 1)
                yield Transfer(at(node, i), at(here, i - 1), at(here + 1, i - 1), Link.INTER, issue, due)
        if w > 1:
            yield Transfer(at(node, i), at(node, i - 1), at(node, i), Link.INTRA, n * w, n * w + 1)

    places = [(node, i) for node in range(n) for i in range(w)]
    order = sorted((when(j, t), j, t) for j in range(n) for t in range(w))
    return Schedule(
        name="two_level_ring",
        topology=topology,
        visits=tuple(tuple(at(node - j, i - t) for _, j, t in order) for node, i in places),
        gather=tuple(transfer for place in places for transfer in gather(*place)),
        reduce=tuple(transfer for place in places for transfer in reduce(*place)) if reduces else (),
        reduces=reduces,
        separate_links=topology.levels == 2,
    ).pruned(needs)


def direct(topology: Topology, reduces: bool = True, needs: Needs | None = None) -> Schedule:
    """From the owner to every rank that needs rows of its block, and back (drawn at the top of this file).

    Steps are the distances at which any rank needs anything. Without `needs` everybody needs everything.
    """
    ranks = topology.ranks
    wanted: Needs = needs if needs is not None else [dict.fromkeys(range(ranks)) for _ in range(ranks)]
    everyone = range(ranks)
    distances = [d for d in everyone if not d or any((rank - d) % ranks in wanted[rank] for rank in everyone)]
    visits = [[(rank - d) % ranks for d in distances] for rank in everyone]
    away = [
        (rank, owner, step)
        for rank, owners in enumerate(visits)
        for step, owner in enumerate(owners)
        if owner in wanted[rank] and owner != rank
    ]
    return Schedule(
        name="direct",
        topology=topology,
        visits=tuple(tuple(o if o in wanted[rank] else None for o in owners) for rank, owners in enumerate(visits)),
        gather=tuple(
            Transfer(
                owner, owner, rank, topology.link(owner, rank), max(step - 1, 0), max(step, 1), wanted[rank][owner]
            )
            for rank, owner, step in away
        ),
        reduce=tuple(
            Transfer(owner, rank, owner, topology.link(owner, rank), step + 1, step + 2, wanted[rank][owner])
            for rank, owner, step in away
        )
        if reduces
        else (),
        reduces=reduces,
    )


SCHEDULES: Mapping[str, Callable[[Topology, bool, Needs | None], Schedule]] = MappingProxyType(
    {"flat_ring": flat_ring, "two_level_ring": two_level_ring, "direct": direct}
)
