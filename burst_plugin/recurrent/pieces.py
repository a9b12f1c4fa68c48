"""Pieces: consecutive tokens of one document that one rank holds. A state goes from piece to piece.

8 tokens in zigzag over 2 ranks, in documents of 3 and 5 tokens:

    rank 0    0 1   6 7     piece 0: tokens 0 1              piece 1: tokens 6 7, after piece 3
    rank 1    2 | 3 4 5     piece 2: token 2, after piece 0  piece 3: tokens 3 4 5

Every batch row has pieces of its own. Pieces are numbered by rank, then row, then in the rank's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from burst_plugin.sequence.layout import Run, check_total
from burst_plugin.sequence.mask import Both, Mask
from burst_plugin.sequence.masks import Keys
from burst_plugin.sequence.prefix_tree import PrefixTree

START = -1  # stands for the piece before one that begins a document


class Piece(NamedTuple):
    """A piece of a sequence: `length` consecutive tokens of one document in a batch row, which one rank holds.

    rank, row: the rank that holds it, and the number of its batch row.
    start: the position of its first token in the sequence.
    offset: how many tokens of its rank come before it, counted row after row.
    before: the number of the piece that it continues, which ends where this one begins, or, in a prefix tree, with
    the token before this one on its path. `START` if it begins a document.
    """

    rank: int
    row: int
    start: int
    length: int
    offset: int
    before: int = START


@dataclass(frozen=True, eq=False)
class Pieces:
    """All pieces of a batch: stretches of consecutive tokens, each held by one of `ranks` ranks.

    every: the pieces in the order of their numbers: by rank, then row, then in the rank's order.
    """

    every: tuple[Piece, ...]
    ranks: int

    @cached_property
    def first_of_rank(self) -> tuple[int, ...]:
        """Return the number of each rank's first piece, and the number of all pieces last."""
        counts = [0] * (self.ranks + 1)
        for piece in self.every:
            counts[piece.rank + 1] += 1
        for rank in range(self.ranks):
            counts[rank + 1] += counts[rank]
        return tuple(counts)

    def of_rank(self, rank: int) -> range:
        """Return the numbers of a rank's pieces, which are consecutive."""
        return range(self.first_of_rank[rank], self.first_of_rank[rank + 1])

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each piece, the numbers of the pieces that continue it.

        They are several only where a prefix tree branches.
        """
        continuations: list[list[int]] = [[] for _ in self.every]
        for number, piece in enumerate(self.every):
            if piece.before != START:
                continuations[piece.before].append(number)
        return tuple(map(tuple, continuations))

    @cached_property
    def last_of_row(self) -> tuple[int, ...]:
        """Return, for each batch row, the number of the piece with its last token."""
        last: dict[int, int] = {}
        for number, piece in enumerate(self.every):
            if piece.row not in last or piece.start > self.every[last[piece.row]].start:
                last[piece.row] = number
        return tuple(last[row] for row in sorted(last))


def cut_into_pieces(shards: Sequence[Sequence[Run]], rows: int, length: int, mask: Mask | None) -> Pieces:
    """Return the pieces of `rows` sequences of `length` tokens; rank r holds the runs `shards[r]` of each.

    `mask` says which documents each row has; None if each row is one document. Tokens before a row's first real key,
    padding on the left, are a document, too. Raises ValueError for a mask that has another number of rows or another
    length, differs between groups of heads, or has other documents for keys than for queries.
    """
    if mask is not None and mask.rows not in (None, rows):
        raise ValueError(f"the mask has {mask.rows} batch rows, but there are {rows}; give a mask for each row")
    begins = [_begins(mask if mask is None else mask.of_row(row), length) for row in range(rows)]
    every: list[Piece] = []
    for rank, runs in enumerate(shards):
        tokens = sum(run.length for run in runs)
        for row in range(rows):
            every += _of_row(rank, row, runs, begins[row], row * tokens)
    numbers = {(piece.row, piece.start + piece.length - 1): number for number, piece in enumerate(every)}
    linked = [
        piece._replace(before=_number_before(begins[piece.row].get(piece.start, piece.start - 1), piece, numbers))
        for piece in every
    ]
    return Pieces(tuple(linked), len(shards))


def _number_before(token: int, piece: Piece, numbers: dict[tuple[int, int], int]) -> int:
    """Return the number of the piece that ends with `token` of the row of `piece`; `START` if there is none."""
    return START if token < 0 else numbers[piece.row, token]


def _of_row(rank: int, row: int, runs: Sequence[Run], begins: dict[int, int], offset: int) -> list[Piece]:
    """Return the pieces of one row on one rank, each run cut where documents or branches begin or end."""
    pieces: list[Piece] = []
    cuts = sorted(begins)
    ends = {before + 1 for before in begins.values() if before >= 0}  # a token that several branches continue
    for start, count in _consecutive(runs):
        inside = {start, start + count, *(at for at in (*cuts, *ends) if start < at < start + count)}
        for first, stop in pairwise(sorted(inside)):
            pieces.append(Piece(rank, row, first, stop - first, offset))
            offset += stop - first
    return pieces


def _consecutive(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return (start, length) of consecutive tokens; tokens of a run with a stride stand alone, neighbours join."""
    joined: list[tuple[int, int]] = []
    for run in runs:
        spans = [(run.start, run.length)]
        if run.stride > 1:
            spans = [(at, 1) for at in range(run.start, run.last + 1, run.stride)]
        for start, length in spans:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
    return joined


def _begins(mask: Mask | None, length: int) -> dict[int, int]:
    """Return where documents and branches of one row begin, each with the token before it on its path, or -1."""
    starts = {0: -1}
    if mask is None:
        return starts
    if mask.head_groups is not None:
        raise ValueError(
            "the mask differs between groups of heads, but all heads of a layer that carries a state share "
            "documents; give one mask for all heads"
        )
    for part in _parts(mask):
        if part.shifts:
            raise ValueError(
                "the mask has other document bounds for keys than for queries, but layers that carry a state have "
                "no keys; give Documents of tokens, without kv_cu_seqlens"
            )
        if isinstance(part, PrefixTree):
            before = part.before()
            jumps = (before[1:] != torch.arange(len(before) - 1, device="cpu")).nonzero().flatten() + 1
            starts.update({at: int(before[at]) for at in jumps.tolist()})
        elif isinstance(part, Keys):
            starts.update({start: -1 for start, stop in part.spans[:1] if start < stop and start < length})
        elif part.documents is not None:
            check_total(part.documents, length)
            starts.update({at: -1 for at in part.documents[:-1] if at < length})
    return starts


def _parts(mask: Mask) -> list[Mask]:
    return [*_parts(mask.one), *_parts(mask.other)] if isinstance(mask, Both) else [mask]
