"""Transports: how bytes get from rank to rank. `post(sends, recvs)` starts, `Pending.wait()` finishes.

Received data exists only after `wait()`, and a buffer may be reused only after the `wait()` of whatever reads
or writes it. There is one communicator per (gather | reduce) x (intra | inter) where a schedule needs them
apart; all messages of a post on one communicator go out in one batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from burst_plugin.packing import Buffer, BufferPool
from burst_plugin.topology import Link, Traffic

__all__ = [
    "Channel",
    "DistributedTransport",
    "Message",
    "PeerLostError",
    "Pending",
    "Transport",
    "Waited",
    "group_device",
    "launches_batches",
    "new_group_like",
    "warm_up",
]


class Channel(NamedTuple):
    """What is carried, over which link; `by_link` where either link needs a communicator of its own."""

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


Waited = Callable[[Sequence[Message]], None]


class Pending(Protocol):
    """Messages under way, receives first."""

    messages: Sequence[Message]

    def wait(self, waited: Waited | None = None) -> None:
        """Order what the current stream does next after these messages. Raises PeerLostError.

        `waited` is called with each message as soon as it is waited for, with several where they are only waited for
        together.
        """
        ...


class Transport(Protocol):
    """One rank's end of the wires."""

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """Start these messages, as one batch per communicator."""
        ...

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """A buffer of at least 1 byte, contents undefined."""
        ...

    def release(self, buffer: Buffer) -> None:
        """Give a leased buffer back; nothing may read or write it any more."""
        ...

    def report_failure(self, text: str) -> str:
        """Record why this rank gives up, and return the reason of the first rank that did."""
        ...


@dataclass
class _DistributedPending:
    messages: Sequence[Message]  # kept, since gloo reads and writes them until waited for
    works: list[dist.Work]

    def wait(self, waited: Waited | None = None) -> None:
        one_by_one = len(self.works) == len(self.messages)
        for number, work in enumerate(self.works):
            messages = self.messages[number : number + 1] if one_by_one else self.messages
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLostError(messages[0].peer, _reason(error)) from error
            if waited is not None:
                waited(messages)
        self.messages = ()


class _Communicator:
    """A process group, as a ring posts to it.

    Backends that launch a batch as one are handed it by `batch_isend_irecv`. For others that would post one message
    after the other, with a dozen checks each: what it calls in the end is called here.
    """

    def __init__(self, group: dist.ProcessGroup, global_ranks: Sequence[int]) -> None:
        self._group, self._global_ranks = group, global_ranks
        self._launches_batches = launches_batches(group)
        self._group_ranks: dict[int, int] = {}  # of peers met so far

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[dist.Work]:
        """Receives before sends."""
        if self._launches_batches:
            both = (*((dist.irecv, m) for m in recvs), *((dist.isend, m) for m in sends))
            ops = [dist.P2POp(op, m.data, self._global_ranks[m.peer], self._group) for op, m in both]
            return dist.batch_isend_irecv(ops)
        works = [self._group.recv([m.data], self._rank_of(m.peer), 0) for m in recvs]
        return works + [self._group.send([m.data], self._rank_of(m.peer), 0) for m in sends]

    def _rank_of(self, peer: int) -> int:
        found = self._group_ranks.get(peer)
        if found is None:
            found = self._group_ranks[peer] = dist.get_group_rank(self._group, self._global_ranks[peer])
        return found


