"""Masks: which keys a query may attend to, in positions of the whole sequence.

Masks combine with `&`: `SlidingWindow(4095) & Documents((0, 700, 8192)) & key_padding(valid)`. A new mask is a frozen
dataclass that returns its regions (`burst_plugin.sequence.mask`). Masks made of blocks are in `sequence.block_masks`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from burst_plugin.checks import as_listed, shown, unreadable, whole_number, whole_numbers
from burst_plugin.sequence.layout import check_cu_seqlens, check_total, shortened
from burst_plugin.sequence.mask import Both, Region, TreeMask
from burst_plugin.sequence.mask import Mask as Mask

_TRUE = re.compile(b"\1+")


@dataclass(frozen=True)
class Full(Mask):
    """Every token attends to every token."""

    compares_positions = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the rectangle of all queries and all keys, one region."""
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
        """Return whether the window extends beyond the query."""
        return self.right != 0

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region: all queries and keys, banded by the window."""
        return (Region(0, q_len, 0, kv_len, None if self.left is None else -self.left, self.right),)


@dataclass(frozen=True)
class Causal(Mask):
    """Every token attends to itself and to what comes before it, counted from the start of both sequences."""

    looks_ahead = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region: all queries and keys, up to the diagonal."""
        return (Region(0, q_len, 0, kv_len, None, 0),)


@dataclass(frozen=True)
class CausalBottomRight(Mask):
    """A causal mask counted from the end of both sequences: the last query attends to every key."""

    looks_ahead = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region: all queries and keys, up to the diagonal that ends at the last of both."""
        return (Region(0, q_len, 0, kv_len, None, kv_len - q_len),)


@dataclass(frozen=True)
class PrefixLM(Mask):
    """A causal mask, except that every token attends to all of the first `prefix` tokens.

    `prefix` is at most the number of keys.
    """

    prefix: int

    def __post_init__(self) -> None:
        expected = "use the number of tokens in the prefix"
        object.__setattr__(self, "prefix", whole_number("PrefixLM(prefix={})", self.prefix, expected))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the prefix and the causal region after it. Raise ValueError for a prefix beyond the keys."""
        if self.prefix > kv_len:
            raise ValueError(
                f"PrefixLM(prefix={self.prefix}) goes beyond the {kv_len} keys that all ranks have together; give a "
                "prefix of this sequence, or Full(), for full attention"
            )
        prefix, rest = Region(0, q_len, 0, self.prefix), Region(0, q_len, self.prefix, kv_len, None, 0)
        return tuple(region for region in (prefix, rest) if not region.is_empty)


@dataclass(frozen=True)
class BidirectionalSpans(Mask):
    """Causal attention, but the tokens of a span, such as one image, attend to each other both ways.

    spans: positions in the whole sequence, `((start, stop), ...)` in ascending order, none in two of them.
    groups: a number for each span; all tokens of spans with one number attend to each other. Without it every span is
        a group of its own.
    left: how many tokens before itself a token attends to besides its own group; None is no bound. (To bound what
        groups attend to as well, combine the mask with `SlidingWindow(left, None)`.)

    Example:
        mask = BidirectionalSpans(((4, 260), (300, 556)))  # two images of 256 tokens in a text
    """

    spans: tuple[tuple[int, int], ...]
    groups: tuple[int, ...] | None = None
    left: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", _spans("BidirectionalSpans", self.spans))
        if self.left is not None:
            expected = "use how many tokens before it a token attends to, or None for no bound"
            object.__setattr__(self, "left", whole_number("BidirectionalSpans(left={})", self.left, expected))
        if self.groups is not None:
            expected = "give the number of a group for every span, or None for a group of each"
            groups = whole_numbers("BidirectionalSpans(groups={})", self.groups, expected)
            object.__setattr__(self, "groups", groups)
            if len(groups) != len(self.spans):
                raise ValueError(
                    f"BidirectionalSpans has {len(self.spans)} spans and {len(groups)} numbers of groups; {expected}"
                )

    @property
    def looks_ahead(self) -> bool:
        """Return whether the mask has any spans, whose tokens attend to later ones."""
        return bool(self.spans)

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the causal region, and the groups' later keys. Raise ValueError for a span beyond the keys."""
        if self.spans and self.spans[-1][1] > kv_len:
            raise ValueError(
                f"BidirectionalSpans up to {self.spans[-1][1]} go beyond the {kv_len} keys that all ranks have "
                "together; let spans end there"
            )
        bound = None if self.left is None else -self.left
        regions = [Region(0, q_len, 0, kv_len, bound, 0)]
        spans: dict[int, list[tuple[int, int]]] = {}  # by group
        for group, span in zip(
            range(len(self.spans)) if self.groups is None else self.groups, self.spans, strict=True
        ):
            if span[0] < span[1]:
                spans.setdefault(group, []).append(span)
        for of_group in spans.values():
            start, stop = of_group[0][0], of_group[-1][1]
            within = tuple(of_group) if len(of_group) > 1 else None
            regions.append(Region(start, stop, start, stop, 1, None, within))
            if bound is not None and start - stop + 1 < bound:  # the group reaches further back than others
                regions.append(Region(start, stop, start, stop, None, bound - 1, within))
        queries = Region(0, q_len, 0, kv_len)
        return tuple(each for region in regions if not (each := region.intersect(queries)).is_empty)


