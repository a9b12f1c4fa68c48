"""All ranks in one process: a transport that is as unkind as a network may be.

A sender's buffer is read as late as it may be, messages arrive in random order, and what is released is
filled with NaN, so that a missing wait or a buffer reused too early shows on any machine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from burst_plugin.packing import Buffer, BufferPool
from burst_plugin.transport import Channel, Message, Pending, Waited

__all__ = ["InProcessNetwork", "InProcessTransport"]

_NAN_BYTE = 0xFF  # every float type reads a run of these as NaN


@dataclass(eq=False)
class _Parcel:
    """One message: posted by the sender, by the receiver, or both."""

    source: Tensor | None = None
    target: Tensor | None = None
    arrived: bool = False

    def deliver(self, route: tuple[int, int, Channel]) -> None:
        if self.arrived:
            return
        if self.source is None or self.target is None:
            missing = "sent" if self.source is None else "received"
            raise RuntimeError(f"deadlock: rank {route[0]} -> rank {route[1]} on {route[2]} was never {missing}")
        if self.source.numel() != self.target.numel():
            raise RuntimeError(f"{self.source.numel()} bytes sent, {self.target.numel()} expected: {route}")
        self.target.copy_(self.source)
        self.arrived = True


@dataclass
class InProcessNetwork:
    """The wires between `ranks` ranks; counts what it carries in `sent_bytes[rank, channel]`."""

    ranks: int
    seed: int = 0
    sent_bytes: Counter[tuple[int, Channel]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._under_way: dict[tuple[int, int, Channel], list[_Parcel]] = {}

    def transports(self) -> list[InProcessTransport]:
        """One end per rank."""
        return [InProcessTransport(self, rank) for rank in range(self.ranks)]

    def parcel(self, route: tuple[int, int, Channel], source: Tensor | None, target: Tensor | None) -> _Parcel:
        """Put one end of a message on its route; ends meet in the order in which they were posted."""
        queue = self._under_way.setdefault(route, [])
        for parcel in queue:
            if source is not None and parcel.source is None:
                parcel.source = source
                return parcel
            if target is not None and parcel.target is None:
                parcel.target = target
                return parcel
        queue.append(_Parcel(source, target))
        return queue[-1]

    def deliver(self, wanted: Sequence[tuple[tuple[int, int, Channel], _Parcel]]) -> None:
        """Deliver what is waited for, in random order, and sometimes something else before it."""
        for route, parcel in self._random.sample(wanted, len(wanted)):
            if self._random.random() < 0.5:
                self._deliver_any()
            parcel.deliver(route)
            if parcel in self._under_way[route]:
                self._under_way[route].remove(parcel)

    def _deliver_any(self) -> None:
        ready = [
            (route, parcel)
            for route, queue in self._under_way.items()
            for parcel in queue
            if parcel.source is not None and parcel.target is not None
        ]
        if ready:
            route, parcel = self._random.choice(ready)
            parcel.deliver(route)


@dataclass
class _InProcessPending:
    messages: Sequence[Message]
    network: InProcessNetwork
    parcels: list[tuple[tuple[int, int, Channel], _Parcel]]

    def wait(self, waited: Waited | None = None) -> None:
        self.network.deliver(self.parcels)
        if waited is not None:
            waited(self.messages)


class InProcessTransport:
    """One rank's end of an `InProcessNetwork`."""

    def __init__(self, network: InProcessNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._pool = BufferPool()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """See `Transport.post`."""
        parcels = []
        for message in recvs:
            route = (message.peer, self._rank, message.channel)
            parcels.append((route, self._network.parcel(route, None, message.data)))
        for message in sends:
            route = (self._rank, message.peer, message.channel)
            parcels.append((route, self._network.parcel(route, message.data, None)))
            self._network.sent_bytes[self._rank, message.channel] += message.data.numel()
        return [_InProcessPending((*recvs, *sends), self._network, parcels)]

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """See `Transport.lease`; full of NaN."""
        buffer = self._pool.lease(nbytes, device)
        buffer.data.fill_(_NAN_BYTE)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """See `Transport.release`; leaves NaN behind."""
        buffer.data.fill_(_NAN_BYTE)
        self._pool.release(buffer)

    def report_failure(self, text: str) -> str:
        """There is only this process."""
        return text
