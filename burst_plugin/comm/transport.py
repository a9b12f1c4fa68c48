"""Transports: how bytes get from rank to rank. `post(sends, recvs)` starts, `Pending.wait()` finishes.

Received data exists only after `wait()`, and a buffer may be reused only after the `wait()` of all messages that read
or write it. A new kind is a subclass of `Transport` with a `start` of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from burst_plugin.comm.buffers import BufferPool
from burst_plugin.comm.failure_watch import Board
from burst_plugin.topology import Link, Traffic


class Channel(NamedTuple):
    """The key of a communicator: a kind of traffic over a kind of link.

    by_link: whether each link has communicators of its own, of a node's ranks or of one rank from each node, since a
        schedule uses both links at the same time; else ranks of the whole ring may share one for both.
    """

    traffic: Traffic
    link: Link
    by_link: bool = False


class Message(NamedTuple):
    """A message to or from rank `peer` of the context-parallel group: bytes, `data` [n], uint8, and a channel."""

    peer: int
    channel: Channel
    data: Tensor


class PeerLostError(RuntimeError):
    """The error of a transfer that failed: `peer` is the rank at its other end, `cause` the backend's reason."""

    def __init__(self, peer: int, cause: str) -> None:
        super().__init__(f"rank {peer}: {cause}")
        self.peer = peer
        self.cause = cause

    @property
    def timed_out(self) -> bool:
        """Return whether the transfer failed because nothing came from the peer in time; the peer may be alive."""
        return "timed out" in self.cause.lower()


Waited = Callable[[Sequence[Message]], None]


class Pending(Protocol):
    """A batch of messages under way; `messages` lists messages to receive, then messages to send."""

    messages: Sequence[Message]

    def wait(self, waited: Waited | None = None) -> None:
        """Wait until these messages are done; on GPUs, order what the current stream does next after them.

        waited: if given, called with each message as soon as it is done, or with several where the backend waits for
            these together.

        Raises PeerLostError if a transfer failed.
        """
        ...


class Transport(ABC):
    """The base class of transports: one rank's end of its connections to other ranks.

    pool: leases the buffers of messages.
    board: where ranks that give up record why, if there is one.
    sent_bytes: bytes of posted messages, by channel.
    """

    def __init__(self, pool: BufferPool | None = None, board: Board | None = None) -> None:
        self.pool = pool or BufferPool()
        self.board = board
        self.sent_bytes: Counter[Channel] = Counter()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """Start to send and to receive messages, and count the bytes sent; return batches to wait for.

        There is one batch for each communicator.
        """
        for message in sends:
            self.sent_bytes[message.channel] += message.data.numel()
        return self.start(sends, recvs)

    @abstractmethod
    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """Start these messages, as one batch per communicator; return the messages in flight."""

    def has_met(self, in_flight: Sequence[Pending]) -> bool:
        """Return whether waiting for the batches `in_flight` can end now, with their data or an error.

        False only where ranks share a process, and another rank has to run first.
        """
        return True

    @property
    def backend_bytes(self) -> float:
        """Return roughly the bytes that the backend itself holds for the peers that messages came from; 0 on CPUs."""
        return 0.0

    def close(self) -> None:
        """Release buffers and connections; no messages may be under way."""
        self.pool = BufferPool()

    def report_failure(self, text: str) -> str:
        """Record `text`, why this rank gives up, unless another rank gave up first; return the first rank's text.

        `text` itself is returned if nothing is recorded, for want of a board.
        """
        return text if self.board is None else self.board.report_failure(text)


class RingError(RuntimeError):
    """The error that a rank was lost; it names the rank, and when it was missed or why it gave up."""


def lost_peer_error(transport: Transport, rank: int, where: str, lost: PeerLostError) -> RingError:
    """Return the RingError that `rank` raises when it misses a peer, and record its text for other ranks.

    The text begins with what the first rank recorded. Where nothing came in time, all ranks may be alive and wait for
    each other, so that the missed one need not be the one at fault: then the text says where each rank is.

    Args:
        transport: the transport that missed the peer; its board, if any, records the text.
        rank: this rank's number in the context-parallel group.
        where: the step at which the peer was missed, such as "forward step 3".
        lost: the error of the failed transfer, which names the peer.
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
