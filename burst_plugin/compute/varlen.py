"""Token rows of tensors [B, S, H, D] and [B, H, S], and the rows of tiles with spans.

Rows of spans are taken together for a kernel, and put back among the rows between them:

    rows of a visit    a a a . . b b c c . .       spans of a, b and c; `.`: rows that have no part in it
    for the kernel     a a a b b c c               a copy, where there are rows between; else a view
    and back           a a a 0 0 b b c c           from the first row to the last

Rows are counted from the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.kernels import Lengths
from burst_plugin.kernels.varlen import lengths_of, sent
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Rows


class SpanRows(NamedTuple):
    """The rows that a tile with spans takes, and the sequences that they make up.

    lengths: the sequences in these rows, for a kernel that takes several; None for one sequence of all rows.
    q, k: the query rows and key rows, int64, counted from the tile's first row; None for all rows.
    """

    lengths: Lengths | None
    q: Tensor | None
    k: Tensor | None


class SpanTable:
    """A cache of the rows of tiles that have spans, for a batch size and a device."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self._device = batch, device
        self._known: dict[Tile, SpanRows] = {}

    def rows_of(self, tile: Tile) -> SpanRows:
        """Return the rows that a tile with spans takes, computed at the first call for this tile."""
        rows = self._known.get(tile)
        if rows is None:
            rows = self._known[tile] = self._found(tile)
        return rows

    def _found(self, tile: Tile) -> SpanRows:
        if tile.taken is not None:
            return SpanRows(None, self._index(tile.taken[0]), self._index(tile.taken[1]))
        batch = self._batch if tile.batch is None else tile.batch[1] - tile.batch[0]
        q_spans, k_spans = [part[:2] for part in tile.subtiles], [part[2:] for part in tile.subtiles]
        q, k = (tuple(stop - start for start, stop in spans) * batch for spans in (q_spans, k_spans))
        return SpanRows(lengths_of(q, k, self._device), self._index(q_spans), self._index(k_spans))

    def _index(self, spans: Sequence[tuple[int, int]]) -> Tensor | None:
        """Return the rows of spans, int64, counted from the first one; None if there are no others between them."""
        if all(one[1] == other[0] for one, other in pairwise(spans)):
            return None
        first = spans[0][0]
        index = torch.cat([torch.arange(start - first, stop - first, device="cpu") for start, stop in spans])
        return sent(index, self._device)


def taken(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return copies of the token rows `rows`, int64, of x [B, S, H, D] or [B, H, S]; x itself for None."""
    return x if rows is None else x.index_select(token_dim(x), rows)


def put_back(x: Tensor, rows: Tensor | None, count: int, nothing: float = 0.0) -> Tensor:
    """Undo `taken`: return x with `count` token rows, its own at `rows` and the value `nothing` in all others.

    rows: int64, as many as x has; for None x itself is returned.
    """
    if rows is None:
        return x
    dim = token_dim(x)
    return x.new_full((*x.shape[:dim], count, *x.shape[dim + 1 :]), nothing).index_copy_(dim, rows, x)


def rows_of(x: Tensor, rows: slice, batch: tuple[int, int] | None = None) -> Tensor:
    """Return the token rows `rows` of x [B, S, H, D] or [B, H, S] as a view.

    batch: (start, stop), the batch rows to return; None for all.
    """
    if batch is not None:
        x = x.narrow(0, batch[0], batch[1] - batch[0])
    dim = 1 if x.dim() == 4 else 2  # as `token_dim` says; ten times per visit, so without a call
    length = rows.stop - rows.start
    return x if length == x.size(dim) else x.narrow(dim, rows.start, length)


def take_rows(x: Tensor, rows: Rows) -> Tensor:
    """Return the token rows in the ranges `rows` of x [B, S, H, D] or [B, H, S], as one tensor.

    It is a view if there is one range, else a copy.
    """
    parts = [rows_of(x, slice(start, stop)) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, token_dim(x))


def token_dim(x: Tensor) -> int:
    """Return the number of the dim with tokens: 1 for [B, S, H, D], 2 for [B, H, S]."""
    return 1 if x.dim() == 4 else 2
