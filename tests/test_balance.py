"""Even work under every mask, and bytes that grow with what a mask leaves, as data: no process, no attention."""

from __future__ import annotations

import random

import pytest
import torch

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Full,
    Keys,
    Mask,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    routes,
)
from burst_plugin.balance import choose_tokens, imbalance, work_by_rank
from burst_plugin.region import work_by_token
from burst_plugin.routes import Attending, RouteTable
from burst_plugin.schedule import SCHEDULES
from burst_plugin.sides import Side
from burst_plugin.tiles import tiles_of


def long_tailed(seed: int, count: int = 64) -> tuple[int, ...]:
    """Where documents of lognormal lengths begin; the longest are a hundred times the median."""
    drawn = random.Random(seed)
    starts = [0]
    for _ in range(count):
        starts.append(starts[-1] + max(1, int(drawn.lognormvariate(7, 1.5))))
    return tuple(starts)


@pytest.mark.parametrize("seed", range(3))
def test_auto_is_even_for_long_tailed_documents(seed: int) -> None:
    starts = long_tailed(seed)
    mask, table = Causal() & Documents(starts), RouteTable(Topology(4, 8), Strategy(layout="auto"))
    tokens = choose_tokens(table, starts[-1], mask)
    assert imbalance(table, Attending(tokens, tokens, mask)) <= 1.05
    whole = Tokens(starts[-1], layout="zigzag")
    assert imbalance(table, Attending(whole, whole, mask)) > 1.5, "without a choice it is not"


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (Causal(), "zigzag"),
        (Full(), "zigzag"),
        (SlidingWindow(1000), "contiguous"),
        (SlidingWindow(500, 500), "contiguous"),
    ],
)
def test_auto_is_even_and_then_sends_least(mask: Mask, layout: str) -> None:
    table, length = RouteTable(Topology(4, 8), Strategy(layout="auto")), 1 << 17
    tokens = choose_tokens(table, length, mask)
    assert tokens.layout == layout
    assert imbalance(table, Attending(tokens, tokens, mask)) <= 1.05


def test_work_by_rank_is_that_of_the_tiles() -> None:
    table = RouteTable(Topology(2, 3), Strategy(layout="contiguous"))
    tokens = Tokens(67)
    attending = Attending(tokens, tokens, SlidingWindow(20, 3) & Documents((0, 30, 67)))
    for home, away in (("q", "kv"), ("kv", "q")):
        tiles = [table.route(rank, attending, away, True).tiles for rank in range(6)]
        found = [sum(tile.work for visit in visits.values() for tile in visit) for visits in tiles]
        assert work_by_rank(table, attending, home) == found


def test_a_window_of_4096_in_a_million_tokens_costs_what_it_needs() -> None:
    """64 ranks: rows sent and pairs worked on, against what the window needs whatever the schedule."""
    length, window = 1 << 20, 4096
    table, mask = RouteTable(Topology(8, 8), Strategy(layout="auto")), SlidingWindow(window - 1)
    tokens = choose_tokens(table, length, mask)
    attending = Attending(tokens, tokens, mask)
    routes = [table.route(rank, attending, "kv", True) for rank in range(64)]
    assert {route.schedule.name for route in routes} == {"direct"}
    sent = {"gather": 0, "reduce": 0}
    for route in routes:
        for transfer in route.schedule.sends:
            assert transfer.rows is not None
            sent[transfer.traffic.value] += sum(stop - start for start, stop in transfer.rows)
    needed = 63 * (window - 1)  # at each seam between two ranks, the keys that reach over it
    assert needed <= sent["gather"] <= 1.05 * needed
    assert needed <= sent["reduce"] <= 1.05 * needed
    work = sum(tile.work for route in routes for visit in route.tiles.values() for tile in visit)
    assert work == int(work_by_token(mask, (length, length)).sum())
    assert imbalance(table, attending) <= 1.05


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_bytes_of_a_window_grow_with_the_window_and_not_with_the_sequence(layout: str) -> None:
    table = RouteTable(Topology(2, 4), Strategy(layout=layout))

    def rows(length: int, window: int) -> int:
        attending = Attending(Tokens(length), Tokens(length), SlidingWindow(window))
        return sum(table.most_rows_sent(attending))

    assert rows(1 << 14, 256) == rows(1 << 18, 256)
    assert rows(1 << 18, 1024) == 4 * rows(1 << 18, 256)


def test_what_a_ring_carries_in_vain_is_left_out() -> None:
    """Contiguous and causal: half of all visits are empty, and a block stops at the last rank."""
    table = RouteTable(Topology(1, 4), Strategy(layout="contiguous", schedule="flat_ring"))
    attending = Attending(Tokens(64), Tokens(64), Causal())
    schedules = [table.route(rank, attending, "kv", False).schedule for rank in range(4)]
    assert [[step.visit for step in mine.steps[:4]] for mine in schedules] == [
        [0, None, None, None],
        [1, 0, None, None],
        [2, 1, 0, None],
        [3, 2, 1, 0],
    ]
    assert [sum(1 for _ in mine.sends) for mine in schedules] == [1, 2, 3, 0]


