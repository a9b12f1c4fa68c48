"""The two passes of attention on one rank: what each side of a visit reads, sends and accumulates (see `shapes`).

Queries that travel backward send a factor per row in place of out, `online_softmax.row_factor`; where they arrive,
`online_softmax.project` turns it and dout into an `out` that any kernel takes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from burst_plugin.compute.accumulators import SOFTMAX, SUM, Accumulator, Storage, Tensors
from burst_plugin.compute.online_softmax import project
from burst_plugin.compute.tile_attention import (
    TileAttention,
    VisitPositions,
    fold,
    fold_lse,
    unfold,
    unfold_lse,
)
from burst_plugin.compute.varlen import put_back, taken
from burst_plugin.kernels import How, Queries, largest_scores
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Side, UnderWay

__all__ = ["BackwardPart", "ForwardPart", "Part"]


class Part(Protocol):
    """One part of the heads in a pass; `q` and `kv` are this rank's operands, as `compute` reads them.

    `under_way` is what kernels are told of messages meanwhile.
    """

    q: Tensors
    kv: Tensors
    under_way: UnderWay

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands of a side as they travel, in the order of `Shapes.side`."""
        ...

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """Return operands that travelled as `compute` reads them."""
        ...

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        """Return an accumulator of a side, with what `tensors` hold if there are any."""
        ...

    def compute(self, q: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> tuple[Tensors, Tensors]:
        """Return what a tile contributes to its queries, and to its keys and values; () for nothing."""
        ...


class ForwardPart(TileAttention):
    """Computes out and lse of one part of the heads; see `Part`.

    `max_logits` [Hq], if it is set, accumulates the largest scores.
    """

    max_logits: Tensor | None = None

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands of a side, which travel as they are."""
        return self.q if side == "q" else self.kv

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """Return operands that travelled; `compute` reads them as they are."""
        return arrived

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        """Return an accumulator of out and lse; for keys and values, which accumulate nothing, an empty one."""
        return Accumulator(SOFTMAX if side == "q" else SUM, storage, tensors)

    def compute(self, q: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> tuple[Tensors, Tensors]:
        """Return what a tile contributes to its queries, (out, lse), and () for its keys and values."""
        query, key, value = fold(q[0], tile.q, tile), fold(kv[0], tile.k, tile), fold(kv[1], tile.k, tile)
        how = self.how(tile, positions)
        if tile.subtiles:
            return self._of_spans(query, key, value, tile, how), ()
        out, lse = self.kernel.forward(query, key, value, how)
        if self.max_logits is not None:
            self.max_logits = self.max_logits.maximum(largest_scores(query, key, how))
        return (unfold(out, tile), unfold_lse(lse, tile)), ()

    def _of_spans(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, how: How) -> Tensors:
        rows = self.spans.rows_of(tile)
        how = how._replace(lengths=rows.lengths)
        out, lse = self.kernel.forward(taken(q, rows.q), taken(k, rows.k), taken(v, rows.k), how)
        return put_back(out, rows.q, q.shape[1]), put_back(lse, rows.q, q.shape[1], -torch.inf)


class BackwardPart(TileAttention):
    """Computes dq, dk and dv of one part of the heads; see `Part`.

    `q` is in the order of `Queries`. `factor` [B, H, S], if it is set, travels with queries in place of out.
    """

    factor: Tensor | None = None

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands of a side as they travel: queries with `factor`, if it is set, for out."""
        if side == "kv":
            return self.kv
        q, dout, out, lse = self.q
        return q, dout, out if self.factor is None else self.factor, lse

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """Return operands that travelled as `compute` reads them: queries with an out made from their factor."""
        if side == "kv" or self.factor is None:
            return arrived
        q, dout, factor, lse = arrived
        return q, dout, project(dout, factor), lse

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        """Return an accumulator of the gradients of a side, with what `tensors` hold if there are any."""
        return Accumulator(SUM, storage, tensors)

    def compute(self, q: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> tuple[Tensors, Tensors]:
        """Return what a tile contributes, (dq,) and (dk, dv); add its gradient of the bias, if there is one."""
        query, dout, out = fold(q[0], tile.q, tile), fold(q[1], tile.q, tile), fold(q[2], tile.q, tile)
        queries = Queries(query, dout, out, fold_lse(q[3], tile))
        key, value = fold(kv[0], tile.k, tile), fold(kv[1], tile.k, tile)
        how = self.how(tile, positions)
        if tile.subtiles:
            return self._of_spans(queries, key, value, tile, how)
        grads = self.kernel.backward(queries, key, value, how)
        self.add_to_dbias(grads.dbias, tile, positions)
        return (unfold(grads.dq, tile),), (unfold(grads.dk, tile), unfold(grads.dv, tile))

    def _of_spans(
        self, queries: Queries, k: Tensor, v: Tensor, tile: Tile, how: How
    ) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
        rows = self.spans.rows_of(tile)
        q_count, k_count = queries.q.shape[1], k.shape[1]
        some = Queries(*(taken(x, rows.q) for x in queries))
        how = how._replace(lengths=rows.lengths)
        grads = self.kernel.backward(some, taken(k, rows.k), taken(v, rows.k), how)
        dk, dv = (put_back(grad, rows.k, k_count) for grad in (grads.dk, grads.dv))
        return (put_back(grads.dq, rows.q, q_count),), (dk, dv)
