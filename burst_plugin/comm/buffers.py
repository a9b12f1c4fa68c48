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
    """Tensors laid out one after another in one byte buffer, each aligned to 64 bytes; then a label, if any."""

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
        """Return the tensors, as views of `data` [nbytes], uint8.

        With a `count`, `data` holds so many messages one behind the other, [count * nbytes]; tensors get a dim in
        front.
        """
        typed = {dtype: data.view(dtype) for dtype, *_ in self._sections}
        found = []
        for dtype, shape, strides, at in self._sections:
            if count:
                shape, strides = (count, *shape), (self.nbytes // dtype.itemsize, *strides)
            found.append(typed[dtype].as_strided(shape, strides, at))
        return tuple(found)

    @property
    def length(self) -> int:
        """Return the number of token rows of the first tensor, [B, S, H, D]."""
        return self._sections[0][1][1]


class Buffer:
    """`data` [nbytes], uint8, to send or receive.

    Buffers are reused for the same messages of every layer, so views of one are made once.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._label = data[-LABEL_BYTES:]  # if there is one
        self._views: dict[tuple[Packing, int], tuple[Tensor, ...]] = {}

    def views(self, packing: Packing, count: int = 0) -> tuple[Tensor, ...]:
        """Return the tensors of a message laid out by `packing` as views of `data`.

        With a `count` above 0 `data` holds so many messages in a row; each tensor gets a first dim of `count`.
        """
        views = self._views.get((packing, count))
        if views is None:
            if len(self._views) == _MOST_CACHED:
                self._views.clear()
            with torch.inference_mode(False):
                views = self._views[packing, count] = packing.views(self.data, count)
        return views

    def put_label(self, label: Tensor | None) -> None:
        """Write a call's label at the end of the message."""
        if label is not None:
            self._label.copy_(label)

    def has_label(self, label: Tensor | None) -> bool:
        """Return whether a message that arrived has this label; True if there is none to compare."""
        return label is None or torch.equal(self._label, label)


class Memory:
    """One allocation, [nbytes], uint8.

    It and its views are made outside of inference mode: tensors made inside cannot be written to outside.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes, self.device = nbytes, device
        self._buffers: dict[int, Buffer] = {}

    def buffer(self, nbytes: int) -> Buffer:
        """Return a buffer of the first `nbytes`, the same object every time."""
        buffer = self._buffers.get(nbytes)
        if buffer is None:
            if len(self._buffers) == _MOST_CACHED:
                self._buffers.clear()
            with torch.inference_mode(False):
                buffer = self._buffers[nbytes] = Buffer(self._whole[:nbytes])
        return buffer


class BufferPool:
    """Buffers that are reused: the steady state allocates nothing.

    A lease takes the smallest free memory that is large enough. Where none is, one that is too small is freed for a
    larger one, so that there are never more than were in use at the same time, whatever their lengths.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Memory]] = {}
        self._leased: dict[Buffer, Memory] = {}
        self.allocated_bytes = 0

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """Return a buffer of `nbytes`, at least one, contents undefined."""
        memory = self._take(nbytes, device)
        buffer = memory.buffer(nbytes)
        self._leased[buffer] = memory
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
            self.allocated_bytes -= free.pop().nbytes
        self.allocated_bytes += nbytes
        return Memory(nbytes, device)

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back. Raise KeyError if it is not leased."""
        memory = self._leased.pop(buffer)
        self._free[memory.device].append(memory)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
