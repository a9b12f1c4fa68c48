"""Runs a rank's part of a schedule over a transport. Knows operands and sums, and nothing of attention.

    ring = RingPass(send_recv, transport, cargo, direction="forward")
    for visit in ring.visits():           # waits, posts, then hands over the block that is here now
        with ring.traced(visit):
            ...                           # read visit.operands, add to visit.sums
        yield                             # one step done: lets ranks in one process take turns
    yield from ring.final_reduce_hops()          # then the rank's own sums are complete

At every step: wait for what is due, post what is issued, work. What step t+1 needs is under way during the
work of step t, and what crosses between nodes during a whole inner ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Buffer, Packing
from burst_plugin.comm.transport import Message, PeerLostError, Pending, Transport, lost_peer_error
from burst_plugin.compute.accumulators import Place, TileSums
from burst_plugin.profiling.recorder import Profile
from burst_plugin.ring.send_recv_plan import Post, SendRecvPlan
from burst_plugin.topology import Traffic
from burst_plugin.types import Direction, Rows

__all__ = [
    "Cargo",
    "RingPass",
    "Visit",
    "lockstep",
]

T = TypeVar("T")


class Cargo(Protocol):
    """What travels in one pass: a side's operands, and its sums if there are any."""

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        ...

    def operands(self, part: int, rows: Rows | None) -> tuple[Tensor, ...]:
        """Some or all rows of a part of this rank's block, as they travel; asked for when they leave."""
        ...

    def sums(self, part: int, place: Place, filled: bool) -> TileSums:
        """Sums of a part of any block in these tensors, or in room for them; `filled`: they hold values already."""
        ...

    def own_sums(self, part: int) -> TileSums:
        """The sums of a part of this rank's block; the same ones whenever they are asked for."""
        ...


