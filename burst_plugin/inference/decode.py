"""Attention of a turn's new tokens, which every rank has, to the keys that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.compute.accumulators import BlockAccumulators
from burst_plugin.compute.online_softmax import merge_
from burst_plugin.compute.passes import NO_POSITIONS, ForwardPart, OfQueries, VisitPositions
from burst_plugin.compute.shapes import Shapes
from burst_plugin.compute.varlen import SpanTable
from burst_plugin.inference.storage import RowStore
from burst_plugin.inference.tree import Partial
from burst_plugin.inference.turn import Turn, held_run, seen
from burst_plugin.kernels import How, Kernel
from burst_plugin.ring.plan import KernelTiles
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Run
from burst_plugin.sequence.masks import Mask
from burst_plugin.sequence.tiles import Regions, Tile, tiles_of
from burst_plugin.types import FULL


class OwnAttention(NamedTuple):
    """The attention of all new tokens of a turn to the keys of one layer that this rank holds: shapes and options.

    turn: the turn, in which every rank has all new tokens.
    shapes: the shapes of all rows together: as many queries as the longest row has new tokens, as many keys as the
        longest row has on this rank.
    mask: the mask in positions of whole sequences, within the layer's window.
    scores: the scores, with the scale filled in.
    kernel: the kernel that computes each tile.
    deterministic: whether two runs have to give the same bits.
    first_keys: by row, the position of the first key that any rank still holds.
    shared: the number of tokens before `first_keys` that all rows share.
    selection: the keys that each query has selected, positions in its row, [B, G, T, n] for G groups of heads; None
        for all keys.
    """

    turn: Turn
    shapes: Shapes
    mask: Mask
    scores: Scores
    kernel: Kernel
    deterministic: bool
    first_keys: tuple[int, ...]
    shared: int = 0
    selection: Tensor | None = None

    @property
    def signature(self) -> Mapping[str, object]:
        """Return the values by name that ranks compare before this call, since they must be equal on every rank."""
        shapes = self.shapes._asdict()
        return {
            **{name: shapes[name] for name in ("batch", "q_len", "q_heads", "kv_heads", "qk_dim", "v_dim", "dtype")},
            "kernel in use": self.kernel.name,
            "mask": self.mask,
            "scores": self.scores,
            "shared tokens": self.shared,
            "selected keys": None if self.selection is None else list(self.selection.shape[1:]),
        }

    def check_shared(self) -> None:
        """Raise ValueError unless the mask lets every new token attend to all tokens that rows share."""
        for row, queries in enumerate(zip(self.turn.starts, self.turn.stops, strict=True)):
            regions = Regions(seen(self.mask, row, queries, (0, self.shared)))
            count = queries[1] - queries[0]
            tiles = tiles_of(regions, [Run(queries[0], count)], [Run(0, self.shared)]) if count else ()
            if count and tiles != (Tile(0, count, 0, self.shared),):
                raise ValueError(
                    f"the mask hides some of the {self.shared} tokens that rows share from row {row}; fork without "
                    "shared=True for such a mask, or give it as the window of the layer"
                )

    def of(self, q: Tensor, store: RowStore, shared: RowStore | None = None) -> Partial:
        """Return out and lse of attention of q [B, T, Hq, D] to the keys that this rank holds, in float32 or float64.

        Args:
            q: the queries of all new tokens, rows padded at their ends.
            store: the rows' own keys and values on this rank.
            shared: the one row of keys and values that all rows share, read once for all of them; None without it.

        Returns:
            out [B, T, Hq, Dv] and lse [B, Hq, T]; out 0 and lse -inf where this rank has no keys. Padding has any
            values.
        """
        result = self._of_own(q, store)
        if shared is not None and shared.lengths[0]:
            out, lse = self._computed(q.flatten(0, 1).unsqueeze(0), shared.row(0), None)
            batch, tokens = q.shape[:2]
            by_row = lse[0].view(-1, batch, tokens).transpose(0, 1).contiguous()
            merge_(result.out, result.lse, [(out[0].view(result.out.shape), by_row)])
        return result

    def _of_own(self, q: Tensor, store: RowStore) -> Partial:
        """Return attention to the rows' own keys."""
        if self.turn.is_uniform and self.mask.rows is None and len(set(self.first_keys)) == 1:
            return self._of_rows(q, store.batch(), 0)
        batch, tokens, heads, _ = q.shape
        shape, wide = (batch, tokens, heads, self.shapes.v_dim), self.shapes.sum_dtype
        result = Partial(q.new_zeros(shape, dtype=wide), q.new_full((batch, heads, tokens), -torch.inf, dtype=wide))
        for row, new in enumerate(self.turn.lengths):
            if new:
                of_row = self._of_rows(q[row : row + 1, :new], store.row(row), row)
                result.out[row, :new], result.lse[row, :, :new] = of_row.out[0], of_row.lse[0]
        return result

    def _of_rows(self, q: Tensor, kv: tuple[Tensor, Tensor], row: int) -> Partial:
        """Return attention of rows that are as long as `row`, and have its mask."""
        order, tiles = self._tiles(row, len(q))
        selected = None if self.selection is None else self.selection[row : row + len(q), :, : q.shape[1]]
        if order is not None:
            q, selected = q[:, order], None if selected is None else selected[:, :, order]
        first = held_run(self.turn.rank, self.turn.ranks, self.first_keys[row], self.turn.stops[row]).start
        out, lse = self._computed(q, kv, tiles, selected, first)
        if order is not None:
            back = torch.tensor(order, device=q.device).argsort()
            out, lse = out[:, back], lse[:, :, back]
        return Partial(out, lse)

    def _computed(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        tiles: Sequence[Tile] | None,
        selected: Tensor | None = None,
        first: int = 0,
    ) -> Partial:
        """Return the attention of tiles, or of all queries to all keys; to `selected` keys alone if it is not None.

        first: the position in its row of this rank's first key.
        """
        if tiles is None:
            tiles = [Tile(0, q.shape[1], 0, kv[0].shape[1])]
        specs = self.shapes._replace(batch=len(q), q_len=q.shape[1]).side("forward", "q")[1]
        how, rows, positions = How(FULL, self.scores, deterministic=self.deterministic), OfQueries(), NO_POSITIONS
        if selected is not None:
            queries, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, kv[0]))
            keys = keys * self.turn.ranks + first  # in the row; where queries are does not matter
            rows, positions = OfQueries.of(None, selected), VisitPositions(queries, keys, keys)
        part = ForwardPart(self.kernel, how, SpanTable(len(q), q.device), rows, (q,), kv)
        accumulators = BlockAccumulators(specs, q.device, [part], "q")
        for tile in tiles:
            accumulators.parts[0].make_room()
            contribution, _ = part.compute((q,), kv, tile, positions)
            accumulators.parts[0].add(tile, "q", contribution)
        return Partial(*accumulators.finished(False))

    def _tiles(self, row: int, batch: int) -> tuple[list[int] | None, Sequence[Tile]]:
        """Return the tiles of a row, and the order of its queries in them, None for their own order.

        Tiles are of runs of one stride: of more queries than ranks every n-th make a run, n being the ranks' number.
        """
        key = ("tiles", self.mask, row, batch, self.first_keys[row], self.kernel.features, self.selection is None)
        if key not in self.turn.known:
            self.turn.known[key] = self._new_tiles(row, batch)
        return self.turn.known[key]  # type: ignore[return-value]

    def _new_tiles(self, row: int, batch: int) -> tuple[list[int] | None, Sequence[Tile]]:
        turn, first_key = self.turn, self.first_keys[row]
        start, stop, ranks = turn.starts[row], turn.stops[row], turn.ranks
        queries = [range(n, stop - start, ranks) for n in range(min(ranks, stop - start))]
        order = None if stop - start <= ranks or ranks == 1 else list(chain.from_iterable(queries))
        keys = held_run(turn.rank, ranks, first_key, stop)
        regions = seen(self.mask, row, (start, stop), (first_key, stop))
        if not keys.length or not regions:
            return order, ()
        runs = [Run(start + each.start, len(each), ranks) for each in queries]
        tiles = tiles_of(Regions(regions), runs, [keys])
        uses_positions = self.selection is not None
        kernel_tiles = KernelTiles(self.kernel.features, self.shapes._replace(batch=batch), uses_positions, False)
        return order, kernel_tiles.of(tiles)