@dataclass(frozen=True)
class Documents(Mask):
    """Packed documents: tokens attend inside their own document only.

    cu_seqlens: bounds of documents, 0 first and the global length last.
    lengths: how many tokens of each document are real, if documents are padded at their ends; padding neither
        attends nor is attended to. (Megatron's `cu_seqlens_padded` and the differences of its `cu_seqlens`.)
    kv_cu_seqlens, kv_lengths: bounds and real tokens of the keys, where they differ: cross attention. With
        `kv_cu_seqlens` alone all keys are real.
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
        self._check_lengths("lengths", self.cu_seqlens)
        self._check_lengths("kv_lengths", self.kv_cu_seqlens or self.cu_seqlens)
        if self.kv_cu_seqlens is not None and len(self.kv_cu_seqlens) != len(self.cu_seqlens):
            raise ValueError(
                f"Documents has {len(self.cu_seqlens) - 1} documents of queries and {len(self.kv_cu_seqlens) - 1} of "
                "keys; every document needs both, if need be of length 0"
            )

    def _check_lengths(self, name: str, starts: tuple[int, ...]) -> None:
        if getattr(self, name) is None:
            return
        expected = "give a list of how many tokens of each document are real"
        lengths = whole_numbers(f"Documents({name}={{}})", getattr(self, name), expected)
        object.__setattr__(self, name, lengths)
        padded = [stop - start for start, stop in pairwise(starts)]
        if len(lengths) != len(padded) or any(not 0 <= n <= most for n, most in zip(lengths, padded, strict=True)):
            raise ValueError(
                f"Documents({name}={shortened(lengths)}) do not fit into documents of {shortened(padded)} tokens; "
                "give one per document, from 0 to its length"
            )

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Return the bounds of documents, `cu_seqlens`, unless the keys have their own."""
        return None if self.shifts else self.cu_seqlens

    @property
    def shifts(self) -> bool:
        """Return whether the keys have documents of their own."""
        return self.kv_cu_seqlens not in (None, self.cu_seqlens)

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region per document. Raise ValueError if documents do not end with the sequences."""
        keys = self.kv_cu_seqlens or self.cu_seqlens
        check_total(self.cu_seqlens, q_len)
        check_total(keys, kv_len)
        kv_lengths = self.lengths if self.kv_cu_seqlens is None and self.kv_lengths is None else self.kv_lengths
        q_ranges, k_ranges = _real_ranges(self.cu_seqlens, self.lengths), _real_ranges(keys, kv_lengths)
        regions = (Region(*q_range, *k_range) for q_range, k_range in zip(q_ranges, k_ranges, strict=True))
        return tuple(region for region in regions if not region.is_empty)


@dataclass(frozen=True)
class Keys(Mask):
    """Only the keys at positions in `spans`, `((start, stop), ...)` in ascending order, are attended to.

    length: number of all keys, attended to or not; None for any number.
    """

    spans: tuple[tuple[int, int], ...]
    length: int | None = None
    compares_positions = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", _spans("Keys", self.spans))
        if self.length is not None:
            expected = "use how many keys there are, or None for any number"
            object.__setattr__(self, "length", whole_number("Keys(length={})", self.length, expected))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region per range of keys. Raise ValueError for a mask of another length."""
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
        """Return one region: the queries before `stop`, with all keys; no region if `stop` is 0."""
        return (Region(0, min(self.stop, q_len), 0, kv_len),) if self.stop else ()


