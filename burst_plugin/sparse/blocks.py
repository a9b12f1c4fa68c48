"""Blocks of keys selected by their best key, for each group of heads, as by the indexer of MiniMax M3.

    starts = sparse.select_blocks(index_q, index_k, 128, 16, cp)        where the selected blocks of each query start
    out = burst_attention(q, k, v, cp, selection=sparse.keys_of_blocks(starts, 128, length))

    blocks of 3, of documents a ... e and f ... i:    a b c | d e | f g h | i
    these blocks on two ranks, zigzag:                a b           h i           rank 0
                                                          c   d e   f g           rank 1

Blocks begin anew with every document, and after padding. A query's score on a block is the maximum of its scores on
the keys of the block that the mask allows; it is found however a block is cut into parts, since the parts of a
block are selected as if they were blocks, and only the best part of each stays (`best_keys`, `repeats`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from burst_plugin.checks import whole_number
from burst_plugin.context import ContextParallel
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.rank_state import RankState
from burst_plugin.sequence.layout import Tokens, positions
from burst_plugin.sequence.masks import Causal, Mask, document_starts
from burst_plugin.sparse.best_keys import BestKeys
from burst_plugin.sparse.selection import Indexed, KeyBlock, RankSelection, SelectionCall, SelectionOptions, selected
from burst_plugin.sparse.tiled_masks import ChunkMask
from burst_plugin.virtual import VirtualRing


@between_graphs
def select_blocks(
    index_q: Tensor,
    index_k: Tensor,
    block: int,
    top_k: int,
    cp: ContextParallel | VirtualRing,
    *,
    forced: int = 1,
    mask: Mask = Causal(),
    tokens: Tokens | None = None,
    tag: object = None,
) -> Tensor:
    """Return the blocks of highest score for each query of this rank and each head of an indexer; collective.

    The score of query t on a block is the maximum of `index_q[t, h] . index_k[s]` over the keys s of the block that
    the mask allows, in float32, or in float64 for float64. Of equal scores the block that starts at the lower
    position comes first. So the result is the same, to the bit, on any number of ranks and in any layout.

    Args:
        index_q: [B, S_local, H, D], floating point; each head selects by itself, for a group of key/value heads.
        index_k: [B, S_local, D], of the same tokens and type.
        block: how many keys a block has, 1 or more; the last one of a document may have fewer.
        top_k: how many blocks a query selects, 1 or more.
        cp: the context-parallel group; with a `VirtualRing` tensors are whole sequences, the result included.
        forced: so many blocks of a query's document, its own and those before it, come before all others.
        mask: which keys a query may select, none of them later than the query; without a prefix tree.
        tokens: the sequence that rows are taken from, as for `burst_attention`.
        tag: a name for this call that is the same on every rank.

    Returns:
        Positions in the whole sequence at which blocks start, int32 [B, H, S_local, min(top_k, blocks of S)], the
        highest score first; -1 in the places of a query that may select fewer blocks. Without gradient.

    Raises:
        ValueError: on every rank, before data moves, for shapes, types or options that do not fit, here or between
            ranks.
    """
    asked = SelectionOptions(BlockSelection, top_k, mask, tokens, 1.0, block, forced)
    found = selected(Indexed(index_q, index_k), asked, cp, tag)
    return found.transpose(1, 2)


def keys_of_blocks(starts: Tensor, block: int, length: int) -> Tensor:
    """Return the positions of the keys of blocks that start at `starts` [..., n], int32 [..., n * block].

    They are -1 where a start is -1, and beyond the `length` of the sequence. Keys that follow a document's last block
    are of the next document, which masks leave out.
    """
    inside = torch.arange(block, dtype=torch.int32, device=starts.device)
    keys = starts.unsqueeze(-1) + inside
    return keys.masked_fill_((starts.unsqueeze(-1) < 0) | (keys >= length), -1).flatten(-2)


class BlockStarts:
    """Says where blocks of `size` keys start in a batch row, anew with every document and after padding.

    mask: of that batch row. device: of the positions that are asked for.
    """

    def __init__(self, mask: Mask, size: int, device: torch.device) -> None:
        self._size = size
        self._documents = torch.tensor(sorted({0} | document_starts(mask)), device=device)

    def documents(self, places: Tensor) -> Tensor:
        """Return where the documents of the tokens at positions `places` start, int64, of the same shape."""
        return self._documents[torch.searchsorted(self._documents, places, right=True) - 1]

    def blocks(self, places: Tensor) -> Tensor:
        """Return where the blocks of the tokens at positions `places` start, int64, of the same shape."""
        return places - (places - self.documents(places)) % self._size

    def are_last(self, places: Tensor) -> Tensor:
        """Return which of the tokens at positions `places` end a block of all `size` tokens, bool.

        The result has the shape of `places`.
        """
        return places - self.blocks(places) == self._size - 1


class BlockParts(NamedTuple):
    """The rows that a rank receives from an owner, cut where one block ends and another begins.

    Parts are in the order of rows; parts of one block need not be side by side.

    edges: the first row of each part, on the host.
    numbers: the number of each row's part, int64 [rows].
    starts: the position in the whole sequence at which each part's block starts, int64 [parts].
    """

    edges: array[int]
    numbers: Tensor
    starts: Tensor

    @classmethod
    def of(cls, starts: Tensor, device: torch.device) -> BlockParts:
        """Return the parts of blocks that rows form, given where each row's block starts, int64 [rows], on the CPU.

        device: of the result's tensors.
        """
        block_starts, numbers, counts = torch.unique_consecutive(starts, return_inverse=True, return_counts=True)
        edges = array("q", (counts.cumsum(0) - counts).tolist())
        return cls(edges, numbers.to(device), block_starts.to(device))

    def maxima(self, scores: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the starts and the highest scores of the parts that rows from `first` on lie in.

        scores: [queries, H, rows], of these rows. Starts are [parts], the highest scores [queries, H, parts].
        """
        stop = first + scores.shape[2]
        low, high = bisect_right(self.edges, first) - 1, bisect_left(self.edges, stop)
        numbers = self.numbers[first:stop] - low
        none = scores.new_full((*scores.shape[:2], high - low), -torch.inf)
        return self.starts[low:high], none.scatter_reduce_(2, numbers.expand_as(scores), scores, "amax")


