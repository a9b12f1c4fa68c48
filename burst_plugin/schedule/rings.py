"""Ring schedules as data: which rank visits which block at which step, and which transfers cross which link then.

Pure Python, without torch. `schedule.schedule` describes the elements of a schedule, and how any schedule is run in
parts (`Schedule.in_parts`). A new schedule is a function, here or in a file of its own, and an entry in the list at
the end; docs/architecture.md says more.

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
             rank 1   1   0 |*3   2       crosses to the next node, which overlaps with the whole
    node 1   rank 2   2   3 |*0   1       inner ring
             rank 3   3   2 |*1   0

    partial results are reduced
               step   0   1   2   3   4   half of the visits inside the owner's node come last: meanwhile the
    node 0   rank 0  0/ |*2   3 | 1  /0   partial results of the other nodes cross back to it; and of the work on
             rank 1  1/ |*3   2 | 0  /1   the own block a tail (/) is left for the last step, which overlaps with
    node 1   rank 2  2/ |*0   1 | 3  /2   the final reduce hop, inside the node
             rank 3  3/ |*1   0 | 2  /3

`tasp`, 3 ranks in 2 parts (3, 4, 5 are the second parts of blocks 0, 1, 2), is a flat ring whose parts go around
different rings, 0 1 2 and 0 2 1:

               step   0   1   2   3   4   5
    node 0   rank 0   0   3   2   4   1   5       gather: the parts visited at steps 2 and 3 leave together before
             rank 1   1   4   0   5   2   3       step 0, from ranks 2 and 1 to rank 0
             rank 2   2   5   1   3   0   4       reduce: both together, after both visits

`direct` is in `schedule.direct`.

Wherever partial results cross nodes, the work on a rank's own block has a tail like that; inside one node the final
hop is short, and one tile is faster than two.

Sources: RingAttention (arXiv 2310.01889); the two-level ring of BurstAttention (2403.09347, section 3.1)
and LoongTrain's double ring (2406.18485, section 4.4); TASP (2509.26541).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from burst_plugin.schedule.direct import direct
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.schedule.steps import Required, Transfer
from burst_plugin.topology import Link, Topology, Traffic


def flat_ring(
    topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
) -> Schedule:
    """Return one ring over all ranks, whatever links join them (drawn at the top of this file).

    Gather and reduce are `ranks - 1` hops per block each.

    Args:
        topology: the nodes and ranks.
        reduces: whether partial results are sent to the owners of blocks.
        required: the rows that each rank works on, by owner: other visits are left out. None for all visits.
        drawn: the number of first ranks whose visits, and whose blocks' transfers, are returned; None for all.
    """
    ranks, drawn_ranks = topology.ranks, range(topology.ranks)[:drawn]

    def hop(traffic: Traffic, owner: int, distance: int, issue: int) -> Transfer:
        src, dst = (owner + distance) % ranks, (owner + distance + 1) % ranks
        return Transfer(traffic, owner, src, dst, topology.link(src, dst), issue, issue + 1)

    schedule = Schedule(
        name="flat_ring",
        topology=topology,
        visits=tuple(tuple((rank - step) % ranks for step in range(ranks)) for rank in drawn_ranks),
        gather=tuple(hop(Traffic.GATHER, b, d, d) for b in drawn_ranks for d in range(ranks - 1)),
        reduce=tuple(hop(Traffic.REDUCE, b, d, d + 1) for b in drawn_ranks for d in range(1, ranks) if reduces),
        reduces=reduces,
        phases=tuple(range(ranks)),
    )
    return schedule.with_tail(Link.INTER).pruned(required)


def tasp(
    topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
) -> Schedule:
    """Return a flat ring; in parts, several rings at once that share no link: part p goes around ring p.

    For nodes in which every rank has a link to every other one. All links carry traffic where there are as many parts
    as rings, `ranks - 1` in one node (4 and 6 ranks: `ranks - 2`); with more parts, rings are used again. Over
    several nodes each of `ranks_per_node` rings crosses over other NICs; see `schedule.disjoint_rings`. Every part
    has as many hops as in a flat ring, and buffers of its own.

    Args:
        topology: the nodes and ranks.
        reduces: whether partial results are sent to the owners of blocks.
        required: the rows that each rank works on, by owner: other visits are left out, and all parts take one way.
            None for all visits.
        drawn: the number of first ranks whose visits, and whose blocks' transfers, are returned; None for all.
    """
    ring = flat_ring(topology, reduces, None, drawn)
    each_step = tuple(range(len(ring.visits[0])))  # the tail too, so that parts are sent on behind the tails of all
    from burst_plugin.schedule.disjoint_rings import disjoint_ring

    return replace(ring, name="tasp", phases=each_step, ring_of_part=disjoint_ring).pruned(required)


def two_level_ring(
    topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
) -> Schedule:
    """Return a ring inside every node, and a ring of nodes around it (drawn at the top of this file).

    With n nodes of w ranks, rank (o, i) visits block ((o-j) mod n, (i-t) mod w) at outer step j, inner step t. Where
    partial results are reduced, the second half of the visits inside the owner's node (j = 0) comes last.

    Gather: per block n(w-1) hops inside nodes and n-1 between them; a block crosses while the node that it leaves
        works around its inner ring. Reduce: as many hops. A node adds up its contributions to a block around the
        inner ring; the rank where that ends sends the result on to the next node, where it is added to that node's,
        and so on until it reaches the owner. All of it overlaps with work.

    Args:
        topology: the nodes and ranks.
        reduces: whether partial results are sent to the owners of blocks.
        required: the rows that each rank works on, by owner: other visits are left out. None for all visits.
        drawn: the number of first ranks whose visits, and whose blocks' transfers, are returned; None for all.
    """
    hops = _TwoLevels(topology, reduces)
    places = [divmod(rank, topology.ranks_per_node) for rank in range(topology.ranks)[:drawn]]
    schedule = Schedule(
        name="two_level_ring",
        topology=topology,
        visits=tuple(hops.visits(*place) for place in places),
        gather=tuple(transfer for place in places for transfer in hops.gather(*place)),
        reduce=tuple(transfer for place in places for transfer in hops.reduce(*place)) if reduces else (),
        reduces=reduces,
        by_link=topology.levels == 2,
        phases=hops.phases,
    )
    final_link = Link.INTRA if topology.ranks_per_node > 1 else Link.INTER
    return schedule.with_tail(final_link).pruned(required)


class _TwoLevels:
    """The visits and transfers of `two_level_ring`; places are (node, local rank), outer steps count nodes."""

    def __init__(self, topology: Topology, reduces: bool) -> None:
        self._at = topology.rank
        self._nodes, self._width = topology.nodes, topology.ranks_per_node
        # Of the visits inside the rank's own node, how many come first, and the step at which the others begin.
        self._first = -(-self._width // 2) if reduces and self._nodes > 1 else self._width
        self._last = self._first + (self._nodes - 1) * self._width

    def _step(self, outer: int, inner: int) -> int:
        """Return the step of a visit."""
        if outer:
            return self._first + (outer - 1) * self._width + inner
        return inner if inner < self._first else self._last + inner - self._first

    @property
    def phases(self) -> tuple[int, ...]:
        """Return the first step of every inner ring; the own node's has two parts."""
        starts = [0, *(self._step(outer, 0) for outer in range(1, self._nodes))]
        return (*starts, self._last) if self._last < self._nodes * self._width else tuple(starts)

    def visits(self, node: int, local: int) -> tuple[int, ...]:
        """Return the blocks that a rank visits, by step."""
        by_step = {
            self._step(outer, inner): self._at(node - outer, local - inner)
            for outer in range(self._nodes)
            for inner in range(self._width)
        }
        return tuple(block for _, block in sorted(by_step.items()))

    def gather(self, node: int, local: int) -> Iterator[Transfer]:
        """Yield the hops of a block's operands."""
        block = self._at(node, local)
        for outer in range(self._nodes):
            here = node + outer
            for inner in range(1, self._width):
                src, dst = self._at(here, local + inner - 1), self._at(here, local + inner)
                due = self._step(outer, inner)
                yield Transfer(Traffic.GATHER, block, src, dst, Link.INTRA, due - 1, due)
            if outer < self._nodes - 1:
                src, dst = self._at(here, local), self._at(here + 1, local)
                issue, due = self._step(outer, 0), self._step(outer + 1, 0)
                yield Transfer(Traffic.GATHER, block, src, dst, Link.INTER, issue, due)

    def reduce(self, node: int, local: int) -> Iterator[Transfer]:
        """Yield the hops of a block's partial results."""
        block = self._at(node, local)
        for outer in range(self._nodes):
            here = node + outer
            for inner in range(1 if outer else 2, self._width):
                src, dst = self._at(here, local + inner - 1), self._at(here, local + inner)
                issue = self._step(outer, inner)
                yield Transfer(Traffic.REDUCE, block, src, dst, Link.INTRA, issue, issue + 1)
            if outer:
                src, dst = self._at(here, local - 1), self._at(here + 1, local - 1)
                issue = self._step(outer, self._width - 1) + 1
                next_is_complete = self._step((outer + 1) % self._nodes, self._width - 1) + 1
                yield Transfer(Traffic.REDUCE, block, src, dst, Link.INTER, issue, max(next_is_complete, issue + 1))
        if self._width > 1:
            steps = self._nodes * self._width
            yield Transfer(Traffic.REDUCE, block, self._at(node, local - 1), block, Link.INTRA, steps, steps + 1)


