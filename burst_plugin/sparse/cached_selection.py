"""Keys selected by score among all cached and new tokens, at inference.

    selected = sparse.select_cached(cache, layer, sparse.Indexed(index_q, index_k, weights), 2048)
    out = cache.attend(other_layer, q, k, v, selection=selected)

Keys of the indexer are values of a layer of the cache, each on the rank of its token. In turns of many tokens they go
around the ring. In turns of few tokens, which every rank has, they stay: each rank scores its own, and ranks exchange
the best of them, some bytes for each key that a query selects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.checks import shown
from burst_plugin.comm.call_identity import CallId
from burst_plugin.inference import KVCache
from burst_plugin.inference.gathering import of_ranks
from burst_plugin.inference.turn_rows import TurnRows
from burst_plugin.recurrent.passes import OfOneRank
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.sequence.layout import positions
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.sparse.blocks import BlockSelection
from burst_plugin.sparse.selection import (
    Indexed,
    RankSelection,
    SelectionCall,
    SelectionOptions,
    checked_options,
    key_shards,
)


class _CachedCall(NamedTuple):
    """A call that selects among cached keys: the layer's rows, which have its new keys, and the selection."""

    rows: TurnRows
    selection: SelectionCall

    def signature(self) -> Mapping[str, object]:
        """Return the values by name that ranks compare before this call, since they must be equal on every rank."""
        return {**self.selection.signature(), "mask": self.rows.mask}


@between_graphs
def select_cached(
    cache: KVCache,
    layer: int,
    given: Indexed,
    top_k: int,
    *,
    mask: Mask = Causal(),
    scale: float | None = None,
) -> Tensor:
    """Store new keys of an indexer, and return the keys of highest score for each new token; collective.

    Scores and their order are those of `select_keys`. Call it once per turn, under `torch.no_grad()`.

    Args:
        cache: a cache with a layer for each indexer, beside the layers that attend.
        layer: the number of the indexer's layer in the cache.
        given: what the indexer computes of this rank's new tokens: queries [B, n, H, D], keys [B, n, D] and weights
            [B, n, H], n = `Turn.size`.
        top_k: how many keys a query selects, 1 or more.
        mask: which keys of its row a query may select, in positions of a whole row.
        scale: the factor on products, above 0; `D ** -0.5` if None.

    Returns:
        Positions in the query's row, int32 [B, n, min(top_k, tokens)], -1 for no key, for `KVCache.attend`. Padding
        has any values.

    Raises:
        ValueError: on every rank, before data moves, for what does not fit, here or between ranks;
            `KVCache.truncate` then ends the turn.
    """
    return _selected(cache, layer, given, SelectionOptions(RankSelection, top_k, mask, None, scale))


@between_graphs
def select_cached_blocks(
    cache: KVCache,
    layer: int,
    given: Indexed,
    block: int,
    top_k: int,
    *,
    forced: int = 1,
    mask: Mask = Causal(),
) -> Tensor:
    """Store new keys of an indexer, and return the blocks of highest score for each head and new token; collective.

    Blocks and their order are as in `select_blocks`; they are counted from the first token of a row.

    Args:
        cache, layer, mask: as for `select_cached`.
        given: queries [B, n, H, D] and keys [B, n, D] of this rank's new tokens; no weights.
        block, top_k, forced: the size of blocks, how many a query selects, and how many before it in any case.

    Returns:
        Positions in the query's row at which blocks start, int32 [B, H, n, blocks], -1 for none. Padding has any
        values.

    Raises:
        ValueError: as `select_cached`.
    """
    found = _selected(cache, layer, given, SelectionOptions(BlockSelection, top_k, mask, None, 1.0, block, forced))
    return found.transpose(1, 2)


def _selected(cache: KVCache, layer: int, indexed: Indexed, asked: SelectionOptions) -> Tensor:
    """Return the keys or blocks that new tokens select, by positions in rows, [B, n, ..., count]; collective."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache={shown(cache)} is not valid; give a KVCache")
    passes = OfOneRank(cache.cp)

    def prepare() -> _CachedCall:
        return _prepared(cache, layer, indexed, asked)

    with torch.no_grad():
        (rows, selection), call = passes.agree(prepare, _CachedCall.signature, ("index", f"layer {layer}"))
        choices = (
            _of_all(cache, rows, selection, call) if rows.turn.replicated else _around(passes, rows, selection, call)
        )
        rows.layer.release()
        result: Tensor = rows.selection_of_rows(choices)
        return result


def _prepared(cache: KVCache, layer: int, indexed: Indexed, asked: SelectionOptions) -> _CachedCall:
    """Return the call, with its new keys in the cache. Raise ValueError for what does not fit."""
    state = cache.cp.rank_state
    count, mask, factor = checked_options(indexed, asked)
    state.check_usable(indexed.q.device)
    asked.kind.check(asked, mask)
    rows = cache.hold(layer, indexed.k, mask=mask)
    shards = key_shards(cache.cp.plans, state, rows.tokens, rows.turn_mask, rows.turn.replicated)
    most = min(count, -(-max(rows.turn.stops) // asked.block))
    selection = SelectionCall(shards, rows.tokens[1], rows.documents, most, factor, indexed, asked, rows.ahead)
    return _CachedCall(rows, selection)


def _around(passes: OfOneRank, rows: TurnRows, selection: SelectionCall, call: CallId) -> Tensor:
    """Return the selections of this rank's queries among all ranks' keys, which come to it; collective."""
    indexed = selection.given
    weights = None if indexed.weights is None else rows.of_new(indexed.weights)
    own_indexed = Indexed(rows.of_new(indexed.q), rows.stored()[0].squeeze(2), weights)
    program = selection.asked.kind(passes.states[0], selection, own_indexed).program(call)
    found: Tensor = passes.run("forward", call, [program], indexed.q.device)[0]
    return found


def _of_all(cache: KVCache, rows: TurnRows, selection: SelectionCall, call: CallId) -> Tensor:
    """Return the selections of queries that all ranks have, out of the best keys of each rank; collective."""
    indexed, cp = selection.given, cache.cp
    order = positions(selection.blocks.pairs.runs["q"][cp.rank], indexed.q.device)
    q, weights = (None if x is None else rows.of_new(x)[:, order] for x in (indexed.q, indexed.weights))
    assert q is not None
    with cp.rank_state.one_pass("forward", call, q.device):
        selector = selection.asked.kind(cp.rank_state, selection, Indexed(q, rows.stored()[0].squeeze(2), weights))
        best = selector.places()
        selector.score(cp.rank, selector.taken(cp.rank), best)
        if cp.ranks > 1:
            best.merge(*(of_ranks(cp, x) for x in best.kept))
    return best.positions().view(*selector.queries, selector.count)[:, order.argsort()]
