"""The two passes of attention on one rank: what each side of a visit reads, sends and accumulates (see `shapes`).

Queries that travel backward send a factor per row in place of out, `online_softmax.row_factor`; where they arrive,
`online_softmax.project` turns it and dout into an `out` that any kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.compute.accumulators import SOFTMAX, SUM, Accumulator, Storage, Tensors
from burst_plugin.compute.online_softmax import project
from burst_plugin.compute.varlen import SpanTable, put_back, taken, token_dim
from burst_plugin.kernels import How, Kernel, Queries, Selection, largest_scores
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Band, Side


class VisitPositions(NamedTuple):
    """The positions of the queries and keys that meet in a visit, int64; None where nothing depends on them.

    q, k: [Sq] and [Sk], positions as scores count them, logical ones under a prefix tree.
    columns: [Sk], the positions of the keys in the sequence, as a bias has them.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    columns: Tensor | None = None


NO_POSITIONS = VisitPositions()


class RowTable:
    """A cache of int64 tensors, positions or row numbers of tokens, by a key; emptied when it grows too large.

    known: the tensors by their keys.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Tensor] = {}

    def of(self, key: Hashable, most: int, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor known as `key`, made by `make` at the first call.

        The table is emptied before it holds more than `most` elements in all.
        """
        tensor = self.known.get(key)
        if tensor is None:
            with torch.inference_mode(False):  # other calls use them, too
                tensor = make()
            if tensor.numel() + sum(each.numel() for each in self.known.values()) > most:
                self.known.clear()
            self.known[key] = tensor
        return tensor


class OfQueries(NamedTuple):
    """The inputs that have a row for every query: a bias, and the lists of keys that queries attend to.

    bias: [1 or B, 1 or Hq, S_local, S_global], or None.
    selection: [B, G, S_local, n], positions of keys, or None.
    """

    bias: Tensor | None = None
    selection: Tensor | None = None

    @classmethod
    def of(cls, bias: Tensor | None, selection: Tensor | None) -> OfQueries:
        """Return both inputs together; a selection [B, S_local, n] becomes [B, 1, S_local, n], one group of heads."""
        if selection is not None and selection.dim() == 3:
            selection = selection.unsqueeze(1)
        return cls(bias, selection)

    def of_part(self, number: int, count: int) -> OfQueries:
        """Return the bias and the selection for part `number`, from 0, of the heads cut into `count` parts."""

        def cut(x: Tensor | None) -> Tensor | None:
            if x is None or x.shape[1] == 1:
                return x
            if x.shape[1] % count == 0:
                return x.chunk(count, 1)[number]
            first = number * x.shape[1] // count  # several parts share a list
            return x[:, first : first + 1]

        return OfQueries(cut(self.bias), cut(self.selection))


class TileAttention:
    """The base of `ForwardPart` and `BackwardPart`: a kernel at work on the tiles of one part of the heads.

    Args:
        how: the kernel's arguments that all tiles share.
        spans: a cache of the rows of tiles that are made of several spans; a bias or a selection rules such tiles
            out.
        rows: the bias and the selection, if there are any. The bias' gradient accumulates in `dbias`.
        q, kv: this rank's operands.
    """

    def __init__(self, kernel: Kernel, how: How, spans: SpanTable, rows: OfQueries, q: Tensors, kv: Tensors) -> None:
        self.kernel, self.spans, self.q, self.kv = kernel, spans, q, kv
        self._base, (self._bias, self._selection) = how, rows
        self._without_positions: dict[tuple[Band, int], How] = {}
        self.dbias: Tensor | None = None

    def how(self, tile: Tile, positions: VisitPositions) -> How:
        """Return the kernel's arguments for a tile, such as its band, its scores, and its rows of the bias.

        positions: the positions of all rows that meet in the visit, if anything depends on them.
        """
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
            assert positions.columns is not None
            bias = bias[_bias_batch(bias, tile), :, tile.q].index_select(3, positions.columns[tile.k])
        selection = None
        if self._selection is not None:
            assert positions.columns is not None
            keys = self._selection[_bias_batch(self._selection, tile), :, tile.q]
            selection = Selection(keys, positions.columns[tile.k])
        return self._base._replace(
            band=tile.band, bias=bias, selection=selection, q_positions=q, k_positions=k, first_batch_row=first
        )

    def add_to_dbias(self, dbias: Tensor, tile: Tile, positions: VisitPositions) -> None:
        """Add the gradient that a kernel gave for a tile's part of the bias to `self.dbias`, made at the first call.

        dbias: [1 or B, 1 or Hq, query rows of the tile, its key rows]. positions: of all rows that meet in the visit.
        """
        bias = self._bias
        if bias is None:
            return
        assert positions.columns is not None
        if self.dbias is None:
            self.dbias = torch.zeros_like(bias, dtype=dbias.dtype)
        self.dbias[_bias_batch(bias, tile), :, tile.q].index_add_(3, positions.columns[tile.k], dbias)


