"""Transfers alone, over the communicators of a ring: every link by itself, all links at once, and small messages.

A ring sends from every rank to its next neighbour at the same time, so a schedule gets the rate of all links at once.
One at a time, each link is judged by itself, and a slow one is named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.check.settings import Sizes
from burst_plugin.check.world import World
from burst_plugin.comm.transport import Channel, Message
from burst_plugin.context import ContextParallel
from burst_plugin.profiling.cluster_profile import LinkRate
from burst_plugin.topology import Link, Topology, Traffic

SLOW = 0.5  # of the median rate of its kind, below which a link counts as slow
_SMALL, _MIDDLE = 1 << 10, 1 << 20  # bytes
_SHARED = 1.5  # times as long, at least, messages take when all ranks of a node send, if these share a NIC
_RETRIES = 3


class Edge(NamedTuple):
    """A link from one rank to another, and the bytes per second that it carried by itself."""

    src: int
    dst: int
    bytes_per_s: float


class Damage(NamedTuple):
    """A message that came with other bytes than were sent: from rank `src` to `dst`, `wrong` of its `nbytes`."""

    src: int
    dst: int
    wrong: int
    nbytes: int


class MeasuredLink(NamedTuple):
    """The measured speed of one kind of link, inside nodes or between them.

    rate: of a rank with all ranks at work at once; of a NIC, if the ranks of a node share it.
    by_size: for messages of several sizes (bytes, seconds). edges: the rate of every single link, measured by itself.
    is_shared: whether the ranks of a node share a NIC.
    damage: messages that came with other bytes than were sent.
    """

    link: Link
    rate: LinkRate
    by_size: tuple[tuple[int, float], ...]
    edges: tuple[Edge, ...]
    is_shared: bool
    damage: tuple[Damage, ...] = ()


def measure_links(world: World, cp: ContextParallel, sizes: Sizes) -> dict[Link, MeasuredLink]:
    """Measure each kind of link of a ring, by transfers over its communicators; collective.

    sizes: how long transfers take, their largest message, and how often each is timed.

    Returns equal results on all ranks, without kinds that do not join any two ranks. Sets the ring's counts of
    traffic to 0.
    """
    cp.connect()
    links = [link for link in Link if len(_peers(cp.topology, 0, link)) > 1]
    measured = {link: _Wire(world, cp, link, sizes).measured() for link in links}
    cp.reset_traffic()
    return measured


def slow_edges(edges: Sequence[Edge]) -> list[Edge]:
    """Return the links whose rate is below `SLOW` times the median of all given ones, the slowest first.

    edges: links of one kind, at least one.
    """
    usual = median(edge.bytes_per_s for edge in edges)
    slow = (edge for edge in edges if edge.bytes_per_s < SLOW * usual)
    return sorted(slow, key=lambda edge: edge.bytes_per_s)


def node_rates(topology: Topology, edges: Sequence[Edge]) -> tuple[float, ...]:
    """Return, for each node, the rate of the slowest NIC of its ranks in bytes per second.

    edges: all links between nodes, each measured by itself. A link is as slow as the slower NIC at its ends, so a NIC
    is taken to have the rate of the fastest of its links. Of two nodes either may be the slow one, and both get its
    rate.
    """
    of_ranks = [0.0] * topology.ranks
    for edge in edges:
        for rank in (edge.src, edge.dst):
            of_ranks[rank] = max(of_ranks[rank], edge.bytes_per_s)
    return tuple(min(of_ranks[rank] for rank in topology.node_peers(first)) for first in topology.counterparts(0))


def _peers(topology: Topology, rank: int, link: Link) -> tuple[int, ...]:
    """Return the ranks that `rank` reaches over a link, itself included, in the order of their ring."""
    return topology.node_peers(rank) if link is Link.INTRA else topology.counterparts(rank)


class _Part(NamedTuple):
    """A rank's part in a transfer."""

    sends: bool
    receives: bool


