"""All ranks in one process: the base of networks between them, and one that delays and reorders.

In a `HostileNetwork` a sender's buffer is read as late as allowed, messages arrive in random order, and released
buffers are filled with NaN, so that a missing wait or a buffer reused too early shows on any machine.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Buffer, BufferPool
from burst_plugin.comm.transport import Channel, Message, Pending, Transport, Waited

_MOST_ASKED = 10_000  # times whether a message has met its other end; no schedule has as many steps
_NAN_BYTE = 0xFF  # every float type reads a run of these as NaN

_Route = tuple[int, int, Channel]  # from rank to rank


@dataclass(eq=False)
class Parcel:
    """One message: posted by its sender, its receiver, or both. `events` are for networks whose copies need them."""

    route: _Route
    source: Tensor | None = None
    target: Tensor | None = None
    events: list[torch.cuda.Event] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether both ends are posted."""
        return self.source is not None and self.target is not None

    def deliver(self) -> None:
        """Copy the data. Raise RuntimeError if an end was never posted, or if the two have different lengths."""
        if self.source is None or self.target is None:
            missing = "sent" if self.source is None else "received"
            raise RuntimeError(f"deadlock: rank {self.route[0]} -> rank {self.route[1]}: never {missing}")
        sent, expected = self.source.numel(), self.target.numel()
        if sent != expected:
            raise RuntimeError(
                f"{sent} bytes sent, {expected} expected: rank {self.route[0]} -> rank {self.route[1]}"
            )
        self.target.copy_(self.source, non_blocking=True)


class InProcessNetwork(ABC):
    """The connections between `ranks` ranks of this process; subclasses differ in when a message is copied."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._half: dict[_Route, deque[Parcel]] = {}  # messages of which one end is posted, oldest first

    def transports(self) -> list[InProcessTransport]:
        """Return the transport of every rank."""
        return [InProcessTransport(self, rank, self._pool()) for rank in range(self.ranks)]

    def put(self, route: _Route, source: Tensor | None, target: Tensor | None) -> Parcel:
        """Post one end of a message. Ends meet in the order in which they were posted. Return the message."""
        queue = self._half.setdefault(route, deque())
        if queue and (queue[0].source is None) != (source is None):
            parcel = queue.popleft()
            parcel.source, parcel.target = (parcel.source, target) if source is None else (source, parcel.target)
        else:
            parcel = Parcel(route, source, target)
            queue.append(parcel)
        self._posted(parcel)
        return parcel

    @abstractmethod
    def _posted(self, parcel: Parcel) -> None:
        """Note that an end of this message has been posted."""

    @abstractmethod
    def collect(self, parcels: Sequence[Parcel]) -> None:
        """Deliver these messages, which a rank waits for. Raise RuntimeError if one cannot be delivered."""

    def _pool(self) -> BufferPool:
        return BufferPool()


class InProcessTransport(Transport):
    """One rank's end of an `InProcessNetwork`."""

    def __init__(self, network: InProcessNetwork, rank: int, pool: BufferPool) -> None:
        super().__init__(pool)
        self._network, self._rank, self._asked = network, rank, 0

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        put, rank = self._network.put, self._rank
        parcels = [put((m.peer, rank, m.channel), None, m.data) for m in recvs]
        parcels += [put((rank, m.peer, m.channel), m.data, None) for m in sends]
        return [_InProcessPending((*recvs, *sends), self._network, parcels)]

    def has_met(self, in_flight: Sequence[Pending]) -> bool:
        """Return whether waiting for these messages would end at once: with their data, or with an error."""
        parcels = [parcel for each in in_flight if isinstance(each, _InProcessPending) for parcel in each.parcels]
        is_whole = all(parcel.is_whole for parcel in parcels)
        self._asked = 0 if is_whole else self._asked + 1
        return is_whole or self._asked > _MOST_ASKED


@dataclass
class _InProcessPending:
    messages: Sequence[Message]
    network: InProcessNetwork
    parcels: Sequence[Parcel]

    def wait(self, waited: Waited | None = None) -> None:
        self.network.collect(self.parcels)
        if waited is not None:
            waited(self.messages)


class HostileNetwork(InProcessNetwork):
    """A network that copies a message when it is waited for, and sometimes others before it, drawn by `seed`."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        super().__init__(ranks)
        self._random = random.Random(seed)
        self._in_flight: list[Parcel] = []

    def _posted(self, parcel: Parcel) -> None:
        if parcel.is_whole:
            self._in_flight.append(parcel)

    def collect(self, parcels: Sequence[Parcel]) -> None:
        """Deliver these messages in random order, with others among them; see `InProcessNetwork.collect`."""
        for parcel in self._random.sample(parcels, len(parcels)):
            if self._in_flight and self._random.random() < 0.5:
                self._deliver(self._random.choice(self._in_flight))
            if parcel in self._in_flight or not parcel.is_whole:
                self._deliver(parcel)

    def _deliver(self, parcel: Parcel) -> None:
        parcel.deliver()
        self._in_flight.remove(parcel)

    def _pool(self) -> BufferPool:
        return PoolOfNaN()


class PoolOfNaN(BufferPool):
    """A pool that fills buffers with NaN when they are leased, and again when they are released."""

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        buffer = super().lease(nbytes, device)
        buffer.data.fill_(_NAN_BYTE)
        return buffer

    def release(self, buffer: Buffer) -> None:
        buffer.data.fill_(_NAN_BYTE)
        super().release(buffer)