class ForwardPart(TileAttention):
    """A `Part` that computes out and lse of one part of the heads.

    `max_logits` [heads of the part], if it is set, is raised to the largest score of each head in every tile.
    """

    max_logits: Tensor | None = None

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands to send: (q,) for side "q", (k, v) for side "kv"."""
        return self.q if side == "q" else self.kv

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """Return received operands unchanged: `compute` reads them as they are sent."""
        return arrived

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        """Return an accumulator of out and lse; for keys and values, which accumulate nothing, an empty one."""
        return Accumulator(SOFTMAX if side == "q" else SUM, storage, tensors)

    def compute(self, q: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> tuple[Tensors, Tensors]:
        """Return the contributions of a tile: (out, lse) to its queries, and () to its keys and values."""
        query, key, value = fold(q[0], tile.q, tile), fold(kv[0], tile.k, tile), fold(kv[1], tile.k, tile)
        how = self.how(tile, positions)
        if tile.subtiles or tile.taken:
            return self._of_spans(query, key, value, tile, how), ()
        out, lse = self.kernel.forward(query, key, value, how)
        if self.max_logits is not None:
            self.max_logits = self.max_logits.maximum(largest_scores(query, key, how))
        return ((out, lse) if tile.pieces == 1 else (unfold(out, tile), unfold(lse, tile))), ()

    def _of_spans(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, how: How) -> Tensors:
        rows = self.spans.rows_of(tile)
        how = how._replace(lengths=rows.lengths)
        out, lse = self.kernel.forward(taken(q, rows.q), taken(k, rows.k), taken(v, rows.k), how)
        return put_back(out, rows.q, q.shape[1]), put_back(lse, rows.q, q.shape[1], -torch.inf)


class BackwardPart(TileAttention):
    """A `Part` that computes dq, dk and dv of one part of the heads.

    `q` is (q, dout, out, lse). `factor` [B, H, S], if it is set, travels with queries in place of out: see
    `online_softmax.row_factor`.
    """

    factor: Tensor | None = None

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands of `side` to send: (q, dout, out or the factor per row, lse), or (k, v)."""
        if side == "kv":
            return self.kv
        q, dout, out, lse = self.q
        return q, dout, out if self.factor is None else self.factor, lse

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """Return received operands of `side` as `compute` reads them: (q, dout, out, lse), or (k, v).

        If a factor per row was sent in place of out, an out is made from it and dout: see `online_softmax.project`.
        """
        if side == "kv" or self.factor is None:
            return arrived
        q, dout, factor, lse = arrived
        return q, dout, project(dout, factor), lse

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        """Return a new accumulator of the gradients of `side`: dq for "q", dk and dv for "kv".

        storage: where its tensors come from. tensors: results so far, to add to; None to begin anew.
        """
        return Accumulator(SUM, storage, tensors)

    def compute(self, q: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> tuple[Tensors, Tensors]:
        """Return the gradients of a tile, (dq,) and (dk, dv); add its gradient of the bias, if any, to `dbias`."""
        queries = Queries(*[fold(x, tile.q, tile) for x in q])
        key, value = fold(kv[0], tile.k, tile), fold(kv[1], tile.k, tile)
        how = self.how(tile, positions)
        if tile.subtiles or tile.taken:
            return self._of_spans(queries, key, value, tile, how)
        grads = self.kernel.backward(queries, key, value, how)
        if grads.dbias is not None:
            self.add_to_dbias(grads.dbias, tile, positions)
        if tile.pieces == 1:
            return (grads.dq,), (grads.dk, grads.dv)
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


Part = ForwardPart | BackwardPart
"""One part of the heads in a pass: it sends, receives, computes and accumulates."""


def bias_grad(bias: Tensor, parts: Sequence[TileAttention]) -> Tensor:
    """Return the gradient of a whole bias [1 or B, 1 or Hq, S_local, S_global], from the `dbias` of all parts.

    parts: the parts of the heads, in order, after the backward pass. A part that had no tile counts as zeros.
    """
    grads = [torch.zeros_like(bias[:, :1]) if part.dbias is None else part.dbias for part in parts]
    if bias.shape[1] == 1:
        return torch.stack(grads).sum(0) if len(grads) > 1 else grads[0]
    heads = bias.shape[1] // len(grads)
    return torch.cat([grad.expand(-1, heads, -1, -1) for grad in grads], 1)


def _bias_batch(bias: Tensor, tile: Tile) -> slice:
    return slice(None) if bias.shape[0] == 1 or tile.batch is None else slice(*tile.batch)


def fold(x: Tensor, rows: slice, tile: Tile) -> Tensor:
    """Return some rows of x [B, S, H, D] or [B, H, S] as a kernel takes a tile; n pieces as a batch of B * n.

    rows: the tile's query rows or key rows, to match x. Of a tile for some batch rows, only these are returned.
    """
    dim = 1 if x.dim() == 4 else 2  # as `token_dim` says
    if tile.batch is not None:
        x = x.narrow(0, tile.batch[0], tile.batch[1] - tile.batch[0])
    if rows.stop - rows.start < x.size(dim):
        x = x.narrow(dim, rows.start, rows.stop - rows.start)
    if tile.pieces == 1:
        return x
    return x.reshape(*x.shape[:dim], tile.pieces, -1, *x.shape[dim + 1 :]).movedim(dim, 1).flatten(0, 1)


def unfold(x: Tensor, tile: Tile) -> Tensor:
    """Undo `fold` for a kernel's result, [B * n, S / n, H, D] or [B * n, H, S / n], of a tile of n pieces."""
    dim = token_dim(x)
    return x.reshape(-1, tile.pieces, *x.shape[1:]).movedim(1, dim).flatten(dim, dim + 1)