class _LeasedRoom:
    """See `sums.Room`: `buffer` is None until one is leased."""

    def __init__(self, packing: Packing, lease: Callable[[int], Buffer], buffer: Buffer | None = None) -> None:
        self._packing, self._lease = packing, lease
        self.buffer = buffer
        self.length = packing.length

    def take(self, kept: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """See `Room.take`."""
        self.buffer = self._lease(self._packing.nbytes)
        views = self.buffer.views(self._packing)
        for tensor, part in zip(views, kept or (), strict=False):
            tensor.copy_(part)
        return views


@dataclass(slots=True)
class _Bag:
    """Sums of another rank's block while they are here, and the room that they leave in."""

    room: _LeasedRoom
    sums: TileSums


@dataclass(slots=True)
class _Ending:
    """What ends before the work of a step: messages to wait for, what they bring, buffers that have left by then."""

    pending: list[Pending] = field(default_factory=list)
    arriving: list[tuple[Post, Buffer]] = field(default_factory=list)
    leaving: list[Buffer] = field(default_factory=list)


@dataclass(slots=True)
class Visit:
    """Part `part` of the block of rank `owner` is here: read its `operands`, add to its `sums`.

    A rank's own block (`is_own`) has no operands: it did not travel. It may come twice, the second
    time for the tail of the work (`is_tail`).
    """

    owner: int
    part: int
    is_tail: bool
    is_own: bool
    operands: tuple[Tensor, ...]
    _sums: Callable[[], TileSums]

    @property
    def sums(self) -> TileSums:
        """What travels along with the block and collects contributions to it."""
        return self._sums()


class RingPass:
    """One rank's run of one direction; used once.

    `label`, `LABEL_BYTES` of uint8 and the same on every rank, says to which call a message belongs. It is compared
    where that costs nothing, on CPUs, where gloo would let a shorter message pass for a longer one.
    """

    def __init__(
        self,
        send_recv: SendRecvPlan,
        transport: Transport,
        cargo: Cargo,
        *,
        direction: Direction,
        label: Tensor | None = None,
        profile: Profile | None = None,
    ) -> None:
        self._send_recv, self._schedule, self._cargo = send_recv, send_recv.schedule, cargo
        self._label = label
        self._direction = direction
        self._step = 0
        self._on_gpu = cargo.device.type == "cuda"
        self._unnamed: AbstractContextManager[None] = nullcontext()
        self._device = cargo.device
        self._log = None if profile is None else profile.begin_pass(direction, self._device)
        self._transport = transport if self._log is None else self._log.watch(transport)
        self._operands: dict[int, tuple[Tensor, ...]] = {}
        self._buffers: dict[int, Buffer] = {}  # leased for operands, by block
        self._bags: dict[int, _Bag] = {}  # sums of others' blocks that are here
        self._endings = defaultdict[int, _Ending](_Ending)  # by step

    @property
    def step(self) -> int:
        """The step of the schedule that this rank is at."""
        return self._step

    def visits(self) -> Iterator[Visit | None]:
        """The blocks as they come by; None at a step at which there is none to work on."""
        for step in range(self._schedule.visit_steps):
            self._advance(step)
            block = self._schedule.steps[step].visit
            if block is None:
                yield None
                continue
            is_own = self._schedule.is_own(block)
            operands = () if is_own else self._operands[block]
            owner, part = self._schedule.owner(block), self._schedule.part(block)
            is_tail = self._schedule.steps[step].is_tail
            yield Visit(owner, part, is_tail, is_own, operands, partial(self._sums_of, block))

    def traced(self, visit: Visit) -> AbstractContextManager[None]:
        """Around the work of a visit: a place in a profile, and on GPUs an NVTX range."""
        named = self._unnamed
        if self._on_gpu:
            name = f"burst {self._direction} step {self._step}, block {visit.owner}, part {visit.part}"
            named = torch.cuda.nvtx.range(name)
        return named if self._log is None else self._log.timed("kernel", named)

    def final_reduce_hops(self) -> Generator[None, None, None]:
        """The steps after the last visit; then the rank's own sums are complete."""
        for step in range(self._schedule.visit_steps, len(self._schedule.steps)):
            self._advance(step)
            yield

    def _advance(self, step: int) -> None:
        self._step = step
        if self._log is None:
            self._move()
            return
        self._log.step = step
        with self._log.timed("move"):
            self._move()

    def _move(self) -> None:
        """Wait for what ends before this step, let go of what nobody needs any more, and post its messages."""
        ending = self._endings.pop(self._step, None) or _Ending()
        for pending in ending.pending:
            try:
                pending.wait()
            except PeerLostError as lost:
                self._give_up(lost)
        for buffer in ending.leaving:
            self._transport.pool.release(buffer)
        for post, buffer in ending.arriving:
            self._arrive(post, buffer)
        for block in self._schedule.steps[self._step].drop:
            self._operands.pop(block, None)
            if block in self._buffers:
                self._transport.pool.release(self._buffers.pop(block))
        self._post()

    def _post(self) -> None:
        """Post this step's messages, those that are due together in one batch per communicator."""
        for due, posts, awaited in self._send_recv.batches[self._step]:
            sends = [Message(post.peer, post.channel, self._outgoing(post).data) for post in posts]
            arriving = [(post, self._transport.pool.lease(post.packing.nbytes, self._device)) for post in awaited]
            recvs = [Message(post.peer, post.channel, buffer.data) for post, buffer in arriving]
            try:
                posted = self._transport.post(sends, recvs)
            except PeerLostError as lost:
                self._give_up(lost)
            self._endings[due].pending.extend(posted)
            self._endings[due].arriving.extend(arriving)

    def _outgoing(self, post: Post) -> Buffer:
        """The bytes of a block or of its sums, on their way out."""
        block, due = post.transfer.block, post.transfer.due
        if post.transfer.traffic is Traffic.REDUCE:
            return self._released_at(due, self._settled(block))
        if post.transfer.rows is not None and self._schedule.is_own(block):  # for one peer alone
            return self._released_at(due, self._pack(post))
        if block not in self._buffers:  # the rank's own block, sent for the first time
            self._buffers[block] = self._pack(post)
        return self._buffers[block]

    def _settled(self, block: int) -> Buffer:
        """The buffer of a block's sums, which leave."""
        self._sums_of(block).settle()
        buffer = self._bags.pop(block).room.buffer
        assert buffer is not None, "settled sums are in their room"
        return buffer

    def _released_at(self, step: int, buffer: Buffer) -> Buffer:
        self._endings[step].leaving.append(buffer)
        return buffer

    def _pack(self, post: Post) -> Buffer:
        """Operands of this rank in a leased buffer."""
        buffer = self._lease(post.packing.nbytes)
        operands = self._cargo.operands(self._schedule.part(post.transfer.block), post.transfer.rows)
        for view, tensor in zip(buffer.views(post.packing), operands, strict=True):
            view.copy_(tensor)
        return buffer

    def _arrive(self, post: Post, buffer: Buffer) -> None:
        if not buffer.has_label(self._label):
            what = "what it sent belongs to another call, or to one with other shapes, types or options"
            self._give_up(PeerLostError(post.peer, what))
        if post.transfer.traffic is Traffic.REDUCE:
            self._sums_arrive(post, buffer)
            return
        self._buffers[post.transfer.block] = buffer
        self._operands[post.transfer.block] = buffer.views(post.packing)

    def _sums_arrive(self, post: Post, buffer: Buffer) -> None:
        """Add them to those that are here; where these have no buffer yet, go on in the one that came."""
        block, is_own = post.transfer.block, self._schedule.is_own(post.transfer.block)
        arrived = self._cargo.sums(self._schedule.part(block), buffer.views(post.packing), True)
        bag = self._bags.get(block)  # none for the rank's own block
        if is_own or (bag is not None and bag.room.buffer is not None):
            self._sums_of(block).join(arrived, post.transfer.rows if is_own else None)  # others are of the same rows
            self._transport.pool.release(buffer)
            return
        if bag is not None:  # what waits, as the kernel returned it
            arrived.join(bag.sums, None)
        self._bags[block] = _Bag(_LeasedRoom(post.packing, self._lease, buffer), arrived)

    def _sums_of(self, block: int) -> TileSums:
        """The sums of a block that are here; fresh ones if there are none."""
        part = self._schedule.part(block)
        if self._schedule.is_own(block):  # these outlive the ring
            return self._cargo.own_sums(part)
        if block not in self._bags:
            packing = self._send_recv.packing(Traffic.REDUCE, block, self._send_recv.rows.get(block))
            room = _LeasedRoom(packing, self._lease)
            self._bags[block] = _Bag(room, self._cargo.sums(part, room, False))
        return self._bags[block].sums

    def _lease(self, nbytes: int) -> Buffer:
        """A buffer to send, with this call's label."""
        buffer = self._transport.pool.lease(nbytes, self._device)
        buffer.put_label(self._label)
        return buffer

    def _give_up(self, lost: PeerLostError) -> NoReturn:
        rank = self._send_recv.peers[self._schedule.rank]
        raise lost_peer_error(self._transport, rank, f"{self._direction} step {self._step}", lost) from lost


def lockstep(programs: Sequence[Generator[None, None, T]]) -> list[T]:
    """Run one program per rank of this process, a step of each in turn, without threads; returns what they return."""
    results: dict[int, T] = {}
    while len(results) < len(programs):
        for rank, program in enumerate(programs):
            if rank not in results:
                try:
                    next(program)
                except StopIteration as stop:
                    results[rank] = stop.value
    return [results[rank] for rank in range(len(programs))]