class BlockSelection(RankSelection):
    """One rank's part of a selection of blocks: its queries select among blocks, whose keys arrive rank by rank."""

    what: ClassVar[str] = "selection of blocks of keys"
    units: ClassVar[str] = "blocks"

    @staticmethod
    def check(asked: SelectionOptions, mask: Mask) -> None:
        """Raise ValueError for a `block` or `forced` that is not valid, or a mask that blocks do not support."""
        whole_number("block={}", asked.block, "give how many keys a block has, 1 or more", 1)
        whole_number("forced={}", asked.forced, "give how many blocks are selected in any case, 0 or more", 0)
        if mask.trees:
            raise ValueError(
                "blocks of keys are not supported with a prefix tree, which has several tokens at one position; "
                "leave it out"
            )
        if mask.looks_ahead:
            raise ValueError("blocks of keys are selected among earlier tokens only; give Causal() & the mask")

    def __init__(self, state: RankState, selection: SelectionCall, given: Indexed) -> None:
        super().__init__(state, selection, given)
        asked, device = selection.asked, given.q.device
        self._size, self._forced = asked.block, asked.forced
        self._masks = [selection.mask.of_row(row) for row in range(selection.mask.rows or 1)]
        self._starts = [BlockStarts(mask, self._size, device) for mask in self._masks]
        self._places = selection.places(state.rank, device)

    @property
    def queries(self) -> torch.Size:
        """Return [B, S_local, H], since each head of each query selects on its own."""
        return self.given.q.shape[:3]

    def places(self, repeats: bool = True) -> BestKeys:
        """Return an empty `BestKeys` for all queries and heads.

        repeats: whether a block may be offered several times, in parts.
        """
        return super().places(repeats)

    def parts(self, owner: int) -> list[BlockParts]:
        """Return the parts of blocks that this rank receives from rank `owner`.

        There is one `BlockParts` for each batch row that the mask tells apart, one if all batch rows share the mask.
        """
        known, device = self._blocks.known, self._keys.device
        key = (BlockParts, self._rank, owner, self._size, device)
        if key not in known:
            places = positions(self._blocks.runs(self._rank, owner))
            starts = (BlockStarts(mask, self._size, places.device).blocks(places) for mask in self._masks)
            known[key] = [BlockParts.of(each, device) for each in starts]
        found: list[BlockParts] = known[key]
        return found

    def score_chunk(self, row: int, rows: slice, mask: ChunkMask, block: KeyBlock, best: BestKeys) -> None:
        """Have some queries of a batch row select among the parts of blocks that an owner has sent.

        row, rows: the batch row, and its queries. mask: which of the block's keys they attend to.
        block: the keys of the owner for this batch row. best: where the best blocks of all queries are kept.
        """
        scores_of = self.tiles.of_heads(self.given.q[row, rows].detach())
        (_, held, heads), starts = self.queries, self._starts[row % len(self._starts)]
        parts = self.parts(block.owner)[row % len(self._starts)]
        into = slice((row * held + rows.start) * heads, (row * held + rows.stop) * heads)
        for first, stop, column in mask.windows(self.tiles.keys):
            scores = scores_of(block.keys[first:stop])
            allowed = mask.allowed(column, column + stop - first, scores.device)
            if allowed is not None:
                scores.masked_fill_(~allowed.unsqueeze(1), -torch.inf)
            blocks, maxima = parts.maxima(scores, first)
            may = maxima > -torch.inf
            maxima.masked_fill_(may & self._is_forced(starts, rows, blocks).unsqueeze(1), torch.inf)
            best.add(into, maxima.flatten(0, 1), blocks, may.flatten(0, 1))

    def _is_forced(self, starts: BlockStarts, rows: slice, blocks: Tensor) -> Tensor:
        """Return which blocks are forced: a query's own, and blocks before it, bool [queries, blocks]."""
        queries = self._places[rows].unsqueeze(1)
        own_blocks = starts.blocks(queries)
        back = own_blocks - blocks
        return (back >= 0) & (back < self._forced * self._size) & (blocks >= starts.documents(queries))
