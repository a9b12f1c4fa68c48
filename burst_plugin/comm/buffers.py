"""Buffers that messages are sent from and arrive in: what lies where in them, and a pool that lends them.

They are lent again and again, so that the steady state allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from burst_plugin.types import Spec

__all__ = ["LABEL_BYTES", "Buffer", "BufferPool", "Memory", "Packing"]

LABEL_BYTES = 16  # a multiple of every type's size
_ALIGNMENT = 64  # a CPU's widest vector: kernels read a received block 3 % more slowly at other alignments
_KEPT = 16  # entries of a look-up table before it is cleared


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

    def views(self, data: Tensor) -> tuple[Tensor, ...]:
        """The tensors, as views of `data` [nbytes], uint8."""
        typed = {dtype: data.view(dtype) for dtype, *_ in self._sections}
        return tuple(typed[dtype].as_strided(shape, strides, at) for dtype, shape, strides, at in self._sections)

    @property
    def length(self) -> int:
        """Token rows of the first tensor, [B, S, H, D]."""
        return self._sections[0][1][1]


class Buffer:
    """`data` [nbytes], uint8, to send or receive.

    Buffers are lent again and again, for the same messages of every layer, so what is laid out in one is looked up
    once.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._label = data[-LABEL_BYTES:]  # if there is one
        self._views: dict[Packing, tuple[Tensor, ...]] = {}

    def views(self, packing: Packing) -> tuple[Tensor, ...]:
        """See `Packing.views`."""
        views = self._views.get(packing)
        if views is None:
            if len(self._views) == _KEPT:
                self._views.clear()
            with torch.inference_mode(False):
                views = self._views[packing] = packing.views(self.data)
        return views

    def put_label(self, label: Tensor | None) -> None:
        """Put a call's label on the message, at its end."""
        if label is not None:
            self._label.copy_(label)

    def has_label(self, label: Tensor | None) -> bool:
        """Whether a message that arrived is of the call of that label, as far as can be told without stalling."""
        return label is None or torch.equal(self._label, label)


class Memory:
    """One allocation, [nbytes], uint8.

    Made outside of inference mode, as are views of it: what is made inside cannot be written to outside.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes, self.device = nbytes, device
        self._buffers: dict[int, Buffer] = {}

    def buffer(self, nbytes: int) -> Buffer:
        """Its first `nbytes`; the same object whenever they are asked for."""
        buffer = self._buffers.get(nbytes)
        if buffer is None:
            if len(self._buffers) == _KEPT:
                self._buffers.clear()
            with torch.inference_mode(False):
                buffer = self._buffers[nbytes] = Buffer(self._whole[:nbytes])
        return buffer


class BufferPool:
    """Buffers that are handed out again: the steady state allocates nothing.

    A request takes the smallest free memory that is large enough. Where none is, a free one that is too small makes
    room for a larger one, so that there are never more than were in use at once, whatever lengths come by.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Memory]] = {}
        self._leased: dict[Buffer, Memory] = {}
        self.allocated_bytes = 0

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """A buffer of `nbytes`, at least one, contents undefined."""
        free = self._free.setdefault(device, [])
        best = None
        for number, memory in enumerate(free):
            size = memory.nbytes
            if size >= nbytes and (best is None or size < free[best].nbytes):
                best = number
                if size == nbytes:
                    break
        if best is not None:
            taken = free.pop(best)
        else:
            if free:
                self.allocated_bytes -= free.pop().nbytes
            taken = Memory(nbytes, device)
            self.allocated_bytes += nbytes
        buffer = taken.buffer(nbytes)
        self._leased[buffer] = taken
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back. KeyError if it is not on lease."""
        memory = self._leased.pop(buffer)
        self._free[memory.device].append(memory)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
