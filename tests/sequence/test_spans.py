"""Tokens in spans as a sequence of their own: their places, and the tiles of rows that are taken together."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import (
    BidirectionalSpans,
    ContextParallel,
    Documents,
    Mask,
    SlidingWindow,
    Strategy,
    Tokens,
    burst_attention,
)
from burst_plugin.sequence.layout import LAYOUTS, Run, positions
from burst_plugin.sequence.mask import Region, allowed
from burst_plugin.sequence.spans import SpanPlaces, rows_at
from burst_plugin.sequence.tiles import Regions, Tile, split_taken, tiles_of
from burst_plugin.types import ANTICAUSAL, CAUSAL
from tests.support.reference import Problem, reference

FRAMES = tuple((start, start + 6) for start in range(2, 128, 8))  # 16, with two tokens of text before each
ONE_GROUP = BidirectionalSpans(FRAMES, (0,) * len(FRAMES))


def test_places_count_tokens_in_spans() -> None:
    places = SpanPlaces(((2, 5), (6, 8), (8, 8), (9, 11)))
    assert [places.place(position) for position in range(12)] == [0, 0, 0, 1, 2, 3, 3, 4, 5, 5, 6, 7]


@pytest.mark.parametrize(
    ("runs", "found", "rows"),
    [
        ([Run(0, 12)], [Run(0, 7)], [(2, 5), (6, 8), (9, 11)]),
        ([Run(4, 3), Run(10, 2)], [Run(2, 2), Run(6, 1)], [(0, 1), (2, 3), (3, 4)]),
        ([Run(0, 2), Run(5, 1)], [], []),
        ([Run(1, 4, 3)], [Run(2, 1, 3), Run(4, 1, 3), Run(6, 1, 3)], [(1, 2), (2, 3), (3, 4)]),
    ],
    ids=["all", "some", "none", "every third"],
)
def test_runs_are_those_of_the_tokens_in_spans(
    runs: list[Run], found: list[Run], rows: list[tuple[int, int]]
) -> None:
    assert SpanPlaces(((2, 5), (6, 8), (9, 11))).of_runs(runs) == (found, rows)


def test_rows_are_found_by_their_places() -> None:
    rows = [(2, 5), (6, 8), (8, 9), (20, 30)]
    assert rows_at(rows, slice(1, 7)) == ((3, 5), (6, 9), (20, 21))
    assert rows_at(rows, slice(6, 7)) == ((20, 21),)


def test_one_group_is_one_tile_more() -> None:
    causal, ahead = tiles_of(Regions(ONE_GROUP.regions(128, 128)), [Run(0, 128)], [Run(0, 128)])
    assert causal == Tile(0, 128, 0, 128, CAUSAL)
    assert (ahead.band, ahead.shape) == (ANTICAUSAL, (95, 95))
    assert ahead.taken is not None
    assert ahead.taken[0] == (*FRAMES[:-1], (122, 127))
    assert ahead.taken[1] == ((3, 8), *FRAMES[1:])
    assert ahead.work == 96 * 95 // 2


def test_few_tiles_in_each_visit_of_many_frames() -> None:
    frames = tuple((start, start + 80) for start in range(8, 96 * 384, 96))
    regions = Regions(BidirectionalSpans(frames, (0,) * 384).regions(96 * 384, 96 * 384))
    runs = [LAYOUTS["zigzag"].runs(rank, 4, Tokens(96 * 384)) for rank in range(4)]
    assert max(len(tiles_of(regions, q, k)) for q in runs for k in runs) <= 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mask",
    [
        ONE_GROUP,
        ONE_GROUP & Documents((0, 50, 51, 128)),
        ONE_GROUP & SlidingWindow(5, None),
        ONE_GROUP & SlidingWindow(None, 9),
        BidirectionalSpans(FRAMES, (0,) * len(FRAMES), left=7),
        BidirectionalSpans(FRAMES, (0, 1) * 8) & BidirectionalSpans(FRAMES[1:9], (0,) * 8),
    ],
    ids=["alone", "documents", "window", "window ahead", "window beside", "two"],
)
def test_rows_that_are_taken_together_are_the_same_work(layout: str, mask: Mask) -> None:
    runs = [LAYOUTS[layout].runs(rank, 3, Tokens(128)) for rank in range(3)]
    regions = Regions(mask.regions(128, 128))
    for q in runs:
        for k in runs:
            tiles = tiles_of(regions, q, k)
            found = torch.zeros(sum(run.length for run in q), sum(run.length for run in k), dtype=torch.int64)
            for tile in (part for whole in tiles for part in split_taken(whole)):
                rows, keys = torch.arange(tile.q_start, tile.q_stop), torch.arange(tile.k_start, tile.k_stop)
                ahead = keys - tile.k_start - (rows - tile.q_start).unsqueeze(1)
                low = -999 if tile.band.lower is None else tile.band.lower
                high = 999 if tile.band.upper is None else tile.band.upper
                found[rows.unsqueeze(1), keys] += (ahead >= low) & (ahead <= high)
            at = (positions(each, torch.device("cpu")) for each in (q, k))
            assert torch.equal(found, allowed(mask, (128, 128), *at).long())
            assert sum(tile.work for tile in tiles) == int(found.sum())


def test_a_region_within_spans_is_cut_for_what_needs_rectangles() -> None:
    region = Region(0, 9, 0, 9, 1, None, ((1, 3), (6, 8)))
    assert list(region.rectangles()) == [
        Region(1, 3, 1, 3, 1, None),
        Region(1, 3, 6, 8, 1, None),
        Region(6, 8, 6, 8, 1, None),
    ]
    assert list(region.met_by(3, 5)) == []
    assert list(region.met_by(2, 4)) == [Region(1, 3, 1, 3, 1, None), Region(1, 3, 6, 8, 1, None)]


def test_largest_scores_of_a_group_are_found() -> None:
    """Rows that are taken together have none."""
    problem, cp = Problem.draw(128, (4, 2)), ContextParallel(strategy=Strategy(kernel="reference"))
    out, found = burst_attention(*problem[:3], cp, mask=ONE_GROUP, return_max_logits=True)
    scores = torch.einsum("bihd,bjhd->hbij", problem.q, problem.k.repeat_interleave(2, 2)) * 8**-0.5
    everyone = torch.arange(128)
    inside = allowed(ONE_GROUP, (128, 128), everyone, everyone)
    torch.testing.assert_close(found, scores.masked_fill(~inside, -torch.inf).amax((1, 2, 3)))
    torch.testing.assert_close(out.double(), reference(problem, ONE_GROUP).out, rtol=1e-5, atol=1e-5)
