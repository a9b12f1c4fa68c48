"""Tiles: exactly the work of a visit, in rectangles of rows of its two sides.

The regions of a mask and the runs of a query rank and of a key rank give *tiles*: slices of local query and key
rows, each with a band,

    lower <= j - i <= upper        i, j: row of the tile's query and key slice, None: no bound

and nothing else. Without tiles there is no work. Kernels see tiles only.

Zigzag over 2 ranks, causal, chunks a b | b' a' of one length; f: full, c: causal, .: nothing

                        keys of rank 0      keys of rank 1
                          a     a'            b     b'
    queries, rank 0   a   c     .             .     .       one causal tile on the left (the three
                      a'  f     c             f     f       pieces are joined), one full on the right
    queries, rank 1   b   f     .             c     .
                      b'  f     .             f     c

Bands that a kernel lacks are cut into bands that it has. A window of n + 1 keys is a staircase of squares of n rows,
a: anticausal, c: causal,

    queries 0 ... n    a c . .       each column of squares on one diagonal is one tile with `pieces` squares,
            n ... 2n   . a c .       which a kernel works on as a batch
            2n .. 3n   . . a c

Tiles that have neither queries nor keys in common, as with packed documents, are batched into one tile for a
kernel that takes documents of any lengths in one call; c: causal,

    queries of documents 0    c . .
                         1    . c .      one tile with three `subtiles`
                         2    . . c

Regions within spans are cut as if a sequence had the tokens in spans alone. Their tiles are made of rows that are
`taken` together, here of a, b and c without the text between them; later keys attend, and c in all is one tile:

    queries of a  a . f . f
            text  . . . . .
               b  . . a . f
            text  . . . . .
               c  . . . . a
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from burst_plugin.sequence.layout import Run
from burst_plugin.sequence.mask import Region
from burst_plugin.sequence.spans import SpanPlaces, inside, rows_at
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, OTHER_SIDE, Band, Rows, Side, row_count

_CUTS = 8  # places at which a tail can be split off
_FEWEST = 3  # tiles that are worth batching: rows between them have to be left out, and put back
_LONG = 2048  # rows of a tile that is worth a call: kernels launch as many blocks for all subtiles as for the longest
_OPEN = 4  # batches that a tile may still be added to


class Tile(NamedTuple):
    """A part of the work of a visit: query rows `q_start:q_stop` on key rows `k_start:k_stop`, within a band.

    Rows count the local tokens of either side. Row i of these queries attends to row j of these keys where
    `band.lower <= j - i <= band.upper`.

    pieces: if above 1, both ranges are cut into so many equal pieces, and piece n of the queries attends to piece n
        of the keys only, within `band` each.
    batch: the range (start, stop) of batch rows that the tile is for; None is all.
    subtiles: if any, the tile is only these rectangles (q_start, q_stop, k_start, k_stop), one after another on both
        sides, each within `band`: full, or causal or anticausal and square.
    taken: (ranges of query rows, ranges of key rows), if the tile is only these rows; its band counts these alone.
        None if it is all rows.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    band: Band = FULL
    pieces: int = 1
    batch: tuple[int, int] | None = None
    subtiles: tuple[tuple[int, int, int, int], ...] = ()
    taken: tuple[Rows, Rows] | None = None

    @property
    def q(self) -> slice:
        """Return the query rows as a slice."""
        return slice(self.q_start, self.q_stop)

    @property
    def k(self) -> slice:
        """Return the key rows as a slice."""
        return slice(self.k_start, self.k_stop)

    def rows(self, side: Side) -> slice:
        """Return the query rows for side "q", or the key rows for side "kv", as a slice."""
        return self.q if side == "q" else self.k

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of query and key rows of one piece."""
        if self.taken is not None:
            return row_count(self.taken[0]), row_count(self.taken[1])
        return (self.q_stop - self.q_start) // self.pieces, (self.k_stop - self.k_start) // self.pieces

    @property
    def work(self) -> int:
        """Return the number of (query, key) pairs that attend in one batch row; `subtiles` are not looked at."""
        rows, columns = self.shape
        lower, upper = self.band
        up_to_upper = rows * columns if upper is None else _pairs_up_to(upper, rows, columns)
        below_lower = 0 if lower is None else _pairs_up_to(lower - 1, rows, columns)
        return self.pieces * (up_to_upper - below_lower)


def _pairs_up_to(upper: int, rows: int, columns: int) -> int:
    """Return how many pairs have `j - i <= upper`: row i has i + upper + 1 keys, at least none and at most all."""
    first = min(max(0, -upper), rows)  # the first row with a key
    full = min(max(first, columns - upper), rows)  # the first row with all keys
    partial = (full - first) * (first + upper + 1 + full + upper) // 2
    return partial + (rows - full) * columns


class Regions:
    """An index of a mask's regions, which finds regions by the positions of queries.

    within: the regions within spans, by their spans.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        cut = [part for each in regions for part in (each.rectangles() if not _is_by_order(each) else (each,))]
        self.within: dict[Rows, list[Region]] = {}  # by spans
        for region in cut:
            if region.within is not None:
                self.within.setdefault(region.within, []).append(region)
        self._regions = sorted(cut, key=lambda region: region[:4])  # bands may be None
        self._starts = [region.q_start for region in self._regions]
        self._stops = list(accumulate((region.q_stop for region in self._regions), max))

    @property
    def transposed(self) -> Regions:
        """Return the regions with queries and keys exchanged."""
        return Regions([region.transposed for region in self._regions])

    def at(self, first: int, last: int) -> Iterator[Region]:
        """Yield the regions that hold any of the queries `first ... last`."""
        for number in range(bisect_right(self._stops, first), bisect_right(self._starts, last)):
            if self._regions[number].q_stop > first:
                yield self._regions[number]