def default_schedule_name(topology: Topology) -> str:
    """Return the name of the schedule that suits this topology where every rank requires every block.

    It is the two-level ring for several nodes of several ranks, else the flat ring.
    """
    return two_level_ring.__name__ if topology.levels == 2 else flat_ring.__name__


class Draw(Protocol):
    """The type of functions that make a schedule, or a sample of one, for a topology."""

    def __call__(
        self, topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
    ) -> Schedule:
        """Return the schedule; with `drawn`, only visits and blocks of that many first ranks, see `sample`."""


EVERY_SCHEDULE = (flat_ring, two_level_ring, direct, tasp)
SCHEDULES: Mapping[str, Draw] = MappingProxyType({schedule.__name__: schedule for schedule in EVERY_SCHEDULE})
# Drawn from what is required, and may send less than the default where a mask leaves little; others are only pruned.
SPARSE = (direct.__name__,)
# Drawn from nodes with equally many ranks: where there are none they would be another schedule without saying so.
BY_NODE = (two_level_ring.__name__,)
# Ranks at the ends of a node use other links than those between them; in other schedules all ranks do the same.
_DIFFERS_IN_NODE = (flat_ring.__name__, tasp.__name__)


def sample(name: str, topology: Topology, reduces: bool) -> Schedule:
    """Return the part of a schedule that stands for all of it where every rank requires every block.

    It has the visits of the first ranks (`sample_ranks`), and the transfers of their blocks. All others do the same
    at the same steps, shifted by whole nodes and by places inside a node. So a sample is as long as one rank's part,
    where the whole schedule grows with the square of the number of ranks.

    name: of the schedule, a key of `SCHEDULES`. reduces: whether partial results are sent to the owners of blocks.
    """
    return SCHEDULES[name](topology, reduces, None, sample_ranks(name, topology))


def sample_ranks(name: str, topology: Topology) -> int:
    """Return how many first ranks a sample of the schedule `name` has: one, or all of node 0 where they differ.

    See `sample`. Ranks of a node differ where only some of them send to other nodes.
    """
    return topology.ranks_per_node if name in _DIFFERS_IN_NODE and topology.levels == 2 else 1
