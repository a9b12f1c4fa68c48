"""What accumulates on either side of the visits: plain sums (dq; dk and dv) and softmax-weighted ones (out, lse)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from burst_plugin.executor import Sums
from burst_plugin.softmax import merge_
from burst_plugin.tiles import Tile
from burst_plugin.transfers import Rows

__all__ = ["OwnSums", "PlainSums", "SoftmaxSums", "TileSums", "in_parts", "take_rows"]


class TileSums:
    """Sums of either kind: tensors [B, S, H, D] or [B, H, S], to which the contributions of tiles are added.

    `filled` says whether the tensors hold values already. A first contribution that covers everything is copied
    rather than added.
    """

    def __init__(self, tensors: tuple[Tensor, ...], filled: bool = False) -> None:
        self.tensors = tensors
        self._filled = filled

    def add(self, tile: Tile, side: str, parts: Sequence[Tensor]) -> None:
        """Add one tile's `parts` to its rows of this side."""
        self._add(tile.rows(side), slice(None) if tile.batch is None else slice(*tile.batch), parts)

    def join(self, other: Sums, rows: Rows | None) -> None:
        """Add another rank's sums: of these rows, or of all."""
        if rows is None:
            self._add(slice(0, self.tensors[0].shape[1]), slice(None), other.tensors)
            return
        offset = 0
        for start, stop in rows:
            within = ((offset, offset + stop - start),)
            self._add(slice(start, stop), slice(None), [take_rows(tensor, within) for tensor in other.tensors])
            offset += stop - start

    def settle(self) -> None:
        """See `Sums.settle`."""
        if not self._filled:
            self._clear()
            self._filled = True

    def _add(self, rows: slice, batch: slice, parts: Sequence[Tensor]) -> None:
        if not self._filled and rows == slice(0, self.tensors[0].shape[1]) and batch == slice(None):
            for tensor, part in zip(self.tensors, parts, strict=True):
                tensor.copy_(part)
            self._filled = True
            return
        self.settle()
        self._accumulate(rows, batch, parts)

    def _clear(self) -> None:
        raise NotImplementedError

    def _accumulate(self, rows: slice, batch: slice, parts: Sequence[Tensor]) -> None:
        raise NotImplementedError


class PlainSums(TileSums):
    """Tensors [B, S, H, D] that contributions are added to."""

    def _clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def _accumulate(self, rows: slice, batch: slice, parts: Sequence[Tensor]) -> None:
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor[batch, rows].add_(part)


class SoftmaxSums(TileSums):
    """out [B, S, H, Dv] and lse [B, H, S] over the keys seen so far; rows that saw none have out 0, lse -inf."""

    def _clear(self) -> None:
        out, lse = self.tensors
        out.zero_()
        lse.fill_(-torch.inf)

    def _accumulate(self, rows: slice, batch: slice, parts: Sequence[Tensor]) -> None:
        out, lse = self.tensors
        merge_(out[batch, rows], lse[batch, :, rows], *parts)


class OwnSums:
    """The sums of a rank's own block: `tensors` whole, and `parts`, sums of their own, one per part of the heads.

    `make` makes sums, of a part whose number it is given, out of tensors that hold no values yet.
    """

    def __init__(self, tensors: tuple[Tensor, ...], parts: int, make: Callable[[int, tuple[Tensor, ...]], TileSums]):
        self.tensors = tensors
        self.parts = [make(part, views) for part, views in enumerate(in_parts(tensors, parts))]

    def settle(self) -> None:
        """See `Sums.settle`."""
        for sums in self.parts:
            sums.settle()


def in_parts(tensors: Sequence[Tensor], parts: int) -> list[tuple[Tensor, ...]]:
    """Each part's heads of tensors [B, S, H, D] or [B, H, S], as views."""
    if parts == 1:
        return [tuple(tensors)]
    cut = [x.chunk(parts, 2 if x.dim() == 4 else 1) for x in tensors]
    return [tuple(x[part] for x in cut) for part in range(parts)]


def take_rows(x: Tensor, rows: Rows) -> Tensor:
    """Some token rows of [B, S, H, D] or [B, H, S]; a view where they are one run."""
    dim = 1 if x.dim() == 4 else 2
    parts = [x.narrow(dim, start, stop - start) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