class _Wire:
    """One rank's end of one kind of link."""

    def __init__(self, world: World, cp: ContextParallel, link: Link, sizes: Sizes) -> None:
        self._world, self._sizes, self._link = world, sizes, link
        self._transport, self._topology = cp.rank_state.transport, cp.topology
        self._channel = Channel(Traffic.GATHER, link, cp.rank_state.route_table.dense(True).by_link)
        self._peers = _peers(cp.topology, cp.rank, link)
        self._place = self._peers.index(cp.rank)
        self._next = self._peers[(self._place + 1) % len(self._peers)]
        self._previous = self._peers[self._place - 1]
        self._out = self._pattern(cp.rank, sizes.most_bytes)
        self._in = torch.empty_like(self._out)

    def measured(self) -> MeasuredLink:
        """Return the measured rates of the links of this kind; collective."""
        both = _Part(sends=True, receives=True)
        latency_s = max(self._best(_SMALL, both, 20))
        middle_s = max(self._best(_MIDDLE, both))
        nbytes = int(min(self._sizes.most_bytes, max(_MIDDLE, _MIDDLE * self._sizes.transfer_s / middle_s)))
        by_rank_s = self._best(nbytes, both)
        is_shared, large_s = self._is_shared(nbytes, by_rank_s), max(by_rank_s)
        by_size = ((_SMALL, latency_s), (_MIDDLE, middle_s), (nbytes, large_s))
        damage = tuple(found for size, _ in by_size for found in self._damage(size))
        sharing = self._topology.ranks_per_node if is_shared else 1
        rate = LinkRate(sharing * nbytes / large_s, latency_s)
        return MeasuredLink(self._link, rate, by_size, self._edges(nbytes), is_shared, damage)

    def _pattern(self, rank: int, nbytes: int) -> Tensor:
        """Return the bytes of a rank's message, which differ by rank and by their place in the message."""
        bytes_251 = torch.arange(251, dtype=torch.uint8, device=self._world.device)
        return bytes_251.repeat(-(-nbytes // 251))[:nbytes] + rank % 256

    def _damage(self, nbytes: int) -> list[Damage]:
        """Return messages of this size that come with other bytes than were sent; collective.

        NCCL sends large messages by other protocols than small ones, and attention's are large.
        """
        self._in.zero_()
        self._transfer(nbytes, _Part(sends=True, receives=True))
        self._world.synchronize()
        wrong = int((self._in[:nbytes] != self._pattern(self._previous, nbytes)).sum())
        by_receiver = self._world.exchange(f"messages {self._link.value} compared", [self._previous, wrong])
        return [Damage(src, dst, wrong, nbytes) for dst, (src, wrong) in enumerate(by_receiver) if wrong]

    def _is_shared(self, nbytes: int, together_s: list[float]) -> bool:
        """Return whether the first ranks of all nodes are faster when the other ones do not send; collective."""
        if self._link is Link.INTRA or self._topology.ranks_per_node == 1:
            return False
        first = range(0, self._topology.ranks, self._topology.ranks_per_node)
        takes_part = self._world.rank in first
        alone_s = self._best(nbytes, _Part(takes_part, takes_part))
        return max(together_s[rank] for rank in first) > _SHARED * max(alone_s[rank] for rank in first)

    def _best(self, nbytes: int, part: _Part, count: int = 1) -> list[float]:
        """Return the seconds of a message on every rank, in the round with the least slow rank; collective."""
        seconds = [self._seconds(nbytes, part, count) for _ in range(self._sizes.rounds)]
        seconds_by_rank = self._world.exchange(f"transfers {self._link.value}", seconds)
        return list(min(zip(*seconds_by_rank, strict=True), key=max))

    def _seconds(self, nbytes: int, part: _Part, count: int = 1) -> float:
        """Return the mean seconds of `count` messages, one after the other, to the next and from the previous rank.

        Ranks leave a barrier as late as its slowest message. So a small message goes first, and the clock starts when
        it is there: the neighbour is ready then.
        """
        self._world.together()
        self._transfer(_SMALL, part)
        self._world.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self._transfer(nbytes, part)
        self._world.synchronize()
        return (time.perf_counter() - start) / count

    def _transfer(self, nbytes: int, part: _Part) -> None:
        out = [Message(self._next, self._channel, self._out[:nbytes])] if part.sends else []
        into = [Message(self._previous, self._channel, self._in[:nbytes])] if part.receives else []
        for pending in self._transport.post(out, into) if out or into else ():
            pending.wait()

    def _edges(self, nbytes: int) -> tuple[Edge, ...]:
        """Return every link, timed by itself, twice; again if one looks slow, since a busy machine is late."""
        best: dict[tuple[int, int], float] = {}
        for turn in range(2 + _RETRIES):
            for edge in self._edges_once(nbytes):
                ends = edge.src, edge.dst
                best[ends] = max(edge.bytes_per_s, best.get(ends, 0.0))
            edges = [Edge(*ends, rate) for ends, rate in sorted(best.items())]
            if turn and not slow_edges(edges):
                break
        return tuple(edges)

    def _edges_once(self, nbytes: int) -> list[Edge]:
        """Time each link, at its receiving end, while no rank has a second one to serve."""
        members, received_s = len(self._peers), 0.0
        for turn in range(3 if members % 2 else 2):
            sends = _turn_of(self._place, members) == turn
            receives = _turn_of((self._place - 1) % members, members) == turn
            took_s = self._seconds(nbytes, _Part(sends, receives))
            received_s = took_s if receives else received_s
        by_receiver = self._world.exchange(f"links {self._link.value} one by one", [self._previous, received_s])
        return [Edge(src, dst, nbytes / took_s) for dst, (src, took_s) in enumerate(by_receiver)]


def _turn_of(place: int, members: int) -> int:
    """Return the turn that the rank at a place sends in, so that no rank sends and receives at once."""
    return 2 if members % 2 and place == members - 1 else place % 2
