"""What a mask leaves of the keys of one block for a chunk of queries: the columns that are needed, and who sees them.

columns of a block   . . a a a . b b b b .      a, b: the parts that some query of the chunk attends to
packed columns           a a a   b b b b        scores are computed of these alone, a window at a time
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from burst_plugin.sequence.tiles import Tile, split_taken
from burst_plugin.types import FULL, Band, merged, row_count


def by_chunk(tiles: Iterable[Tile], size: int) -> dict[int, list[Tile]]:
    """Cut tiles to chunks of `size` query rows; return the tiles of each chunk by its number.

    Chunk c has the query rows from c * size on; its tiles count query rows from there. Chunks without work are left
    out.
    """
    chunks: dict[int, list[Tile]] = {}
    for whole in tiles:
        for tile in split_taken(whole):
            for chunk in range(tile.q_start // size, -(-tile.q_stop // size)):
                cut = _cut(tile, chunk * size, (chunk + 1) * size)
                if cut is not None:
                    chunks.setdefault(chunk, []).append(cut)
    return chunks


def _cut(tile: Tile, start: int, stop: int) -> Tile | None:
    """Return a tile's part in query rows `start:stop`, counted from `start`, without keys that none attends to."""
    first, last = max(start, tile.q_start), min(stop, tile.q_stop)
    skipped, rows, columns = first - tile.q_start, last - first, tile.k_stop - tile.k_start
    lower, upper = (None if edge is None else edge + skipped for edge in tile.band)
    low = 0 if lower is None else max(0, lower)
    high = columns if upper is None else min(columns, rows + upper)
    if low >= high:
        return None
    lower = None if lower is None or lower - low <= 1 - rows else lower - low
    upper = None if upper is None or upper >= high - 1 else upper - low
    k = tile.k_start
    return Tile(first - start, last - start, k + low, k + high, Band(lower, upper), batch=tile.batch)


class ChunkMask:
    """The mask of a chunk of queries on the keys of a block.

    tiles: of the chunk, as `by_chunk` returns them. queries: how many the chunk has.
    ranges: the row ranges of the block that any query attends to; side by side they are the packed columns.
    columns: the number of packed columns.
    """

    def __init__(self, tiles: Sequence[Tile], queries: int) -> None:
        self.ranges = merged((tile.k_start, tile.k_stop) for tile in tiles)
        self.columns = row_count(self.ranges)
        self._tiles, self._queries = tiles, queries
        self._starts = [start for start, _ in self.ranges]
        self._offsets = list(accumulate((stop - start for start, stop in self.ranges), initial=0))

    def packed(self, x: Tensor) -> Tensor:
        """Select the rows of x, one for each row of the block, that any query attends to: the packed columns."""
        parts = [x[start:stop] for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def windows(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, column): rows `start:stop` that queries attend to, and row `start`'s packed column.

        At most `size` rows are yielded at a time; together they are all of `ranges`.
        """
        for (first, last), column in zip(self.ranges, self._offsets[:-1], strict=True):
            for start in range(first, last, size):
                yield start, min(last, start + size), column + start - first

    def allowed(self, start: int, stop: int, device: torch.device) -> Tensor | None:
        """Return which queries attend to packed columns `start:stop`, bool [queries, columns]; None if all do."""
        tiles = list(self._within(start, stop))
        everything = (0, self._queries, 0, stop - start, FULL)
        if any(tile[:5] == everything for tile in tiles):
            return None
        allowed = torch.zeros(self._queries, stop - start, dtype=torch.bool, device=device)
        for tile in tiles:
            if tile.band == FULL:
                allowed[tile.q, tile.k] = True
                continue
            rows, columns = tile.shape
            ahead = torch.arange(columns, device=device) - torch.arange(rows, device=device).unsqueeze(1)
            lower, upper = tile.band
            low, high = -rows if lower is None else lower, columns if upper is None else upper
            allowed[tile.q, tile.k] |= (ahead >= low) & (ahead <= high)
        return allowed

    def _within(self, start: int, stop: int) -> Iterator[Tile]:
        """Yield tiles cut to packed columns `start:stop`, counted from `start`."""
        for tile in self._tiles:
            number = bisect_right(self._starts, tile.k_start) - 1
            shift = self._offsets[number] - self._starts[number]
            first, last = max(start, tile.k_start + shift), min(stop, tile.k_stop + shift)
            if first < last:
                skipped = first - (tile.k_start + shift)
                rows, columns = tile.q_stop - tile.q_start, last - first
                lower, upper = (None if edge is None else edge - skipped for edge in tile.band)
                lower = None if lower is None or lower <= 1 - rows else lower
                upper = None if upper is None or upper >= columns - 1 else upper
                yield tile._replace(k_start=first - start, k_stop=last - start, band=Band(lower, upper))
