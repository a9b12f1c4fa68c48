"""Which rows of which blocks every rank works on, found by position, without a look at ranks that are far apart.

A window over four ranks, contiguous; k: the keys that queries of rank 2 attend to

    rank 0       rank 1       rank 2       rank 3
    . . . . . . . . . . . k k k k k k k k . . . . . .      the last two rows of block 1, and all of block 2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from burst_plugin.sequence.layout import Run, token_count
from burst_plugin.sequence.tiles import Regions, RunIndex, key_rows
from burst_plugin.types import Rows, merged

__all__ = ["RequiredRows", "find_required_rows"]

_MOST_MEETINGS = 200_000  # of runs, above which it is not worked out who needs what; this many take half a second
_MOST_ROWS = 0.4  # causal masks in zigzag need half of a block, or more, if it has some tokens

Shards = Sequence[Sequence[Run]]  # by rank: what it holds
RequiredRows = Sequence[Mapping[int, Rows]]  # by rank and owner, see `transfers.Required`


def find_required_rows(regions: Sequence[Regions], home: Shards, travelling: Shards) -> RequiredRows | None:
    """The rows of every travelling block that every rank works on, where `regions` have what is at home as queries.

    Runs are of one stride. None if three ranks, looked at for all, need most rows of every block, or if too many runs
    meet: then blocks go to all.
    """
    some = [home[rank] for rank in dict.fromkeys((0, len(home) // 2, len(home) - 1))]
    try:
        few = _Meetings(regions, travelling, _MOST_MEETINGS * len(some) // len(home))
        if all(few.are_most(few.of(held)) for held in some):
            return None
        meetings = _Meetings(regions, travelling, _MOST_MEETINGS)
        return [meetings.of(held) for held in home]
    except _TooManyError:
        return None


class _TooManyError(Exception):
    """More runs meet than are looked at."""


class _Meetings:
    """What meets the runs that are asked for; raises _TooManyError after `most` of them in all."""

    def __init__(self, regions: Sequence[Regions], travelling: Shards, most: int) -> None:
        self._regions, self._blocks, self._left = regions, travelling, most
        self._runs = [
            (run, owner, offset)
            for owner, held in enumerate(travelling)
            for run, offset in zip(held, accumulate((run.length for run in held), initial=0), strict=False)
        ]
        self._index = RunIndex([run for run, *_ in self._runs])

    def of(self, held: Sequence[Run]) -> dict[int, Rows]:
        """By owner: the rows of its block that these runs work on, if any."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for owner, rows in self._met(held):
            spans.setdefault(owner, []).append(rows)
        return {owner: merged(spans[owner]) for owner in sorted(spans)}

    def _met(self, held: Sequence[Run]) -> Iterator[tuple[int, tuple[int, int]]]:
        for run in held:
            for regions in self._regions:
                for region in regions.at(run.start, run.last):
                    first, last = max(run.start, region.q_start), min(run.last, region.q_stop - 1)
                    numbers = self._index.at(*region.keys_of(first, last))
                    self._left -= len(numbers)
                    if self._left < 0:
                        raise _TooManyError
                    ends = {*numbers[:1], *numbers[-1:]}
                    for number in numbers:
                        other, owner, offset = self._runs[number]
                        inside = run.stride == 1 and number not in ends  # of what is attended to, without a gap
                        start, stop = (0, other.length) if inside else key_rows(region, run, other)
                        if start < stop:
                            yield owner, (offset + start, offset + stop)

    def are_most(self, needed: Mapping[int, Rows]) -> bool:
        """Whether these are most rows of every block."""
        return all(
            sum(stop - start for start, stop in needed.get(owner, ())) >= _MOST_ROWS * token_count(block)
            for owner, block in enumerate(self._blocks)
        )
