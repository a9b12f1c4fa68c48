"""Tokens in spans of a sequence, such as all its images, as a sequence of their own.

sequence    t t a a a t b b t      spans (2, 5), (6, 8)
places      . . 0 1 2 . 3 4 .
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from burst_plugin.sequence.layout import Run
from burst_plugin.types import Rows, merged


class SpanPlaces:
    """The numbering of the tokens that lie in spans, and only of these: a token's place is its number, from 0.

    spans: (start, stop) of positions, in ascending order.
    """

    def __init__(self, spans: Rows) -> None:
        self._spans = spans
        self._starts = [start for start, _ in spans]
        self._before = list(accumulate((stop - start for start, stop in spans), initial=0))

    def place(self, position: int) -> int:
        """Return how many tokens in spans come before a position: the place of a token there, if it is in a span."""
        number = bisect_right(self._starts, position) - 1
        if number < 0:
            return 0
        start, stop = self._spans[number]
        return self._before[number] + min(position, stop) - start

    def of_runs(self, runs: Sequence[Run]) -> tuple[list[Run], list[tuple[int, int]]]:
        """Select the tokens of `runs` that are in spans; return them as runs of places, and as row ranges.

        Rows count the tokens of `runs` in their order; ranges are (start, stop).
        """
        place_runs: list[Run] = []
        rows: list[tuple[int, int]] = []
        offset = 0
        for run in runs:
            first_span, stop_span = (bisect_right(self._starts, edge) for edge in (run.start, run.last))
            for span in self._spans[max(0, first_span - 1) : stop_span]:
                first, count = inside(run, *span)
                if count <= 0:
                    continue
                start = self.place(run.start + first * run.stride)
                if place_runs and place_runs[-1].last + run.stride == start:
                    place_runs[-1] = place_runs[-1]._replace(length=place_runs[-1].length + count)
                else:
                    place_runs.append(Run(start, count, run.stride))
                rows.append((offset + first, offset + first + count))
            offset += run.length
        return place_runs, rows


def rows_at(rows: Sequence[tuple[int, int]], places: slice) -> Rows:
    """Return the row ranges of the rows with numbers `places`, if the rows in the ranges `rows` are numbered from 0.

    rows: (start, stop), ascending.
    """
    ranges, offset = [], 0
    for start, stop in rows:
        first, last = max(start, start + places.start - offset), min(stop, start + places.stop - offset)
        if first < last:
            ranges.append((first, last))
        offset += stop - start
    return merged(ranges)


def inside(run: Run, start: int, stop: int) -> tuple[int, int]:
    """Return which rows of a run are at positions `start:stop`, as (first row, number of rows).

    A number below 1 says that there are none.
    """
    first = max(0, -((run.start - start) // run.stride))
    return first, min(run.length, -((run.start - stop) // run.stride)) - first
