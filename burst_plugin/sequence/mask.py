"""Masks: the regions that a mask allows, its special properties, and the intersection of two masks.

A mask is a few disjoint *regions*: rectangles of query and key positions, each with a band around a diagonal,

    lower <= key position - query position <= upper        None: no bound

A region within spans covers only queries and keys in these spans, such as all tokens of several images.

The work of a rank follows from the regions and the positions that it holds, see `sequence.tiles`. The masks
themselves are in `sequence.masks`, `sequence.block_masks` and `sequence.prefix_tree`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from burst_plugin.checks import shown
from burst_plugin.types import Rows, Side

_COMPARED = 100  # rectangles of a mask of a user's own


class Region(NamedTuple):
    """A rectangle of queries `q_start:q_stop` and keys `k_start:k_stop`, where `lower <= key - query <= upper`.

    All are positions in the whole sequence.

    lower, upper: the band, None for no bound.
    within: spans of positions, (start, stop) in ascending order, that both queries and keys are in; None is no such
        bound.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lower: int | None = None
    upper: int | None = None
    within: Rows | None = None

    def intersect(self, other: Region) -> Region:
        """Return the intersection of both regions; it may be empty."""
        return Region(
            max(self.q_start, other.q_start),
            min(self.q_stop, other.q_stop),
            max(self.k_start, other.k_start),
            min(self.k_stop, other.k_stop),
            _narrower(max, self.lower, other.lower),
            _narrower(min, self.upper, other.upper),
            _common(self.within, other.within),
        )

    def rectangles(self) -> Iterator[Region]:
        """Yield regions without spans that make up this one: itself, or one for each pair of spans that attend."""
        spans, region = self.within, self._replace(within=None)
        if spans is None:
            yield region
            return
        for q_span in spans:
            for k_span in spans:
                part = region.intersect(Region(*q_span, *k_span))
                low, high = part.keys_of(part.q_start, part.q_stop - 1)
                if low <= high and not part.is_empty:
                    yield part

    def met_by(self, first: int, last: int) -> Iterator[Region]:
        """Yield regions without spans that cover what queries `first ... last` attend to in this region.

        They may cover more: queries between spans, too.
        """
        if self.within is None:
            yield self
            return
        met = [(start, stop) for start, stop in self.within if start <= last and stop > first]
        for k_span in self.within if met else ():
            part = self._replace(within=None).intersect(Region(met[0][0], met[-1][1], *k_span))
            if not part.is_empty:
                yield part

    def keys_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the first and the last key that queries `first ... last` may attend to.

        If there are none, the last is below the first.
        """
        low = self.k_start if self.lower is None else max(self.k_start, first + self.lower)
        high = self.k_stop - 1 if self.upper is None else min(self.k_stop - 1, last + self.upper)
        return low, high

    @property
    def transposed(self) -> Region:
        """Return the region with queries and keys exchanged."""
        lower, upper = (None if edge is None else -edge for edge in (self.upper, self.lower))
        return Region(self.k_start, self.k_stop, self.q_start, self.q_stop, lower, upper, self.within)

    @property
    def is_empty(self) -> bool:
        """Return whether the region holds no (query, key) pair."""
        crossed = self.lower is not None and self.upper is not None and self.lower > self.upper
        return crossed or self.q_start >= self.q_stop or self.k_start >= self.k_stop


class Mask(ABC):
    """The keys that each query may attend to. Subclasses are frozen dataclasses: masks are compared and cached.

    Where a subclass has a constant for one of the properties, the constant is not annotated: it would become a field
    then, an argument of the constructor.
    """

    @abstractmethod
    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return disjoint regions for `q_len` queries and `kv_len` keys. Raise ValueError if they do not fit."""

    @property
    def rows(self) -> int | None:
        """Return the batch size that the mask is made for; None if all batch rows share the mask."""
        return None

    def of_row(self, row: int) -> Mask:
        """Return the mask of one batch row."""
        return self

    @property
    def head_groups(self) -> int | None:
        """Return the number of groups of heads that the mask is made for; None if all heads share the mask."""
        return None

    def of_head_group(self, group: int) -> Mask:
        """Return the mask of one group of heads."""
        return self

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Return the bounds of documents of queries and keys, as `cu_seqlens`; None if there are none."""
        return None

    @property
    def compares_positions(self) -> bool:
        """Return whether the distance between query and key matters, as in causal masks and windows.

        Such masks do not combine with documents whose keys lie at other positions than their queries (`shifts`).
        """
        return True

    @property
    def looks_ahead(self) -> bool:
        """Return whether a query may attend to a key at a later position, where there are as many keys as queries.

        If not, padding at the end needs no mask.
        """
        return True

    @property
    def is_fixed(self) -> bool:
        """Return whether all batches of a run have this mask.

        If not, every batch may bring tiles of new shapes.
        """
        return False

    @property
    def shifts(self) -> bool:
        """Return whether keys lie at other positions than the queries of their documents, as in cross attention.

        Each side then has document bounds of its own.
        """
        return False

    @property
    def trees(self) -> frozenset[TreeMask]:
        """Return the prefix trees of all batch rows and groups of heads, which give tokens logical positions."""
        return frozenset()

    def beside_trees(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the regions for `q_len` queries and `kv_len` keys that the mask would have without its prefix tree.

        If the mask has a tree, bands of these regions count logical positions.
        """
        return self.regions(q_len, kv_len)

    def __and__(self, other: Mask) -> Mask:
        """Return the mask that allows what both masks allow."""
        return Both(self, other)

    def __bool__(self) -> NoReturn:
        """Raise TypeError: Python's `and` and `or` would keep one of two masks, and drop the other in silence."""
        raise TypeError("masks combine with &, as in Causal() & SlidingWindow(4, 0), not with 'and' or 'or'")


