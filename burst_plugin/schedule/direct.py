"""The schedule `direct`: every rank is sent just the rows that it requires, straight from their owner.

2 nodes x 2 ranks; `.` is no visit:

               step   0   1   2   3
    node 0   rank 0   0   .   .   .       owners send required rows to the ranks that require them; but where several
             rank 1   1   0   .   .       ranks of another node require the same block (2 and 3 that of 1), once to
    node 1   rank 2   2   .   .   1       their counterpart there (3), which sends it on (to 2), and adds up the
             rank 3   3   2 |*1   .       partial results on their way back
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from burst_plugin.schedule.schedule import Schedule
from burst_plugin.schedule.steps import Required, Transfer
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import Rows, union


def direct(
    topology: Topology, reduces: bool = True, required: Required | None = None, drawn: int | None = None
) -> Schedule:
    """Return the schedule that sends blocks from owners straight to the ranks that require rows of them, and back.

    Every rank is sent just the rows that it requires. But where several ranks of another node require the same block,
    everything that crosses nodes goes over counterparts: an owner sends to its own counterpart there, once, what that
    node requires. The counterpart sends it on, adds up the partial results, and sends these back. Steps are those at
    which any rank visits a block, or a counterpart is sent one.

    Args:
        topology: the nodes and ranks.
        reduces: whether partial results are sent back to the owners.
        required: the rows that each rank works on, by owner; None if every rank requires every block.
        drawn: the number of first ranks whose visits, and whose blocks' transfers, are returned; None for all.
    """
    if required is None:
        required = [dict.fromkeys(range(topology.ranks))] * topology.ranks
    drawn_ranks = range(topology.ranks)[:drawn]
    pairs = [
        (rank, owner) for rank, owners in enumerate(required) for owner in (owners if drawn is None else drawn_ranks)
    ]
    by_node = _visitors_by_node(topology, pairs)
    over_counterparts = any(len(ranks) > 1 for ranks in by_node.values())
    steps = _Steps(topology, pairs, reduces, over_counterparts)
    transfers = _Transfers(topology, steps)
    for rank, owner in pairs:
        crosses = topology.link(owner, rank) is Link.INTER
        if rank != owner and not (crosses and over_counterparts):
            transfers.add_visit(owner, owner, rank, required[rank][owner])
    if over_counterparts:
        for (owner, node), ranks in by_node.items():
            transfers.add_crossing(owner, node, ranks, union(required[rank][owner] for rank in ranks))
    return Schedule(
        name="direct",
        topology=topology,
        visits=tuple(steps.visits(rank, required[rank]) for rank in drawn_ranks),
        gather=tuple(transfers.gather),
        reduce=tuple(transfers.reduce) if reduces else (),
        reduces=reduces,
        by_link=over_counterparts,
        phases=tuple(range(steps.count)),
    ).with_tail(Link.INTER)


def sent_early(schedule: Schedule, lengths: Sequence[int]) -> Schedule:
    """Return the schedule with what a node's ranks send each other posted at the first step, if that is little.

    lengths: the rows of every rank's block. What is sent is little if the most rows of any rank, between nodes and
    inside them, are at most a block. These operands arrive together, in one batch behind the first visit, and partial
    results are awaited at the last step, so that no rank waits for one that is behind in its visits.
    """
    early = {t for t in schedule.gather if t.link is Link.INTRA and t.src == schedule.owner(t.block)}
    if not early or sum(schedule.most_rows_moved(lengths)) > max(lengths):
        return schedule
    first, last = min(t.due for t in early), max((t.due for t in schedule.reduce), default=0)
    return replace(
        schedule,
        gather=tuple(t._replace(issue=0, due=first) if t in early else t for t in schedule.gather),
        reduce=tuple(t._replace(due=last) if t.dst == schedule.owner(t.block) else t for t in schedule.reduce),
    )


def _visitors_by_node(topology: Topology, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """Return by owner and by another node than the owner's: the ranks there that require the owner's block."""
    visitors = defaultdict[tuple[int, int], list[int]](list)
    for rank, owner in pairs:
        if topology.link(owner, rank) is Link.INTER:
            visitors[owner, topology.node(rank)].append(rank)
    return visitors


class _Transfers:
    """The transfers of `direct`: each is matched by one back, of partial results of the same rows."""

    def __init__(self, topology: Topology, steps: _Steps) -> None:
        self._topology, self._steps = topology, steps
        self.gather: list[Transfer] = []
        self.reduce: list[Transfer] = []

    def add_visit(self, owner: int, src: int, dst: int, rows: Rows | None) -> None:
        """Send rows to `dst` just before it visits the block, and the partial results back just after."""
        step = self._steps.of(dst, owner)
        self._add(owner, src, dst, rows, (step - 1, step), (step + 1, step + 2))

    def add_crossing(self, owner: int, node: int, ranks: Sequence[int], rows: Rows | None) -> None:
        """Send rows that ranks of another node require to the owner's counterpart there, and on to these.

        They cross while the group of steps before is worked on, and partial results cross back while as many steps
        are as the group after has.
        """
        counterpart = self._topology.rank(node, self._topology.local_rank(owner))
        others = [rank for rank in ranks if rank != counterpart]
        for rank in others:
            self.add_visit(owner, counterpart, rank, rows)
        arrives = self._steps.of(counterpart, owner)
        leaves = max([arrives + 1, *(self._steps.of(rank, owner) + 2 for rank in others)])
        before, after = self._steps.around(arrives)
        back = max(leaves + 1, min(leaves + after, self._steps.count + 1))  # after the tail
        self._add(owner, owner, counterpart, rows, (arrives - before, arrives), (leaves, back))

    def _add(
        self, owner: int, src: int, dst: int, rows: Rows | None, there: tuple[int, int], back: tuple[int, int]
    ) -> None:
        link = self._topology.link(src, dst)
        self.gather.append(Transfer(Traffic.GATHER, owner, src, dst, link, *there, rows))
        self.reduce.append(Transfer(Traffic.REDUCE, owner, dst, src, link, *back, rows))


class _Steps:
    """The steps of `direct`: distances between ranks and the owners that they visit, (nodes, ranks).

    With `by_node` they form groups as in `two_level_ring`, and a group begins with the visit to counterparts;
    otherwise ranks are counted through all nodes, in one group.
    """

    def __init__(self, topology: Topology, pairs: Sequence[tuple[int, int]], reduces: bool, by_node: bool) -> None:
        self._nodes, self._width = (topology.nodes, topology.ranks_per_node) if by_node else (1, topology.ranks)
        distances = {(0, 0), *(self._distance(*pair) for pair in pairs)}
        ordered = sorted({*distances, *((nodes, 0) for nodes, _ in distances)})
        own_node, *others = ([*group] for _, group in groupby(ordered, key=lambda distance: distance[0]))
        first = -(-len(own_node) // 2) if reduces and others else len(own_node)  # the rest comes last
        self._groups = [group for group in (own_node[:first], *others, own_node[first:]) if group]
        order = [distance for group in self._groups for distance in group]
        self._step_of = {distance: step for step, distance in enumerate(order)}
        self.count = len(order)

    def _distance(self, rank: int, owner: int) -> tuple[int, int]:
        (node, local), (owner_node, owner_local) = divmod(rank, self._width), divmod(owner, self._width)
        return (node - owner_node) % self._nodes, (local - owner_local) % self._width

    def of(self, rank: int, owner: int) -> int:
        """Return the step at which a rank visits an owner's block."""
        return self._step_of[self._distance(rank, owner)]

    def visits(self, rank: int, owners: Iterable[int]) -> tuple[int | None, ...]:
        """Return the one of these owners that a rank visits at each step."""
        at = {self.of(rank, owner): owner for owner in owners}
        return tuple(at.get(step) for step in range(self.count))

    def around(self, step: int) -> tuple[int, int]:
        """Return the numbers of steps in the groups before and after the group of a step."""
        lengths = [0, *map(len, self._groups), 0]
        group = sum(end <= step for end in accumulate(map(len, self._groups)))
        return lengths[group], lengths[group + 2]
