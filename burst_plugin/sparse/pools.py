"""Pools of keys: keys made of several tokens each, selected by their scores, as by the indexer of GLM-5-Next.

    keys = sparse.pool(mean, index_k, 16, cp)                           the key of each pool of 16 tokens
    starts = sparse.select_pools(index_q, keys, weights, 16, 128, cp)   where the selected pools of a query start
    listed = sparse.keys_of_pools(starts, 16, cp)                       their tokens, and some of the own pool
    out = burst_attention(q, k, v, cp, selection=listed)

    pools of 3, of documents a ... g and h ... k:     a b c | d e f | g | h i j | k
    on two ranks, contiguous:                         a b c   d e                      rank 0, with the key of a b c
                                                                  f   g   h i j   k    rank 1, with two keys

Pools begin anew with every document, and after padding. The rank that holds the last token of a pool makes its key,
and gets the other tokens from the ranks before. A pool that its document leaves incomplete, such as g, has no key.
A query may select the pools whose last token the mask allows it. Of its own pool it attends to the tokens up to
itself in any case, as long as they are not all of the pool (`keys_of_pools`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from burst_plugin.checks import whole_number
from burst_plugin.context import ContextParallel
from burst_plugin.recurrent.placement import Placement
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.rank_state import RankState
from burst_plugin.sequence.layout import Run, Tokens, cut_runs, positions
from burst_plugin.sequence.masks import Causal, Mask, check_padding
from burst_plugin.sparse.best_keys import BestKeys
from burst_plugin.sparse.blocks import BlockStarts
from burst_plugin.sparse.selection import Indexed, KeyBlock, RankSelection, SelectionCall, SelectionOptions, selected
from burst_plugin.sparse.tiled_masks import ChunkMask
from burst_plugin.virtual import VirtualRing

_SIZE = "give how many tokens a pool has, 1 or more"


@between_graphs
def pool(
    function: Callable[[Any], Tensor],
    x: Tensor | list[Tensor],
    size: int,
    cp: ContextParallel | VirtualRing,
    *,
    mask: Mask = Causal(),
    tokens: Tokens | None = None,
    tag: object = None,
) -> Tensor:
    """Compute a function of the tokens of each pool, on the rank that holds its last token; collective.

    Args:
        function: takes x of the tokens of some pools, [pools, size, ...], in their order, or a list of such tensors;
            returns [pools, ...], of each pool by itself. There may be no pools.
        x: [B, S_local, ...], or a list of such tensors.
        size: how many tokens a pool has, 1 or more.
        cp: the context-parallel group; with a `VirtualRing` tensors are whole sequences, the result included.
        mask: documents, and padding on the left; without a prefix tree.
        tokens: the sequence that rows are taken from, as for `burst_attention`.
        tag: a name for this call that is the same on every rank.

    Returns:
        [B, S_local, ...]: the function's results, each at the last token of its pool; zeros at other tokens. They
        have gradients, which go to the ranks of all tokens.

    Raises:
        ValueError: on every rank, if shapes or options do not fit on any of them.
    """
    xs = [x] if isinstance(x, Tensor) else list(x)
    place = Placement(cp, mask, tokens, tag)

    def check() -> dict[str, object]:
        whole_number("size={}", size, _SIZE, 1)
        _check_mask(mask)
        return {"size": size, "sizes": [list(y.shape[2:]) for y in xs], "dtype": [y.dtype for y in xs]}

    call = place.call("pool", {f"x{n or ''}": y for n, y in enumerate(xs)}, check)
    held, device = call.held, xs[0].device
    extended, keep = call.with_tokens_before([held.flat(y) for y in xs], size - 1)
    at = _own_positions(cp, held.tokens, torch.device("cpu"))
    is_last = torch.stack([BlockStarts(mask.of_row(row), size, at.device).are_last(at) for row in range(held.rows)])
    last = held.flat(is_last).nonzero().flatten().to(device)
    of_pools = keep[last].unsqueeze(1) + torch.arange(1 - size, 1, device=device)
    pools = [y[of_pools] for y in extended]
    made = function(pools[0] if isinstance(x, Tensor) else pools)
    everywhere = made.new_zeros((xs[0].shape[:2].numel(), *made.shape[1:]))
    return held.unflat(everywhere.index_copy(0, last, made))


@between_graphs
def select_pools(
    index_q: Tensor,
    keys: Tensor,
    weights: Tensor,
    size: int,
    top_k: int,
    cp: ContextParallel | VirtualRing,
    *,
    mask: Mask = Causal(),
    tokens: Tokens | None = None,
    scale: float | None = None,
    tag: object = None,
) -> Tensor:
    """Return the pools of highest score for each query of this rank, of the pools of all ranks; collective.

    A query may select the whole pools whose last token the mask allows it. Scores and their order are as in
    `select_keys`, with the key of a pool in place of a token's; of equal scores the earlier pool comes first.

    Args:
        index_q: [B, S_local, H, D], floating point.
        keys: [B, S_local, D], of the type of index_q: the key of each pool at its last token, as `pool` returns it;
            numbers at other tokens are neither read nor sent.
        weights: [B, S_local, H], of any floating point type.
        size: how many tokens a pool has, 1 or more.
        top_k: how many pools a query selects, 1 or more.
        cp, mask, tokens, tag: see `pool`; a query is allowed no later keys.
        scale: above 0; `D ** -0.5` if None.

    Returns:
        Positions in the whole sequence at which pools start, int32 [B, S_local, min(top_k, S / size rounded up)], the
        highest score first; -1 in the places of a query that may select fewer pools. Without gradient.

    Raises:
        ValueError: on every rank, before data moves, for shapes, types or options that do not fit, here or between
            ranks.
    """
    asked = SelectionOptions(PoolSelection, top_k, mask, tokens, scale, size)
    return selected(Indexed(index_q, keys, weights), asked, cp, tag)


def keys_of_pools(
    starts: Tensor,
    size: int,
    cp: ContextParallel | VirtualRing,
    *,
    mask: Mask = Causal(),
    tokens: Tokens | None = None,
) -> Tensor:
    """Return the positions of the keys that queries attend to: of selected pools, and of the query's own pool.

    Args:
        starts: where the selected pools start, int32 [B, S_local, n], as `select_pools` returns them; -1 for none.
        size: how many tokens a pool has.
        cp, mask, tokens: as for `select_pools`.

    Returns:
        int32 [B, S_local, (n + 1) * size - 1], -1 for none: the `size` tokens of each selected pool; then tokens of
        the query's own pool up to the query, unless the query is its last token.
    """
    whole, device = 1 if isinstance(cp, VirtualRing) else cp.ranks, starts.device
    at = _own_positions(cp, tokens or Tokens(max(1, starts.shape[1] * whole)), device)
    inside = torch.arange(size, dtype=torch.int32, device=device)
    keys = (starts.unsqueeze(-1) + inside).masked_fill_(starts.unsqueeze(-1) < 0, -1).flatten(-2)
    rows = []
    for row in range(mask.rows or 1):
        begin = BlockStarts(mask.of_row(row), size, device).blocks(at)
        none = at - begin == size - 1  # the query is the last token of its pool
        own = begin.to(torch.int32).unsqueeze(1) + inside[:-1]
        rows.append(own.masked_fill_((own > at.unsqueeze(1)) | none.unsqueeze(1), -1))
    begun_pools = torch.stack(rows).expand(starts.shape[0], -1, -1)
    return torch.cat([keys, begun_pools], -1)


class PoolEnds(NamedTuple):
    """The pools whose last tokens are among the rows that a rank receives from an owner, in the order of rows.

    rows: the row of each pool's last token, on the host, ascending.
    columns: a copy of `rows` on the keys' device, int64 [pools].
    starts: the position in the whole sequence at which each pool starts, int64 [pools].
    """

    rows: array[int]
    columns: Tensor
    starts: Tensor


class PoolSelection(RankSelection):
    """One rank's part of a selection of pools: its queries select among pools, and only keys of pools are sent."""

    what: ClassVar[str] = "selection of pools of keys"
    units: ClassVar[str] = "pools"

    @staticmethod
    def check(asked: SelectionOptions, mask: Mask) -> None:
        """Raise ValueError for an invalid size, or a mask that pools do not support."""
        whole_number("size={}", asked.block, _SIZE, 1)
        _check_mask(mask)
        if mask.looks_ahead:
            raise ValueError("pools of keys are selected among earlier tokens only; give Causal() & the mask")

    def __init__(self, state: RankState, selection: SelectionCall, given: Indexed) -> None:
        super().__init__(state, selection, given)
        self._mask, self._size = selection.mask, selection.asked.block

    def taken(self, to: int) -> Tensor:
        """Return the keys [B, pools, D] of pools that end among the rows of this rank that rank `to` needs.

        Batch rows with fewer pools are filled up with other keys.
        """
        keys, ends = self._keys, self._ends(to, self._rank)
        rows = positions(cut_runs((Run(0, keys.shape[1]),), self._blocks.rows(to, self._rank)), keys.device)
        most = max(len(each.rows) for each in ends)
        chosen = [torch.nn.functional.pad(rows[each.columns], (0, most - len(each.rows))) for each in ends]
        at = torch.stack(chosen).expand(keys.shape[0], -1)
        return keys.gather(1, at.unsqueeze(2).expand(-1, -1, keys.shape[2]))

    def arriving(self, owner: int) -> int:
        """Return how many keys of pools this rank receives from rank `owner` for each batch row."""
        return max(len(each.rows) for each in self._ends(self._rank, owner))

    def _ends(self, to: int, owner: int) -> list[PoolEnds]:
        """Return, for each row of the mask, the pools that end among the rows that a rank gets from an owner."""
        known, size, device = self._blocks.known, self._size, self._keys.device
        key = (PoolEnds, to, owner, size, device)
        if key not in known:
            places, ends = positions(self._blocks.runs(to, owner)), []
            for row in range(self._mask.rows or 1):
                last = BlockStarts(self._mask.of_row(row), size, places.device).are_last(places)
                rows = last.nonzero().flatten()
                starts = places[rows] - (size - 1)
                ends.append(PoolEnds(array("q", rows.tolist()), rows.to(device), starts.to(device)))
            known[key] = ends
        found: list[PoolEnds] = known[key]
        return found

    def score_chunk(self, row: int, rows: slice, mask: ChunkMask, block: KeyBlock, best: BestKeys) -> None:
        """Have some queries of a batch row select among the pools that end in an owner's block.

        row, rows: the batch row, and its queries. mask: which of the block's rows they attend to.
        block: the keys of the owner's pools for this batch row. best: where the best pools of all queries are kept.
        """
        scores_of, of_rows = self.scores_of(row, rows), self._ends(self._rank, block.owner)
        ends, keys = of_rows[row % len(of_rows)], block.keys
        held, tile_keys = self.given.q.shape[1], self.tiles.keys
        into = slice(row * held + rows.start, row * held + rows.stop)
        for first, stop, column in mask.windows(mask.columns):
            last = bisect_left(ends.rows, stop)
            for start in range(bisect_left(ends.rows, first), last, tile_keys):
                some = slice(start, min(last, start + tile_keys))
                low, high = ends.rows[some.start], ends.rows[some.stop - 1] + 1
                allowed = mask.allowed(column + low - first, column + high - first, keys.device)
                allowed = None if allowed is None else allowed[:, ends.columns[some] - low]
                best.add(into, scores_of(keys[some]), ends.starts[some], allowed)


def _check_mask(mask: Mask) -> None:
    """Raise ValueError for a mask that pools do not support."""
    if mask.trees:
        raise ValueError(
            "pools of keys are not supported with a prefix tree, which has several tokens at one position; leave it "
            "out"
        )
    check_padding(mask, "pools of keys")


def _own_positions(cp: ContextParallel | VirtualRing, tokens: Tokens, device: torch.device) -> Tensor:
    """Return the positions of the tokens that a process holds of a sequence, int64."""
    if isinstance(cp, VirtualRing):
        return torch.arange(tokens.length, device=device)
    return positions(cp.rank_state.route_table.shards(tokens)[cp.rank], device)