@dataclass(frozen=True)
class _Several(Mask):
    """Several masks, each for a part of a call, and the properties that they have together."""

    masks: tuple[Mask, ...]

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Return the bounds of documents, if all masks have equal ones."""
        found = {mask.documents for mask in self.masks}
        return found.pop() if len(found) == 1 else None

    @property
    def compares_positions(self) -> bool:
        """Return whether any mask does."""
        return any(mask.compares_positions for mask in self.masks)

    @property
    def looks_ahead(self) -> bool:
        """Return whether any mask does."""
        return any(mask.looks_ahead for mask in self.masks)

    @property
    def shifts(self) -> bool:
        """Return whether any mask does."""
        return any(mask.shifts for mask in self.masks)

    @property
    def trees(self) -> frozenset[TreeMask]:
        """Return the prefix trees of all masks."""
        return frozenset().union(*(mask.trees for mask in self.masks))


@dataclass(frozen=True)
class PerRow(_Several):
    """A mask that differs by batch row: `masks` has one for each."""

    def __post_init__(self) -> None:
        expected = "give a list of masks, one for every batch row"
        masks = as_listed("PerRow(masks={})", self.masks, expected)
        odd = [m for m in masks if not isinstance(m, Mask) or m.rows is not None or m.head_groups is not None]
        if odd or not masks:
            held = f"holds {shown(odd[0])}, which is no mask of one row" if odd else "holds none"
            raise ValueError(f"PerRow(masks=...) {held}; {expected}")
        object.__setattr__(self, "masks", masks)

    @property
    def rows(self) -> int | None:
        """Return the number of batch rows, each with its mask."""
        return len(self.masks)

    def of_row(self, row: int) -> Mask:
        """Return the mask of one batch row."""
        return self.masks[row]

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Raise ValueError: rows have different regions."""
        raise ValueError("PerRow has regions row by row; ask of_row(row)")


