"""Run a rank's part of a schedule over a transport. Knows operands and partial results, and nothing of attention.

    ring = RingPass(send_recv, transport, parts, own)
    for visit in ring.steps():    # waits, posts, then hands over the block that is here now, if any
        with ring.traced(visit):
            ...                   # read visit.operands, add to visit.accumulator
        yield                     # one step done: lets ranks in one process take turns

At every step: wait for messages that are due, post messages that are issued, work. Blocks for step t+1 are in flight
during the work of step t, and blocks that cross between nodes during a whole inner ring.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Buffer, BufferPool, Packing
from burst_plugin.comm.transport import Channel, Message, PeerLostError, Pending, Transport, lost_peer_error
from burst_plugin.compute.accumulators import Accumulator, MovingHeads, Tensors
from burst_plugin.compute.varlen import take_rows
from burst_plugin.schedule.steps import RankSchedule, Step, Transfer
from burst_plugin.topology import Traffic
from burst_plugin.types import Direction, Rows, Side

if TYPE_CHECKING:
    from burst_plugin.profiling.recorder import PassLog

T = TypeVar("T")


class P2POp(NamedTuple):
    """A message that a rank sends or receives: its transfer, its peer, its channel and its layout.

    peer: the number of the other rank, as the transport knows it.
    """

    transfer: Transfer
    peer: int  # as the transport knows it
    channel: Channel
    packing: Packing


class Batch(NamedTuple):
    """The messages that a rank posts at one step and that all have to be done by step `due`."""

    due: int
    sends: tuple[P2POp, ...]
    recvs: tuple[P2POp, ...]


@dataclass(frozen=True, eq=False, repr=False)
class SendRecvPlan:
    """A plan of the messages that a rank sends and receives in a pass, made once for all calls of a kind.

    moving: the side whose blocks are sent.
    device: the device of these blocks.
    schedule: the rank's steps, with their transfers.
    peers: the number by which the transport knows each rank of the schedule.
    packing: returns the layout of a message, from its traffic, the number of the block and the rows of it, None for
        all: of operands (gather) or partial results (reduce).
    """

    direction: Direction
    moving: Side
    device: torch.device
    schedule: RankSchedule
    peers: Sequence[int]
    packing: Callable[[Traffic, int, Rows | None], Packing]

    @cached_property
    def batches(self) -> tuple[tuple[Batch, ...], ...]:
        """Return the messages that are posted at each step, one batch for all messages that are due together."""
        return tuple(self._of_step(step) for step in self.schedule.steps)

    def _of_step(self, step: Step) -> tuple[Batch, ...]:
        schedule, by_due = self.schedule, dict[int, tuple[list[P2POp], list[P2POp]]]()
        for t in step.issue:
            sends = t.src == schedule.rank
            posts = by_due.setdefault(t.due, ([], []))[0 if sends else 1]
            channel = Channel(t.traffic, t.link, schedule.by_link)
            peer = self.peers[t.dst if sends else t.src]
            posts.append(P2POp(t, peer, channel, self.packing(t.traffic, t.block, t.rows)))
        return tuple(Batch(due, tuple(sends), tuple(recvs)) for due, (sends, recvs) in by_due.items())

    @cached_property
    def rows(self) -> dict[int, Rows | None]:
        """Return the rows that this rank receives of each block that it receives, by block; None for all rows."""
        return self.schedule.rows

    @cached_property
    def has_messages(self) -> bool:
        """Return whether this rank sends or receives anything."""
        return any(step.issue for step in self.schedule.steps)

    @cached_property
    def sent_bytes(self) -> Counter[Channel]:
        """Return the bytes that this rank sends in a pass, by channel."""
        sent: Counter[Channel] = Counter()
        for batch in chain.from_iterable(self.batches):
            for post in batch.sends:
                sent[post.channel] += post.packing.nbytes
        return sent


@dataclass(slots=True, eq=False, repr=False)
class _Ending:
    """What ends before the work of a step: messages to wait for, blocks that arrive, buffers that have been sent."""

    pending: list[Pending] = field(default_factory=list)
    arriving: list[tuple[P2POp, Buffer]] = field(default_factory=list)
    leaving: list[Buffer] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Visit:
    """A block that is here to be worked on: part `part` of the block of rank `owner`.

    Read its `operands`, and add results to its `accumulator`.

    A rank's own block (`is_own`) has no operands: it did not travel. It may come twice, for a share of the work each;
    the second time it `is_tail`.
    """

    owner: int
    part: int
    is_tail: bool
    is_own: bool
    operands: Tensors
    _accumulator: Callable[[], Accumulator]

    @property
    def accumulator(self) -> Accumulator:
        """Return the accumulator of results for the block, which travels along with it."""
        return self._accumulator()


class RingPass:
    """One rank's run of a forward or backward pass around the ring; used once.

    Args:
        send_recv: the messages of the pass.
        transport: carries them.
        parts: the parts of the heads, whose operands of the moving side go around.
        own: by part, the accumulators of this rank's own block, for results of the moving side.
        label: `LABEL_BYTES` of uint8, equal on every rank: it says which call a message belongs to. It is compared
            where that costs nothing, on CPUs, where gloo would let a shorter message pass for a longer one. None for
            none.
        log: notes steps, messages and waits for a profile; None if there is none.
    """

    def __init__(
        self,
        send_recv: SendRecvPlan,
        transport: Transport,
        parts: Sequence[MovingHeads],
        own: Sequence[Accumulator],
        *,
        label: Tensor | None = None,
        log: PassLog | None = None,
    ) -> None:
        self.send_recv, self._schedule = send_recv, send_recv.schedule
        self._parts = parts
        self._moving, self._direction, self._device = send_recv.moving, send_recv.direction, send_recv.device
        self._label = label
        self._step = 0
        self._on_gpu = self._device.type == "cuda"
        self._unnamed: AbstractContextManager[None] = nullcontext()
        self._log = log
        self.transport = transport if self._log is None else self._log.watch(transport)
        self._operands: dict[int, Tensors] = {}
        self._buffers: dict[int, Buffer] = {}  # leased for operands, by block
        self._lease = partial(_labelled, transport.pool, self._device, label)  # holds nothing of this pass
        self._results = PartialResults(send_recv, parts, own, self._lease, transport.pool.release)
        self._endings = defaultdict[int, _Ending](_Ending)  # by step

    @property
    def step(self) -> int:
        """Return the step of the schedule that this rank is at."""
        return self._step

    def steps(self) -> Iterator[Visit | None]:
        """Run all steps of the pass: at each wait for messages, post messages, then yield the block to work on.

        Yields None at a step without a block to work on. After the last step, which may be a reduce hop, the results
        of the rank's own block are complete.
        """
        for number, step in enumerate(self._schedule.steps):
            self._step = number
            if self._log is None:
                self.move(step)
            else:
                self._log.step = number
                with self._log.timed("move"):
                    self.move(step)
            yield None if step.visit is None else self._visit(step.visit, step.is_tail)

    def _visit(self, block: int, is_tail: bool) -> Visit:
        part, owner = divmod(block, self._schedule.ranks)
        is_own = owner == self._schedule.rank
        operands = () if is_own else self._operands[block]
        return Visit(owner, part, is_tail, is_own, operands, partial(self._results.of, block))

    def traced(self, visit: Visit) -> AbstractContextManager[None]:
        """Return a context for the work of `visit`: it notes an event in a profile, and on GPUs an NVTX range."""
        named = self._unnamed
        if self._on_gpu:
            name = f"burst {self._direction} step {self._step}, block {visit.owner}, part {visit.part}"
            named = torch.cuda.nvtx.range(name)
        return named if self._log is None else self._log.timed("kernel", named)

    def move(self, step: Step) -> None:
        """Wait for messages that end before this step, release buffers no longer needed, and post its messages."""
        ending = self._endings.pop(self._step, None)
        if ending is not None:
            for pending in ending.pending:
                try:
                    pending.wait()
                except PeerLostError as lost:
                    self._give_up(lost)
            for buffer in ending.leaving:
                self.transport.pool.release(buffer)
            for post, buffer in ending.arriving:
                self._arrive(post, buffer)
        for block in step.drop:
            self._operands.pop(block, None)
            if block in self._buffers:
                self.transport.pool.release(self._buffers.pop(block))
        if step.issue:
            self._post()

    def _post(self) -> None:
        """Post this step's messages; messages that are due together form one batch per communicator."""
        for due, posts, awaited in self.send_recv.batches[self._step]:
            sends = [Message(post.peer, post.channel, self._outgoing(post).data) for post in posts]
            arriving = [(post, self.transport.pool.lease(post.packing.nbytes, self._device)) for post in awaited]
            recvs = [Message(post.peer, post.channel, buffer.data) for post, buffer in arriving]
            try:
                posted = self.transport.post(sends, recvs)
            except PeerLostError as lost:
                self._give_up(lost)
            self._endings[due].pending.extend(posted)
            self._endings[due].arriving.extend(arriving)

    def _outgoing(self, post: P2POp) -> Buffer:
        """Return the bytes of a block, or of partial results of it, on their way out."""
        block, due = post.transfer.block, post.transfer.due
        if post.transfer.traffic is Traffic.REDUCE:
            return self._released_at(due, self._results.leave(block))
        if post.transfer.rows != self.send_recv.rows.get(block):  # some of those here, for one peer alone
            return self._released_at(due, self._packed(post))
        if block not in self._buffers:  # the rank's own block, sent for the first time
            self._buffers[block] = self._packed(post)
        return self._buffers[block]

    def _released_at(self, step: int, buffer: Buffer) -> Buffer:
        self._endings[step].leaving.append(buffer)
        return buffer

    def _packed(self, post: P2POp) -> Buffer:
        """Return a leased buffer with the operands of a block of this rank's own: all rows of it, or some."""
        operands = self._parts[self._schedule.part(post.transfer.block)].outgoing(self._moving)
        if post.transfer.rows is not None:
            operands = tuple(take_rows(x, post.transfer.rows) for x in operands)
        buffer = self._lease(post.packing.nbytes)
        for view, operand in zip(buffer.views(post.packing), operands, strict=True):
            view.copy_(operand)
        return buffer

    def _arrive(self, post: P2POp, buffer: Buffer) -> None:
        if not buffer.has_label(self._label):
            what = "what it sent belongs to another call, or to one with other shapes, types or options"
            self._give_up(PeerLostError(post.peer, what))
        if post.transfer.traffic is Traffic.REDUCE:
            self._results.arrive(post, buffer)
            return
        self._buffers[post.transfer.block] = buffer
        self._operands[post.transfer.block] = buffer.views(post.packing)

    def _give_up(self, lost: PeerLostError) -> NoReturn:
        rank = self.send_recv.peers[self._schedule.rank]
        raise lost_peer_error(self.transport, rank, f"{self._direction} step {self._step}", lost) from lost