class TreeMask(Mask):
    """A mask that gives tokens logical positions, their places on a path from a root, see `sequence.prefix_tree`."""

    @abstractmethod
    def logical(self, positions: Tensor) -> Tensor:
        """Return the logical positions of tokens at `positions` of the sequence, int64, of the same shape."""

    @abstractmethod
    def reached_later(self, reach: int, slack: int) -> int:
        """Return the lowest position that a token appended to the sequence may attend to, within a window.

        reach: how many tokens before itself the window has, by logical positions.
        slack: how many tokens at the end of the sequence may be taken back before that token is appended.
        """

    @abstractmethod
    def within(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Return the parts of other masks' regions that the tree allows.

        Bands of `regions` count logical positions; bands of the result count positions in the sequence.
        """


@dataclass(frozen=True)
class Both(Mask):
    """The intersection of two masks, made by `&`: a query attends where both allow it."""

    one: Mask
    other: Mask

    def __post_init__(self) -> None:
        parts = (self.one, self.other)
        if not all(isinstance(mask, Mask) for mask in parts):
            raise ValueError(f"only masks combine with &, got {shown(self.one)} & {shown(self.other)}")
        if len({mask.rows for mask in parts} - {None}) > 1:
            raise ValueError(
                f"masks for {self.one.rows} and {self.other.rows} batch rows do not combine; make both of one batch"
            )
        if len({mask.head_groups for mask in parts} - {None}) > 1:
            raise ValueError(
                f"masks for {self.one.head_groups} and {self.other.head_groups} groups of heads do not combine; make "
                "both of as many"
            )
        if any(mask.shifts for mask in parts) and self.compares_positions:
            raise ValueError(
                "documents whose keys begin elsewhere than their queries have no common positions, so a causal mask "
                "or a window means nothing there; use the Documents alone"
            )
        if all(mask.trees for mask in parts) and len(self.trees) > 1:
            raise ValueError(
                "two prefix trees do not combine: a token has one path; give every batch row its own tree, "
                "PerRow((tree, ...)), and combine that with masks of other kinds"
            )

    @property
    def rows(self) -> int | None:
        """Return the batch size that either mask is made for; None if all batch rows share both masks."""
        return self.one.rows if self.one.rows is not None else self.other.rows

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Return the document bounds of the first mask, or of the second if the first has none, as `cu_seqlens`.

        None if neither has any.
        """
        return self.one.documents or self.other.documents

    def of_row(self, row: int) -> Mask:
        """Return the intersection of both masks for one batch row."""
        return self if self.rows is None else Both(self.one.of_row(row), self.other.of_row(row))

    @property
    def head_groups(self) -> int | None:
        """Return the number of groups of heads that either mask is made for; None if all heads share both masks."""
        return self.one.head_groups if self.one.head_groups is not None else self.other.head_groups

    def of_head_group(self, group: int) -> Mask:
        """Return the intersection of both masks for one group of heads."""
        if self.head_groups is None:
            return self
        return Both(self.one.of_head_group(group), self.other.of_head_group(group))

    @property
    def compares_positions(self) -> bool:
        """Return whether the distance of query and key matters in either mask."""
        return self.one.compares_positions or self.other.compares_positions

    @property
    def looks_ahead(self) -> bool:
        """Return whether both masks let a query attend to a later key."""
        return self.one.looks_ahead and self.other.looks_ahead

    @property
    def is_fixed(self) -> bool:
        """Return whether all batches of a run have both masks."""
        return self.one.is_fixed and self.other.is_fixed

    @property
    def shifts(self) -> bool:
        """Return whether either mask has keys at other positions than the queries of their documents."""
        return self.one.shifts or self.other.shifts

    @property
    def trees(self) -> frozenset[TreeMask]:
        """Return the prefix trees of both masks."""
        return self.one.trees | self.other.trees

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the intersections of the regions of both masks, cut to what a prefix tree of either mask allows.

        Raises ValueError if `q_len` queries and `kv_len` keys do not fit a mask.
        """
        regions = self.beside_trees(q_len, kv_len)
        return next(iter(self.trees)).within(regions) if self.trees else regions

    def beside_trees(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the intersections of the regions that both masks would have without a prefix tree.

        If either mask has a tree, bands of these regions count logical positions.
        """
        others = self.other.beside_trees(q_len, kv_len)
        regions = (a.intersect(b) for a in self.one.beside_trees(q_len, kv_len) for b in others)
        return tuple(region for region in regions if not region.is_empty)


def allowed(mask: Mask, lengths: tuple[int, int], queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether queries attend to keys, bool [Sq, Sk], or [B, Sq, Sk] if batch rows differ.

    `queries` [Sq] and `keys` [Sk] are positions; `lengths` are (queries, keys) of the whole sequences.
    """
    if mask.rows is not None:
        return torch.stack([allowed(mask.of_row(row), lengths, queries, keys) for row in range(mask.rows)])
    queries = queries.unsqueeze(1)
    attends = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=queries.device)
    for r in mask.regions(*lengths):
        inside = (queries >= r.q_start) & (queries < r.q_stop) & (keys >= r.k_start) & (keys < r.k_stop)
        if r.lower is not None:
            inside &= keys - queries >= r.lower
        if r.upper is not None:
            inside &= keys - queries <= r.upper
        if r.within is not None:
            inside &= _are_in(queries, r.within) & _are_in(keys, r.within)
        attends |= inside
    return attends


def work_by_token(mask: Mask, lengths: tuple[int, int], side: Side = "q") -> Tensor:
    """Return how many keys every query attends to, or for side "kv" how many queries attend to every key; int64 [S].

    `lengths` are (queries, keys) of the whole sequences. Work is summed over batch rows if their masks differ.
    """
    if mask.rows is not None:
        return torch.stack([work_by_token(mask.of_row(row), lengths, side) for row in range(mask.rows)]).sum(0)
    work = torch.zeros(lengths[side == "kv"], dtype=torch.int64, device="cpu")
    for region in mask.regions(*lengths):
        start, stop, other_start, other_stop, lower, upper, within = region if side == "q" else region.transposed
        tokens = torch.arange(start, stop, device="cpu")
        first, last = torch.full_like(tokens, other_start), torch.full_like(tokens, other_stop)
        if lower is not None:
            first = first.maximum(tokens + lower)
        if upper is not None:
            last = last.minimum(tokens + upper + 1)
        if within is not None:  # all that counts are positions in spans
            others = torch.arange(other_start, other_stop, device="cpu")
            before = torch.nn.functional.pad(_are_in(others, within).cumsum(0), (1, 0))
            first, last = (before[(x - other_start).clamp(0, len(others))] for x in (first, last))
            last = last.where(_are_in(tokens, within), first)
        work[start:stop] += (last - first).clamp_(min=0)
    return work


def _are_in(positions: Tensor, spans: Rows) -> Tensor:
    """Return which positions are in spans, bool, of the same shape."""
    edges = torch.tensor(spans, dtype=torch.int64, device=positions.device).flatten()
    return torch.searchsorted(edges, positions, right=True) % 2 == 1


def _common(first: Rows | None, second: Rows | None) -> Rows | None:
    """Return the spans that are in both; None stands for everything."""
    if first is None or second is None or first == second:
        return second if first is None else first
    both = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return tuple((start, stop) for start, stop in both if start < stop)


def _narrower(choose: Callable[[int, int], int], first: int | None, second: int | None) -> int | None:
    """Return the tighter of two bounds, each of which may be None."""
    if first is None or second is None:
        return second if first is None else first
    return choose(first, second)


def regions_of(mask: Mask, q_len: int, kv_len: int) -> tuple[Region, ...]:
    """Return the regions of the mask of one batch row, which are disjoint also if a user wrote its class.

    Raises ValueError for lengths that do not fit, and if regions overlap, where a key would count twice. Of a user's
    mask the first 100 rectangles are compared.
    """
    regions = mask.regions(q_len, kv_len)
    if _is_known(mask):
        return regions
    parts = [part for region in regions for part in islice(region.rectangles(), _COMPARED)][:_COMPARED]
    for first, second in combinations(parts, 2):
        common = first.intersect(second)
        low, high = common.k_start - common.q_stop + 1, common.k_stop - 1 - common.q_start
        lower = low if common.lower is None else max(low, common.lower)
        upper = high if common.upper is None else min(high, common.upper)
        if not common.is_empty and lower <= upper:
            raise ValueError(
                f"regions of the mask {shown(mask)} overlap, so that keys would count twice: {first} and {second}; "
                "return disjoint regions"
            )
    return regions


def _is_known(mask: Mask) -> bool:
    """Return whether the classes of a mask, and of the masks that it combines, are this package's."""
    if isinstance(mask, Both):
        return _is_known(mask.one) and _is_known(mask.other)
    return type(mask).__module__.startswith("burst_plugin.")
