"""Which rows of which blocks ranks are sent, and by which schedule, as data: no process, no attention."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from burst_plugin import (
    BlockMask,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
)
from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.sequence import required_rows
from burst_plugin.sequence.layout import LAYOUTS, positions
from burst_plugin.sequence.tiles import key_rows
from burst_plugin.types import Side
from tests.support.reference import painted


def test_queries_and_keys_of_unlike_strides_are_refused_by_every_rank() -> None:
    """Also by those that would find nothing to do."""
    mask = SlidingWindow(0) & Documents((0, 6, 8, 16), lengths=(0, 2, 0))
    q, kv = Tokens(16, layout="striped"), Tokens(16, layout="contiguous")
    for rank in range(4):
        table = RouteTable(Topology(1, 4), Strategy())
        with pytest.raises(ValueError, match="runs with different strides do not make tiles"):
            table.route(rank, PassKey(Attending(q, kv, mask), "kv", True))


def test_chunks_for_another_number_of_ranks_are_refused() -> None:
    cp = ContextParallel()
    with pytest.raises(
        ValueError, match=r"Tokens\(holders=\(0, 1\)\) is for 2 ranks, but the context-parallel group has 1"
    ):
        cp.shard(torch.zeros(1, 8), tokens=Tokens(8, holders=(0, 1)))


@pytest.mark.parametrize("moving", ["q", "kv"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "chunks"])
@pytest.mark.parametrize(
    "mask",
    [
        SlidingWindow(3),
        SlidingWindow(2) & Documents((0, 9, 30, 64)),
        Causal() & Documents((0, 9, 30, 64)),
        BlockMask(16, ((True, False, False, False), (True, True) * 2, (False,) * 4, (False, True) * 2)),
        SlidingWindow(20, 9) & BlockMask(8, ((True,) * 8, (False,) * 8) * 4),
    ],
    ids=str,
)
def test_ranks_need_the_rows_that_the_mask_says(mask: Mask, layout: str, moving: Side) -> None:
    """Against the painted mask, pair by pair: exactly, but for what lies between keys of a striped rank."""
    holders = tuple(rank * 5 % 14 for rank in range(3 * 14))
    tokens = Tokens(64, holders=holders) if layout == "chunks" else Tokens(64, layout=layout)
    table = RouteTable(Topology(2, 7), Strategy())
    pairs = table.pairs(Attending(tokens, tokens, mask))
    allowed = painted(mask, 1, 64, 64)[0]
    regions = pairs._regions[0][1]
    if moving == "q":
        allowed, regions = allowed.T, regions.transposed
    held = [positions(runs) for runs in table.runs(tokens)]
    meetings = required_rows.Meetings([regions], pairs.runs["kv"], 10**6)
    for rank in range(14):
        expected = [allowed[held[rank]][:, held[owner]].any(0).nonzero()[:, 0].tolist() for owner in range(14)]
        found = meetings.of(pairs.runs["q"][rank])
        assert sorted(found) == [owner for owner in range(14) if expected[owner]]
        for owner, spans in found.items():
            rows = [row for start, stop in spans for row in range(start, stop)]
            if layout == "striped":
                assert (rows[0], rows[-1]) == (expected[owner][0], expected[owner][-1])
            else:
                assert rows == expected[owner]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_bytes_of_a_window_grow_with_the_window_and_not_with_the_sequence(layout: str) -> None:
    table = RouteTable(Topology(2, 4), Strategy(layout=layout))

    def rows(length: int, window: int) -> int:
        attending = Attending(Tokens(length), Tokens(length), SlidingWindow(window))
        return sum(table.most_rows_moved(attending))

    assert rows(1 << 14, 256) == rows(1 << 18, 256)
    assert rows(1 << 18, 1024) == 4 * rows(1 << 18, 256)


def test_what_a_ring_carries_in_vain_is_left_out() -> None:
    """Contiguous and causal: half of all visits are empty, and a block stops at the last rank."""
    table = RouteTable(Topology(1, 4), Strategy(layout="contiguous", schedule="flat_ring"))
    attending = Attending(Tokens(64), Tokens(64), Causal())
    schedules = [table.route(rank, PassKey(attending, "kv", False)).schedule for rank in range(4)]
    assert [[step.visit for step in mine.steps[:4]] for mine in schedules] == [
        [0, None, None, None],
        [1, 0, None, None],
        [2, 1, 0, None],
        [3, 2, 1, 0],
    ]
    sent = [[t for step in mine.steps for t in step.issue if t.src == mine.rank] for mine in schedules]
    assert [*map(len, sent)] == [1, 2, 3, 0]


def test_auto_keeps_the_ring_where_everything_is_needed() -> None:
    table = RouteTable(Topology(2, 4), Strategy())
    for mask in (Causal(), Full()):
        attending = Attending(Tokens(256), Tokens(256), mask)
        assert table.route(0, PassKey(attending, "kv", True)).schedule.name == "two_level_ring"


def test_auto_keeps_the_ring_where_a_block_would_cross_many_times() -> None:
    table = RouteTable(Topology(2, 4), Strategy(layout="contiguous"))
    attending = Attending(Tokens(256), Tokens(256), Causal())
    assert table.pairs(attending).required("kv") is not None
    assert table.route(0, PassKey(attending, "kv", True)).schedule.name == "two_level_ring"


def test_half_of_all_blocks_is_not_everything() -> None:
    table, mask = RouteTable(Topology(1, 4), Strategy(layout="contiguous")), Documents((0, 32, 64))
    found = table.pairs(Attending(Tokens(64), Tokens(64), mask)).required("kv")
    assert found is not None
    assert [sorted(owners) for owners in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_little_of_some_blocks_is_not_everything() -> None:
    """A quarter of every block of the other half, though three quarters of all rows."""
    table = RouteTable(Topology(1, 4), Strategy(layout="contiguous"))
    mask = BlockMask(4, tuple(tuple(i // 8 == j // 8 or j % 4 == 0 for j in range(16)) for i in range(16)))
    found = table.pairs(Attending(Tokens(64), Tokens(64), mask)).required("kv")
    assert found is not None
    assert found[0] == {0: ((0, 16),), 1: ((0, 16),), 2: ((0, 4),), 3: ((0, 4),)}


def test_what_is_remembered_of_calls_is_bounded() -> None:
    table = RouteTable(Topology(1, 2), Strategy())
    for window in range(150):
        table.route(0, PassKey(Attending(Tokens(16), Tokens(16), SlidingWindow(window)), "kv", True))
    remembered = (table._pairs, table._schedules, table._routes)
    assert all(len(known) <= 2 * 64 for known in remembered)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("moving", ["q", "kv"])
def test_of_many_ranks_only_those_near_by_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, layout: str, moving: Side
) -> None:
    """A window, 512 ranks: each meets itself and the next one, in zigzag on both of its chunks."""
    looked_at = []
    monkeypatch.setattr(required_rows, "key_rows", lambda *args: looked_at.append(args) or key_rows(*args))
    table = RouteTable(Topology(64, 8), Strategy(layout=layout))
    attending = Attending(Tokens(1 << 18), Tokens(1 << 18), SlidingWindow(50))
    found = table.pairs(attending).required(moving)
    assert found is not None
    assert sum(map(len, found)) == (512 + 511 if layout == "contiguous" else 512 + 2 * 511)
    assert len(looked_at) < 3 * sum(map(len, found))
    assert table.route(300, PassKey(attending, moving, True)).schedule.name == "direct"


def test_where_too_many_meet_blocks_go_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(required_rows, "MOST_MEETINGS", 2000)
    table = RouteTable(Topology(8, 40), Strategy(schedule="flat_ring"))
    attending = Attending(Tokens(6400), Tokens(6400), SlidingWindow(50))
    assert table.pairs(attending).required("kv") is None
    assert table.dense(False) == SCHEDULES["flat_ring"](Topology(8, 40), False, None)


def test_packed_documents_that_need_everything_are_not_looked_through() -> None:
    """Three ranks are enough to see that, so that a new batch of documents costs little time."""
    starts = tuple(range(0, 64 * 32 + 1, 64))
    mask, tokens = Causal() & Documents(starts), Tokens(starts[-1], starts)
    table = RouteTable(Topology(2, 8), Strategy())
    attending = Attending(tokens, tokens, mask)
    with mock.patch.object(
        required_rows.Meetings, "of", autospec=True, side_effect=required_rows.Meetings.of
    ) as looked_at:
        assert table.route(3, PassKey(attending, "kv", True)).schedule.name == "two_level_ring"
    assert looked_at.call_count == 3


def test_three_ranks_are_not_looked_at_for_long() -> None:
    """64 ranks, 1000 documents, each spread over all ranks: each of these meets some 129 runs of every document."""
    starts = tuple(range(0, 1000 * 512 + 1, 512))
    mask, tokens = Causal() & Documents(starts), Tokens(starts[-1], starts)
    table = RouteTable(Topology(8, 8), Strategy())
    with mock.patch.object(required_rows, "key_rows", side_effect=key_rows) as looked_at:
        assert table.pairs(Attending(tokens, tokens, mask)).required("kv") is None
    assert looked_at.call_count <= 3 * 200_000 / 64
