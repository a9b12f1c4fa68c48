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

    `filled` says whether the tensors hold values already. The first contribution is copied rather than added; or, if
    the sums may have other tensors than those given (`free`), one that covers everything becomes the sums.
    """

    nothing: tuple[float, ...]  # what rows that nothing was added to read as, by tensor

    def __init__(self, tensors: tuple[Tensor, ...], filled: bool = False) -> None:
        self.tensors = tensors
        self.free = False
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
            self._clear(slice(None))
            self._filled = True

    def _add(self, rows: slice, batch: slice, parts: Sequence[Tensor]) -> None:
        if not self._filled and batch == slice(None):
            self._begin(rows, parts)
            return
        self.settle()
        self._accumulate(rows, batch, parts)

    def _begin(self, rows: slice, parts: Sequence[Tensor]) -> None:
        """The first contribution, to all batch rows."""
        self._filled = True
        length, pairs = self.tensors[0].shape[1], list(zip(self.tensors, parts, strict=True))
        if self.free and rows == slice(0, length):
            self.tensors = tuple(_taken(part, tensor) for tensor, part in pairs)
            return
        for rest in (slice(0, rows.start), slice(rows.stop, length)):
            if rest.start < rest.stop:
                self._clear(rest)
        for tensor, part in pairs:
            _rows(tensor, rows).copy_(part)

    def _clear(self, rows: slice) -> None:
        for tensor, value in zip(self.tensors, self.nothing, strict=False):
            _rows(tensor, rows).fill_(value)

    def _accumulate(self, rows: slice, batch: slice, parts: Sequence[Tensor]) -> None:
        raise NotImplementedError


class PlainSums(TileSums):
    """Tensors [B, S, H, D] that contributions are added to."""

    nothing = (0.0, 0.0)

    def _accumulate(self, rows: slice, batch: slice, parts: Sequence[Tensor]) -> None:
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor[batch, rows].add_(part)


class SoftmaxSums(TileSums):
    """out [B, S, H, Dv] and lse [B, H, S] over the keys seen so far; rows that saw none have out 0, lse -inf."""

    nothing = (0.0, -torch.inf)

    def _accumulate(self, rows: slice, batch: slice, parts: Sequence[Tensor]) -> None:
        out, lse = self.tensors
        merge_(out[batch, rows], lse[batch, :, rows], *parts)


class OwnSums:
    """The sums of a rank's own block: `tensors` whole, and `parts`, sums of their own, one per part of the heads.

    `make` makes sums, of a part whose number it is given, out of tensors that hold no values yet.
    """

    def __init__(self, tensors: tuple[Tensor, ...], parts: int, make: Callable[[int, tuple[Tensor, ...]], TileSums]):
        self._tensors = tensors
        self.parts = [make(part, views) for part, views in enumerate(in_parts(tensors, parts))]
        self.parts[0].free = parts == 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums, once settled."""
        return self.parts[0].tensors if len(self.parts) == 1 else self._tensors

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


def _rows(x: Tensor, rows: slice) -> Tensor:
    """A run of token rows of [B, S, H, D] or [B, H, S], as a view."""
    return x[:, rows] if x.dim() == 4 else x[:, :, rows]


def _taken(part: Tensor, tensor: Tensor) -> Tensor:
    """`part` in place of `tensor` if it is as good and holds no more memory; else `tensor` with its values."""
    alike = part.dtype == tensor.dtype and part.shape == tensor.shape and part.is_contiguous()
    if alike and part.untyped_storage().nbytes() == part.nbytes:
        return part.data  # a kernel's view of its own tensor: as an output it must not count as one
    return tensor.copy_(part)
