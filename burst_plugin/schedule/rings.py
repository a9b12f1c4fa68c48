"""Ring schedules as data: who visits which block when, and what travels over which link meanwhile.

Pure Python, without torch. At every step each rank visits the block of one *owner*. What a schedule is made of is in
`schedule.schedule`, and how any of them is run in parts (`Schedule.in_parts`); a new one is a function here and a
line at the end.

`flat_ring`, 4 ranks; rows are ranks, columns steps, entries the owner of the block visited:

               step   0   1   2   3
    node 0   rank 0   0   3   2   1       gather: every block moves to the next rank at every step
             rank 1   1   0   3   2       reduce: starts at owner+1, one step behind, ends at the owner
             rank 2   2   1   0   3
             rank 3   3   2   1   0

`two_level_ring`, 2 nodes x 2 ranks; `*` marks a block that came from another node:

    nothing is reduced
               step   0   1   2   3       inside a node the flat ring, over NVLink;
    node 0   rank 0   0   1 |*2   3       meanwhile the block held at the start of each inner ring
             rank 1   1   0 |*3   2       crosses to the next node, with the whole inner ring to hide
    node 1   rank 2   2   3 |*0   1       behind
             rank 3   3   2 |*1   0

    sums are reduced
               step   0   1   2   3   4   half of the work inside the home node waits until the end: what
    node 0   rank 0  0/ |*2   3 | 1  /0   other nodes summed up crosses on its way home meanwhile; and of the
             rank 1  1/ |*3   2 | 0  /1   own block a share (/) to the very end, for the last hop, inside the
    node 1   rank 2  2/ |*0   1 | 3  /2   node, to hide behind
             rank 3  3/ |*1   0 | 2  /3

`direct`, 2 nodes x 2 ranks, where few need anything of each other; `.` is no visit:

               step   0   1   2   3
    node 0   rank 0   0   .   .   .       owners send just the rows that are needed, to who needs them; but where
             rank 1   1   0   .   .       ranks of another node need the same block (2 and 3 that of 1), once to the
    node 1   rank 2   2   .   .   1       counterpart there (3), which hands it on (to 2) and adds up the sums on
             rank 3   3   2 |*1   .       their way back

Wherever sums come home over several nodes a rank visits its own block in two turns like that; inside one node the
last hop is short, and one tile is faster than two.

Sources: RingAttention (arXiv 2310.01889); the two-level ring of BurstAttention (2403.09347, section 3.1)
and LoongTrain's double ring (2406.18485, section 4.4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from types import MappingProxyType
from typing import Protocol

from burst_plugin.schedule.schedule import Required, Schedule, Transfer
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import Rows, union

__all__ = [
    "SCHEDULES",
    "SPARSE",
    "Draw",
    "default_schedule_name",
    "direct",
    "flat_ring",
    "sample",
    "sample_ranks",
    "two_level_ring",
]


def flat_ring(
    topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
) -> Schedule:
    """One ring over all ranks, whatever joins them (drawn at the top of this file).

    Gather and reduce are `ranks - 1` hops per block each. Without `reduces` nothing is summed on the way.
    """
    ranks, members = topology.ranks, range(topology.ranks)[:drawn]

    def hop(traffic: Traffic, owner: int, distance: int, issue: int) -> Transfer:
        src, dst = (owner + distance) % ranks, (owner + distance + 1) % ranks
        return Transfer(traffic, owner, src, dst, topology.link(src, dst), issue, issue + 1)

    schedule = Schedule(
        name="flat_ring",
        topology=topology,
        visits=tuple(tuple((rank - step) % ranks for step in range(ranks)) for rank in members),
        gather=tuple(hop(Traffic.GATHER, b, d, d) for b in members for d in range(ranks - 1)),
        reduce=tuple(hop(Traffic.REDUCE, b, d, d + 1) for b in members for d in range(1, ranks) if reduces),
        reduces=reduces,
        phases=tuple(range(ranks)),
    )
    return schedule.keeping(_kept(topology, Link.INTER)).pruned(required)


def two_level_ring(
    topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
) -> Schedule:
    """A ring inside every node, and a ring of nodes around it (drawn at the top of this file).

    With n nodes of w ranks, rank (o, i) visits block ((o-j) mod n, (i-t) mod w) at outer step j, inner step t.
    Where sums are reduced, the second half of the visits inside the home node (j = 0) is kept for the end.

    Gather: per rank n(w-1) hops inside nodes and n-1 between them; a block crosses while the node that it leaves
    is working around its inner ring. Reduce: the same counts. A node sums up its contributions to a block around
    the inner ring; from the rank where that ends one running sum goes on to the next node, to be added there, and
    so on until it is home, all of it behind work.
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
        traffic, block = Traffic.GATHER, at(node, i)
        for outer in range(n):
            here = node + outer
            for t in range(1, w):
                due = when(outer, t)
                yield Transfer(traffic, block, at(here, i + t - 1), at(here, i + t), Link.INTRA, due - 1, due)
            if outer < n - 1:
                issue, due = when(outer, 0), when(outer + 1, 0)
                yield Transfer(traffic, block, at(here, i), at(here + 1, i), Link.INTER, issue, due)

    def reduce(node: int, i: int) -> Iterator[Transfer]:
        traffic, block = Traffic.REDUCE, at(node, i)
        for outer in range(n):
            here = node + outer
            for t in range(1 if outer else 2, w):
                issue = when(outer, t)
                yield Transfer(traffic, block, at(here, i + t - 1), at(here, i + t), Link.INTRA, issue, issue + 1)
            if outer:
                issue, last = when(outer, w - 1) + 1, when((outer + 1) % n, w - 1) + 1
                due = max(last, issue + 1)
                yield Transfer(traffic, block, at(here, i - 1), at(here + 1, i - 1), Link.INTER, issue, due)
        if w > 1:
            yield Transfer(traffic, block, at(node, i - 1), block, Link.INTRA, n * w, n * w + 1)

    places = [divmod(rank, w) for rank in range(topology.ranks)[:drawn]]
    order = sorted((when(j, t), j, t) for j in range(n) for t in range(w))
    schedule = Schedule(
        name="two_level_ring",
        topology=topology,
        visits=tuple(tuple(at(node - j, i - t) for _, j, t in order) for node, i in places),
        gather=tuple(transfer for place in places for transfer in gather(*place)),
        reduce=tuple(transfer for place in places for transfer in reduce(*place)) if reduces else (),
        reduces=reduces,
        by_link=topology.levels == 2,
        phases=(0, *(when(outer, 0) for outer in range(1, n)), *([tail] if tail < n * w else [])),
    )
    return schedule.keeping(_kept(topology, Link.INTRA if w > 1 else Link.INTER)).pruned(required)


