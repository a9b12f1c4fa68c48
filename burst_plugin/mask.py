"""Masks, and the tiles that they leave of a visit.

A mask says which key positions a query position may attend to. Together with the runs of a query rank and a
key rank (`burst_plugin.layout`) it gives *tiles*: rectangles of local query and key rows, each with a band,

    lower <= j - i <= upper        i, j: row of the tile's query and key slice, None: no bound

that is exactly the work of that visit and nothing else; no tiles, no work. Kernels see tiles only.

Zigzag over 2 ranks, causal, chunks a b | b' a' of one length; f: full, c: causal, .: nothing

                        keys of rank 0      keys of rank 1
                          a     a'            b     b'
    queries, rank 0   a   c     .             .     .       one causal tile on the left (the three
                      a'  f     c             f     f       pieces are joined), one full on the right
    queries, rank 1   b   f     .             c     .
                      b'  f     .             f     c
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from burst_plugin.layout import Run

__all__ = ["CAUSAL", "FULL", "Band", "Causal", "Full", "Mask", "Tile", "tiles"]


class Band(NamedTuple):
    """Query row i attends to key row j where `lower <= j - i <= upper`; None is no bound."""

    lower: int | None
    upper: int | None


FULL = Band(None, None)
CAUSAL = Band(None, 0)


class Tile(NamedTuple):
    """Query rows `q_start:q_stop` on key rows `k_start:k_stop` of a visit, within `band`."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    band: Band

    @property
    def q(self) -> slice:
        """The query rows."""
        return slice(self.q_start, self.q_stop)

    @property
    def k(self) -> slice:
        """The key rows."""
        return slice(self.k_start, self.k_stop)

    def rows(self, side: str) -> slice:
        """The rows of side "q" or "kv"."""
        return self.q if side == "q" else self.k

    @property
    def work(self) -> int:
        """Number of (query, key) pairs that attend."""
        rows, columns = self.q_stop - self.q_start, self.k_stop - self.k_start
        if self.band == FULL:
            return rows * columns
        lower = -rows if self.band.lower is None else self.band.lower
        upper = columns if self.band.upper is None else self.band.upper
        return sum(max(0, min(columns, i + upper + 1) - max(0, i + lower)) for i in range(rows))


class Mask(Protocol):
    """What may attend to what, as bounds on key position minus query position (inclusive, None: no bound)."""

    def reach(self) -> tuple[int | None, int | None]:
        """(lowest, highest) allowed `key position - query position`."""
        ...


@dataclass(frozen=True)
class Causal:
    """Every token attends to itself and to what comes before it."""

    def reach(self) -> tuple[int | None, int | None]:
        """Nothing ahead."""
        return None, 0


@dataclass(frozen=True)
class Full:
    """Every token attends to every token."""

    def reach(self) -> tuple[int | None, int | None]:
        """No bound."""
        return None, None


def tiles(mask: Mask, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...]) -> tuple[Tile, ...]:
    """The work of queries at `q_runs` on keys at `k_runs`, as few tiles as possible.

    Bands other than full and causal are cut into those where that is exact; adjacent tiles are joined.
    Raises ValueError for runs of unlike strides.
    """
    found: list[Tile] = []
    q_offset = 0
    for q_run in q_runs:
        k_offset = 0
        for k_run in k_runs:
            found += _clip(mask, q_run, k_run, q_offset, k_offset)
            k_offset += k_run.length
        q_offset += q_run.length
    return _join(found)


def _clip(mask: Mask, q_run: Run, k_run: Run, q_offset: int, k_offset: int) -> Iterator[Tile]:
    """The tiles of one run on another. `k_pos - q_pos = k.start - q.start + stride * (j - i)`."""
    if q_run.stride != k_run.stride:
        raise ValueError(f"runs of unlike strides do not make tiles: {q_run} and {k_run}")
    lowest, highest = mask.reach()
    ahead, stride = k_run.start - q_run.start, q_run.stride
    lower = None if lowest is None else -((ahead - lowest) // stride)
    upper = None if highest is None else (highest - ahead) // stride
    rows, columns = q_run.length, k_run.length
    if lower is not None and lower <= 1 - rows:
        lower = None
    if upper is not None and upper >= columns - 1:
        upper = None
    if lower is not None and upper is not None and lower > upper:  # strides step over a narrow band
        return
    if upper is not None and upper < 0:  # the first rows see nothing: start where the diagonal enters
        q_offset, rows, lower, upper = q_offset - upper, rows + upper, None if lower is None else lower - upper, 0
    if rows <= 0 or (lower is not None and lower >= columns):
        return
    if lower is None and upper is not None:
        if upper > 0:
            yield Tile(q_offset, q_offset + rows, k_offset, k_offset + upper, FULL)
            k_offset, columns, upper = k_offset + upper, columns - upper, 0
        square = min(rows, columns)
        yield Tile(q_offset, q_offset + square, k_offset, k_offset + square, CAUSAL)
        if rows > square:
            yield Tile(q_offset + square, q_offset + rows, k_offset, k_offset + square, FULL)
        return
    yield Tile(q_offset, q_offset + rows, k_offset, k_offset + columns, Band(lower, upper))


def _join(found: list[Tile]) -> tuple[Tile, ...]:
    """Join tiles pairwise until nothing changes."""
    joined = sorted(found)
    while True:
        for stairs in _stairs(joined):
            joined = sorted([stairs, *(t for t in joined if not _inside(t, stairs))])
            break
        else:
            for one, other in _beside(joined):
                joined.remove(one)
                joined.remove(other)
                joined.append(Tile(one.q_start, other.q_stop, one.k_start, other.k_stop, FULL))
                joined.sort()
                break
            else:
                return tuple(joined)


def _stairs(found: list[Tile]) -> Iterator[Tile]:
    """Two causal squares and the full rectangle below the first make one causal square."""
    squares = [t for t in found if t.band == CAUSAL and t.q_stop - t.q_start == t.k_stop - t.k_start]
    for one, other in pairwise(squares):
        corner = Tile(other.q_start, other.q_stop, one.k_start, one.k_stop, FULL)
        if (one.q_stop, one.k_stop) == (other.q_start, other.k_start) and corner in found:
            yield Tile(one.q_start, other.q_stop, one.k_start, other.k_stop, CAUSAL)


def _inside(tile: Tile, of: Tile) -> bool:
    return of.q_start <= tile.q_start < of.q_stop and of.k_start <= tile.k_start < of.k_stop


def _beside(found: list[Tile]) -> Iterator[tuple[Tile, Tile]]:
    """Full tiles that make a rectangle together."""
    full = [t for t in found if t.band == FULL]
    for one in full:
        for other in full:
            same_q = (one.q_start, one.q_stop) == (
                other.q_start,
                other.q_stop,
            ) and one.k_stop == other.k_start
            same_k = (one.k_start, one.k_stop) == (
                other.k_start,
                other.k_stop,
            ) and one.q_stop == other.q_start
            if same_q or same_k:
                yield one, other