@dataclass(frozen=True)
class PerHeadGroup(_Several):
    """A mask that differs by group of heads: of G masks the first is for the first 1 / G of the query heads.

    Query heads that share keys and values are next to each other, so that with as many masks as key/value heads each
    mask is for all that share one. Attention has a ring pass for each group.
    """

    def __post_init__(self) -> None:
        expected = "give a list of masks, one for every group of heads, each for all batch rows or a PerRow"
        masks = as_listed("PerHeadGroup(masks={})", self.masks, expected)
        odd = [mask for mask in masks if not isinstance(mask, Mask) or mask.head_groups is not None]
        if odd or not masks:
            held = f"holds {shown(odd[0])}, which is no mask of one group" if odd else "holds none"
            raise ValueError(f"PerHeadGroup(masks=...) {held}; {expected}")
        object.__setattr__(self, "masks", masks)
        if len({mask.rows for mask in self.masks} - {None}) > 1:
            raise ValueError(f"PerHeadGroup(masks=...) holds masks of unequal numbers of batch rows; {expected}")

    @property
    def head_groups(self) -> int | None:
        """Return the number of groups of heads, each with its mask."""
        return len(self.masks)

    def of_head_group(self, group: int) -> Mask:
        """Return the mask of one group of heads."""
        return self.masks[group]

    @property
    def rows(self) -> int | None:
        """Return the batch size that any mask of a group is made for; None if all batch rows share all masks."""
        return next((mask.rows for mask in self.masks if mask.rows is not None), None)

    def of_row(self, row: int) -> Mask:
        """Return the masks of all groups of heads for one batch row."""
        return PerHeadGroup(tuple(mask.of_row(row) for mask in self.masks))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Raise ValueError: groups have different regions."""
        raise ValueError(
            "a mask per group of heads cuts no sequence, since all heads have the same tokens; let the tokens suit a "
            "mask that all heads share, such as Causal()"
        )


def key_padding(valid: Tensor) -> PerRow:
    """Return the mask of a padded batch: `valid` [B, S], bool, says which keys of the whole sequence are real.

    Raises ValueError for another shape or type.
    """
    check_flags("key padding is a bool tensor [batch, keys]", valid)
    return PerRow(tuple(Keys(tuple(true_ranges(row)), len(row)) for row in flag_rows(valid)))


def document_starts(mask: Mask) -> set[int]:
    """Return the positions where documents of one batch row start, and its first real token if it has padding.

    mask: of one batch row. Masks without documents or padding have no such positions.
    """
    if isinstance(mask, Both):
        return document_starts(mask.one) | document_starts(mask.other)
    if isinstance(mask, Keys):
        return {mask.spans[0][0]} if mask.spans else set()
    return set() if mask.documents is None or mask.trees else set(mask.documents[:-1])


def check_padding(mask: Mask, what: str) -> None:
    """Raise ValueError if the mask has padding in the middle of a document.

    what: for the error, what would count the padding, such as "windows of tokens".
    """
    for row in range(mask.rows or 1):
        of_row = mask.of_row(row)
        inside = _begins_of_keys(of_row) - document_starts(of_row)
        if inside:
            raise ValueError(
                f"padding ends at token {min(inside)} of batch row {row}, in the middle of a document, and would be "
                f"in its {what}; put padding before or after a document"
            )


def _begins_of_keys(mask: Mask) -> set[int]:
    """Return where keys begin again after padding, by the mask of one batch row."""
    if isinstance(mask, Both):
        return _begins_of_keys(mask.one) | _begins_of_keys(mask.other)
    return {start for start, _ in mask.spans} if isinstance(mask, Keys) else set()


def flag_rows(flags: Tensor) -> list[bytes]:
    """Return the rows of a bool tensor [rows, columns] on any device as bytes, 1 for True and 0 for False.

    The tensor is copied to the host at once.
    """
    data = bytearray(max(1, flags.numel()))
    torch.frombuffer(data, dtype=torch.bool, count=-1)[: flags.numel()].copy_(flags.reshape(-1))
    columns = flags.shape[1]
    return [bytes(data[row * columns : (row + 1) * columns]) for row in range(flags.shape[0])]


def true_ranges(flags: bytes) -> Iterator[tuple[int, int]]:
    """Yield the index ranges (start, stop) of consecutive flags that are 1, in order."""
    return (found.span() for found in _TRUE.finditer(flags))


def check_flags(expected: str, flags: object) -> None:
    """Raise ValueError unless `flags` is a bool tensor of two dimensions with values that can be read.

    `expected` says what is expected, and begins the error message.
    """
    if not isinstance(flags, Tensor):
        raise ValueError(f"{expected}, got {shown(flags)}; make it one with torch.tensor(..., dtype=torch.bool)")
    if flags.dtype is not torch.bool or flags.dim() != 2:
        raise ValueError(f"{expected}, got {flags.dtype} {list(flags.shape)}")
    if unreadable(flags):
        raise ValueError(f"{expected}, got one {unreadable(flags)}; give one whose values are here")


def _spans(mask: str, ranges: object) -> tuple[tuple[int, int], ...]:
    """Return index ranges as pairs of ints. Raise ValueError, with the name of the `mask`, for anything else."""
    expected = f"give (start, stop) pairs of whole numbers, such as {mask}(((0, 7), (9, 16)))"
    ranges = getattr(ranges, "tolist", lambda: ranges)()
    listed = as_listed(f"{mask}({{}})", ranges, expected)
    spans = [whole_numbers(f"{mask} with a span of {{}}", span, expected) for span in listed]
    for span in spans:
        if len(span) != 2:
            raise ValueError(f"{mask} with a span of {shown(span)} is not valid; {expected}")
    edges = [edge for span in spans for edge in span]
    if edges != sorted(edges) or (edges and edges[0] < 0):
        raise ValueError(f"{mask}({shown(tuple(spans))}) must be (start, stop) pairs in ascending order, from 0 on")
    return tuple((start, stop) for start, stop in spans)


def _real_ranges(starts: tuple[int, ...], lengths: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """Return the index range (start, stop) of the real tokens of every document."""
    if lengths is None:
        return list(pairwise(starts))
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]