def test_auto_keeps_the_ring_where_everything_is_needed() -> None:
    table = RouteTable(Topology(2, 4), Strategy())
    for mask in (Causal(), Full()):
        attending = Attending(Tokens(256), Tokens(256), mask)
        assert table.route(0, attending, "kv", True).schedule.name == "two_level_ring"


def test_auto_keeps_the_ring_where_a_block_would_cross_many_times() -> None:
    table = RouteTable(Topology(2, 4), Strategy(layout="contiguous"))
    attending = Attending(Tokens(256), Tokens(256), Causal())
    assert table.pairs(attending).needs("kv") is not None
    assert table.route(0, attending, "kv", True).schedule.name == "two_level_ring"


def test_half_of_all_blocks_is_not_everything() -> None:
    table, mask = RouteTable(Topology(1, 4), Strategy(layout="contiguous")), Documents((0, 32, 64))
    needs = table.pairs(Attending(Tokens(64), Tokens(64), mask)).needs("kv")
    assert needs is not None
    assert [sorted(owners) for owners in needs] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_imbalance_is_that_of_the_worse_side() -> None:
    """Every query attends to as many keys, but all of them are at the first rank."""
    table, mask = RouteTable(Topology(1, 4), Strategy(layout="contiguous")), Keys(((0, 16),))
    attending = Attending(Tokens(32), Tokens(64), mask)
    assert work_by_rank(table, attending, "q") == [128] * 4
    assert work_by_rank(table, attending, "kv") == [512, 0, 0, 0]
    assert imbalance(table, attending) == 4.0


def test_what_is_remembered_of_calls_is_bounded() -> None:
    table = RouteTable(Topology(1, 2), Strategy())
    for window in range(150):
        table.route(0, Attending(Tokens(16), Tokens(16), SlidingWindow(window)), "kv", True)
    remembered = (table._pairs, table._schedules, table._routes)
    assert all(len(known) <= 2 * 64 for known in remembered)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("traveller", ["q", "kv"])
def test_of_many_ranks_only_those_near_by_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, layout: str, traveller: Side
) -> None:
    """A window, 512 ranks: each meets itself and the next one, in zigzag on both of its chunks."""
    looked_at = []
    monkeypatch.setattr(routes, "tiles_of", lambda *args: looked_at.append(args) or tiles_of(*args))
    table = RouteTable(Topology(64, 8), Strategy(layout=layout))
    attending = Attending(Tokens(1 << 18), Tokens(1 << 18), SlidingWindow(50))
    needs = table.pairs(attending).needs(traveller)
    assert needs is not None
    assert sum(map(len, needs)) == len(looked_at) == (512 + 511 if layout == "contiguous" else 512 + 2 * 511)
    assert table.route(300, attending, traveller, True).schedule.name == "direct"


def test_where_too_many_meet_blocks_go_to_all() -> None:
    table = RouteTable(Topology(8, 40), Strategy(schedule="flat_ring"))
    attending = Attending(Tokens(6400), Tokens(6400), SlidingWindow(5000))
    assert table.pairs(attending).needs("kv") is None
    assert table.dense(False) == SCHEDULES["flat_ring"](Topology(8, 40), False, None)


def test_auto_has_to_be_asked() -> None:
    cp = ContextParallel(layout="auto")
    x = torch.arange(12).view(1, 12)
    with pytest.raises(
        ValueError, match=r"layout='auto' depends on the mask: let tokens = cp.tokens\(length, mask\)"
    ):
        cp.shard(x)
    tokens = cp.tokens(12, SlidingWindow(3))
    assert torch.equal(cp.unshard(cp.shard(x, tokens=tokens), tokens=tokens), x)
    assert cp.imbalance(SlidingWindow(3), tokens) == 1.0


def test_packed_documents_that_need_everything_are_not_looked_through() -> None:
    """Three ranks are enough to see that, so that a new batch of documents costs little time."""
    starts = tuple(range(0, 64 * 32 + 1, 64))
    mask, tokens = Causal() & Documents(starts), Tokens(starts[-1], starts)
    table = RouteTable(Topology(2, 8), Strategy())
    attending = Attending(tokens, tokens, mask)
    pairs = table.pairs(attending)
    looked_at: set[int] = set()
    original = pairs._needs_of

    def needs_of(rank: int, away: str) -> dict[int, tuple[tuple[int, int], ...]]:
        looked_at.add(rank)
        return original(rank, away)

    pairs._needs_of = needs_of  # type: ignore[method-assign]
    assert table.route(3, attending, "kv", True).schedule.name == "two_level_ring"
    assert looked_at == {0, 8, 15}
