"""What accumulates on either side of the visits: plain sums (dq; dk and dv) and softmax-weighted ones (out, lse)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_plugin.executor import Sums
from burst_plugin.softmax import merge_

__all__ = ["PlainSums", "SoftmaxSums"]


class PlainSums:
    """Tensors [B, S, H, D] that contributions are added to; `filled` says whether they hold values already.

    The first contribution is copied rather than added if it covers all rows.
    """

    def __init__(self, tensors: tuple[Tensor, ...], filled: bool = False) -> None:
        self.tensors = tensors
        self._filled = filled

    def add(self, rows: slice, parts: Sequence[Tensor]) -> None:
        """Add one tile's `parts` to `rows`."""
        if not self._filled and rows == slice(0, self.tensors[0].shape[1]):
            for tensor, part in zip(self.tensors, parts, strict=True):
                tensor.copy_(part)
            self._filled = True
            return
        self.settle()
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor[:, rows].add_(part)

    def join(self, other: Sums) -> None:
        """Add another rank's sums."""
        self.add(slice(0, self.tensors[0].shape[1]), other.tensors)

    def settle(self) -> None:
        """Nothing added yet means zeros."""
        if not self._filled:
            for tensor in self.tensors:
                tensor.zero_()
            self._filled = True


class SoftmaxSums:
    """out [B, S, H, Dv] and lse [B, H, S] over the keys seen so far; rows that saw none have out 0, lse -inf."""

    def __init__(self, tensors: tuple[Tensor, ...], filled: bool = False) -> None:
        self.out, self.lse = tensors
        self._filled = filled

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(out, lse)."""
        return self.out, self.lse

    def add(self, rows: slice, parts: Sequence[Tensor]) -> None:
        """Merge one tile's (out, lse) into `rows`."""
        out, lse = parts
        if not self._filled and rows == slice(0, self.out.shape[1]):
            self.out.copy_(out)
            self.lse.copy_(lse)
            self._filled = True
            return
        self.settle()
        merge_(self.out[:, rows], self.lse[:, :, rows], out, lse)

    def join(self, other: Sums) -> None:
        """Merge another rank's (out, lse)."""
        self.add(slice(0, self.out.shape[1]), other.tensors)

    def settle(self) -> None:
        """Nothing merged yet means out 0, lse -inf."""
        if not self._filled:
            self.out.zero_()
            self.lse.fill_(-torch.inf)
            self._filled = True