def direct(
    topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
) -> Schedule:
    """From the owner to those that need rows of its block, and back (drawn at the top of this file).

    Everyone is sent just the rows that it needs. But where ranks of another node need the same block, all that cross
    go over counterparts: an owner sends to its own there, once, what that node needs. That one hands it on, adds up
    the sums, and sends these back. Steps are those at which any rank needs anything, or a counterpart is sent
    something.
    Without `required` every rank needs every block.
    """
    wanted: Required = required if required is not None else [dict.fromkeys(range(topology.ranks))] * topology.ranks
    members = range(topology.ranks)[:drawn]
    pairs = [(rank, owner) for rank, owners in enumerate(wanted) for owner in (owners if drawn is None else members)]
    visitors = defaultdict[tuple[int, int], list[int]](list)  # by owner, and another node than its own
    for rank, owner in pairs:
        if topology.link(owner, rank) is Link.INTER:
            visitors[owner, topology.node(rank)].append(rank)
    over_counterparts = any(len(ranks) > 1 for ranks in visitors.values())
    steps = _Steps(topology, pairs, reduces, by_node=over_counterparts)
    gather, reduce = [], []

    def send(
        owner: int, src: int, dst: int, rows: Rows | None, there: tuple[int, int], back: tuple[int, int]
    ) -> None:
        gather.append(Transfer(Traffic.GATHER, owner, src, dst, topology.link(src, dst), *there, rows))
        reduce.append(Transfer(Traffic.REDUCE, owner, dst, src, topology.link(src, dst), *back, rows))

    def send_at_once(owner: int, src: int, dst: int, rows: Rows | None) -> None:
        step = steps.of(dst, owner)
        send(owner, src, dst, rows, (step - 1, step), (step + 1, step + 2))

    for rank, owner in pairs:
        if rank != owner and not (over_counterparts and topology.link(owner, rank) is Link.INTER):
            send_at_once(owner, owner, rank, wanted[rank][owner])
    for (owner, node), ranks in visitors.items() if over_counterparts else ():
        counterpart, rows = topology.rank(node, topology.local_rank(owner)), union(wanted[r][owner] for r in ranks)
        others = [rank for rank in ranks if rank != counterpart]
        for rank in others:
            send_at_once(owner, counterpart, rank, rows)
        # Behind the group of steps before, and back behind as many as there are in the next one.
        first = steps.of(counterpart, owner)
        summed = max([first + 1, *(steps.of(rank, owner) + 2 for rank in others)])
        before, after = steps.around(first)
        home = max(summed + 1, min(summed + after, len(steps.order)))
        send(owner, owner, counterpart, rows, (first - before, first), (summed, home))
    return Schedule(
        name="direct",
        topology=topology,
        visits=tuple(steps.visits(rank, wanted[rank]) for rank in members),
        gather=tuple(gather),
        reduce=tuple(reduce) if reduces else (),
        reduces=reduces,
        by_link=over_counterparts,
        phases=tuple(range(len(steps.order))),
    ).keeping(_kept(topology, Link.INTER))