class RunIndex:
    """An index of runs in any order, which finds runs by position.

    Runs of one rank need not be in ascending order of their starts: a Ulysses group that holds interleaved stripes,
    cut to some rows, has runs in another order.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._numbers = sorted(range(len(runs)), key=lambda number: runs[number].start)
        self._starts = [runs[number].start for number in self._numbers]
        self._lasts = list(accumulate((runs[number].last for number in self._numbers), max))

    def at(self, first: int, last: int) -> list[int]:
        """Return the numbers of the runs that may hold any position of `first ... last`, in order of their starts."""
        return self._numbers[bisect_left(self._lasts, first) : bisect_right(self._starts, last)]


def check_strides(runs: Iterable[Run]) -> None:
    """Raise ValueError unless all runs have one stride."""
    strides = {run.stride for run in runs}
    if len(strides) > 1:
        raise ValueError(
            f"runs with different strides do not make tiles: {sorted(strides)}; give queries and keys layouts of one "
            "stride (layout= of Strategy or Tokens)"
        )


def tiles_of(regions: Regions, q_runs: Sequence[Run], k_runs: Sequence[Run]) -> tuple[Tile, ...]:
    """Return the work of queries in `q_runs` on keys in `k_runs` under a mask's regions, in as few tiles as possible.

    One-sided bands are cut into full and square ones where that is exact, and adjacent tiles joined. Raises
    ValueError for runs with different strides.
    """
    check_strides((*q_runs, *k_runs))
    keys = RunIndex(k_runs)
    k_offsets = [0, *accumulate(run.length for run in k_runs)]
    tiles: list[Tile] = []
    q_offset = 0
    for q_run in q_runs:
        for region in regions.at(q_run.start, q_run.last):
            if region.within is not None:
                continue
            for number in keys.at(*region.keys_of(q_run.start, q_run.last)):
                tiles += _clip(region, q_run, k_runs[number], q_offset, k_offsets[number])
        q_offset += q_run.length
    taken = [tile for spans, inside in regions.within.items() for tile in _taken(spans, inside, q_runs, k_runs)]
    return (*_join(tiles), *taken)


def _is_by_order(region: Region) -> bool:
    """Return whether all later tokens attend, or all earlier ones, which holds among the tokens in spans as well."""
    return region.within is None or region[4:6] in ((1, None), (None, -1))


def _taken(spans: Rows, regions: Sequence[Region], q_runs: Sequence[Run], k_runs: Sequence[Run]) -> Iterator[Tile]:
    """Yield the tiles of regions within spans, found in a sequence that has the tokens of spans alone."""
    places = SpanPlaces(spans)
    (q_inside, q_rows), (k_inside, k_rows) = places.of_runs(q_runs), places.of_runs(k_runs)
    alone = []
    for region in regions:
        q_start, q_stop, k_start, k_stop = map(places.place, region[:4])
        alone.append(Region(q_start, q_stop, k_start, k_stop, region.lower, region.upper))
    for tile in tiles_of(Regions(alone), q_inside, k_inside):
        q, k = rows_at(q_rows, tile.q), rows_at(k_rows, tile.k)
        taken = None if len(q) == len(k) == 1 else (q, k)
        yield Tile(q[0][0], q[-1][1], k[0][0], k[-1][1], tile.band, taken=taken)


def split_taken(tile: Tile) -> Iterator[Tile]:
    """Yield a tile whose rows come from several ranges as tiles of one range of queries and of keys each."""
    if tile.taken is None:
        yield tile
        return
    q_at = 0
    for q_start, q_stop in tile.taken[0]:
        k_at = 0
        for k_start, k_stop in tile.taken[1]:
            part = Tile(q_start, q_stop, k_start, k_stop, batch=tile.batch)
            yield from banded(part, *_shifted(tile.band, k_at - q_at))
            k_at += k_stop - k_start
        q_at += q_stop - q_start


def key_rows(region: Region, q_run: Run, k_run: Run) -> tuple[int, int]:
    """Return the row range (start, stop) of `k_run` that `q_run` attends to; none if start is not below stop."""
    tile, lower, upper = _clipped(region, q_run, k_run)
    rows, columns = tile.shape
    if rows <= 0 or (lower is not None and upper is not None and lower > upper):
        return 0, 0
    first, end = 0 if lower is None else max(0, lower), columns if upper is None else min(columns, rows + upper)
    return tile.k_start + first, tile.k_start + end


def _clip(region: Region, q_run: Run, k_run: Run, q_offset: int, k_offset: int) -> Iterator[Tile]:
    """Yield the tiles of one run on another."""
    tile, lower, upper = _clipped(region, q_run, k_run)
    if min(tile.shape) > 0:
        q, q_stop, k, k_stop = tile[:4]
        yield from banded(Tile(q_offset + q, q_offset + q_stop, k_offset + k, k_offset + k_stop), lower, upper)


def _clipped(region: Region, q_run: Run, k_run: Run) -> tuple[Tile, int | None, int | None]:
    """Return the rows of one run on another in a region, and their band: `key - query = k - q + stride * (j - i)`."""
    stride = q_run.stride
    q_first, rows = inside(q_run, region.q_start, region.q_stop)
    k_first, columns = inside(k_run, region.k_start, region.k_stop)
    ahead = k_run.start - q_run.start + stride * (k_first - q_first)
    lower = None if region.lower is None else -((ahead - region.lower) // stride)
    upper = None if region.upper is None else (region.upper - ahead) // stride
    return Tile(q_first, q_first + rows, k_first, k_first + columns), lower, upper


def banded(tile: Tile, lower: int | None, upper: int | None) -> Iterator[Tile]:
    """Cut a band out of a full tile of one piece; yield the tiles that it leaves, without empty rows and columns.

    Row i of the tile's queries keeps row j of its keys where `lower <= j - i <= upper`; None is no bound.
    """
    parts = _banded(tile, lower, upper)
    return parts if tile.batch is None else (part._replace(batch=tile.batch) for part in parts)


def _banded(tile: Tile, lower: int | None, upper: int | None) -> Iterator[Tile]:
    """Yield the tiles of `banded`, for all batch rows."""
    q, q_stop, k, k_stop = tile[:4]
    if lower is not None and upper is not None and lower > upper:  # strides step over a narrow band
        return
    if upper is not None and upper < 0:  # the first rows have no key
        q, lower, upper = q - upper, None if lower is None else lower - upper, 0
    if lower is not None and lower > 0:  # the first columns have no query
        k, lower, upper = k + lower, 0, None if upper is None else upper - lower
    if lower is not None:
        q_stop = min(q_stop, q + k_stop - k - lower)
    if upper is not None:
        k_stop = min(k_stop, k + q_stop - q + upper)
    rows, columns = q_stop - q, k_stop - k
    if rows <= 0 or columns <= 0:
        return
    if lower is not None and lower <= 1 - rows:
        lower = None
    if upper is not None and upper >= columns - 1:
        upper = None
    if lower is None and upper is not None:
        yield from _causal(Tile(q, q_stop, k, k_stop), upper)
    elif upper is None and lower is not None:
        yield from _anticausal(Tile(q, q_stop, k, k_stop), -lower)
    else:
        yield Tile(q, q_stop, k, k_stop, Band(lower, upper))


def _causal(tile: Tile, ahead: int) -> Iterator[Tile]:
    """Yield `j - i <= ahead`, 0 or more: whole columns on the left, a causal square, and whole rows below it."""
    q, q_stop, k, k_stop = tile[:4]
    if ahead:
        yield Tile(q, q_stop, k, k + ahead)
        k += ahead
    square = min(q_stop - q, k_stop - k)
    yield Tile(q, q + square, k, k + square, CAUSAL)
    if q + square < q_stop:
        yield Tile(q + square, q_stop, k, k + square)


def _anticausal(tile: Tile, behind: int) -> Iterator[Tile]:
    """Yield `j - i >= -behind`, 0 or more: whole rows on top, an anticausal square, whole columns right of it."""
    q, q_stop, k, k_stop = tile[:4]
    if behind:
        yield Tile(q, q + behind, k, k_stop)
        q += behind
    square = min(q_stop - q, k_stop - k)
    yield Tile(q, q + square, k, k + square, ANTICAUSAL)
    if k + square < k_stop:
        yield Tile(q, q + square, k + square, k_stop)


def _join(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Join causal stairs, then full tiles side by side and one above the other, until nothing changes."""
    joined, before = tiles, None
    while len(joined) > 1 and before != len(joined):
        before = len(joined)
        joined = _beside(_beside(_stairs(joined), "q"), "kv")
    return tuple(sorted(joined, key=lambda tile: tile[:4]))


