"""Buffers for messages: how tensors are laid out in one, and a pool that leases them.

Buffers are reused, so that the steady state allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from burst_plugin.types import Spec

LABEL_BYTES = 16  # a multiple of every type's size
_ALIGNMENT = 64  # a CPU's widest vector: kernels read a received block 3 % more slowly at other alignments
_MOST_CACHED = 16  # entries of a look-up table before it is cleared


class Packing:
    """The layout of a message: where each of several tensors lies in one byte buffer, aligned to 64 bytes.

    Args:
        tensors: shape and type of each tensor, in the order in which they lie one after another.
        labelled: whether `LABEL_BYTES` for the label of a call follow.

    `nbytes` is the length of the message, at least `LABEL_BYTES`.
    """

    def __init__(self, tensors: Sequence[Spec], labelled: bool = False) -> None:
        self._sections: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        stop = 0
        for shape, dtype in tensors:
            start = _round_up(stop, _ALIGNMENT)
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            self._sections.append((dtype, shape, strides, start // dtype.itemsize))
            stop = start + math.prod(shape) * dtype.itemsize
        stop = _round_up(stop, LABEL_BYTES) + (LABEL_BYTES if labelled else 0)
        self.nbytes = max(stop, LABEL_BYTES)  # no backend is sure to carry empty messages

    def views(self, data: Tensor, count: int = 0) -> tuple[Tensor, ...]:
        """Return the tensors of this layout, in their order, as views of the bytes `data`.

        data: [nbytes], uint8. With a `count` above 0 it is [count * nbytes], that many messages one after another,
            and each tensor gets a first dim of `count`.
        """
        typed = {dtype: data.view(dtype) for dtype, *_ in self._sections}
        tensors = []
        for dtype, shape, strides, at in self._sections:
            if count:
                shape, strides = (count, *shape), (self.nbytes // dtype.itemsize, *strides)
            tensors.append(typed[dtype].as_strided(shape, strides, at))
        return tuple(tensors)

    @property
    def length(self) -> int:
        """Return S, the number of token rows, of the first tensor of the message, which is [B, S, H, D]."""
        return self._sections[0][1][1]


class Buffer:
    """The bytes of a message to send or receive, `data` [nbytes], uint8, with cached views of them as tensors.

    Buffers are reused for messages of one kind in every layer, so views of a buffer are made once.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._label = data[-LABEL_BYTES:]  # if there is one
        self._views: dict[tuple[Packing, int], tuple[Tensor, ...]] = {}

    def views(self, packing: Packing, count: int = 0) -> tuple[Tensor, ...]:
        """Return the tensors of a message laid out by `packing` as views of `data`.

        With a `count` above 0 `data` holds that many messages one after another; each tensor gets a first dim of
        `count`.
        """
        views = self._views.get((packing, count))
        if views is None:
            if len(self._views) == _MOST_CACHED:
                self._views.clear()
            with torch.inference_mode(False):
                views = self._views[packing, count] = packing.views(self.data, count)
        return views

    def put_label(self, label: Tensor | None) -> None:
        """Write `label` [LABEL_BYTES], uint8, into the last bytes of the buffer; nothing for None."""
        if label is not None:
            self._label.copy_(label)

    def has_label(self, label: Tensor | None) -> bool:
        """Return whether the last bytes of the buffer are `label` [LABEL_BYTES], uint8; True for None."""
        return label is None or torch.equal(self._label, label)


class Memory:
    """One allocation of `nbytes` bytes on `device`, whose beginning serves as a `Buffer` of any length up to that.

    It and its views are made outside of inference mode: tensors made inside cannot be written to outside.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes, self.device = nbytes, device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._buffers: dict[int, Buffer] = {}

    def give_up(self) -> None:
        """Keep the allocator from handing out this memory before the current stream, which may use it, is done.

        That stream is another one than the memory was made on where passes run beside others.
        """
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            if current != self._stream:
                self._whole.record_stream(current)

    def buffer(self, nbytes: int) -> Buffer:
        """Return a `Buffer` of the first `nbytes` bytes, mostly the one that was returned for this length before."""
        buffer = self._buffers.get(nbytes)
        if buffer is None:
            if len(self._buffers) == _MOST_CACHED:
                self._buffers.clear()
            with torch.inference_mode(False):
                buffer = self._buffers[nbytes] = Buffer(self._whole[:nbytes])
        return buffer


class BufferPool:
    """A pool of byte buffers for messages, which are leased and released: the steady state allocates nothing.

    A lease takes the smallest free memory that is large enough. Where none is, a free one that is too small is given
    up for a larger one, so that there are never more than were in use at the same time, whatever their lengths.
    `allocated_bytes` counts the bytes of all of them; `leased` has the memory of each buffer that is out.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Memory]] = {}
        self.leased: dict[Buffer, Memory] = {}
        self.allocated_bytes = 0

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """Return a `Buffer` of `nbytes` bytes, 1 or more, on `device`; its contents are undefined."""
        memory = self._take(nbytes, device)
        buffer = memory.buffer(nbytes)
        self.leased[buffer] = memory
        return buffer

    def _take(self, nbytes: int, device: torch.device) -> Memory:
        """Return free memory that is large enough, or new memory."""
        free = self._free.setdefault(device, [])
        best = None
        for number, memory in enumerate(free):
            if memory.nbytes == nbytes:
                return free.pop(number)
            if memory.nbytes > nbytes and (best is None or memory.nbytes < free[best].nbytes):
                best = number
        if best is not None:
            return free.pop(best)
        if free:
            memory = free.pop()
            memory.give_up()
            self.allocated_bytes -= memory.nbytes
        self.allocated_bytes += nbytes
        return Memory(nbytes, device)

    def release(self, buffer: Buffer) -> None:
        """Take back a buffer that `lease` returned, for later leases. Raise KeyError if it is not leased."""
        memory = self.leased.pop(buffer)
        self._free[memory.device].append(memory)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
