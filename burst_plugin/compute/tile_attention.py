"""What a kernel is told of a tile, and a tile's rows of a visit's tensors, its pieces as a batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.compute.accumulators import Tensors
from burst_plugin.compute.rows import rows_of
from burst_plugin.compute.varlen import SpanTable
from burst_plugin.kernels import How, Kernel
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import NOTHING_UNDER_WAY, Band, UnderWay

__all__ = [
    "NO_POSITIONS",
    "RowTable",
    "TileAttention",
    "VisitPositions",
    "bias_grad",
    "fold",
    "fold_lse",
    "unfold",
    "unfold_lse",
]


class VisitPositions(NamedTuple):
    """Which tokens meet in a visit, int64; None where nothing depends on them.

    q, k: [Sq] and [Sk], positions as scores count them, logical ones under a prefix tree.
    columns: [Sk], the positions of the keys in the sequence, as a bias has them.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    columns: Tensor | None = None


NO_POSITIONS = VisitPositions()


class RowTable:
    """Positions or rows of tokens on a device, made once, and kept for as many as meet in calls of one kind."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Tensor] = {}

    def of(self, key: Hashable, most: int, make: Callable[[], Tensor]) -> Tensor:
        """Return what `make` gives, which `key` is the name of. What is kept goes before it is more than `most`."""
        found = self._known.get(key)
        if found is None:
            with torch.inference_mode(False):  # other calls use them, too
                found = make()
            if found.numel() + sum(each.numel() for each in self._known.values()) > most:
                self._known.clear()
            self._known[key] = found
        return found


class TileAttention:
    """A kernel at work on the tiles of one part of the heads; see `passes` for its two kinds.

    Args:
        how: what the call wants of its scores.
        spans: the rows of tiles with spans, of which there are none with a bias.
        bias: [1 or B, 1 or Hq, S_local, S_global], or None. Its gradient accumulates in `dbias`.
        q, kv: this rank's operands.

    `under_way` are messages during the visit at work.
    """

    def __init__(
        self, kernel: Kernel, how: How, spans: SpanTable, bias: Tensor | None, q: Tensors, kv: Tensors
    ) -> None:
        self.kernel, self.spans, self.q, self.kv = kernel, spans, q, kv
        self._base, self._bias = how, bias
        self.under_way = NOTHING_UNDER_WAY
        self._without_positions: dict[tuple[Band, int, UnderWay], How] = {}
        self.dbias: Tensor | None = None

    def how(self, tile: Tile, positions: VisitPositions) -> How:
        """Return what the kernel is told of a tile."""
        first = 0 if tile.batch is None else tile.batch[0]
        if positions.q is None or positions.k is None:
            how = self._without_positions.get((tile.band, first, self.under_way))
            if how is None:
                how = self._base._replace(band=tile.band, first_batch_row=first, under_way=self.under_way)
                self._without_positions[tile.band, first, self.under_way] = how
            return how
        q, k = positions.q[tile.q], positions.k[tile.k]
        bias = self._bias
        if bias is not None:
            assert positions.columns is not None
            bias = bias[_bias_batch(bias, tile), :, tile.q].index_select(3, positions.columns[tile.k])
        return self._base._replace(band=tile.band, bias=bias, q_positions=q, k_positions=k, first_batch_row=first)

    def add_to_dbias(self, dbias: Tensor | None, tile: Tile, positions: VisitPositions) -> None:
        """Add a tile's gradient of the bias, if there is one."""
        bias = self._bias
        if dbias is None or bias is None:
            return
        assert positions.columns is not None
        if self.dbias is None:
            self.dbias = torch.zeros_like(bias, dtype=dbias.dtype)
        self.dbias[_bias_batch(bias, tile), :, tile.q].index_add_(3, positions.columns[tile.k], dbias)


def bias_grad(bias: Tensor, parts: Sequence[TileAttention]) -> Tensor:
    """Return the gradient of a whole bias, from that of each part of the heads."""
    grads = [torch.zeros_like(bias[:, :1]) if part.dbias is None else part.dbias for part in parts]
    if bias.shape[1] == 1:
        return torch.stack(grads).sum(0) if len(grads) > 1 else grads[0]
    heads = bias.shape[1] // len(grads)
    return torch.cat([grad.expand(-1, heads, -1, -1) for grad in grads], 1)


def _bias_batch(bias: Tensor, tile: Tile) -> slice:
    return slice(None) if bias.shape[0] == 1 or tile.batch is None else slice(*tile.batch)


def fold(x: Tensor, rows: slice, tile: Tile) -> Tensor:
    """Return these rows of [B, S, H, D]; of a tile with n pieces, [B * n, S/n, H, D]."""
    x = rows_of(x, rows, tile.batch)
    return x if tile.pieces == 1 else _split(x, 1, tile.pieces).flatten(0, 1)


def unfold(x: Tensor, tile: Tile) -> Tensor:
    """Return [B * n, S/n, H, D] as [B, S, H, D]."""
    return x if tile.pieces == 1 else x.reshape(-1, tile.pieces, *x.shape[1:]).flatten(1, 2)


def fold_lse(lse: Tensor, tile: Tile) -> Tensor:
    """Return the tile's queries of [B, H, S]; of a tile with n pieces, [B * n, H, S/n]."""
    lse = rows_of(lse, tile.q, tile.batch)
    return lse if tile.pieces == 1 else _split(lse, 2, tile.pieces).transpose(1, 2).flatten(0, 1)


def unfold_lse(lse: Tensor, tile: Tile) -> Tensor:
    """Return [B * n, H, S/n] as [B, H, S]."""
    return lse if tile.pieces == 1 else lse.reshape(-1, tile.pieces, *lse.shape[1:]).transpose(1, 2).flatten(2, 3)


def _split(x: Tensor, dim: int, pieces: int) -> Tensor:
    """Return x with `dim` as two dims, the first of `pieces`."""
    return x.reshape(*x.shape[:dim], pieces, -1, *x.shape[dim + 1 :])
