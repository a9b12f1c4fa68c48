"""Regions: what every mask is made of.

A mask is a few disjoint *regions*: rectangles of query and key positions, each with a band around a diagonal,

    lower <= key position - query position <= upper        None: no bound

What a rank computes follows from the regions and the positions that it holds, see `sequence.tiles`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Region"]


class Region(NamedTuple):
    """Queries `q_start:q_stop` on keys `k_start:k_stop` where `lower <= key - query <= upper`; None is no bound."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lower: int | None = None
    upper: int | None = None

    def intersect(self, other: Region) -> Region:
        """Return what both regions allow; it may be empty."""
        return Region(
            max(self.q_start, other.q_start),
            min(self.q_stop, other.q_stop),
            max(self.k_start, other.k_start),
            min(self.k_stop, other.k_stop),
            _narrower(max, self.lower, other.lower),
            _narrower(min, self.upper, other.upper),
        )

    def keys_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the first and the last key that queries `first ... last` may attend to."""
        low = self.k_start if self.lower is None else max(self.k_start, first + self.lower)
        high = self.k_stop - 1 if self.upper is None else min(self.k_stop - 1, last + self.upper)
        return low, high

    @property
    def transposed(self) -> Region:
        """Return the region with queries and keys exchanged."""
        lower, upper = (None if edge is None else -edge for edge in (self.upper, self.lower))
        return Region(self.k_start, self.k_stop, self.q_start, self.q_stop, lower, upper)

    @property
    def is_empty(self) -> bool:
        """Return whether it holds no pair."""
        crossed = self.lower is not None and self.upper is not None and self.lower > self.upper
        return crossed or self.q_start >= self.q_stop or self.k_start >= self.k_stop


def _narrower(choose: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    """Return the bound that leaves less, of two that may be None."""
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)
