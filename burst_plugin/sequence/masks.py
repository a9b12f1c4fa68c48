"""Masks: which keys a query may attend to, in positions of the whole sequence.

Masks combine with `&`: `SlidingWindow(4095) & Documents((0, 700, 8192)) & key_padding(valid)`. A mask of one's own is
a frozen dataclass that gives its regions (`burst_plugin.sequence.regions`); nothing else has to know of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from burst_plugin.checks import as_listed, as_whole, shown, unreadable, whole_number, whole_numbers
from burst_plugin.sequence.layout import check_cu_seqlens, check_total, shortened
from burst_plugin.sequence.regions import Mask, Region

__all__ = [
    "BlockMask",
    "Causal",
    "CausalBottomRight",
    "Documents",
    "Full",
    "Keys",
    "Mask",
    "PerRow",
    "PrefixLM",
    "SlidingWindow",
    "key_padding",
]

_FLAGS = "give rows of True and False, one per block of queries, or BlockMask.of(tensor, block)"


@dataclass(frozen=True)
class Full(Mask):
    """Every token attends to every token."""

    compares_positions = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """One region."""
        return (Region(0, q_len, 0, kv_len),)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i attends to the keys i - left ... i + right; None is no bound.

    This is flash-attention's and Megatron's `window_size=(left, right)`; a window of W tokens that includes the query
    itself, Hugging Face's `sliding_window=W`, has left = W - 1. Positions count from the start on both sides; where
    queries and keys differ in number, flash-attention counts from the end.
    """

    left: int | None
    right: int | None = 0
    is_fixed = True

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            expected = f"a window holds at least the query itself, so {name} is 0 or more, or None for no bound"
            if value is not None:
                object.__setattr__(self, name, whole_number(f"SlidingWindow({name}={{}})", value, expected))

    @property
    def looks_ahead(self) -> bool:
        """Unless it ends at the query."""
        return self.right != 0

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """One region."""
        return (Region(0, q_len, 0, kv_len, None if self.left is None else -self.left, self.right),)


@dataclass(frozen=True)
class Causal(Mask):
    """Every token attends to itself and to what comes before it, counted from the start of both sequences."""

    looks_ahead = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """One region."""
        return (Region(0, q_len, 0, kv_len, None, 0),)


@dataclass(frozen=True)
class CausalBottomRight(Mask):
    """Causal, counted from the end of both sequences: the last query attends to every key."""

    looks_ahead = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """One region."""
        return (Region(0, q_len, 0, kv_len, None, kv_len - q_len),)


@dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, but every token attends to all of the first `prefix` tokens, at most as many as there are."""

    prefix: int

    def __post_init__(self) -> None:
        expected = "use the number of tokens in the prefix"
        object.__setattr__(self, "prefix", whole_number("PrefixLM(prefix={})", self.prefix, expected))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """The prefix, and what comes after it."""
        if self.prefix > kv_len:
            raise ValueError(
                f"PrefixLM(prefix={self.prefix}) goes beyond the {kv_len} keys that all ranks have together; give a "
                "prefix of this sequence, or Full(), where all see all"
            )
        prefix, rest = Region(0, q_len, 0, self.prefix), Region(0, q_len, self.prefix, kv_len, None, 0)
        return tuple(r for r in (prefix, rest) if not r.is_empty)


@dataclass(frozen=True)
class Documents(Mask):
    """Packed documents: tokens attend inside their own document only.

    cu_seqlens: where documents begin, 0 first and the global length last.
    lengths: how many tokens of each document are real, if documents are padded at their ends; padding neither
        attends nor is attended to. (Megatron's `cu_seqlens_padded` and the differences of its `cu_seqlens`.)
    kv_cu_seqlens, kv_lengths: the same for the keys, where they differ: cross attention. With `kv_cu_seqlens` alone
        all keys are real.
    """

    cu_seqlens: tuple[int, ...]
    lengths: tuple[int, ...] | None = None
    kv_cu_seqlens: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    compares_positions = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cu_seqlens", check_cu_seqlens(self.cu_seqlens, "Documents(cu_seqlens={})"))
        if self.kv_cu_seqlens is not None:
            checked = check_cu_seqlens(self.kv_cu_seqlens, "Documents(kv_cu_seqlens={})")
            object.__setattr__(self, "kv_cu_seqlens", checked)
        for name, starts in (("lengths", self.cu_seqlens), ("kv_lengths", self.kv_cu_seqlens or self.cu_seqlens)):
            if getattr(self, name) is None:
                continue
            expected = "give a list of how many tokens of each document are real"
            lengths = whole_numbers(f"Documents({name}={{}})", getattr(self, name), expected)
            object.__setattr__(self, name, lengths)
            room = [stop - start for start, stop in pairwise(starts)]
            if len(lengths) != len(room) or any(not 0 <= n <= most for n, most in zip(lengths, room, strict=True)):
                raise ValueError(
                    f"Documents({name}={shortened(lengths)}) do not fit into documents of {shortened(room)} tokens; "
                    "give one per document, from 0 to its length"
                )
        if self.kv_cu_seqlens is not None and len(self.kv_cu_seqlens) != len(self.cu_seqlens):
            raise ValueError(
                f"Documents has {len(self.cu_seqlens) - 1} documents of queries and {len(self.kv_cu_seqlens) - 1} of "
                "keys; every document needs both, if need be of length 0"
            )

    @property
    def documents(self) -> tuple[int, ...] | None:
        """`cu_seqlens`, unless the keys have their own."""
        return None if self.shifts else self.cu_seqlens

    @property
    def shifts(self) -> bool:
        """Where keys have documents of their own."""
        return self.kv_cu_seqlens not in (None, self.cu_seqlens)

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """One region per document."""
        keys = self.kv_cu_seqlens or self.cu_seqlens
        check_total(self.cu_seqlens, q_len)
        check_total(keys, kv_len)
        kv_lengths = self.lengths if self.kv_cu_seqlens is None and self.kv_lengths is None else self.kv_lengths
        spans = zip(_spans(self.cu_seqlens, self.lengths), _spans(keys, kv_lengths), strict=True)
        return tuple(r for q, k in spans if not (r := Region(*q, *k)).is_empty)


def _spans(starts: tuple[int, ...], lengths: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """(start, stop) of what is real in every document."""
    if lengths is None:
        return list(pairwise(starts))
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]


@dataclass(frozen=True)
class Keys(Mask):
    """Only the keys at these positions, `((start, stop), ...)` in ascending order, are attended to.

    length: how many keys there are, those that are not attended to among them; None for any number.
    """

    spans: tuple[tuple[int, int], ...]
    length: int | None = None
    compares_positions = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", _pairs(self.spans))
        edges = [edge for span in self.spans for edge in span]
        if edges != sorted(edges) or (edges and edges[0] < 0):
            raise ValueError(f"Keys({shown(self.spans)}) must be (start, stop) pairs in ascending order, from 0 on")
        if self.length is not None:
            expected = "use how many keys there are, or None for any number"
            object.__setattr__(self, "length", whole_number("Keys(length={})", self.length, expected))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """One region per span."""
        if self.length not in (None, kv_len):
            raise ValueError(
                f"the mask says which of {self.length} keys are real, but there are {kv_len}, those of all ranks: "
                "give it for the whole sequence"
            )
        if self.spans and self.spans[-1][1] > kv_len:
            raise ValueError(
                f"Keys up to {self.spans[-1][1]} go beyond the {kv_len} keys that all ranks have together; let spans "
                "end there"
            )
        return tuple(r for start, stop in self.spans if not (r := Region(0, q_len, start, stop)).is_empty)


@dataclass(frozen=True)
class BlockMask(Mask):
    """Any mask made of square blocks: `allowed[i][j]` says whether block i of queries attends to block j of keys.

    `BlockMask.of(tensor, block)` makes one from a bool tensor [query blocks, key blocks]. The last may be short.
    """

    block: int
    allowed: tuple[tuple[bool, ...], ...]
    compares_positions = False

    def __post_init__(self) -> None:
        rows = getattr(self.allowed, "tolist", lambda: self.allowed)()
        allowed = tuple(_flags(row) for row in as_listed("BlockMask(allowed={})", rows, _FLAGS))
        block, lengths = as_whole(self.block), sorted({len(row) for row in allowed})
        if block is None or block < 1 or len(lengths) != 1:
            raise ValueError(
                f"BlockMask needs block >= 1, got {shown(self.block)}, and rows of one length, got {lengths}"
            )
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "allowed", allowed)

    @classmethod
    def of(cls, allowed: Tensor, block: int) -> BlockMask:
        """From a bool tensor [query blocks, key blocks]; ValueError for another shape or type."""
        _check_flags("a block mask is a bool tensor [query blocks, key blocks]", allowed)
        return cls(block, tuple(tuple(row) for row in allowed.tolist()))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """One region per stretch of blocks, for as many rows as look alike."""
        size = (-(-q_len // self.block), -(-kv_len // self.block))
        if (len(self.allowed), len(self.allowed[0])) != size:
            raise ValueError(
                f"BlockMask of {len(self.allowed)} x {len(self.allowed[0])} blocks of {self.block} does not fit "
                f"{q_len} queries and {kv_len} keys, which are {size[0]} x {size[1]}"
            )
        regions, q_start = [], 0
        for row, alike in groupby(self.allowed):
            q_stop = min(q_start + self.block * len(list(alike)), q_len)
            regions += [Region(q_start, q_stop, *span) for span in _stretches(row, self.block, kv_len)]
            q_start = q_stop
        return tuple(regions)


def _stretches(flags: Sequence[bool], unit: int, length: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of what is true, `unit` tokens per flag."""
    start = 0
    for flag, alike in groupby(flags):
        stop = min(start + unit * len(list(alike)), length)
        if flag:
            yield start, stop
        start = stop


@dataclass(frozen=True)
class PerRow(Mask):
    """A mask of its own for every batch row."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        expected = "give a list of masks, one for every batch row"
        masks = as_listed("PerRow(masks={})", self.masks, expected)
        odd = [mask for mask in masks if not isinstance(mask, Mask) or mask.rows is not None]
        if odd or not masks:
            held = f"holds {shown(odd[0])}, which is no mask of one row" if odd else "holds none"
            raise ValueError(f"PerRow(masks=...) {held}; {expected}")
        object.__setattr__(self, "masks", masks)

    @property
    def rows(self) -> int | None:
        """As many as there are masks."""
        return len(self.masks)

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Those of all rows, if they are the same."""
        found = {mask.documents for mask in self.masks}
        return found.pop() if len(found) == 1 else None

    def of_row(self, row: int) -> Mask:
        """The mask of that row."""
        return self.masks[row]

    @property
    def compares_positions(self) -> bool:
        """If any row's does."""
        return any(mask.compares_positions for mask in self.masks)

    @property
    def looks_ahead(self) -> bool:
        """If any row's does."""
        return any(mask.looks_ahead for mask in self.masks)

    @property
    def shifts(self) -> bool:
        """If any row's does."""
        return any(mask.shifts for mask in self.masks)

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """There are none for all rows at once."""
        raise ValueError("PerRow has regions row by row; ask of_row(row)")


def key_padding(valid: Tensor) -> PerRow:
    """The mask of a padded batch: `valid` [B, S_global], bool, says which keys of the whole sequence are real.

    Raises ValueError for another shape or type.
    """
    _check_flags("key padding is a bool tensor [batch, keys]", valid)
    return PerRow(tuple(Keys(tuple(_stretches(row, 1, len(row))), len(row)) for row in valid.tolist()))


def _check_flags(expected: str, flags: object) -> None:
    """Raise ValueError for what is not a bool tensor of two dimensions that has its values here."""
    if not isinstance(flags, Tensor):
        raise ValueError(f"{expected}, got {shown(flags)}; make it one with torch.tensor(..., dtype=torch.bool)")
    if flags.dtype is not torch.bool or flags.dim() != 2:
        raise ValueError(f"{expected}, got {flags.dtype} {list(flags.shape)}")
    if unreadable(flags):
        raise ValueError(f"{expected}, got one {unreadable(flags)}; give one whose values are here")


def _pairs(spans: object) -> tuple[tuple[int, int], ...]:
    """Spans of keys as pairs of ints; ValueError for anything else."""
    expected = "give (start, stop) pairs of whole numbers, such as Keys(((0, 7), (9, 16)))"
    spans = getattr(spans, "tolist", lambda: spans)()
    pairs = [whole_numbers("Keys with a span of {}", x, expected) for x in as_listed("Keys({})", spans, expected)]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"Keys with a span of {shown(pair)} is not valid; {expected}")
    return tuple((start, stop) for start, stop in pairs)


def _flags(row: object) -> tuple[bool, ...]:
    """A row of a block mask; ValueError for anything but True and False, or 1 and 0."""
    flags = as_listed("BlockMask(allowed=...) with a row of {}", row, _FLAGS)
    if not set(map(type, flags)) <= {bool}:
        odd = [flag for flag in flags if flag not in (0, 1)]
        if odd:
            raise ValueError(f"BlockMask(allowed=...) holds {shown(odd[0])}; {_FLAGS}")
    return tuple(map(bool, flags))
