"""Types that every part of the package shares: sides and directions, row ranges, shapes of tensors, bands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Side = Literal["q", "kv"]
"""Queries, or keys and values; with all that belongs to them in a pass."""
Direction = Literal["forward", "backward"]
"""Of a pass."""

SIDES: tuple[Side, Side] = ("q", "kv")
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
OTHER_SIDE: Mapping[Side, Side] = MappingProxyType({"q": "kv", "kv": "q"})
BOTH = "both"
"""What moves where one side does in some visits of a pass, and the other in the rest."""

Rows = tuple[tuple[int, int], ...]
"""Row ranges (start, stop) of a block, ascending."""

Spec = tuple[tuple[int, ...], "torch.dtype"]
"""Shape and type of a tensor."""


class Band(NamedTuple):
    """Query row i attends to key row j where `lower <= j - i <= upper`; None is no bound."""

    lower: int | None
    upper: int | None


FULL = Band(None, None)
CAUSAL = Band(None, 0)
ANTICAUSAL = Band(0, None)


def merged(parts: Iterable[tuple[int, int]]) -> Rows:
    """Return row ranges in ascending order; ranges that touch or overlap become one."""
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
        else:
            ranges.append((start, stop))
    return tuple(ranges)


def row_count(rows: Iterable[tuple[int, int]]) -> int:
    """Return how many rows there are in these ranges."""
    return sum(stop - start for start, stop in rows)


def union(several: Iterable[Rows | None]) -> Rows | None:
    """Return the rows that are in any of several sets of row ranges; None, given or returned, is all rows."""
    several = list(several)
    known = [rows for rows in several if rows is not None]
    return merged(chain.from_iterable(known)) if len(known) == len(several) else None
