"""One tile's work: its rows taken out of a visit's tensors, its pieces made a batch, and the kernel called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.compute.rows import rows_of
from burst_plugin.compute.varlen import SpanTable, put_back, taken
from burst_plugin.kernels import How, Kernel, Queries, largest_scores
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Band

__all__ = ["NO_POSITIONS", "TileWork", "VisitPositions", "bias_grad"]


class VisitPositions(NamedTuple):
    """Which tokens meet in a visit: positions [Sq] and [Sk], int64; None where nothing depends on them."""

    q: Tensor | None = None
    k: Tensor | None = None


NO_POSITIONS = VisitPositions()


class TileWork:
    """A kernel, how a call wants its scores, and `bias` [1 or B, 1 or Hq, S_local, S_global] if it has one.

    `spans` has the rows of tiles with spans, of which there are none with a bias or where largest scores are wanted.
    The gradient of the bias accumulates in `dbias`; and in `max_logits` [Hq], if it is given, the largest scores.
    """

    def __init__(
        self, kernel: Kernel, how: How, spans: SpanTable, bias: Tensor | None, max_logits: Tensor | None = None
    ) -> None:
        self._kernel, self._base, self._spans, self._bias = kernel, how, spans, bias
        self._without_positions: dict[tuple[Band, int], How] = {}
        self.dbias: Tensor | None = None
        self.max_logits = max_logits

    def forward(
        self, q: Tensor, kv: tuple[Tensor, ...], tile: Tile, positions: VisitPositions
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of the tile's queries on its keys."""
        q, k, v = (_tokens(x, rows, tile) for x, rows in zip((q, *kv), (tile.q, tile.k, tile.k), strict=True))
        how = self._how(tile, positions)
        if tile.subtiles:
            return self._forward_of_spans(q, k, v, tile, how)
        out, lse = self._kernel.forward(q, k, v, how)
        if self.max_logits is not None:
            self.max_logits = self.max_logits.maximum(largest_scores(q, k, how))
        return _unfolded(out, tile), _unfolded_rows(lse, tile)

    def backward(
        self, queries: Queries, kv: tuple[Tensor, ...], tile: Tile, positions: VisitPositions
    ) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
        """((dq,), (dk, dv)) that the tile contributes."""
        q, dout, out = (_tokens(x, tile.q, tile) for x in queries[:3])
        k, v = (_tokens(x, tile.k, tile) for x in kv)
        lse = _folded_rows(rows_of(queries.lse, tile.q, tile.batch), tile)
        how = self._how(tile, positions)
        if tile.subtiles:
            return self._backward_of_spans(Queries(q, dout, out, lse), k, v, tile, how)
        grads = self._kernel.backward(Queries(q, dout, out, lse), k, v, how)
        if grads.dbias is not None and self._bias is not None:
            self._add_to_dbias(grads.dbias, self._bias, tile, positions)
        return (_unfolded(grads.dq, tile),), (_unfolded(grads.dk, tile), _unfolded(grads.dv, tile))

    def _forward_of_spans(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, how: How) -> tuple[Tensor, Tensor]:
        rows = self._spans.rows_of(tile)
        k, v = (taken(x, rows.k) for x in (k, v))
        out, lse = self._kernel.forward(taken(q, rows.q), k, v, how._replace(lengths=rows.lengths))
        return put_back(out, rows.q, q.shape[1]), put_back(lse, rows.q, q.shape[1], -torch.inf)

    def _backward_of_spans(
        self, queries: Queries, k: Tensor, v: Tensor, tile: Tile, how: How
    ) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
        rows = self._spans.rows_of(tile)
        q_count, k_count = queries.q.shape[1], k.shape[1]
        q, dout, out = (taken(x, rows.q) for x in queries[:3])
        some = Queries(q, dout, out, taken(queries.lse, rows.q))
        k, v = (taken(x, rows.k) for x in (k, v))
        grads = self._kernel.backward(some, k, v, how._replace(lengths=rows.lengths))
        dk, dv = (put_back(grad, rows.k, k_count) for grad in (grads.dk, grads.dv))
        return (put_back(grads.dq, rows.q, q_count),), (dk, dv)

    def _how(self, tile: Tile, positions: VisitPositions) -> How:
        first = 0 if tile.batch is None else tile.batch[0]
        if positions.q is None or positions.k is None:
            how = self._without_positions.get((tile.band, first))
            if how is None:
                how = self._base._replace(band=tile.band, first_batch_row=first)
                self._without_positions[tile.band, first] = how
            return how
        q, k = positions.q[tile.q], positions.k[tile.k]
        bias = self._bias
        if bias is not None:
            bias = bias[_bias_batch(bias, tile), :, tile.q].index_select(3, k)
        return self._base._replace(band=tile.band, bias=bias, q_positions=q, k_positions=k, first_batch_row=first)

    def _add_to_dbias(self, part: Tensor, bias: Tensor, tile: Tile, positions: VisitPositions) -> None:
        assert positions.k is not None
        if self.dbias is None:
            self.dbias = torch.zeros_like(bias, dtype=part.dtype)
        self.dbias[_bias_batch(bias, tile), :, tile.q].index_add_(3, positions.k[tile.k], part)


def bias_grad(bias: Tensor, works: Sequence[TileWork]) -> Tensor:
    """The gradient of a whole bias, from the work on each part of the heads."""
    grads = [torch.zeros_like(bias[:, :1]) if work.dbias is None else work.dbias for work in works]
    if bias.shape[1] == 1:
        return torch.stack(grads).sum(0) if len(grads) > 1 else grads[0]
    heads = bias.shape[1] // len(grads)
    return torch.cat([grad.expand(-1, heads, -1, -1) for grad in grads], 1)


def _batch(tile: Tile) -> slice:
    return slice(None) if tile.batch is None else slice(*tile.batch)


def _bias_batch(bias: Tensor, tile: Tile) -> slice:
    return slice(None) if bias.shape[0] == 1 else _batch(tile)


def _tokens(x: Tensor, rows: slice, tile: Tile) -> Tensor:
    """Rows of [B, S, H, D]; n pieces of S/n rows as [B * n, S/n, H, D]."""
    x = rows_of(x, rows, tile.batch)
    return x if tile.pieces == 1 else _split(x, 1, tile.pieces).flatten(0, 1)


def _unfolded(x: Tensor, tile: Tile) -> Tensor:
    """[B * n, S/n, H, D] as [B, S, H, D]."""
    return x if tile.pieces == 1 else x.reshape(-1, tile.pieces, *x.shape[1:]).flatten(1, 2)


def _folded_rows(x: Tensor, tile: Tile) -> Tensor:
    """[B, H, S] as [B * n, H, S/n]."""
    return x if tile.pieces == 1 else _split(x, 2, tile.pieces).transpose(1, 2).flatten(0, 1)


def _unfolded_rows(x: Tensor, tile: Tile) -> Tensor:
    """[B * n, H, S/n] as [B, H, S]."""
    return x if tile.pieces == 1 else x.reshape(-1, tile.pieces, *x.shape[1:]).transpose(1, 2).flatten(2, 3)


def _split(x: Tensor, dim: int, pieces: int) -> Tensor:
    """`dim` as two dims, the first of `pieces`."""
    return x.reshape(*x.shape[:dim], pieces, -1, *x.shape[dim + 1 :])
