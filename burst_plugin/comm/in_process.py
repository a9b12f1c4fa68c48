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

_MOST_ASKED = 10_000  # calls of `has_met` before a rank waits all the same; no schedule has as many steps
_NAN_BYTE = 0xFF  # every float type reads a run of these as NaN

_Route = tuple[int, int, Channel]  # from rank to rank


@dataclass(eq=False)
class Parcel:
    """A message between two ranks of one process, posted by its sender, its receiver, or both.

    route: (sending rank, receiving rank, channel).
    source: the sender's bytes; None until it has posted.
    target: the receiver's buffer; None until it has posted.
    events: CUDA events, for networks that copy on streams of their own.
    """

    route: _Route
    source: Tensor | None = None
    target: Tensor | None = None
    events: list[torch.cuda.Event] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether both ends of the message are posted."""
        return self.source is not None and self.target is not None

    def deliver(self) -> None:
        """Copy `source` to `target`. Raise RuntimeError if an end was never posted, or if their lengths differ."""
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
        """Return the transports of all ranks, in rank order."""
        return [InProcessTransport(self, rank, self._pool()) for rank in range(self.ranks)]

    def put(self, route: _Route, source: Tensor | None, target: Tensor | None) -> Parcel:
        """Post one end of a message, and return the message; one of `source` and `target` is None.

        Args:
            route: (sending rank, receiving rank, channel). Ends on one route meet in the order in which they are
                posted.
            source: the bytes to send, for the sender's end.
            target: the buffer to fill, for the receiver's end.
        """
        queue = self._half.setdefault(route, deque())
        if queue and (queue[0].source is None) != (source is None):
            parcel = queue.popleft()
            parcel.source, parcel.target = (parcel.source, target) if source is None else (source, parcel.target)
        else:
            parcel = Parcel(route, source, target)
            queue.append(parcel)
        self.note_posted(parcel)
        return parcel

    @abstractmethod
    def note_posted(self, parcel: Parcel) -> None:
        """Note that an end of this message has been posted."""

    @abstractmethod
    def collect(self, parcels: Sequence[Parcel]) -> None:
        """Deliver messages that a rank waits for. Raise RuntimeError if one cannot be delivered."""

    def _pool(self) -> BufferPool:
        return BufferPool()


class InProcessTransport(Transport):
    """The transport of one rank over an `InProcessNetwork`."""

    def __init__(self, network: InProcessNetwork, rank: int, pool: BufferPool) -> None:
        super().__init__(pool)
        self._network, self._rank, self._asked = network, rank, 0

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        put, rank = self._network.put, self._rank
        parcels = [put((m.peer, rank, m.channel), None, m.data) for m in recvs]
        parcels += [put((rank, m.peer, m.channel), m.data, None) for m in sends]
        return [InProcessPending((*recvs, *sends), self._network, parcels)]

    def has_met(self, in_flight: Sequence[Pending]) -> bool:
        """Return whether waiting for these messages would end at once: with their data, or with an error."""
        parcels = [parcel for each in in_flight if isinstance(each, InProcessPending) for parcel in each.parcels]
        is_whole = all(parcel.is_whole for parcel in parcels)
        self._asked = 0 if is_whole else self._asked + 1
        return is_whole or self._asked > _MOST_ASKED


@dataclass
class InProcessPending:
    """Messages of a rank that are in flight on a network of this process, with the network's record of each."""

    messages: Sequence[Message]
    network: InProcessNetwork
    parcels: Sequence[Parcel]

    def wait(self, waited: Waited | None = None) -> None:
        """Have the network deliver all messages, and give them to `waited`."""
        self.network.collect(self.parcels)
        if waited is not None:
            waited(self.messages)


class HostileNetwork(InProcessNetwork):
    """A network between ranks of this process that shows faults: it copies messages late, in random order.

    A message is copied when a rank waits for it, and sometimes others with it. `seed` makes the order repeatable.
    """

    def __init__(self, ranks: int, seed: int = 0) -> None:
        super().__init__(ranks)
        self._random = random.Random(seed)
        self._in_flight: list[Parcel] = []

    def note_posted(self, parcel: Parcel) -> None:
        if parcel.is_whole:
            self._in_flight.append(parcel)

    def collect(self, parcels: Sequence[Parcel]) -> None:
        """Deliver the messages `parcels` in random order, sometimes with others that are under way between them.

        Raises RuntimeError if an end of one was never posted.
        """
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
    """A pool of buffers that are filled with NaN when they are leased, and again when they are released."""

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """Return a `Buffer` of `nbytes` bytes on `device`, filled with NaN."""
        buffer = super().lease(nbytes, device)
        buffer.data.fill_(_NAN_BYTE)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Fill a buffer that `lease` returned with NaN, and take it back. Raise KeyError if it is not leased."""
        buffer.data.fill_(_NAN_BYTE)
        super().release(buffer)
