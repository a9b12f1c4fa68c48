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

Sources: RingAttention (arXiv 2310.01889); the two-level ring of BurstAttention (2403.09347, section 3.1)
and LoongTrain's double ring (2406.18485, section 4.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from burst_plugin.topology import Link, Topology, Traffic

__all__ = [
    "SCHEDULES",
    "RankPlan",
    "Schedule",
    "ScheduleError",
    "Step",
    "Transfer",
    "flat_ring",
    "two_level_ring",
]


class ScheduleError(ValueError):
    """A schedule that would lose, repeat or read ahead of data."""


class Transfer(NamedTuple):
    """One block (gather) or one sum (reduce) of `owner` going from `src` to `dst`."""

    owner: int
    src: int
    dst: int
    link: Link
    issue: int
    due: int


class Step(NamedTuple):
    """What one rank does at one step, in this order: wait for `due`, post `issue`, work on `visit`."""

    visit: int | None
    due: tuple[tuple[Traffic, Transfer], ...]
    issue: tuple[tuple[Traffic, Transfer], ...]
    drop: tuple[int, ...]  # owners whose operands nobody needs here from this step on


class RankPlan(NamedTuple):
    """A schedule as one rank sees it."""

    rank: int
    steps: tuple[Step, ...]
    sends: Mapping[tuple[Traffic, Link], int]  # how many messages


@dataclass(frozen=True)
class Schedule:
    """Visits and transfers of all ranks: `visits[rank][step]` is the owner of the block visited.

    `reduces` is whether sums are brought home; `separate_links` whether transfers on both links are under way at
    once for unlike times, so that each link needs communicators of its own.
    """

    name: str
    topology: Topology
    visits: tuple[tuple[int, ...], ...]
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
        needed = {owner: step + 1 for step, owner in enumerate(self.visits[rank])}
        for kind, t in mine:
            issue[t.issue].append((kind, t))
            due[t.due].append((kind, t))
            if kind is Traffic.GATHER and t.src == rank:
                needed[t.owner] = max(needed[t.owner], t.due)
        visits = [*self.visits[rank], *[None] * (last - len(self.visits[rank]))]
        drop = [tuple(o for o, end in needed.items() if end == step) for step in range(last)]
        for transfers in issue:  # one order on every rank: ring by ring, what is due first before the rest
            transfers.sort(key=lambda pair: (pair[1].due, pair[0], pair[1].link))
        steps = tuple(Step(visits[s], tuple(due[s]), tuple(issue[s]), drop[s]) for s in range(last))
        return RankPlan(rank, steps, Counter((kind, t.link) for kind, t in mine if t.src == rank))

    def validate(self) -> Schedule:
        """Check that the schedule is exact, and return it.

        Each block visits each rank once; links are as the topology says; nothing is worked on or sent before
        it is there, and nothing is sent to a rank that has it; every contribution reaches its owner once.
        Raises ScheduleError naming the first rank, step and block for which this fails.
        """
        everyone = list(range(self.ranks))
        for rank, visits in enumerate(self.visits):
            if sorted(visits) != everyone:
                raise ScheduleError(f"{self.name}: rank {rank} does not visit every block exactly once: {visits}")
        for t in (*self.gather, *self.reduce):
            if t.src == t.dst or t.issue >= t.due or t.link is not self.topology.link(t.src, t.dst):
                raise ScheduleError(f"{self.name}: impossible transfer {t}")
        self._validate_gather()
        self._validate_reduce()
        return self

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
                if held_from.get((rank, owner), step + 1) > step:
                    raise ScheduleError(f"{self.name}: rank {rank} visits block {owner} at step {step} without it")

    def _validate_reduce(self) -> None:
        """Follow the sums; a set of contributing ranks is one integer, a bit per rank."""
        if not self.reduces:
            return
        bags: Counter[tuple[int, int]] = Counter()
        events: list[tuple[int, int, Transfer | tuple[int, int]]] = []
        for rank, visits in enumerate(self.visits):
            events += [(step + 1, 0, (rank, owner)) for step, owner in enumerate(visits)]
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
        everyone = (1 << self.ranks) - 1
        for (rank, owner), piece in bags.items():
            if rank != owner or piece != everyone:
                raise ScheduleError(f"{self.name}: the sum of block {owner} ends incomplete at rank {rank}")

    def format(self) -> str:
        """The schedule as a grid: rows are ranks, columns steps, `*` a block that came from another node."""
        crossed = {(t.dst, t.owner) for t in self.gather if t.link is Link.INTER}
        width = len(str(self.ranks)) + 2
        lines = [f"{self.name}, {self.topology}"]
        for rank, visits in enumerate(self.visits):
            cells = [f"{'*' if (rank, owner) in crossed else ''}{owner}".rjust(width) for owner in visits]
            nodes = [self.topology.node(owner) for owner in visits]
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


def flat_ring(topology: Topology, reduces: bool = True) -> Schedule:
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
    )


def two_level_ring(topology: Topology, reduces: bool = True) -> Schedule:
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
    )


SCHEDULES: Mapping[str, Callable[[Topology, bool], Schedule]] = MappingProxyType(
    {"flat_ring": flat_ring, "two_level_ring": two_level_ring}
)
