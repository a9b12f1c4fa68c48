"""Masks: which keys a query may attend to, in positions of the whole sequence.

Masks combine with `&`: `SlidingWindow(4095) & Documents((0, 700, 8192)) & key_padding(valid)`. A new mask is a frozen
dataclass that returns its regions (`burst_plugin.sequence.mask`). Those that list keys, batch rows or groups of heads
are in `sequence.listed_masks`, those made of blocks in `sequence.block_masks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from burst_plugin.checks import whole_number, whole_numbers
from burst_plugin.sequence.layout import check_cu_seqlens, check_total, shortened
from burst_plugin.sequence.listed_masks import Keys, PerHeadGroup, PerRow, key_padding
from burst_plugin.sequence.mask import Mask
from burst_plugin.sequence.regions import Region

__all__ = [
    "Causal",
    "CausalBottomRight",
    "Documents",
    "Full",
    "Keys",
    "Mask",
    "PerHeadGroup",
    "PerRow",
    "PrefixLM",
    "SlidingWindow",
    "key_padding",
]


@dataclass(frozen=True)
class Full(Mask):
    """Every token attends to every token."""

    compares_positions = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region."""
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
        """Return one region."""
        return (Region(0, q_len, 0, kv_len, None if self.left is None else -self.left, self.right),)


@dataclass(frozen=True)
class Causal(Mask):
    """Every token attends to itself and to what comes before it, counted from the start of both sequences."""

    looks_ahead = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region."""
        return (Region(0, q_len, 0, kv_len, None, 0),)


@dataclass(frozen=True)
class CausalBottomRight(Mask):
    """Causal, counted from the end of both sequences: the last query attends to every key."""

    looks_ahead = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region."""
        return (Region(0, q_len, 0, kv_len, None, kv_len - q_len),)


@dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, but every token attends to all of the first `prefix` tokens, at most as many as there are."""

    prefix: int

    def __post_init__(self) -> None:
        expected = "use the number of tokens in the prefix"
        object.__setattr__(self, "prefix", whole_number("PrefixLM(prefix={})", self.prefix, expected))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the prefix, and what comes after it. Raise ValueError if it is longer than the keys."""
        if self.prefix > kv_len:
            raise ValueError(
                f"PrefixLM(prefix={self.prefix}) goes beyond the {kv_len} keys that all ranks have together; give a "
                "prefix of this sequence, or Full(), for full attention"
            )
        prefix, rest = Region(0, q_len, 0, self.prefix), Region(0, q_len, self.prefix, kv_len, None, 0)
        return tuple(region for region in (prefix, rest) if not region.is_empty)


@dataclass(frozen=True)
class Documents(Mask):
    """Packed documents: tokens attend inside their own document only.

    cu_seqlens: bounds of documents, 0 first and the global length last.
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


def _real_ranges(starts: tuple[int, ...], lengths: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """Return the index range (start, stop) of the real tokens of every document."""
    if lengths is None:
        return list(pairwise(starts))
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]
