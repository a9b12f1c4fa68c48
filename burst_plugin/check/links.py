"""Transfers alone, over the communicators of a ring: every link by itself, all links at once, and small messages.

A ring sends from every rank to its next neighbour at the same time, so the rate that a schedule gets is that of all
at once. One at a time, each link is judged by itself, and a slow one is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from burst_plugin.check.settings import Sizes
from burst_plugin.check.world import World
from burst_plugin.comm.transport import Channel, Message
from burst_plugin.context import ContextParallel
from burst_plugin.profiling.cluster_profile import LinkRate
from burst_plugin.topology import Link, Topology, Traffic

__all__ = ["SLOW", "Edge", "Measured", "measure_links", "slow_edges"]

SLOW = 0.5  # of the median rate of its kind, from which on a link counts as slow
_SMALL, _MIDDLE = 1 << 10, 1 << 20  # bytes
_SHARED = 1.5  # times the rate of a NIC that one rank has for itself, over that when all ranks of a node send
_RETRIES = 3


class Edge(NamedTuple):
    """A link from one rank to another, and the bytes per second that it carried by itself."""

    src: int
    dst: int
    bytes_per_s: float


class Measured(NamedTuple):
    """What one kind of link carries.

    rate: with all ranks at work at once; of a NIC, if the ranks of a node share it. by_size: (bytes, seconds) of a
    message. edges: every link by itself. is_shared: whether the ranks of a node share a NIC.
    """

    link: Link
    rate: LinkRate
    by_size: tuple[tuple[int, float], ...]
    edges: tuple[Edge, ...]
    is_shared: bool


def measure_links(world: World, cp: ContextParallel, sizes: Sizes) -> dict[Link, Measured]:
    """Return what each kind of link of the ring carries; the same on every rank; collective."""
    cp.connect()
    found = {}
    for link in Link:
        if len(_peers(cp.topology, 0, link)) > 1:
            found[link] = _Wire(world, cp, link, sizes).measured()
    cp.reset_traffic()
    return found


def slow_edges(edges: Sequence[Edge]) -> list[Edge]:
    """Return the links that carry less than `SLOW` of the median of their kind, the slowest first."""
    usual = median(edge.bytes_per_s for edge in edges)
    return sorted((e for e in edges if e.bytes_per_s < SLOW * usual), key=lambda edge: edge.bytes_per_s)


def _peers(topology: Topology, rank: int, link: Link) -> tuple[int, ...]:
    """Return the ranks that one reaches over a link, itself included, in the order of their ring."""
    return topology.node_peers(rank) if link is Link.INTRA else topology.counterparts(rank)


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
        self._out = torch.ones(sizes.most_bytes, dtype=torch.uint8, device=world.device)
        self._in = torch.empty_like(self._out)

    def measured(self) -> Measured:
        """Return what the links of this kind carry; collective."""
        self._exchange(_SMALL, 3)  # opens connections
        latency_s = self._best(partial(self._exchange, _SMALL, 20)) / 20
        middle_s = self._best(partial(self._exchange, _MIDDLE, 1))
        nbytes = int(min(self._sizes.most_bytes, max(_MIDDLE, _MIDDLE * self._sizes.transfer_s / middle_s)))
        large_s = self._best(partial(self._exchange, nbytes, 1))
        edges = self._edges(nbytes)
        rate, width = nbytes / large_s, self._topology.ranks_per_node
        is_shared = False
        if self._link is Link.INTER and width > 1:
            alone_s = self._best(partial(self._exchange, nbytes, 1, self._topology.local_rank(self._world.rank) == 0))
            is_shared = large_s > _SHARED * alone_s
        by_size = ((_SMALL, latency_s), (_MIDDLE, middle_s), (nbytes, large_s))
        rate_of_nic = rate * width if is_shared else rate
        return Measured(self._link, LinkRate(rate_of_nic, latency_s), by_size, edges, is_shared)

    def _exchange(self, nbytes: int, count: int, takes_part: bool = True) -> None:
        """Send to the next rank and receive from the previous one, so many times."""
        for _ in range(count if takes_part else 0):
            self._transfer(nbytes, sends=True, receives=True)

    def _transfer(self, nbytes: int, *, sends: bool, receives: bool) -> None:
        out = [Message(self._next, self._channel, self._out[:nbytes])] if sends else []
        into = [Message(self._previous, self._channel, self._in[:nbytes])] if receives else []
        for pending in self._transport.post(out, into) if out or into else ():
            pending.wait()

    def _best(self, work: Callable[[], Any]) -> float:
        """Return the seconds of the slowest rank, in the best of some rounds; collective."""
        seconds = [self._world.timed(work) for _ in range(self._sizes.rounds)]
        every = self._world.exchange(f"transfers {self._link.value}", seconds)
        return min(max(float(each) for each in turn) for turn in zip(*every, strict=True))

    def _edges(self, nbytes: int) -> tuple[Edge, ...]:
        """Return every link by itself; those that look slow are timed again, since a busy machine is late."""
        best: dict[tuple[int, int], float] = {}
        for _ in range(1 + _RETRIES):
            for each in self._edges_once(nbytes):
                key = each.src, each.dst
                best[key] = max(each.bytes_per_s, best.get(key, 0.0))
            edges = [Edge(*key, rate) for key, rate in sorted(best.items())]
            if not slow_edges(edges):
                break
        return tuple(edges)

    def _edges_once(self, nbytes: int) -> list[Edge]:
        """Time each link while no rank has a second one to serve; the receiver's time counts."""
        members, seconds = len(self._peers), 0.0
        for turn in range(3 if members % 2 else 2):
            sends = _turn_of(self._place, members) == turn
            receives = _turn_of((self._place - 1) % members, members) == turn
            took_s = self._world.timed(partial(self._transfer, nbytes, sends=sends, receives=receives))
            seconds = took_s if receives else seconds
        every = self._world.exchange(f"links {self._link.value} one by one", [self._previous, seconds])
        return [Edge(src, dst, nbytes / took_s) for dst, (src, took_s) in enumerate(every)]


def _turn_of(place: int, members: int) -> int:
    """Return in which turn the rank at a place sends, so that no rank is at two ends at once."""
    return 2 if members % 2 and place == members - 1 else place % 2