def _stairs(tiles: list[Tile]) -> list[Tile]:
    """Join two causal squares and the full rectangle below the first to one causal square."""
    result = dict.fromkeys(tiles)
    squares = {}
    for tile in tiles:
        rows, columns = tile.shape
        if tile.band == CAUSAL and rows == columns:
            squares[tile.q_start, tile.k_start] = tile
    for start in sorted(squares):
        if start not in squares:
            continue
        square = squares[start]
        while next_square := squares.get((square.q_stop, square.k_stop)):
            corner = Tile(next_square.q_start, next_square.q_stop, square.k_start, square.k_stop)
            if corner not in result:
                break
            for part in (square, next_square, corner):
                result.pop(part, None)
            del squares[next_square.q_start, next_square.k_start]
            square = Tile(square.q_start, next_square.q_stop, square.k_start, next_square.k_stop, CAUSAL)
            squares[start] = square
            result[square] = None
    return list(result)


def _beside(tiles: list[Tile], side: Side) -> list[Tile]:
    """Join full tiles with the same rows on `side` and adjacent ones on the other."""
    other_side = OTHER_SIDE[side]
    joined = [tile for tile in tiles if tile.band != FULL]
    full = [tile for tile in tiles if tile.band == FULL]
    full.sort(key=lambda t: (t.rows(side).start, t.rows(side).stop, t.rows(other_side).start))
    last: Tile | None = None
    for tile in full:
        if (
            last is None
            or last.rows(side) != tile.rows(side)
            or last.rows(other_side).stop != tile.rows(other_side).start
        ):
            last = tile
            joined.append(tile)
        else:
            last = joined[-1] = Tile(last.q_start, tile.q_stop, last.k_start, tile.k_stop)
    return joined


