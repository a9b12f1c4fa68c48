"""Keys and values of one layer in host memory, copied to the device shortly before and while the layer attends.

The copy of a layer's cached tokens begins while the layer before is at work. New tokens are written both to the host
and to the copy. On CPUs copies are made as well, to plain memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from burst_plugin.inference.storage import RowStore


class HostRowStore(RowStore):
    """A `RowStore` in host memory, pinned if there is a GPU; reads are served by a copy on the device."""

    def __init__(self, rows: int, reserve: int = 0) -> None:
        super().__init__(rows, reserve)
        self._fetched: tuple[Tensor, ...] = ()
        self._done: Any = None  # an event after the copies to `_fetched`, on GPUs

    @property
    def fetched_bytes(self) -> int:
        """Return the bytes of keys and values that have been copied to the device, or are on their way."""
        return sum(x.nbytes for x in self._fetched)

    def fetch(self) -> None:
        """Start to copy the stored keys and values to the device, unless a copy has been started."""
        if self._fetched or self.is_empty:
            return
        stored = self._tensors()
        with torch.inference_mode(False):  # a turn outside may write to what one inside has fetched
            self._fetched = tuple(torch.empty_like(x, device=self.device) for x in stored)
        stream = copy_stream(self.device)
        if stream is None:
            self._copy(stored)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still use that memory
        with torch.cuda.stream(stream):
            self._copy(stored)
            self._done = stream.record_event()

    def release(self) -> None:
        """Free the copy of keys and values on the device; they stay in host memory."""
        self._wait()
        self._fetched = ()

    def append(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """Append new tokens to each row, on the host and in the copy on the device, if there is one.

        k[i] and v[i], [n, heads, dim] on the device, are for row i; n may differ between rows.
        """
        self.device, stored, before = k[0].device, self._tensors(), self.lengths
        self._wait()
        super().append(k, v)
        if self.device.type == "cuda":  # the host may move what it stores next
            torch.cuda.current_stream(self.device).synchronize()
        if stored and stored[0] is not self._tensors()[0]:  # they have moved to larger tensors
            self.release()
        if self._fetched:
            after, self.lengths = self.lengths, before
            for fetched, new in zip(self._fetched, (k, v), strict=True):
                self._write(fetched, new)
            self.lengths = after

    def keep(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Keep tokens `start:stop` of each row, and forget its other tokens and the copy on the device.

        `ranges` has a pair for each row. Host memory is freed if less than half of it is needed.
        """
        self.release()
        super().keep(ranges)

    def undo(self, lengths: Sequence[int] | None) -> None:
        """Forget the tokens appended since `state` returned `lengths`, and the copy on the device.

        None for `lengths`, the state of an empty store, also forgets the type, heads and dims of keys and values.
        """
        self.release()
        super().undo(lengths)

    def _readable(self) -> tuple[Tensor, ...]:
        self.fetch()
        self._wait()
        return self._fetched

    def _new(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.empty(*shape, dtype=like.dtype, pin_memory=self.device.type == "cuda", device="cpu")

    def _copy(self, stored: Sequence[Tensor]) -> None:
        for fetched, x in zip(self._fetched, stored, strict=True):
            fetched.copy_(x, non_blocking=True)

    def _wait(self) -> None:
        """Have what comes next on the device wait for the copies."""
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)
            self._done = None


@cache
def copy_stream(device: torch.device) -> Any:
    """Return the stream of copies to a device; None for CPUs."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
