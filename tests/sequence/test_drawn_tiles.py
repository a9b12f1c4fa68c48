"""Drawn layouts and masks: tiles are all of the work, and required rows are those of the tiles.

`BURST_SOAK=2000 bash tests/run.sh tests/sequence/test_drawn_tiles.py` draws that many cases, other ones every time,
instead of the same 150. Whole attention calls are drawn in `tests/test_drawn_calls.py`.
"""

from __future__ import annotations

import os
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burst_plugin import Tokens
from burst_plugin.ring.routes import Attending, Pairs
from burst_plugin.sequence import required_rows
from burst_plugin.sequence.mask import work_by_token
from burst_plugin.sequence.tiles import Regions, tiles_of
from burst_plugin.types import SIDES, Side, merged
from tests.support.draws import cu_seqlens, layouts, masks

SOAK = int(os.environ.get("BURST_SOAK", "0"))
DRAWN = settings(
    max_examples=SOAK or 150, deadline=None, derandomize=not SOAK, suppress_health_check=[HealthCheck.too_slow]
)


@DRAWN
@given(st.data(), st.integers(1, 9), st.integers(1, 60))
def test_tiles_are_all_of_the_work_and_nothing_else(data: st.DataObject, ranks: int, size: int) -> None:
    mask = data.draw(masks(size, size, per_row=False))
    tokens = Tokens(size, data.draw(st.one_of(st.none(), cu_seqlens(size))))
    layout = data.draw(layouts(ranks))
    runs = [layout.runs(rank, ranks, tokens) for rank in range(ranks)]
    regions = Regions(mask.regions(size, size))
    work = sum(tile.work for q in runs for k in runs for tile in tiles_of(regions, q, k))
    assert work == int(work_by_token(mask, (size, size)).sum())


@DRAWN
@given(st.data(), st.integers(1, 9), st.integers(1, 60))
def test_required_rows_are_the_rows_of_the_tiles(data: st.DataObject, ranks: int, size: int) -> None:
    mask = data.draw(masks(size, size))
    tokens = Tokens(size, data.draw(st.one_of(st.none(), cu_seqlens(size))))
    layout = data.draw(layouts(ranks))
    runs = [layout.runs(rank, ranks, tokens) for rank in range(ranks)]
    pairs = Pairs(Attending(tokens, tokens, mask), {"q": runs, "kv": runs})
    side: Side
    for side in SIDES:
        with mock.patch.object(required_rows, "MOST_ROWS", 2.0):  # not even all of them
            found = pairs.required(side)
        visits = [[pairs.of_visit(side, owner, rank) for owner in range(ranks)] for rank in range(ranks)]
        assert found == [
            {
                owner: merged((tile.rows(side).start, tile.rows(side).stop) for tile in tiles)
                for owner, tiles in enumerate(by_owner)
                if tiles
            }
            for by_owner in visits
        ]
