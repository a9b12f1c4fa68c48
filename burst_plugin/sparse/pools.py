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

from collections.abc import Callable
from typing import Any, ClassVar

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
from burst_plugin.sparse.selection import Indexed, RankSelection, SelectionCall, SelectionOptions, selected
from burst_plugin.sparse.tiled_masks import ChunkMask
from burst_plugin.types import row_count
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
        ValueError: on every rank, for shapes or options that do not fit any of them.
    """
    xs = [x] if isinstance(x, Tensor) else list(x)
    place = Placement(cp, mask, tokens, tag)

    def check() -> dict[str, object]:
        whole_number("size={}", size, _SIZE, 1)
        _check_mask(mask)
        return {"size": size, "sizes": [list(each.shape[2:]) for each in xs], "dtype": [each.dtype for each in xs]}

    call = place.call("pool", {f"x{n or ''}": each for n, each in enumerate(xs)}, check)
    held, device = call.held, xs[0].device
    extended, keep = call.with_tokens_before([held.flat(each) for each in xs], size - 1)
    at = _own_positions(cp, held.tokens)
    is_last = torch.stack([PoolEnds(mask.of_row(row), size).at(at) for row in range(held.rows)])
    last = held.flat(is_last).nonzero().flatten().to(device)
    of_pools = keep[last].unsqueeze(1) + torch.arange(1 - size, 1, device=device)
    pools = [each[of_pools] for each in extended]
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
    """Return the positions of the keys that queries attend to: of selected pools, and of the query's own one.

    Args:
        starts: int32 [B, S_local, n], as `select_pools` returns them.
        size, cp, mask, tokens: as for `select_pools`.

    Returns:
        int32 [B, S_local, (n + 1) * size - 1], -1 for none: the `size` tokens of each selected pool; then tokens of
        the query's own pool up to the query, unless the query is the last one of them.
    """
    whole = 1 if isinstance(cp, VirtualRing) else cp.ranks
    at = _own_positions(cp, tokens or Tokens(max(1, starts.shape[1] * whole)))
    inside = torch.arange(size, dtype=torch.int32, device=starts.device)
    keys = (starts.unsqueeze(-1) + inside).masked_fill_(starts.unsqueeze(-1) < 0, -1).flatten(-2)
    rows = []
    for row in range(mask.rows or 1):
        begun = at - BlockStarts(mask.of_row(row), size, at.device).blocks(at)  # tokens of the pool before a query
        own = (at - begun).unsqueeze(1) + torch.arange(size - 1, device=at.device)
        is_whole = begun == size - 1
        rows.append(own.masked_fill_((own > at.unsqueeze(1)) | is_whole.unsqueeze(1), -1))
    begun_pools = torch.stack(rows).to(starts.device, torch.int32).expand(starts.shape[0], -1, -1)
    return torch.cat([keys, begun_pools], -1)


class PoolEnds:
    """Where pools of `size` tokens end in a batch row with the padding and the documents of a mask; on the CPU."""

    def __init__(self, mask: Mask, size: int) -> None:
        self._starts, self._size = BlockStarts(mask, size, torch.device("cpu")), size

    def at(self, places: Tensor) -> Tensor:
        """Return which of the tokens at `places`, on the CPU, are the last ones of whole pools, bool."""
        return places - self._starts.blocks(places) == self._size - 1


class PoolSelection(RankSelection):
    """One rank's part of a selection: its queries select among pools, and it gets the keys of pools alone."""

    what: ClassVar[str] = "selection of pools of keys"
    units: ClassVar[str] = "pools"

    @staticmethod
    def check(asked: SelectionOptions, mask: Mask) -> None:
        """Raise ValueError for numbers that are not valid, and for masks that pools are not supported with."""
        whole_number("size={}", asked.block, _SIZE, 1)
        _check_mask(mask)
        if mask.looks_ahead:
            raise ValueError("pools of keys are selected among earlier tokens only; give Causal() & the mask")

    def __init__(self, state: RankState, selection: SelectionCall, given: Indexed) -> None:
        super().__init__(state, selection, given)
        mask, self._size = selection.mask, selection.asked.block
        self._ends = [PoolEnds(mask.of_row(row), self._size) for row in range(mask.rows or 1)]

    def taken(self, to: int) -> Tensor:
        """Return the keys [B, pools, D] of the pools that end among the rows of this rank that a rank gets."""
        rows = positions(cut_runs((Run(0, self._keys.shape[1]),), self._blocks.rows(to, self._rank)))
        ends = self._ends_among(to, self._rank)
        most = max(map(len, ends))
        chosen = [torch.nn.functional.pad(rows[each], (0, most - len(each))) for each in ends]
        at = torch.stack(chosen).to(self._keys.device).expand(self._keys.shape[0], -1)
        return self._keys.gather(1, at.unsqueeze(2).expand(-1, -1, self._keys.shape[2]))

    def arriving(self, owner: int) -> int:
        """Return for how many pools in a batch row, at most, this rank gets keys of an owner."""
        return max(map(len, self._ends_among(self._rank, owner)))

    def _ends_among(self, to: int, owner: int) -> list[Tensor]:
        """Return for each row of the mask which of the rows that a rank gets of an owner are the last of pools."""
        places = positions(cut_runs(self._blocks.shards[owner], self._blocks.rows(to, owner)))
        return [ends.at(places).nonzero().flatten() for ends in self._ends]

    def score(self, owner: int, keys: Tensor, best: BestKeys) -> None:
        """Select among the pools of an owner, whose keys are put in a row with its tokens; see `RankSelection`."""
        rows = row_count(self._blocks.rows(self._rank, owner))
        everywhere = keys.new_zeros((keys.shape[0], rows, keys.shape[2]))
        for row, ends in enumerate(self._ends_among(self._rank, owner)):
            among = slice(None) if len(self._ends) == 1 else slice(row, row + 1)
            everywhere[among, ends.to(keys.device)] = keys[among, : len(ends)]
        super().score(owner, everywhere, best)

    def score_chunk(
        self, row: int, rows: slice, mask: ChunkMask, block: tuple[Tensor, Tensor], best: BestKeys
    ) -> None:
        """Select for some queries of a batch row among the pools that end in a block; see `RankSelection`."""
        scores_of = self.scores_of(row, rows)
        keys, places = (mask.packed(x) for x in block)
        ends = self._ends[row % len(self._ends)].at(places.cpu()).nonzero().flatten()
        columns, ends = ends.tolist(), ends.to(keys.device)
        held, each = self.given.q.shape[1], self.tiles.keys
        into = slice(row * held + rows.start, row * held + rows.stop)
        for start in range(0, len(columns), each):
            inside = ends[start : start + each]
            first, last = columns[start], columns[min(len(columns), start + each) - 1]
            allowed = mask.allowed(first, last + 1, keys.device)
            allowed = None if allowed is None else allowed[:, inside - first]
            best.add(into, scores_of(keys[inside]), places[inside] - (self._size - 1), allowed)


def _check_mask(mask: Mask) -> None:
    """Raise ValueError for a mask that pools are not supported with."""
    if mask.trees:
        raise ValueError(
            "pools of keys are not supported with a prefix tree, which has several tokens at one position; leave it "
            "out"
        )
    check_padding(mask, "pools of keys")


def _own_positions(cp: ContextParallel | VirtualRing, tokens: Tokens) -> Tensor:
    """Return the positions of the tokens that a process holds of a sequence, int64, on the CPU."""
    if isinstance(cp, VirtualRing):
        return torch.arange(tokens.length, device="cpu")
    return positions(cp.rank_state.route_table.shards(tokens)[cp.rank])
