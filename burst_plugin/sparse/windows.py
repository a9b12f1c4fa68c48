"""Windows of consecutive tokens, each of them made into one entry: where windows lie, and which rank makes an entry.

Windows of 4 tokens in documents of 10 and 6, contiguous on two ranks; entries have slots in the order of windows:

    tokens    0 1 2 3 4 5 6 7 | 8 9 a b c d e f
    windows   [-----] [-----]   . . [-----] . .       the rest of a document has no entry
    entries         0       1             2           each on the rank that holds its window's last token

With `overlaps` an entry is made of the window before as well, if that is of its document. Batch rows may have
documents and padding of their own: for each chunk of tokens that a rank holds, every row has as many slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.sequence.layout import Run, Tokens
from burst_plugin.sequence.mask import Mask
from burst_plugin.sequence.masks import PerRow, check_padding, document_starts
from burst_plugin.sparse.entry_masks import EntryMask, Stairs, TokensAndEntries


class _Row(NamedTuple):
    """The windows of a batch row in their order, int64 [windows] each.

    ends: last tokens. begins, stops: of their documents. chunks: that hold their last tokens. numbers: among the
    windows of the chunk.
    """

    ends: Tensor
    begins: Tensor
    stops: Tensor
    chunks: Tensor
    numbers: Tensor


class Sources(NamedTuple):
    """The tokens that the entries of one rank are made of, for each row of a batch.

    rows: for each slot the rows of its tokens, int64 [B, slots, width], among this rank's own B * S_local rows
        followed by the rows that other ranks send (`Windows.foreign`).
    exist: whether the document has such a token, bool [B, slots, width]; True for slots without a window.
    last: which of the rank's own tokens is the last of the window, int64 [B, slots]; -1 for slots without a window.
    """

    rows: Tensor
    exist: Tensor
    last: Tensor


class Windows:
    """The windows of a batch on all ranks, and the slots of their entries, on the CPU.

    Args:
        shards: for each rank the runs of the sequence that it holds.
        length: the number of tokens of the whole sequence.
        mask: documents and padding; None for none.
        rate: the number of tokens of a window.
        overlaps: whether entries are made of the window before as well.

    Raises:
        ValueError: for prefix trees, a mask that differs between groups of heads, padding inside a document, or a
            striped layout.
    """

    def __init__(
        self, shards: Sequence[Sequence[Run]], length: int, mask: Mask | None, rate: int, overlaps: bool
    ) -> None:
        if mask is not None and (mask.trees or mask.head_groups is not None):
            raise ValueError(
                "windows of tokens are not supported with a prefix tree, or with a mask for each group of heads; "
                "leave it out"
            )
        if mask is not None:
            check_padding(mask, "windows of tokens")
        if any(run.stride > 1 and run.length > 1 for held in shards for run in held):
            raise ValueError("layout='striped' scatters windows of tokens over all ranks; use 'zigzag'")
        self.length, self.rate, self.width = length, rate, 2 * rate if overlaps else rate
        nothing = (Run(length, 0),)  # of a rank without tokens
        chunks = sorted((run.start, rank, run.length) for rank, held in enumerate(shards) for run in held or nothing)
        self._starts, self._ranks, lengths = torch.tensor(chunks, device="cpu").view(-1, 3).t().contiguous()
        self._offsets = self._before_in_rank(lengths)
        masks = [mask] if mask is None or mask.rows is None else [mask.of_row(row) for row in range(mask.rows)]
        self.rows = [self._row(each) for each in masks]
        counts = torch.stack([torch.bincount(row.chunks, minlength=len(chunks)) for row in self.rows]).amax(0)
        self._counts, self._first_slots = counts, counts.cumsum(0) - counts
        self.slots = int(counts.sum())

    def _row(self, mask: Mask | None) -> _Row:
        """Return the windows of a batch row."""
        starts = sorted({0} | (set() if mask is None else {at for at in document_starts(mask) if at < self.length}))
        bounds, firsts = [*starts, self.length], [start + self.rate - 1 for start in starts]
        of_documents = [
            torch.arange(first, max(first, stop), self.rate, device="cpu")
            for first, stop in zip(firsts, bounds[1:], strict=True)
        ]
        counts = torch.tensor([len(each) for each in of_documents], device="cpu")
        begins, stops = (torch.tensor(x, device="cpu").repeat_interleave(counts) for x in (starts, bounds[1:]))
        ends = torch.cat(of_documents)
        chunks = self._chunk_of(ends)
        before = torch.searchsorted(chunks, chunks)  # windows of chunks before
        return _Row(ends, begins, stops, chunks, torch.arange(len(ends), device="cpu") - before)

    def _chunk_of(self, tokens: Tensor) -> Tensor:
        """Return the numbers of the chunks that hold tokens, of the same shape."""
        return torch.searchsorted(self._starts, tokens, right=True) - 1

    def _before_in_rank(self, counts: Tensor) -> Tensor:
        """Return, for each chunk, the sum of `counts` over the earlier chunks of its rank."""
        counts_before = torch.zeros_like(counts)
        for rank in self._ranks.unique().tolist():
            own_chunks = self._ranks == rank
            counts_before[own_chunks] = counts[own_chunks].cumsum(0) - counts[own_chunks]
        return counts_before

    def holder_of(self, tokens: Tensor) -> Tensor:
        """Return the rank that holds each token, int64, in the shape of `tokens`, positions in the whole sequence."""
        found: Tensor = self._ranks[self._chunk_of(tokens)]
        return found

    def place_of(self, tokens: Tensor) -> Tensor:
        """Return the place of each token among all tokens of its rank, int64, in the shape of `tokens`.

        tokens: positions in the whole sequence.
        """
        chunks = self._chunk_of(tokens)
        found: Tensor = self._offsets[chunks] + tokens - self._starts[chunks]
        return found

    @cached_property
    def tokens_and_entries(self) -> Tokens:
        """Return the sequence of all tokens followed by all slots of entries, as attention to both takes it.

        Each rank holds its tokens, and then the slots of the windows that end among them.
        """
        slots = (self._first_slots + self.length).tolist()
        bounds = (*self._starts.tolist(), *slots, self.length + self.slots)
        return Tokens(bounds[-1], holders=2 * tuple(self._ranks.tolist()), bounds=bounds)

    @cached_property
    def _masks(self) -> dict[bool, list[EntryMask]]:
        """Return the masks of all rows, exact or not."""
        stairs = [tuple(self._stairs(row)) for row in self.rows]
        return {exact: [EntryMask(self.rate, each, exact) for each in stairs] for exact in (True, False)}

    def _stairs(self, row: _Row) -> list[Stairs]:
        """Return the windows of a row in groups that are consecutive, in documents and in slots."""
        slots = self._first_slots[row.chunks] + row.numbers
        breaks = torch.nonzero((slots.diff() != 1) | (row.begins.diff() != 0)).flatten() + 1
        edges = [0, *breaks.tolist(), len(slots)] if len(slots) else []
        firsts = (x[edges[:-1]].tolist() for x in (row.ends, slots, row.stops))
        return [
            Stairs(end, slot, b - a, stop) for end, slot, stop, (a, b) in zip(*firsts, pairwise(edges), strict=True)
        ]

    def mask_with(self, of_tokens: Mask, exact: bool) -> Mask:
        """Return the mask of queries on tokens and entries, given their mask on tokens.

        exact: if False, queries may also attend to some entries of windows that are not complete, for fewer regions;
            only for calls with a selection, which leaves these entries out.
        """
        masks, rows = self._masks[exact], of_tokens.rows
        if rows is None and len(masks) == 1:
            return TokensAndEntries(self.length, of_tokens, masks[0])
        masks = masks if len(masks) > 1 else masks * (rows or 1)
        both = (TokensAndEntries(self.length, of_tokens.of_row(row), each) for row, each in enumerate(masks))
        return PerRow(tuple(both))

    def foreign(self, rank: int, batch: int) -> list[Tensor]:
        """Return the tokens of other ranks that entries of `rank` are made of, for each batch row.

        They are positions, int64, ascending. batch: the number of batch rows.
        """
        foreign_tokens = []
        for ends, begins, _, chunks, _ in self.rows:
            starts = self._starts[chunks]
            cut = (self._ranks[chunks] == rank) & (ends - self.width + 1 < starts)
            tokens = ends[cut].unsqueeze(1) - torch.arange(self.width, device="cpu")
            there = (tokens >= begins[cut].unsqueeze(1)) & (tokens < starts[cut].unsqueeze(1))
            needed = torch.unique(tokens[there])
            foreign_tokens.append(needed[self.holder_of(needed) != rank])
        return foreign_tokens if len(foreign_tokens) > 1 else foreign_tokens * batch

    def slots_by_end(self) -> Tensor:
        """Return, at the position of each window's last token, the slot of its entry, and 0 at other positions.

        It is int64 [rows, length]; `rows` is 1 if all batch rows have the same windows.
        """
        slot_table = torch.zeros((len(self.rows), self.length), dtype=torch.int64, device="cpu")
        for slots, row in zip(slot_table, self.rows, strict=True):
            slots[row.ends] = self._first_slots[row.chunks] + row.numbers
        return slot_table

    def sources(self, rank: int, batch: int, held: int) -> Sources:
        """Return the tokens that the entries of `rank` are made of.

        batch: the number of batch rows. held: how many tokens the rank holds in each.
        """
        count = int(self._counts[self._ranks == rank].sum())
        before, foreign, sent = self._before_in_rank(self._counts), self.foreign(rank, batch), batch * held
        parts = []
        for number, others in enumerate(foreign):
            row = self.rows[number % len(self.rows)]
            own_windows = self._ranks[row.chunks] == rank
            ends, begins, _, chunks, numbers = (x[own_windows] for x in row)
            tokens = ends.unsqueeze(1) + torch.arange(1 - self.width, 1, device="cpu")
            exist = tokens >= begins.unsqueeze(1)
            tokens = tokens.clamp(min=0)
            there = sent + torch.searchsorted(others, tokens)
            rows = torch.where(self.holder_of(tokens) == rank, number * held + self.place_of(tokens), there)
            sent += len(others)
            row_sources = Sources(
                torch.zeros((count, self.width), dtype=torch.int64, device="cpu"),
                torch.ones((count, self.width), dtype=torch.bool, device="cpu"),
                torch.full((count,), -1, dtype=torch.int64, device="cpu"),
            )
            places = before[chunks] + numbers
            for into, x in zip(row_sources, (rows.masked_fill(~exist, 0), exist, self.place_of(ends)), strict=True):
                into[places] = x
            parts.append(row_sources)
        return Sources(*(torch.stack(each) for each in zip(*parts, strict=True)))
