"""Transports: how bytes get from rank to rank. `post(sends, recvs)` starts, `Pending.wait()` finishes.

Received data exists only after `wait()`, and a buffer may be reused only after the `wait()` of all messages that read
or write it. A new kind is a subclass of `Transport` with a `_start` of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from burst_plugin.comm.buffers import BufferPool
from burst_plugin.comm.failure_watch import Board
from burst_plugin.topology import Link, Traffic


class Channel(NamedTuple):
    """Traffic over one link; `by_link`: each link has communicators of its own."""

    traffic: Traffic
    link: Link
    by_link: bool = False


class Message(NamedTuple):
    """`data` (uint8, one dim) to or from rank `peer` of the context-parallel group."""

    peer: int
    channel: Channel
    data: Tensor


class PeerLostError(RuntimeError):
    """A transfer failed; `peer` is the rank at its other end."""

    def __init__(self, peer: int, cause: str) -> None:
        super().__init__(f"rank {peer}: {cause}")
        self.peer = peer
        self.cause = cause

    @property
    def timed_out(self) -> bool:
        """Return whether nothing came from the peer in time; it may be alive."""
        return "timed out" in self.cause.lower()


Waited = Callable[[Sequence[Message]], None]


class Pending(Protocol):
    """Messages under way, receives first."""

    messages: Sequence[Message]

    def wait(self, waited: Waited | None = None) -> None:
        """Wait until these messages are done; on GPUs, order what the current stream does next after them.

        `waited` is called with each message as soon as it is done, with several where the backend waits for these
        together. Raises PeerLostError.
        """
        ...


class Transport(ABC):
    """One rank's end of all connections.

    pool: leases the buffers of messages.
    board: where ranks that give up record why, if there is one.
    sent_bytes: bytes of posted messages, by channel.
    """

    def __init__(self, pool: BufferPool | None = None, board: Board | None = None) -> None:
        self.pool = pool or BufferPool()
        self.board = board
        self.sent_bytes: Counter[Channel] = Counter()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """Start to send and to receive messages, in one batch per communicator, and count the bytes sent."""
        for message in sends:
            self.sent_bytes[message.channel] += message.data.numel()
        return self._start(sends, recvs)

    @abstractmethod
    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """Start these messages, as one batch per communicator; return the messages in flight."""

    def has_met(self, in_flight: Sequence[Pending]) -> bool:
        """Return whether waiting would end now; False only if ranks share a process, and another has to run first."""
        return True

    @property
    def backend_bytes(self) -> float:
        """Return roughly the bytes that the backend itself has for the peers that messages came from; 0 on CPUs."""
        return 0.0

    def ctas(self, channels: Iterable[Channel]) -> int:
        """Return how many of a GPU's thread blocks move messages on these channels at once; 0 if unknown."""
        return 0

    def close(self) -> None:
        """Release buffers and connections; no messages may be under way."""
        self.pool = BufferPool()

    def report_failure(self, text: str) -> str:
        """Record why this rank gives up. Return why the first rank to give up did so; `text` if that is unknown."""
        return text if self.board is None else self.board.report_failure(text)


class RingError(RuntimeError):
    """A rank of the ring was lost; the text names it, and when it was missed or why it gave up."""


def lost_peer_error(transport: Transport, rank: int, where: str, lost: PeerLostError) -> RingError:
    """Return the error that `rank` raises when it misses a peer, and record it for others.

    The text begins with what the first rank recorded. Where nothing came in time, all ranks may be alive and wait for
    each other, so that the missed one need not be the one at fault: then the text says where each rank is.
    """
    board = transport.board
    missed, here = ("", "") if board is None else (board.name_of(lost.peer), board.name_of(rank))
    at = where if board is None or board.progress.call is None else f"{where} of {board.progress.call}"
    group = f"the context-parallel group{missed}"
    text = f"rank {lost.peer} of {group} was missed at {at} by rank {rank}{here} ({lost.cause})"
    if board is not None and lost.timed_out and (places := board.unlike_places()):
        text = f"{places}; {text}"
    first = transport.report_failure(text)
    return RingError(text if first == text else f"{first}; then {text}")
