"""The rows of one layer in one turn, as the ring takes them: as a batch, or one after another in one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.inference.layer import LayerCache
from burst_plugin.inference.turn import Everywhere, RoundRobin, Turn, TurnMask
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Documents, Mask


class TurnRows(NamedTuple):
    """The batch rows of one layer in one turn.

    turn: the turn, with its new tokens and their positions.
    layer: what this rank stores of the layer.
    mask: which keys of its row a token attends to, in positions of a row.
    """

    turn: Turn
    layer: LayerCache
    mask: Mask

    @property
    def is_uniform(self) -> bool:
        """Return whether batch rows have equal lengths and one mask, and share no tokens.

        The ring takes such rows as a batch, others one after another in one sequence, so that nothing is padded.
        """
        layer, mask = self.layer, self.mask
        return self.turn.is_uniform and mask.rows is None and len(set(layer.first_keys)) == 1 and not layer.shared

    @property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return by row of the ring's sequence the positions of its first key and first new token, and its end."""
        turn, count = self.turn, 1 if self.is_uniform else len(self.turn.starts)
        return self.layer.first_keys[:count], turn.starts[:count], turn.stops[:count]

    @property
    def turn_mask(self) -> TurnMask:
        """Return the mask of the turn's queries and keys, as they lie in the ring's sequence."""
        return TurnMask(self.mask, *self.bounds, self.layer.shared)

    @property
    def tokens(self) -> tuple[Tokens, RoundRobin]:
        """Return the tokens of (queries, keys) in the ring's sequence."""
        (first_keys, starts, stops), shared = self.bounds, self.layer.shared
        queries: Tokens = RoundRobin.of(starts, stops)
        if self.turn.replicated:
            queries = Everywhere(queries.length, queries.cu_seqlens)
        if self.layer.shared_store is not None:
            first_keys, stops = (0, *first_keys), (shared, *stops)
        return queries, RoundRobin.of(first_keys, stops)

    def of_new(self, x: Tensor) -> Tensor:
        """Return values [B, size, ...] of this rank's new tokens as they lie in the ring's sequence."""
        if self.is_uniform:
            return x
        return torch.cat([row[:count] for row, count in zip(x, self.turn.counts, strict=True)]).unsqueeze(0)

    def stored(self) -> tuple[Tensor, Tensor]:
        """Return this rank's keys and values of the layer as they lie in the ring's sequence."""
        layer = self.layer
        k, v = layer.store.batch() if self.is_uniform else layer.store.packed()
        if layer.shared_store is not None:
            k, v = (torch.cat(both, 1) for both in zip(layer.shared_store.row(0), (k, v), strict=True))
        return k, v

    def append(self, k: Tensor, v: Tensor) -> None:
        """Append the new keys and values [B, size, heads, dim] to the layer's store, where this rank stores them."""
        turn = self.turn
        own = turn.own if turn.replicated else [slice(count) for count in turn.counts]
        new = ([row[:n][mine] for row, n, mine in zip(x, turn.counts, own, strict=True)] for x in (k, v))
        self.layer.store.append(*new)

    def by_row(self, x: Tensor) -> Tensor:
        """Return values of new tokens in the ring's sequence as [B, size, ...], rows padded with zeros."""
        if self.is_uniform:
            return x
        counts = self.turn.counts
        rows = x.new_zeros(len(counts), self.turn.size, *x.shape[2:])
        for row, stop, count in zip(rows, accumulate(counts), counts, strict=True):
            row[:count] = x[0, stop - count : stop]
        return rows

    def selection_of_rows(self, selected: Tensor) -> Tensor:
        """Return keys selected in the ring's sequence as positions in their rows, [B, size, ..., n]."""
        if not self.is_uniform:
            selected = self._shifted(selected, -1)
        return self.by_row(selected)

    def selection_of_sequence(self, selected: Tensor) -> Tensor:
        """Return keys that are selected in their rows, as positions in the ring's sequence.

        selected: [B, size, n], or [B, G, size, n] for groups of heads.
        """
        if self.is_uniform:
            return selected
        if selected.dim() == 3:
            return self._shifted(self.of_new(selected), 1)
        return self._shifted(self.of_new(selected.transpose(1, 2)), 1).transpose(1, 2)

    @property
    def ahead(self) -> Tensor:
        """Return by query of the ring's sequence how far behind it the query's own key is there, int64 on the CPU."""
        _, starts, stops = self.bounds
        counts = torch.tensor([stop - start for start, stop in zip(starts, stops, strict=True)], device="cpu")
        return torch.tensor(starts, device="cpu").cumsum(0).repeat_interleave(counts)

    @property
    def documents(self) -> Mask:
        """Return the mask that keeps the rows of the ring's sequence of keys apart."""
        return Documents((0, *accumulate(self.bounds[2])))

    def _shifted(self, selected: Tensor, sign: int) -> Tensor:
        """Return positions moved by the lengths of the rows before their own row; -1 remains."""
        before: Sequence[int] = [0, *accumulate(self.turn.stops)][:-1]
        counts = torch.tensor(self.turn.counts, device=selected.device)
        shift = torch.tensor(before, dtype=selected.dtype, device=selected.device).repeat_interleave(counts)
        shift = shift.view(-1, *[1] * (selected.dim() - 2))
        return torch.where(selected < 0, selected, selected + sign * shift)
