"""Tiles cut further, into bands that a kernel has, pieces, and the two turns of a visit; or put together.

Bands that a kernel lacks are cut into ones that it has. A window of n + 1 keys is a staircase of squares of n rows,
a: anticausal, c: causal,

    queries 0 ... n    a c . .       each column of squares on one diagonal is one tile with `pieces` squares,
            n ... 2n   . a c .       which a kernel works on as a batch
            2n .. 3n   . . a c

Tiles that have neither queries nor keys in common, as those of packed documents, are put together for a kernel that
takes sequences of any lengths in one call; c: causal,

    queries of documents 0    c . .
                         1    . c .      one tile with three spans
                         2    . . c
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from burst_plugin.sequence.tiles import Tile, banded
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, Band

__all__ = ["cut", "in_turns", "one_by_one", "together"]

_CUTS = 8  # places at which a visit can be cut in two turns
_FEWEST = 3  # tiles that are worth putting together: rows between them have to be left out, and put back
_LONG = 2048  # rows of a tile that is worth a call: kernels launch as many blocks for all as for the longest
_OPEN = 4  # how many are being put together at a time


def cut(tile: Tile, most: int) -> Iterator[Tile]:
    """`tile` in full, causal and anticausal tiles of at most so many pieces; drawn at the top of this file."""
    lower, upper = tile.band
    if lower is None or upper is None:
        yield tile  # full, causal or anticausal: `tiles` makes no other one-sided bands
        return
    step = max(1, upper - lower)
    for first, band in ((lower, ANTICAUSAL), (lower + step, CAUSAL)):
        if upper == lower:
            if band is CAUSAL:
                return
            band = FULL
        yield from (piece._replace(batch=tile.batch) for piece in _staircase(tile, first, step, band, most))


def one_by_one(tile: Tile) -> Iterator[Tile]:
    """The pieces of `tile`, a tile each."""
    rows, columns = tile.shape
    for n in range(tile.pieces):
        q, k = tile.q_start + n * rows, tile.k_start + n * columns
        yield tile._replace(q_start=q, q_stop=q + rows, k_start=k, k_stop=k + columns, pieces=1)


def together(tiles: Sequence[Tile], most: int) -> Iterator[Tile]:
    """Full tiles, and causal squares, as few tiles of at most so many spans; drawn at the top of this file."""
    chains: dict[object, list[list[Tile]]] = {}
    for tile in sorted(tiles, key=lambda tile: tile[:4]):
        if tile.band not in (FULL, CAUSAL) or tile.pieces > 1 or max(tile.shape) > _LONG:
            yield tile
            continue
        alike = chains.setdefault((tile.band, tile.batch), [])
        fitting = (chain for chain in alike[-_OPEN:] if len(chain) < most and _follows(tile, chain[-1]))
        chain = next(fitting, None)
        if chain is None:
            alike.append([tile])
        else:
            chain.append(tile)
    for chain in (chain for alike in chains.values() for chain in alike):
        if len(chain) < _FEWEST:
            yield from chain
            continue
        first, last = chain[0], chain[-1]
        yield first._replace(q_stop=last.q_stop, k_stop=last.k_stop, spans=tuple(tile[:4] for tile in chain))


def _follows(tile: Tile, last: Tile) -> bool:
    """Whether `tile` comes after `last` on both sides, with no more rows between them than both have."""
    gaps = (tile.q_start - last.q_stop, tile.k_start - last.k_stop)
    return all(0 <= gap <= one + other for gap, one, other in zip(gaps, tile.shape, last.shape, strict=True))


def in_turns(tiles: Sequence[Tile], kept: float) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """The work of a visit in two turns, the second with about a share of `kept`; cut between two keys.

    Half of the keys of a causal square are a quarter of its work:

        queries   c . . .        first turn    c .   and below it    second turn    . .
                  f c . .                      f c                                  . .
                  f f c .                                    f f                    c .
                  f f f c                                    f f                    f c
    """
    if not kept or not tiles:
        return tuple(tiles), ()
    first, stop = min(tile.k_start for tile in tiles), max(tile.k_stop for tile in tiles)
    cuts = [_between_keys(tiles, first + n * (stop - first) // _CUTS) for n in range(1, _CUTS + 1)]
    wanted = kept * _pairs_of(tiles)
    return min(cuts, key=lambda turns: abs(_pairs_of(turns[1]) - wanted))


def _between_keys(tiles: Sequence[Tile], column: int) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """What attends to keys before and from `column` on."""
    before: list[Tile] = []
    after: list[Tile] = []
    for tile in tiles:
        if not tile.k_start < column < tile.k_stop:
            (before if tile.k_stop <= column else after).append(tile)
            continue
        shifted = (None if edge is None else edge - (column - tile.k_start) for edge in tile.band)
        for turn, part, band in (
            (before, tile._replace(k_stop=column), tile.band),
            (after, tile._replace(k_start=column), shifted),
        ):
            turn += banded(part, *band)
    return tuple(before), tuple(after)


def _pairs_of(tiles: Sequence[Tile]) -> int:
    """Pairs that attend, of all batch rows that a tile is for."""
    return sum(tile.work * (1 if tile.batch is None else tile.batch[1] - tile.batch[0]) for tile in tiles)


def _staircase(tile: Tile, first: int, step: int, band: Band, most: int) -> Iterator[Tile]:
    """Squares of `step` rows down a diagonal: square n has the rows from n * step on, and keys `first` further."""
    q, q_stop, k, k_stop = tile[:4]
    squares = range(-(-(q_stop - q) // step))
    whole = [n for n in squares if q + (n + 1) * step <= q_stop and _fits(k + first + n * step, step, k, k_stop)]
    for at in range(0, len(whole), most):
        some = whole[at : at + most]
        rows, keys, length = q + some[0] * step, k + first + some[0] * step, len(some) * step
        yield Tile(rows, rows + length, keys, keys + length, band, len(some))
    for n in squares:
        if whole and whole[0] <= n <= whole[-1]:
            continue
        rows, keys = q + n * step, k + first + n * step
        part = Tile(rows, min(rows + step, q_stop), max(keys, k), min(keys + step, k_stop))
        if part.k_start < part.k_stop:
            shift = part.k_start - keys  # the band is that of the square, from its own corner
            yield from banded(part, *(None if edge is None else edge - shift for edge in band))


def _fits(start: int, length: int, low: int, high: int) -> bool:
    return low <= start and start + length <= high