def cut(tile: Tile, most: int) -> Iterator[Tile]:
    """Cut a tile into full, causal and anticausal tiles of at most `most` pieces; drawn at the top of this file."""
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
    """Yield the pieces of a tile, one tile of one piece each."""
    rows, columns = tile.shape
    for n in range(tile.pieces):
        q, k = tile.q_start + n * rows, tile.k_start + n * columns
        yield tile._replace(q_start=q, q_stop=q + rows, k_start=k, k_stop=k + columns, pieces=1)


def batched(tiles: Sequence[Tile], most: int) -> Iterator[Tile]:
    """Yield full tiles, and causal and anticausal squares, joined into few tiles of at most `most` subtiles each.

    Tiles that are too long for joining to pay, or that cannot be joined, are yielded as they are.
    """
    batches: dict[object, list[list[Tile]]] = {}  # by what all subtiles of a tile share
    for tile in sorted(tiles, key=lambda tile: tile[:4]):
        if tile.band not in (FULL, CAUSAL, ANTICAUSAL) or tile.pieces > 1 or tile.taken or max(tile.shape) > _LONG:
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
    """Return the tiles of a visit in two, head and tail, cut between two keys where the tail is nearest to its share.

    tail_share: of the work, from 0 to 1; with 0 the tail is empty. Half of the keys of a causal square are a quarter
        of its work:

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
        if tile.k_stop <= column or (tile.taken and tile.k_start < column):
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
    full = [n for n in squares if q + (n + 1) * step <= q_stop and _fits(k + first + n * step, step, k, k_stop)]
    for at in range(0, len(full), most):
        count, shift = len(full[at : at + most]), full[at] * step
        rows, keys = q + shift, k + first + shift
        yield Tile(rows, rows + count * step, keys, keys + count * step, band, count)
    for n in squares:
        if full and full[0] <= n <= full[-1]:
            continue
        rows, keys = q + n * step, k + first + n * step
        part = Tile(rows, min(rows + step, q_stop), max(keys, k), min(keys + step, k_stop))
        if part.k_start < part.k_stop:
            yield from banded(part, *_shifted(band, part.k_start - keys))  # the band is that of the whole square


def _fits(start: int, length: int, low: int, high: int) -> bool:
    return low <= start and start + length <= high
