"""Rings over the same ranks that share no link, so that all of them can be busy at once: TASP (arXiv 2509.26541).

Inside one node every rank has a link to every other one, in both directions. These links fall into Hamiltonian
cycles: `ranks - 1` of them, all links there are, for every number of ranks but 4 and 6, for which that is impossible
(Bermond and Faber 1976, Tillson 1980) and there are `ranks - 2`. Over several nodes a ring takes a path through all
ranks of a node, and the same one in the next node: as many paths as a node has ranks, no two of which share a link or
begin at the same rank, so that every NIC sends for one ring. A node with an odd number of ranks has one path less.

    1 node of 5 ranks     2 nodes of 4 ranks
    0 1 2 3 4             0 1 2 3   4 5 6 7
    0 2 4 1 3             1 3 0 2   5 7 4 6
    0 4 3 2 1             3 2 1 0   7 6 5 4
    0 3 1 4 2             2 0 3 1   6 4 7 5

Everything is made from one zigzag, 0, 1, -1, 2, -2, ... modulo an even number m. Its m translates are paths that use
each link between two of m ranks once. A hub that closes each of them makes them m cycles of m + 1 ranks. Where there
is a last rank, it is inserted into each of these in place of one link; the links that were replaced are a path, and
with the last rank the one cycle that was missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from burst_plugin.topology import Topology

_HUB, _LAST = -1, -2  # the ranks that are in no zigzag, until ranks are named by the first ring


def ring_count(topology: Topology) -> int:
    """Return how many different rings over all ranks `disjoint_ring` makes; no two of them share a link."""
    ranks = topology.ranks_per_node
    if topology.nodes > 1:
        return max(1, ranks - ranks % 2)
    return max(1, ranks - (2 if ranks in (4, 6) else 1))


def disjoint_ring(topology: Topology, number: int) -> Sequence[int]:
    """Return the ranks in the order of ring `number`; after the last rank the ring goes on to the first.

    Ring 0 is 0, 1, 2, ...; numbers from `ring_count` on begin again. In every ring the ranks of a node follow each
    other, and nodes are in their order.
    """
    ranks, number = topology.ranks_per_node, number % ring_count(topology)
    make = _path if topology.nodes > 1 else _cycle
    renamed = {rank: name for name, rank in enumerate(make(ranks, 0))}  # by which the first is in order
    order = [renamed[rank] for rank in make(ranks, number)]
    return [topology.rank(node, local) for node in range(topology.nodes) for local in order]


def _zigzag(m: int, start: int) -> list[int]:
    """Return start, start + 1, start - 1, start + 2, ..., start + m / 2, modulo m."""
    return [(start + (step + 1) // 2 * (1 if step % 2 else -1)) % m for step in range(m)]


def _path(ranks: int, number: int) -> list[int]:
    """Return a path through the ranks of a node; no two of them share a link, a first or a last rank."""
    if ranks % 2 == 0 or ranks == 1:
        return _zigzag(ranks, number)
    hub, first, *rest = _cycle(ranks, number)
    return [*rest, hub, first]


def _cycle(ranks: int, number: int) -> list[int]:
    """Return a cycle through the ranks of a node that begins with the same one as all others."""
    if ranks <= 2:
        return list(range(ranks))
    m = ranks - 2 + ranks % 2
    if number < m:
        cycle = [_HUB, *_zigzag(m, number)]
        if ranks in (4, 6):
            cycle.insert(m // 2 + 1, _LAST)
        elif ranks % 2 == 0:
            links = _one_link_of_each(m)
            before = next(src for src, dst in pairwise(links) if _cycle_of(m, src, dst) == number)
            cycle.insert(cycle.index(before) + 1, _LAST)
        return cycle
    path = _one_link_of_each(m)
    at = path.index(_HUB)
    return [*path[at:], _LAST, *path[:at]]


def _cycle_of(m: int, src: int, dst: int) -> int:
    """Return which of the m cycles of m + 1 ranks, each a zigzag closed by the hub, has this link."""
    if src == _HUB:
        return dst
    if dst == _HUB:
        return (src + m // 2) % m
    ahead = (dst - src) % m
    return (src + ahead // 2 + (0 if ahead % 2 else m // 2)) % m


def _one_link_of_each(m: int) -> list[int]:
    """Return a path through m + 1 ranks that has one link of each of their m cycles; m is even, at least 6.

    The links from each rank to the one `stride` further on are of different cycles. So the path goes on like that,
    but for a few jumps, by which it comes to the ranks that it would miss, and to the hub.
    """
    k, third = m // 4, m // 3
    if m % 4 == 2:
        start, stride, jumps = _HUB, 2 * k - 1, {_HUB: 2 * k - 1, 0: m - 2, k: k - 1, 3 * k + 2: 3 * k - 1}
    elif m % 12 == 0:
        start, stride, jumps = _HUB, 2 * k - 1, {_HUB: 2 * k - 1, 0: third // 2 - 1, k: k - 1, 3 * k: 3 * k - 1}
        jumps |= {2 * third: third - 1, 5 * m // 6: m - 1}
    elif m % 12 == 8:
        start, stride, jumps = 3 * k + 5, 2 * k + 3, {_HUB: 2 * k + 3, 0: _HUB, k + 2: 3 * k + 2, k - 1: k + 4}
    else:
        start, stride, jumps = 4, 2 * k + 3, {_HUB: 2 * k + 3, 0: 3, k + 1: k + 2, k + 2: k + 3, 2 * k: _HUB}
        jumps |= {2 * k + 1: 2 * k + 4, 3 * k - 1: 3 * k + 4, 3 * k: 3 * k + 5}
    path = []
    rank = start
    for _ in range(m + 1):
        path.append(rank if rank == _HUB else rank % m)
        rank = jumps.get(path[-1], path[-1] + stride)
    return path
