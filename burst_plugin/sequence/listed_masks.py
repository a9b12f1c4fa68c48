"""Masks that list what may be attended to: keys, blocks, or a mask for every batch row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from burst_plugin.checks import as_listed, as_whole, shown, unreadable, whole_number, whole_numbers
from burst_plugin.sequence.regions import Mask, Region

__all__ = ["BlockMask", "Keys", "PerRow", "key_padding"]

_FLAGS = "give rows of True and False, one per block of queries, or BlockMask.of(tensor, block)"


@dataclass(frozen=True)
class Keys(Mask):
    """Only the keys in these index ranges, `((start, stop), ...)` in ascending order, are attended to.

    length: number of all keys, also those that are not attended to; None for any number.
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
        """Return one region per index range."""
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
        regions = (Region(0, q_len, start, stop) for start, stop in self.spans)
        return tuple(region for region in regions if not region.is_empty)


@dataclass(frozen=True)
class QueriesBefore(Mask):
    """Only the queries before position `stop` attend to anything."""

    stop: int
    compares_positions = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region."""
        return (Region(0, min(self.stop, q_len), 0, kv_len),) if self.stop else ()


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
        """Return the mask of a bool tensor [query blocks, key blocks]. Raise ValueError for another shape or type."""
        _check_flags("a block mask is a bool tensor [query blocks, key blocks]", allowed)
        return cls(block, tuple(tuple(row) for row in allowed.tolist()))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region per range of allowed blocks, for as many equal rows as follow each other."""
        size = (-(-q_len // self.block), -(-kv_len // self.block))
        if (len(self.allowed), len(self.allowed[0])) != size:
            raise ValueError(
                f"BlockMask of {len(self.allowed)} x {len(self.allowed[0])} blocks of {self.block} does not fit "
                f"{q_len} queries and {kv_len} keys, which are {size[0]} x {size[1]}"
            )
        regions, q_start = [], 0
        for row, same_rows in groupby(self.allowed):
            q_stop = min(q_start + self.block * len(list(same_rows)), q_len)
            regions += [Region(q_start, q_stop, *keys) for keys in _true_ranges(row, self.block, kv_len)]
            q_start = q_stop
        return tuple(regions)


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
        """Number of masks."""
        return len(self.masks)

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Bounds of the documents of all rows, if they are the same."""
        found = {mask.documents for mask in self.masks}
        return found.pop() if len(found) == 1 else None

    def of_row(self, row: int) -> Mask:
        """Return the mask of that row."""
        return self.masks[row]

    @property
    def compares_positions(self) -> bool:
        """Whether any row's mask does."""
        return any(mask.compares_positions for mask in self.masks)

    @property
    def looks_ahead(self) -> bool:
        """Whether any row's mask does."""
        return any(mask.looks_ahead for mask in self.masks)

    @property
    def shifts(self) -> bool:
        """Whether any row's mask does."""
        return any(mask.shifts for mask in self.masks)

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Raise ValueError: rows have different regions."""
        raise ValueError("PerRow has regions row by row; ask of_row(row)")


def key_padding(valid: Tensor) -> PerRow:
    """Return the mask of a padded batch: `valid` [B, S], bool, says which keys of the whole sequence are real.

    Raises ValueError for another shape or type.
    """
    _check_flags("key padding is a bool tensor [batch, keys]", valid)
    return PerRow(tuple(Keys(tuple(_true_ranges(row, 1, len(row))), len(row)) for row in valid.tolist()))


def _true_ranges(flags: Sequence[bool], unit: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield index ranges (start, stop) of what is true, `unit` tokens per flag."""
    start = 0
    for flag, same in groupby(flags):
        stop = min(start + unit * len(list(same)), length)
        if flag:
            yield start, stop
        start = stop


def _check_flags(expected: str, flags: object) -> None:
    """Raise ValueError unless `flags` is a bool tensor of two dimensions with values that can be read."""
    if not isinstance(flags, Tensor):
        raise ValueError(f"{expected}, got {shown(flags)}; make it one with torch.tensor(..., dtype=torch.bool)")
    if flags.dtype is not torch.bool or flags.dim() != 2:
        raise ValueError(f"{expected}, got {flags.dtype} {list(flags.shape)}")
    if unreadable(flags):
        raise ValueError(f"{expected}, got one {unreadable(flags)}; give one whose values are here")


def _pairs(ranges: object) -> tuple[tuple[int, int], ...]:
    """Return index ranges of keys as pairs of ints. Raise ValueError for anything else."""
    expected = "give (start, stop) pairs of whole numbers, such as Keys(((0, 7), (9, 16)))"
    ranges = getattr(ranges, "tolist", lambda: ranges)()
    pairs = [whole_numbers("Keys with a span of {}", x, expected) for x in as_listed("Keys({})", ranges, expected)]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"Keys with a span of {shown(pair)} is not valid; {expected}")
    return tuple((start, stop) for start, stop in pairs)


def _flags(row: object) -> tuple[bool, ...]:
    """Return a row of a block mask. Raise ValueError for anything but True and False, or 1 and 0."""
    flags = as_listed("BlockMask(allowed=...) with a row of {}", row, _FLAGS)
    if not set(map(type, flags)) <= {bool}:
        odd = [flag for flag in flags if flag not in (0, 1)]
        if odd:
            raise ValueError(f"BlockMask(allowed=...) holds {shown(odd[0])}; {_FLAGS}")
    return tuple(map(bool, flags))