class _Leased:
    """A `Storage`: `buffer`, leased when it is asked for, if there is none yet."""

    def __init__(self, packing: Packing, lease: Callable[[int], Buffer], buffer: Buffer | None = None) -> None:
        self._packing, self._lease = packing, lease
        self.buffer = buffer
        self.length = packing.length

    def take(self, kept: Sequence[Tensor] | None) -> Tensors:
        """Return views of a buffer, leased now, with the values of the contribution `kept` if there is one."""
        self.buffer = self._lease(self._packing.nbytes)
        views = self.buffer.views(self._packing)
        for tensor, part in zip(views, kept or (), strict=False):
            tensor.copy_(part)
        return views


class PartialResults:
    """The accumulators of partial results that are on this rank in a pass, by block.

    Args:
        send_recv: the messages of the pass.
        parts: the parts of the heads, which make accumulators.
        own: by part of the heads, the accumulators of this rank's own block, which outlive the pass.
        lease: returns a buffer of so many bytes, with the label of the pass.
        release: takes such a buffer back.
    """

    def __init__(
        self,
        send_recv: SendRecvPlan,
        parts: Sequence[MovingHeads],
        own: Sequence[Accumulator],
        lease: Callable[[int], Buffer],
        release: Callable[[Buffer], None],
    ) -> None:
        self._send_recv, self._schedule, self._moving = send_recv, send_recv.schedule, send_recv.moving
        self._parts, self._own = parts, own
        self._lease, self._release = lease, release
        self._here: dict[int, tuple[_Leased, Accumulator]] = {}  # of others' blocks

    def of(self, block: int) -> Accumulator:
        """Return the accumulator, on this rank, of results for the block of this number, made at the first call."""
        part, owner = divmod(block, self._schedule.ranks)
        if owner == self._schedule.rank:
            return self._own[part]
        if block not in self._here:
            packing = self._send_recv.packing(Traffic.REDUCE, block, self._send_recv.rows.get(block))
            storage = _Leased(packing, self._lease)
            self._here[block] = storage, self._parts[part].accumulator(self._moving, storage)
        return self._here[block][1]

    def arrive(self, post: P2POp, buffer: Buffer) -> None:
        """Add the partial results in `buffer`, received as the message `post`, to the accumulator of their block.

        If the block has none here, or none with tensors, the buffer becomes the storage of its accumulator.
        """
        block, rows = post.transfer.block, post.transfer.rows
        part = self._parts[self._schedule.part(block)]
        storage = _Leased(post.packing, self._lease, buffer)
        arrived = part.accumulator(self._moving, storage, buffer.views(post.packing))
        if self._schedule.is_own(block):
            self.of(block).join(arrived, rows)
            self._release(buffer)
            return
        if block in self._here:
            own, here = self._here[block]  # of the same rows
            if own.buffer is not None:
                here.join(arrived, None)
                self._release(buffer)
                return
            arrived.join(here, None)  # what waits, as the kernel returned it
        self._here[block] = storage, arrived

    def leave(self, block: int) -> Buffer:
        """Return a buffer with this rank's partial results for another rank's block, and drop their accumulator."""
        self.of(block).settle()
        buffer = self._here.pop(block)[0].buffer
        assert buffer is not None, "settled results are in their storage"
        return buffer


def _labelled(pool: BufferPool, device: torch.device, label: Tensor | None, nbytes: int) -> Buffer:
    """Return a leased buffer to send, with a call's label."""
    buffer = pool.lease(nbytes, device)
    buffer.put_label(label)
    return buffer


def lockstep(programs: Sequence[Generator[None, None, T]]) -> list[T]:
    """Run one program per rank of this process, a step of each in turn, without threads; return their results.

    programs: generators, by rank, that yield after every step.
    """
    results: dict[int, T] = {}
    while len(results) < len(programs):
        for rank, program in enumerate(programs):
            if rank not in results:
                try:
                    next(program)
                except StopIteration as stop:
                    results[rank] = stop.value
    return [results[rank] for rank in range(len(programs))]