class _Steps:
    """The steps of `direct`: distances between ranks and the owners that they visit, (nodes, ranks).

    `by_node` they are in groups as those of `two_level_ring`, each beginning with the visit to counterparts; else
    ranks are counted through all nodes, in one group.
    """

    def __init__(self, topology: Topology, pairs: Sequence[tuple[int, int]], reduces: bool, by_node: bool) -> None:
        self._nodes, self._width = (topology.nodes, topology.ranks_per_node) if by_node else (1, topology.ranks)
        distances = {(0, 0), *(self._distance(*pair) for pair in pairs)}
        ordered = sorted({*distances, *((nodes, 0) for nodes, _ in distances)})
        home, *others = ([*group] for _, group in groupby(ordered, key=lambda distance: distance[0]))
        head = -(-len(home) // 2) if reduces and others else len(home)
        self._groups = [home[:head], *others, *([home[head:]] if head < len(home) else [])]
        self.order = [distance for group in self._groups for distance in group]
        self._step_of = {distance: step for step, distance in enumerate(self.order)}

    def _distance(self, rank: int, owner: int) -> tuple[int, int]:
        (node, place), (other, elsewhere) = divmod(rank, self._width), divmod(owner, self._width)
        return (node - other) % self._nodes, (place - elsewhere) % self._width

    def of(self, rank: int, owner: int) -> int:
        """The step at which a rank visits an owner's block."""
        return self._step_of[self._distance(rank, owner)]

    def visits(self, rank: int, owners: Iterable[int]) -> tuple[int | None, ...]:
        """The owner that a rank visits at each step, of these."""
        at = {self.of(rank, owner): owner for owner in owners}
        return tuple(at.get(step) for step in range(len(self.order)))

    def around(self, step: int) -> tuple[int, int]:
        """How many steps the groups before and after that of a step have."""
        lengths = [0, *map(len, self._groups), 0]
        group = sum(end <= step for end in accumulate(map(len, self._groups)))
        return lengths[group], lengths[group + 2]


def _kept(topology: Topology, last_hop: Link) -> float:
    """The share of the work on its own block that a rank keeps for the end, for sums to come home over that link."""
    if topology.nodes == 1:
        return 0.0
    return 0.5 if last_hop is Link.INTER else 0.25


def default_schedule_name(topology: Topology) -> str:
    """The name of the schedule for ranks that need every block."""
    return two_level_ring.__name__ if topology.levels == 2 else flat_ring.__name__


class Draw(Protocol):
    """A schedule function: draws a schedule, or a part of one."""

    def __call__(
        self, topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
    ) -> Schedule:
        """Return the schedule; with `drawn`, see `sample`, only visits and blocks of the first so many ranks."""


SCHEDULES: Mapping[str, Draw] = MappingProxyType(
    {schedule.__name__: schedule for schedule in (flat_ring, two_level_ring, direct)}
)
# May send less than the usual one where a mask leaves little, and are made of what is needed; others are only pruned.
SPARSE = (direct.__name__,)
# Ranks at the ends of a node use other links than those between them; in all other schedules every rank does alike.
_ALIKE_BY_NODE = (flat_ring.__name__,)


def sample(name: str, topology: Topology, reduces: bool) -> Schedule:
    """Return the part of a schedule that stands for all of it where every rank needs every block.

    It has the visits of the first ranks (`sample_ranks`), and the transfers of their blocks. All others do the same
    at the same steps: shift every rank by as many nodes, and by as many places inside its node. So a sample is as
    long as one rank's part, where the whole schedule grows with the square of the number of ranks.
    """
    return SCHEDULES[name](topology, reduces, None, sample_ranks(name, topology))


def sample_ranks(name: str, topology: Topology) -> int:
    """Return how many ranks stand for all: rank 0, or those of node 0 where ranks of a node do not do alike."""
    return topology.ranks_per_node if name in _ALIKE_BY_NODE and topology.levels == 2 else 1
