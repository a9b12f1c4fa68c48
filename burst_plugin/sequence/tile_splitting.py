"""Tiles split further, into bands that a kernel has, pieces, or head and tail of a visit; or batched into one tile.

Bands that a kernel lacks are cut into bands that it has. A window of n + 1 keys is a staircase of squares of n rows,
a: anticausal, c: causal,

    queries 0 ... n    a c . .       each column of squares on one diagonal is one tile with `pieces` squares,
            n ... 2n   . a c .       which a kernel works on as a batch
            2n .. 3n   . . a c

Tiles that have neither queries nor keys in common, as those of packed documents, are batched into one tile for a
kernel that takes documents of any lengths in one call; c: causal,

    queries of documents 0    c . .
                         1    . c .      one tile with three `subtiles`
                         2    . . c
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from burst_plugin.sequence.tiles import Tile, banded
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, Band

__all__ = ["batched", "cut", "split_pieces", "split_tail"]

_CUTS = 8  # places at which a tail can be split off
_FEWEST = 3  # tiles that are worth batching: rows between them have to be left out, and put back
_LONG = 2048  # rows of a tile that is worth a call: kernels launch as many blocks for all subtiles as for the longest
_OPEN = 4  # batches that a tile may still be added to


def cut(tile: Tile, most: int) -> Iterator[Tile]:
    """Yield `tile` in full, causal and anticausal tiles of at most `most` pieces; drawn at the top of this file."""
    lower, upper = tile.band
    if lower is None or upper is None:
        yield tile  # full, causal or anticausal: `tiles` makes no other one-sided bands
        return
    is_diagonal = lower == upper  # squares of one row
    staircases = [(lower, FULL)] if is_diagonal else [(lower, ANTICAUSAL), (upper, CAUSAL)]
    for first, band in staircases:
        for piece in _staircase(tile, first, max(1, upper - lower), band, most):
            yield piece._replace(batch=tile.batch)


def split_pieces(tile: Tile) -> Iterator[Tile]:
    """Yield the pieces of `tile`, one tile each."""
    rows, columns = tile.shape
    for n in range(tile.pieces):
        q, k = tile.q_start + n * rows, tile.k_start + n * columns
        yield tile._replace(q_start=q, q_stop=q + rows, k_start=k, k_stop=k + columns, pieces=1)


def batched(tiles: Sequence[Tile], most: int) -> Iterator[Tile]:
    """Yield full tiles and causal squares in few tiles of at most `most` subtiles; drawn at the top of this file.

    Tiles that are not worth it, or that a batch cannot have, are yielded as they are.
    """
    batches: dict[object, list[list[Tile]]] = {}  # by what all subtiles of a tile share
    for tile in sorted(tiles, key=lambda tile: tile[:4]):
        if tile.band not in (FULL, CAUSAL) or tile.pieces > 1 or max(tile.shape) > _LONG:
            yield tile
            continue
        started = batches.setdefault((tile.band, tile.batch), [])
        for batch in started[-_OPEN:]:
            if len(batch) < most and _follows(tile, batch[-1]):
                batch.append(tile)
                break
        else:
            started.append([tile])
    for started in batches.values():
        for batch in started:
            if len(batch) < _FEWEST:
                yield from batch
            else:
                subtiles = tuple(tile[:4] for tile in batch)
                yield batch[0]._replace(q_stop=batch[-1].q_stop, k_stop=batch[-1].k_stop, subtiles=subtiles)


def _follows(tile: Tile, last: Tile) -> bool:
    """Return whether `tile` comes after `last` on both sides, with no more rows between them than both have."""
    gaps = (tile.q_start - last.q_stop, tile.k_start - last.k_stop)
    return all(0 <= gap <= one + other for gap, one, other in zip(gaps, tile.shape, last.shape, strict=True))


def split_tail(tiles: Sequence[Tile], tail_share: float) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Return the work of a visit in two, head and tail, the tail with about that share; cut between two keys.

    Half of the keys of a causal square are a quarter of its work:

        queries   c . . .        head    c .   and below it    tail    . .
                  f c . .                f c                           . .
                  f f c .                              f f             c .
                  f f f c                              f f             f c
    """
    if not tail_share or not tiles:
        return tuple(tiles), ()
    first, stop = min(tile.k_start for tile in tiles), max(tile.k_stop for tile in tiles)
    splits = [_between_keys(tiles, first + n * (stop - first) // _CUTS) for n in range(1, _CUTS + 1)]
    wanted = tail_share * _pairs_of(tiles)
    return min(splits, key=lambda split: abs(_pairs_of(split[1]) - wanted))


def _between_keys(tiles: Sequence[Tile], column: int) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Return the tiles on keys before `column`, and those on keys from it on."""
    before: list[Tile] = []
    after: list[Tile] = []
    for tile in tiles:
        if tile.k_stop <= column:
            before.append(tile)
        elif tile.k_start >= column:
            after.append(tile)
        else:
            shift = column - tile.k_start  # a band is counted from the tile's first key
            before += banded(tile._replace(k_stop=column), *tile.band)
            after += banded(tile._replace(k_start=column), *_shifted(tile.band, shift))
    return tuple(before), tuple(after)


def _shifted(band: Band, shift: int) -> Band:
    """Return the band counted from `shift` keys further on."""
    lower, upper = (None if edge is None else edge - shift for edge in band)
    return Band(lower, upper)


def _pairs_of(tiles: Sequence[Tile]) -> int:
    """Return how many pairs attend in all batch rows of these tiles."""
    return sum(tile.work * (1 if tile.batch is None else tile.batch[1] - tile.batch[0]) for tile in tiles)


def _staircase(tile: Tile, first: int, step: int, band: Band, most: int) -> Iterator[Tile]:
    """Yield squares of `step` rows down a diagonal: square n begins at row n * step, and its keys `first` further."""
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
            yield from banded(part, *_shifted(band, part.k_start - keys))  # the band is that of the whole square


def _fits(start: int, length: int, low: int, high: int) -> bool:
    return low <= start and start + length <= high
