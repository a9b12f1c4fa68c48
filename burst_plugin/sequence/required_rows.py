"""Required rows: the rows of each rank's block that every other rank works on, found from positions.

Ranks that are far apart are not compared with each other. A window over four ranks, contiguous; k: the keys that
queries of rank 2 attend to

    rank 0       rank 1       rank 2       rank 3
    . . . . . . . . . . . k k k k k k k k . . . . . .      the last two rows of block 1, and all of block 2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from burst_plugin.sequence.layout import Run, token_count
from burst_plugin.sequence.mask import Region
from burst_plugin.sequence.tiles import Regions, RunIndex, key_rows
from burst_plugin.types import Rows, merged, row_count

MOST_MEETINGS = 200_000  # of runs, above which required rows are not worked out; so many take half a second
MOST_ROWS = 0.4  # causal masks in zigzag require half of a block, or more, if it has some tokens

Shards = Sequence[Sequence[Run]]  # by rank: the runs that it holds
RequiredRows = Sequence[Mapping[int, Rows]]  # by rank and owner, see `schedule.Required`


def find_required_rows(regions: Sequence[Regions], local: Shards, moving: Shards) -> RequiredRows | None:
    """Return, for every rank, the rows that it needs of each moving block; None if blocks should go to all ranks.

    A rank's rows are row ranges by the block's owner. Blocks should go to all ranks if the first, the middle and the
    last rank, as a sample, each need 40 % or more of the rows of every block; or if so many runs meet that finding
    the rows would take too long.

    regions: of the masks of all batch rows, with the side that stays as queries.
    local, moving: for each rank the runs that it holds of the side that stays, and of the side that moves. All runs
        have one stride.
    """
    samples = [local[rank] for rank in dict.fromkeys((0, len(local) // 2, len(local) - 1))]
    try:
        sampled = Meetings(regions, moving, MOST_MEETINGS * len(samples) // len(local))
        if all(sampled.are_most(sampled.of(held)) for held in samples):
            return None
        meetings = Meetings(regions, moving, MOST_MEETINGS)
        return [meetings.of(held) for held in local]
    except _TooManyError:
        return None


class _TooManyError(Exception):
    """More runs meet than are looked at."""


class Meetings:
    """The runs of moving blocks that meet given ones; raises _TooManyError after `most` of them in all."""

    def __init__(self, regions: Sequence[Regions], moving: Shards, most: int) -> None:
        self._regions, self._blocks, self._left = regions, moving, most
        self._runs: list[tuple[Run, int, int]] = []  # with their owners, and the rows before them in the block
        for owner, held in enumerate(moving):
            offsets = accumulate((run.length for run in held), initial=0)
            self._runs += [(run, owner, offset) for run, offset in zip(held, offsets, strict=False)]
        self._index = RunIndex([run for run, *_ in self._runs])

    def of(self, held: Sequence[Run]) -> dict[int, Rows]:
        """Return by owner the rows of its block that these runs work on, if any."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for owner, rows in self._met(held):
            ranges.setdefault(owner, []).append(rows)
        return {owner: merged(ranges[owner]) for owner in sorted(ranges)}

    def _met(self, held: Sequence[Run]) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (owner, row range of its block) wherever one of these runs meets one of the block's."""
        for run in held:
            yield from self._met_at_once(run) if run.stride == 1 else self._met_by_region(run)

    def _met_at_once(self, run: Run) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (owner, row range) for consecutive queries: the keys of all regions together, without gaps."""
        key_ranges = []
        for region, first, last in self._regions_at(run):
            low, high = region.keys_of(first, last)
            if low <= high:
                key_ranges.append((low, high + 1))
        self._count(len(key_ranges))
        for low, stop in merged(key_ranges):
            numbers = self._index.at(low, stop - 1)
            self._count(len(numbers) - 1)  # the first one is counted already
            for number in numbers:
                other, owner, offset = self._runs[number]
                start, end = max(low - other.start, 0), min(stop - other.start, other.length)
                if start < end:
                    yield owner, (offset + start, offset + end)

    def _met_by_region(self, run: Run) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (owner, row range) for queries with gaps between them, which may leave keys out."""
        for region, first, last in self._regions_at(run):
            numbers = self._index.at(*region.keys_of(first, last))
            self._count(len(numbers))
            for number in numbers:
                other, owner, offset = self._runs[number]
                start, stop = key_rows(region, run, other)
                if start < stop:
                    yield owner, (offset + start, offset + stop)

    def _regions_at(self, run: Run) -> Iterator[tuple[Region, int, int]]:
        """Yield the regions that a run meets, with the first and the last of its positions in each."""
        for regions in self._regions:
            for whole in regions.at(run.start, run.last):
                for region in whole.met_by(run.start, run.last):
                    first, last = max(run.start, region.q_start), min(run.last, region.q_stop - 1)
                    if first <= last:
                        yield region, first, last

    def _count(self, meetings: int) -> None:
        self._left -= meetings
        if self._left < 0:
            raise _TooManyError

    def are_most(self, required: Mapping[int, Rows]) -> bool:
        """Return whether these are most rows of every block."""
        return all(
            row_count(required.get(owner, ())) >= MOST_ROWS * token_count(block)
            for owner, block in enumerate(self._blocks)
        )