class DistributedTransport:
    """torch.distributed: NCCL, gloo, or whatever backend the groups have.

    `communicators` maps every channel to a group; `global_ranks[r]` is the global rank of CP rank r.
    """

    def __init__(
        self,
        communicators: Mapping[Channel, dist.ProcessGroup],
        global_ranks: Sequence[int],
        store: Store | None = None,
    ) -> None:
        self._groups = communicators
        self._global_ranks = global_ranks
        self._communicators: dict[dist.ProcessGroup, _Communicator] = {}
        self._by_channel: dict[Channel, _Communicator] = {}
        self.store = store
        self.pool = BufferPool()
        self.sent_bytes: Counter[Channel] = Counter()

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """See `Transport.lease`."""
        return self.pool.lease(nbytes, device)

    def release(self, buffer: Buffer) -> None:
        """See `Transport.release`."""
        self.pool.release(buffer)

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """See `Transport.post`; receives are posted before sends.

        Communicators follow one order on all ranks, whatever each of them sends and receives: NCCL connects two ranks
        when they first meet, and holds up the host until both are there.
        """
        batches: dict[_Communicator, tuple[list[Message], list[Message]]] = {}
        for number, posted in enumerate((recvs, sends)):
            for message in posted:
                communicator = self._by_channel.get(message.channel) or self._communicator(message.channel)
                batch = batches.get(communicator)
                if batch is None:
                    batch = batches[communicator] = ([], [])
                batch[number].append(message)
        for message in sends:
            self.sent_bytes[message.channel] += message.data.numel()
        found: list[Pending] = []
        in_order = batches.items() if len(batches) == 1 else sorted(batches.items(), key=_first_channel)
        for communicator, (to_receive, to_send) in in_order:
            messages = to_receive + to_send
            try:
                found.append(_DistributedPending(messages, communicator.post(to_send, to_receive)))
            except RuntimeError as error:
                raise PeerLostError(messages[0].peer, _reason(error)) from error
        return found

    def _communicator(self, channel: Channel) -> _Communicator:
        """That of a channel, which may share it with others."""
        group = self._groups[channel]
        if group not in self._communicators:
            self._communicators[group] = _Communicator(group, self._global_ranks)
        self._by_channel[channel] = self._communicators[group]
        return self._by_channel[channel]

    def report_failure(self, text: str) -> str:
        """See `Transport.report_failure`; through the store that the ranks met at, while that can be reached."""
        if self.store is None:
            return text
        try:
            first: bytes = self.store.compare_set("first_failure", "", text)
        except RuntimeError:  # the store went with the rank that hosted it
            return text
        return first.decode()


def _first_channel(batch: tuple[_Communicator, tuple[list[Message], list[Message]]]) -> Channel:
    """Of a communicator's batch; no two communicators of a ring share one."""
    return min(message.channel for messages in batch[1] for message in messages)


def _reason(error: RuntimeError) -> str:
    """The sentence of a backend's error that says what happened, without source file and advice."""
    sentence = str(error).splitlines()[0].split("] ", 1)[-1]
    return sentence.split(". This is typically", 1)[0]


def new_group_like(group: dist.ProcessGroup, global_ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A new communicator over `global_ranks`, with the backend, time-out and options of `group`.

    Called by exactly those ranks, in the same order on each, with a `name` that is theirs alone. It is warmed up.
    """
    device = group_device(group)
    original = group._get_backend(device)
    backend, existing = original.name(), original.options  # the group may have another one for other devices
    options = None
    if backend == "nccl":  # a copy: torch writes into what it is given
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=existing.is_high_priority_stream)  # type: ignore[attr-defined]
        options.config = existing.config  # type: ignore[attr-defined]
    with _created_by_members_alone(name):
        created: dist.ProcessGroup = dist.new_group(
            list(global_ranks),
            timeout=existing._timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=name,
        )
    warm_up(created)
    return created


def warm_up(group: dist.ProcessGroup) -> None:
    """Set up a communicator that may be new; all of its ranks call this together.

    A first batch of point-to-point messages in which only some ranks take part is undefined in torch.
    """
    dist.all_reduce(torch.zeros(1, device=group_device(group)), group=group)


@contextmanager
def _created_by_members_alone(name: str) -> Iterator[None]:
    """Keep two things in torch's `new_group(use_local_synchronization=True)` from needing other ranks.

    It names a group after its ranks and the number of groups that this rank is in, so that ranks in unlike numbers of
    groups wait for each other under different names until the time-out. And where the world is bound to a device, it
    splits the world's communicator, in which all ranks of the world would have to take part.
    """
    torch_private: Any = dist.distributed_c10d
    world, original = torch_private._get_default_group(), torch_private._process_group_name
    device = world.bound_device_id
    torch_private._process_group_name = lambda ranks, use_hashed_name: name
    try:
        if device is not None:
            world.bound_device_id = None
        yield
    finally:
        torch_private._process_group_name = original
        if device is not None:
            world.bound_device_id = device


def launches_batches(group: dist.ProcessGroup) -> bool:
    """Whether the backend launches a batch of messages as one, as NCCL does."""
    found: bool = group._get_backend(group_device(group)).supports_coalescing
    return found


def group_device(group: dist.ProcessGroup) -> torch.device:
    """The device whose tensors `group` moves: the current GPU for NCCL, also beside gloo for CPUs, else the CPU."""
    for device in group._device_types:
        if device.type == "cuda" and group._get_backend(device).name() != "gloo":  # which says that it moves both
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
