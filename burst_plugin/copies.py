"""All ranks in one process at full speed: every message is one copy in memory, on GPUs beside the work.

For timing what a ring does besides its kernels, on one machine without a network:

    ring = burst_plugin.VirtualRing(topology, network=CopyNetwork(topology.ranks, device))

On a GPU the copies run on a stream of the receiving rank, ordered by events after what the sender and the receiver
have done before they post; `wait` orders the current stream behind the copy and never stalls the host. On a CPU a
message is copied where its second end is posted. Where a fault has to show, use `burst_plugin.in_process` instead.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from burst_plugin.packing import Buffer, BufferPool
from burst_plugin.transport import Channel, Message, Pending, Waited

__all__ = ["CopyNetwork", "CopyTransport"]

_Route = tuple[int, int, Channel]


@dataclass(eq=False)
class _Copy:
    """One message; `done` is recorded behind its copy, on GPUs."""

    route: _Route
    source: Tensor | None = None
    target: Tensor | None = None
    posted: list[torch.cuda.Event] = field(default_factory=list)
    done: torch.cuda.Event | None = None

    def run(self, stream: torch.cuda.Stream | None) -> None:
        assert self.source is not None
        assert self.target is not None
        if stream is None:
            self.target.copy_(self.source)
            return
        with torch.cuda.stream(stream):
            for event in self.posted:
                stream.wait_event(event)
            self.target.copy_(self.source, non_blocking=True)
            self.done = stream.record_event()

    def wait(self) -> None:
        if self.source is None or self.target is None:
            missing = "sent" if self.source is None else "received"
            raise RuntimeError(f"deadlock: rank {self.route[0]} -> rank {self.route[1]}: never {missing}")
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)


class CopyNetwork:
    """The wires between `ranks` ranks whose tensors are on `device`; counts what it carries in `sent_bytes`."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.ranks = ranks
        self.sent_bytes: Counter[tuple[int, Channel]] = Counter()
        streams = range(ranks) if device.type == "cuda" else ()
        self._streams = [torch.cuda.Stream(device) for _ in streams]  # type: ignore[no-untyped-call]
        self._half: dict[_Route, deque[_Copy]] = {}  # messages of which one end is posted, oldest first

    def transports(self) -> list[CopyTransport]:
        """One end per rank."""
        return [CopyTransport(self, rank) for rank in range(self.ranks)]

    def put(self, route: _Route, source: Tensor | None, target: Tensor | None) -> _Copy:
        """Put one end of a message on its route, and copy it if the other end is there; ends meet in order."""
        queue = self._half.setdefault(route, deque())
        is_second = bool(queue) and (queue[0].source is None) != (source is None)
        copy = queue.popleft() if is_second else _Copy(route)
        copy.source, copy.target = (copy.source, target) if source is None else (source, copy.target)
        if self._streams:
            copy.posted.append(torch.cuda.current_stream().record_event())
        if is_second:
            copy.run(self._streams[route[1]] if self._streams else None)
        else:
            queue.append(copy)
        return copy


@dataclass
class _CopyPending:
    messages: Sequence[Message]
    copies: list[_Copy]

    def wait(self, waited: Waited | None = None) -> None:
        for copy in self.copies:
            copy.wait()
        if waited is not None:
            waited(self.messages)


class CopyTransport:
    """One rank's end of a `CopyNetwork`."""

    def __init__(self, network: CopyNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank
        self.pool = BufferPool()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """See `Transport.post`."""
        copies = [self._network.put((m.peer, self._rank, m.channel), None, m.data) for m in recvs]
        for message in sends:
            copies.append(self._network.put((self._rank, message.peer, message.channel), message.data, None))
            self._network.sent_bytes[self._rank, message.channel] += message.data.numel()
        return [_CopyPending((*recvs, *sends), copies)]

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """See `Transport.lease`."""
        return self.pool.lease(nbytes, device)

    def release(self, buffer: Buffer) -> None:
        """See `Transport.release`."""
        self.pool.release(buffer)

    def report_failure(self, text: str) -> str:
        """There is only this process."""
        return text
