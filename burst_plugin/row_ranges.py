"""Ranges of token rows of a block, as schedules name them. Pure Python, without torch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

__all__ = ["Rows", "merged", "union"]

Rows = tuple[tuple[int, int], ...]  # (start, stop) of rows of a block, ascending


def merged(parts: Iterable[tuple[int, int]]) -> Rows:
    """Ranges of rows in ascending order; what touches or overlaps is one."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return tuple(spans)


def union(needed: Iterable[Rows | None]) -> Rows | None:
    """The rows that any of these needs; None is all."""
    several = list(needed)
    known = [rows for rows in several if rows is not None]
    return merged(chain.from_iterable(known)) if len(known) == len(several) else None
