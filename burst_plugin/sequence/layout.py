"""Layouts: the tokens of a sequence that a rank holds, and their order.

A layout says so with *runs*, arithmetic progressions of positions. 8 tokens over 2 ranks:

    contiguous   rank 0: 0 1 2 3      rank 1: 4 5 6 7
    striped      rank 0: 0 2 4 6      rank 1: 1 3 5 7
    zigzag       rank 0: 0 1 6 7      rank 1: 2 3 4 5

with `Tokens(8, cu_seqlens=(0, 4, 8))`, every document on its own:

    zigzag       rank 0: 0 3 4 7      rank 1: 1 2 5 6

and in chunks, as `assignment.balance` assigns them by their work, with `Tokens(8, holders=(0, 1, 0, 1))`, and with
`Tokens(8, holders=(0, 1, 0), bounds=(0, 3, 7, 8))`:

    chunks       rank 0: 0 1 4 5      rank 1: 2 3 6 7
    chunks       rank 0: 0 1 2 7      rank 1: 3 4 5 6

Lengths that do not divide give ranks unequal numbers of tokens, down to none; nothing is padded or dropped. Under
a causal mask contiguous leaves the first ranks idle; striped and zigzag give every rank the same work. Under a
window contiguous sends the fewest bytes. A layout says itself for which masks `layout="auto"` considers it.

Sources: zigzag is Megatron-core's own (`megatron/core/utils.py`, `get_batch_on_this_cp_rank`): of 2P chunks
rank r holds r and 2P-1-r; by document as Transformer Engine's `thd_get_partitioned_indices`. Striped: Striped
Attention, arXiv 2311.09431.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.checks import shown, whole_number, whole_numbers
from burst_plugin.sequence.mask import Mask


class Run(NamedTuple):
    """An arithmetic progression of `length` positions: `start`, `start + stride`, `start + 2 * stride`, ...

    All of them are tokens of a sequence that one rank holds.
    """

    start: int
    length: int
    stride: int = 1

    @property
    def last(self) -> int:
        """Return the position of the last token."""
        return self.start + (self.length - 1) * self.stride


@dataclass(frozen=True)
class Tokens:
    """The sequence that a context-parallel group holds between its ranks.

    length: tokens, 1 or more, whether or not a multiple of the number of ranks.
    cu_seqlens: bounds of documents, 0 first and `length` last, if every document is spread over all ranks on its own,
        as Megatron does with packed sequences; None if the sequence is spread as a whole.
    layout: the name of a layout to take in place of the group's; None for the group's.
    holders: chunk-to-rank assignment in place of a layout: the rank that holds each chunk, of about equal lengths.
        `(0, 1, 1, 0)` is zigzag over two ranks. Ranks hold equally many tokens, whatever their chunks, if their
        number divides the length.
    bounds: where the chunks of `holders` begin, 0 first and `length` last, if they are not of about equal lengths.

    Raises ValueError for a length below 1, cu_seqlens or bounds that decrease or do not run from 0 to `length`,
    holders beside a layout or cu_seqlens or that leave a rank out, or bounds of another number of chunks.
    """

    length: int
    cu_seqlens: tuple[int, ...] | None = None
    layout: str | None = None
    holders: tuple[int, ...] | None = None
    bounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        expected = "a sequence has 1 token or more, as a whole number"
        object.__setattr__(self, "length", whole_number("Tokens(length={})", self.length, expected, 1))
        if self.layout is not None and (not isinstance(self.layout, str) or self.layout not in LAYOUTS):
            raise ValueError(f"Tokens(layout={shown(self.layout)}) is not valid; use one of: {', '.join(LAYOUTS)}")
        if self.cu_seqlens is not None:
            object.__setattr__(self, "cu_seqlens", check_cu_seqlens(self.cu_seqlens, "Tokens(cu_seqlens={})"))
            check_total(self.cu_seqlens, self.length)
        if self.holders is not None or self.bounds is not None:
            self._check_chunks()

    def _check_chunks(self) -> None:
        expected = "give a list with the rank that holds each chunk, such as (0, 1, 1, 0)"
        holders = whole_numbers("Tokens(holders={})", () if self.holders is None else self.holders, expected)
        object.__setattr__(self, "holders", holders)
        if self.layout is not None or self.cu_seqlens is not None:
            beside = "layout" if self.cu_seqlens is None else "cu_seqlens"
            raise ValueError(f"Tokens(holders=...) has {beside}= as well; give one of them")
        if set(holders) != set(range(len(set(holders)))) or not holders:
            raise ValueError(f"Tokens(holders={shortened(holders)}) is not valid; every rank from 0 up holds a chunk")
        if self.bounds is not None:
            expected = f"give where each of the {len(holders)} chunks begins, 0 first, and their end, {self.length}"
            bounds = whole_numbers("Tokens(bounds={})", self.bounds, expected)
            object.__setattr__(self, "bounds", bounds)
            ends = (*bounds[:1], *bounds[-1:])
            if len(bounds) != len(holders) + 1 or ends != (0, self.length) or list(bounds) != sorted(bounds):
                raise ValueError(f"Tokens(bounds={shortened(bounds)}) is not valid; {expected}")

    def __hash__(self) -> int:
        """Return a hash that is computed once: every layer asks for it, and there may be thousands of chunks."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.length, self.cu_seqlens or (), self.holders or (), self.bounds or ()))

    def __repr__(self) -> str:
        """Return a text with every field that is given; ranks compare it."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return f"Tokens({', '.join(f'{name}={value!r}' for name, value in values if value is not None)})"


def even_length(length: int, ranks: int) -> int:
    """Return the least length, from `length` on, that every layout divides equally between ranks.

    For one rank it is `length`.
    """
    if ranks == 1:
        return length
    unit = math.lcm(*(layout.chunks_per_rank for layout in LAYOUTS.values())) * ranks
    return -(-length // unit) * unit


def check_cu_seqlens(cu_seqlens: Sequence[int], pattern: str = "cu_seqlens={}") -> tuple[int, ...]:
    """Return `cu_seqlens` as a tuple. Raise ValueError unless it begins at 0 and does not decrease.

    `pattern` is how errors name the argument, with `{}` where its value goes.
    """
    expected = (
        "give one list of where documents begin, 0 first and the number of tokens last; other documents in every "
        "batch row are PerRow((Documents(...), ...))"
    )
    offsets = whole_numbers(pattern, cu_seqlens, expected)
    if len(offsets) < 2 or offsets[0] != 0:
        raise ValueError(f"cu_seqlens={shortened(offsets)} must begin with 0 and end with the number of tokens")
    for number, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise ValueError(
                f"cu_seqlens must not decrease, but document {number} runs from {start} to {stop}; pass cumulative "
                "lengths, 0 first"
            )
    return offsets


def check_total(cu_seqlens: tuple[int, ...], length: int) -> None:
    """Raise ValueError unless `cu_seqlens` ends at `length`."""
    if cu_seqlens[-1] != length:
        raise ValueError(
            f"cu_seqlens={shortened(cu_seqlens)} ends at {cu_seqlens[-1]}, but the sequence has {length} tokens "
            "over all ranks; cu_seqlens are global, and padding at the end needs a document of its own"
        )


def shortened(numbers: Sequence[int]) -> str:
    """Return numbers as text for a message; of many, the first ones and the last."""
    return str(tuple(numbers)) if len(numbers) < 12 else f"({', '.join(map(str, numbers[:5]))}, ..., {numbers[-1]})"


@dataclass(frozen=True)
class Layout:
    """A rule that assigns the positions of a sequence to ranks.

    name: as users give it, such as "zigzag".
    assign: `assign(rank, ranks, length)` returns the runs of a rank.
    chunks_per_rank: all ranks hold equally many tokens where this times the number of ranks divides the length.
    suits: whether `layout="auto"` considers this layout for a mask. It takes the fastest layout considered.
    """

    name: str
    assign: Callable[[int, int, int], tuple[Run, ...]]
    chunks_per_rank: int = 1
    suits: Callable[[Mask], bool] = lambda mask: True

    def runs(self, rank: int, ranks: int, tokens: Tokens) -> tuple[Run, ...]:
        """Return the runs of tokens that `rank` of `ranks` holds, in its local order; none is empty."""
        return tuple(
            run._replace(start=run.start + start) if start else run
            for start, stop in pairwise(tokens.cu_seqlens or (0, tokens.length))
            for run in self.assign(rank, ranks, stop - start)
            if run.length
        )

    def shard(self, x: Tensor, dim: int, place: tuple[int, int], tokens: Tokens) -> Tensor:
        """Return the tokens that one rank holds of the whole sequence `x`, along `dim`; contiguous in memory.

        `place` is (rank, number of ranks). Raises ValueError if `x` has another length than `tokens`.
        """
        if x.shape[dim] != tokens.length:
            raise ValueError(
                f"x {list(x.shape)} has {x.shape[dim]} tokens along dim {dim}, but {tokens} was given; pass the "
                "whole sequence, and the tokens= of its length"
            )
        runs = self.runs(*place, tokens)
        return torch.cat([_take(x, dim, run) for run in runs] or [x.narrow(dim, 0, 0)], dim)

    def unshard(self, shards: Sequence[Tensor], dim: int, tokens: Tokens) -> Tensor:
        """Return the whole sequence from the shards of all ranks, in rank order, along `dim`."""
        shape = list(shards[0].shape)
        shape[dim] = tokens.length
        full = shards[0].new_empty(shape)
        for rank, shard in enumerate(shards):
            offset = 0
            for run in self.runs(rank, len(shards), tokens):
                _take(full, dim, run).copy_(shard.narrow(dim, offset, run.length))
                offset += run.length
        return full


def token_count(runs: Sequence[Run]) -> int:
    """Return the number of tokens in these runs."""
    return sum(run.length for run in runs)


def positions(runs: Sequence[Run], device: torch.device | str | None = "cpu") -> Tensor:
    """Return the positions of the tokens of these runs, one run after another, [S_local], int64."""
    ranges = [torch.arange(run.start, run.start + run.length * run.stride, run.stride, device=device) for run in runs]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)


def cut_runs(runs: Sequence[Run], rows: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """Return the runs of some of the tokens of `runs`, which are rows in that order.

    rows: row ranges (start, stop), ascending.
    """
    cut, offset = [], 0
    for run in runs:
        for start, stop in rows:
            first, last = max(start - offset, 0), min(stop - offset, run.length)
            if first < last:
                cut.append(Run(run.start + first * run.stride, last - first, run.stride))
        offset += run.length
    return tuple(cut)


def _take(x: Tensor, dim: int, run: Run) -> Tensor:
    """Return a view of the positions of `run` along `dim`."""
    index = [slice(None)] * x.dim()
    index[dim] = slice(run.start, run.last + 1, run.stride)
    return x[tuple(index)]


def _zigzag(rank: int, ranks: int, length: int) -> tuple[Run, ...]:
    return tuple(_chunk(chunk, 2 * ranks, length) for chunk in (rank, 2 * ranks - 1 - rank))


def _striped(rank: int, ranks: int, length: int) -> tuple[Run, ...]:
    return (Run(rank, max(0, -(-(length - rank) // ranks)), ranks),)


def _contiguous(rank: int, ranks: int, length: int) -> tuple[Run, ...]:
    return (_chunk(rank, ranks, length),)


def _chunk(chunk: int, chunks: int, length: int) -> Run:
    """Return one of `chunks` chunks that differ by at most one token."""
    start, stop = chunk * length // chunks, (chunk + 1) * length // chunks
    return Run(start, stop - start)


@lru_cache(maxsize=64)
def in_chunks(holders: tuple[int, ...], bounds: tuple[int, ...] | None = None) -> Layout:
    """Return the layout that gives chunk c, `bounds[c]:bounds[c + 1]` of a sequence, to rank `holders[c]`.

    Without bounds all ranks hold equally many tokens, as far as they divide, and the chunks of a rank differ in
    length by at most one token.
    """

    def even_bounds(ranks: int, length: int) -> list[int]:
        numbers, counts, bounds = [0] * ranks, Counter(holders), [0]
        for rank in holders:
            tokens_of_rank = _chunk(rank, ranks, length).length
            bounds.append(bounds[-1] + _chunk(numbers[rank], counts[rank], tokens_of_rank).length)
            numbers[rank] += 1
        return bounds

    @lru_cache(maxsize=1)
    def runs_by_rank(ranks: int, length: int) -> list[tuple[Run, ...]]:
        by_rank: list[list[Run]] = [[] for _ in range(ranks)]
        for rank, (start, stop) in zip(holders, pairwise(bounds or even_bounds(ranks, length)), strict=True):
            runs = by_rank[rank]
            if runs and runs[-1].start + runs[-1].length == start:
                runs[-1] = Run(runs[-1].start, stop - runs[-1].start)
            else:
                runs.append(Run(start, stop - start))
        return list(map(tuple, by_rank))

    return Layout("chunks", lambda rank, ranks, length: runs_by_rank(ranks, length)[rank])


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            Layout("zigzag", _zigzag, chunks_per_rank=2),
            Layout("striped", _striped, suits=lambda mask: False),  # even work as zigzag, but more bytes and tiles
            Layout("contiguous", _contiguous),
        )
    }
)
