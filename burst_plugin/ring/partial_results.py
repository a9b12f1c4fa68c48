"""Partial results on one rank during a pass: of other ranks' blocks, which come and leave, and of its own.

arrive, add     ->  an accumulator per block  ->  leave
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from burst_plugin.comm.buffers import Buffer, Packing
from burst_plugin.compute.accumulators import Accumulator, Storage, Tensors
from burst_plugin.ring.send_recv_plan import Post, SendRecvPlan
from burst_plugin.topology import Traffic
from burst_plugin.types import Side

__all__ = ["Moving", "PartialResults"]


class Moving(Protocol):
    """A part of the heads, as far as it travels; see `passes.Part`."""

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands of a side as they travel; asked for when they leave."""
        ...

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        """Return an accumulator of a side, with what `tensors` hold if there are any."""
        ...


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


@dataclass(slots=True, eq=False, repr=False)
class _Partial:
    """Partial results of another rank's block, and the storage in which they leave."""

    storage: _Leased
    accumulator: Accumulator


class PartialResults:
    """Accumulators by block.

    Args:
        own: by part of the heads, the accumulators of this rank's own block, which outlive the pass.
        lease, release: of buffers.
    """

    def __init__(
        self,
        send_recv: SendRecvPlan,
        parts: Sequence[Moving],
        own: Sequence[Accumulator],
        lease: Callable[[int], Buffer],
        release: Callable[[Buffer], None],
    ) -> None:
        self._send_recv, self._schedule, self._moving = send_recv, send_recv.schedule, send_recv.moving
        self._parts, self._own = parts, own
        self._lease, self._release = lease, release
        self._here: dict[int, _Partial] = {}  # of others' blocks

    def of(self, block: int) -> Accumulator:
        """Return the accumulator of a block that is here; an empty one if there is none."""
        part = self._schedule.part(block)
        if self._schedule.is_own(block):
            return self._own[part]
        if block not in self._here:
            packing = self._send_recv.packing(Traffic.REDUCE, block, self._send_recv.rows.get(block))
            storage = _Leased(packing, self._lease)
            self._here[block] = _Partial(storage, self._parts[part].accumulator(self._moving, storage))
        return self._here[block].accumulator

    def arrive(self, post: Post, buffer: Buffer) -> None:
        """Add partial results to those that are here; where these have no buffer yet, go on in the one that came."""
        block, rows = post.transfer.block, post.transfer.rows
        part = self._parts[self._schedule.part(block)]
        storage = _Leased(post.packing, self._lease, buffer)
        arrived = part.accumulator(self._moving, storage, buffer.views(post.packing))
        if self._schedule.is_own(block):
            self.of(block).join(arrived, rows)
            self._release(buffer)
            return
        here = self._here.get(block)  # of the same rows, if there are any
        if here is not None and here.storage.buffer is not None:
            here.accumulator.join(arrived, None)
            self._release(buffer)
            return
        if here is not None:  # what waits, as the kernel returned it
            arrived.join(here.accumulator, None)
        self._here[block] = _Partial(storage, arrived)

    def leave(self, block: int) -> Buffer:
        """Return the buffer with the partial results of another rank's block, which this rank holds no longer."""
        self.of(block).settle()
        buffer = self._here.pop(block).storage.buffer
        assert buffer is not None, "settled results are in their storage"
        return buffer
