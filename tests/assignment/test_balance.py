"""Even work under every mask, and bytes that grow with what a mask leaves, as data: no process, no attention."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Keys,
    Mask,
    PerRow,
    PrefixLM,
    PrefixTree,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    key_padding,
    shard_batch,
)
from burst_plugin.assignment import balance, chunks
from burst_plugin.assignment.balance import choose_tokens, imbalance, work_by_rank
from burst_plugin.assignment.chunks import assign_chunks
from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.sequence.layout import LAYOUTS, positions, token_count
from burst_plugin.sequence.mask import work_by_token
from burst_plugin.types import SIDES, row_count


def long_tailed(seed: int, count: int = 64) -> tuple[int, ...]:
    """Where documents of lognormal lengths begin; the longest are a hundred times the median."""
    drawn = random.Random(seed)
    starts = [0]
    for _ in range(count):
        starts.append(starts[-1] + max(1, int(drawn.lognormvariate(7, 1.5))))
    return tuple(starts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", [Strategy(layout="auto"), Strategy(layout="auto", ulysses_degree=4)], ids=str)
def test_auto_is_even_for_long_tailed_documents(seed: int, strategy: Strategy) -> None:
    """Long enough for computing to take longer than sending."""
    starts = tuple(8 * start for start in long_tailed(seed))
    mask, table = Causal() & Documents(starts), RouteTable(Topology(4, 8), strategy)
    tokens = choose_tokens(table, starts[-1], mask)
    assert imbalance(table, Attending(tokens, tokens, mask)) <= 1.05
    assert tokens.holders is not None
    held = [token_count(runs) for runs in table.shards(tokens)]
    assert max(held) - min(held) <= 1
    whole = Tokens(starts[-1], layout="zigzag")
    assert imbalance(table, Attending(whole, whole, mask)) > 1.5, "without a choice it is not"


def test_auto_is_even_for_a_prompt_that_attends_both_ways() -> None:
    mask, table = BidirectionalSpans(((0, 5000),)), RouteTable(Topology(1, 4), Strategy(layout="auto"))
    tokens, zigzag = choose_tokens(table, 1 << 13, mask), Tokens(1 << 13, layout="zigzag")
    assert imbalance(table, Attending(tokens, tokens, mask)) <= 1.05
    assert imbalance(table, Attending(zigzag, zigzag, mask)) > 1.3, "without a choice it is not"


NO_WORK = {
    "padding alone": key_padding(torch.zeros(2, 64, dtype=torch.bool)) & Causal(),
    "documents of padding": Documents((0, 32, 64), (0, 0)) & Causal(),
    "no keys": Keys(()),
    "no blocks": BlockMask.of(torch.zeros(8, 8, dtype=torch.bool), 8),
    "a tree of padding": PrefixTree((-1,), (64,)) & Keys(()),
}


@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(1, 4), Topology(2, 2)], ids=str)
@pytest.mark.parametrize("name", NO_WORK)
def test_auto_assigns_the_tokens_of_a_mask_without_work(name: str, topology: Topology) -> None:
    table, mask = RouteTable(topology, Strategy(layout="auto")), NO_WORK[name]
    for alike in (False, True):
        tokens = choose_tokens(table, 64, mask, alike)
        held = torch.cat([positions(runs) for runs in table.shards(tokens)])
        assert sorted(held.tolist()) == list(range(64))
        assert imbalance(table, Attending(tokens, tokens, mask)) == 1


def test_a_batch_of_padding_alone_is_cut_in_the_auto_layout() -> None:
    batch = {
        "input_ids": torch.ones(2, 16, dtype=torch.int64),
        "attention_mask": torch.zeros(2, 16, dtype=torch.int64),
    }
    cut = shard_batch(batch, ContextParallel(layout="auto"))
    assert cut["input_ids"].shape == (2, 16)


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=["whole documents", "in chunks"])
def test_auto_gives_groups_of_ranks_far_apart_what_it_gives_neighbours(mask: Mask) -> None:
    """Rings of the same four groups, over other ranks."""
    starts = tuple(8 * start for start in long_tailed(0))
    mask &= Documents(starts)
    apart = Strategy(layout="auto", ulysses_degree=2, ulysses_placement="context_first")
    tables = (
        RouteTable(Topology(1, 8), replace(apart, ulysses_placement="head_first")),
        RouteTable(Topology(2, 4), apart),
    )
    neighbours, others = (choose_tokens(table, starts[-1], mask) for table in tables)
    assert neighbours.holders != others.holders
    assert tables[0].runs(neighbours) == tables[1].runs(others)
    assert imbalance(tables[1], Attending(others, others, mask)) <= 1.05


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("topology", [Topology(1, 8), Topology(2, 8), Topology(4, 8)], ids=str)
def test_auto_takes_no_longer_than_any_layout(seed: int, scale: int, topology: Topology) -> None:
    """By its estimate; documents one by one are what Megatron does."""
    starts = tuple(scale * start for start in long_tailed(seed))
    mask, table = Causal() & Documents(starts), RouteTable(topology, Strategy(layout="auto"))
    plain = Attending(Tokens(starts[-1]), Tokens(starts[-1]), mask)
    work = {side: balance.summed_work(plain, side) for side in SIDES}

    def time(tokens: Tokens) -> float:
        return balance.estimated_time(table, Attending(tokens, tokens, mask), work)

    others = [Tokens(starts[-1], starts, "zigzag"), *(Tokens(starts[-1], layout=layout) for layout in LAYOUTS)]
    others += [
        Tokens(starts[-1], holders=assign_chunks(work, topology, 1, number, documents))
        for number in (4, 8, 16)
        for documents in (None, starts)
    ]
    assert time(choose_tokens(table, starts[-1], mask)) <= 1.05 * min(map(time, others))


def test_chunks_of_documents_visit_few_rows() -> None:
    """One long document and many short ones: ranks need what is of the same document, and no more."""
    starts = (0, 1 << 14, *range((1 << 14) + 512, (1 << 16) + 1, 512))
    mask, table = Causal() & Documents(starts), RouteTable(Topology(1, 8), Strategy(layout="auto"))
    tokens = choose_tokens(table, starts[-1], mask)
    striped = Tokens(starts[-1], layout="striped")
    chunks, all_rows = (sum(table.rows_visited(Attending(x, x, mask))) for x in (tokens, striped))
    assert tokens.holders is not None
    assert chunks < 0.5 * all_rows


def test_auto_is_not_even_at_any_price() -> None:
    """A document has twice the work of a rank, which is little: to cut it and others would take longer."""
    starts = (0, 64, *range(64 + 16, 8 * 1024 + 1, 16))
    mask, table = Causal() & Documents(starts), RouteTable(Topology(8, 8), Strategy(layout="auto"))
    tokens = choose_tokens(table, starts[-1], mask)
    attending = Attending(tokens, tokens, mask)
    assert table.most_rows_moved(attending)[0] == 0
    assert 1.5 < imbalance(table, attending) < 5


@pytest.mark.parametrize("length", [64, 66, 68])
def test_ranks_hold_equally_many_if_they_have_to(length: int) -> None:
    """In zigzag they hold 16 or 17 of 66 tokens, and unequal numbers of 68, as of chunks not."""
    table, mask = RouteTable(Topology(1, 4), Strategy(layout="auto")), Causal() & Documents((0, 30, 40, length))
    if length == 66:
        with pytest.raises(ValueError, match="4 ranks cannot hold equally many of 66 tokens; 72 would do"):
            choose_tokens(table, length, mask, alike=True)
        return
    held = [token_count(runs) for runs in table.shards(choose_tokens(table, length, mask, alike=True))]
    assert held == [length // 4] * 4


def test_short_sequences_are_not_cut_into_shreds() -> None:
    """Causal documents are cut where ranks need it; under other masks there are four chunks for each rank."""
    table, documents = RouteTable(Topology(1, 4), Strategy(layout="auto")), Documents((0, 30, 40, 64))
    with mock.patch.object(balance, "assign_chunks", wraps=assign_chunks) as looked_at:
        choose_tokens(table, 64, SlidingWindow(20) & documents)
        assert {call.args[3] for call in looked_at.mock_calls} == {4}
        looked_at.reset_mock()
        tokens = choose_tokens(table, 64, Causal() & documents)
    assert not looked_at.mock_calls
    assert max(map(len, table.shards(tokens))) <= 4


def test_batch_rows_of_unlike_documents_count_as_one() -> None:
    """Computing is that of all rows, and what is sent is too: as if all had the same documents."""
    starts = long_tailed(3)
    documents, table = Documents(starts), RouteTable(Topology(4, 8), Strategy(layout="auto"))
    one, many = Causal() & documents, Causal() & PerRow((documents,) * 16)
    assert (many.documents, PerRow((documents, Full())).documents) == (starts, None)
    assert choose_tokens(table, starts[-1], one) == choose_tokens(table, starts[-1], many)
    plain = Tokens(starts[-1], layout="contiguous")
    times = [
        balance.estimated_time(table, attending, {side: balance.summed_work(attending, side) for side in SIDES})
        for attending in (Attending(plain, plain, one), Attending(plain, plain, many))
    ]
    assert times[0] == times[1]


def test_fewer_tokens_than_chunks() -> None:
    assert chunks.work_by_chunk(torch.tensor([0, 5, 6, 8]), 6).tolist() == [0, 5, 0, 1, 0, 2]


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
    with mock.patch.object(balance, "assign_chunks", side_effect=AssertionError("chunks are not looked at")):
        tokens = choose_tokens(table, length, mask)
    assert tokens.layout == layout
    assert imbalance(table, Attending(tokens, tokens, mask)) <= 1.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_work_by_rank_is_that_of_the_tiles(layout: str) -> None:
    table = RouteTable(Topology(2, 3), Strategy(layout=layout))
    tokens = Tokens(67)
    attending = Attending(tokens, tokens, SlidingWindow(20, 3) & Documents((0, 30, 67)))
    for local, moving in (("q", "kv"), ("kv", "q")):
        tiles = [table.route(rank, PassKey(attending, moving, True)).tiles for rank in range(6)]
        found = [sum(tile.work for visit in visits.values() for tile in visit) for visits in tiles]
        assert work_by_rank(table, attending, local) == found


def test_what_is_hidden_counts_a_little() -> None:
    """Two documents over two nodes of two ranks: each in one, or in both; computing takes longer than sending."""
    mask = SlidingWindow(1000) & Documents((0, 1 << 15, 1 << 16))
    table = RouteTable(Topology(2, 2), Strategy(layout="auto"))
    plain = Attending(Tokens(1 << 16), Tokens(1 << 16), mask)
    work = {side: balance.summed_work(plain, side) for side in SIDES}
    near, far = (Tokens(1 << 16, holders=holders) for holders in ((0, 1, 2, 3), (0, 2, 1, 3)))
    near_time, far_time = (balance.estimated_time(table, Attending(each, each, mask), work) for each in (near, far))
    computing = max(balance.work_of_shares(table, near, work["q"]))
    assert computing < near_time < far_time < 1.5 * computing


def test_many_ranks_have_fewer_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who meets whom has to be found out."""
    monkeypatch.setattr(balance, "MOST_CHUNKS", 4 * 8)
    starts = tuple(8 * start for start in long_tailed(0))
    mask = PrefixLM(8) & Documents(starts)
    with mock.patch.object(balance, "assign_chunks", wraps=assign_chunks) as looked_at:
        choose_tokens(RouteTable(Topology(2, 2), Strategy(layout="auto")), starts[-1], mask)
    assert max(call.args[3] for call in looked_at.mock_calls) == 8


def test_a_window_of_4096_in_a_million_tokens_costs_what_it_needs() -> None:
    """64 ranks: rows sent and pairs worked on, against what the window needs whatever the schedule."""
    length, window = 1 << 20, 4096
    table, mask = RouteTable(Topology(8, 8), Strategy(layout="auto")), SlidingWindow(window - 1)
    tokens = choose_tokens(table, length, mask)
    attending = Attending(tokens, tokens, mask)
    routes = [table.route(rank, PassKey(attending, "kv", True)) for rank in range(64)]
    assert {route.schedule.name for route in routes} == {"direct"}
    sent = {"gather": 0, "reduce": 0}
    for route in routes:
        posted = [t for step in route.schedule.steps for t in step.issue if t.src == route.schedule.rank]
        for transfer in posted:
            assert transfer.rows is not None
            sent[transfer.traffic.value] += row_count(transfer.rows)
    needed = 63 * (window - 1)  # at each seam between two ranks, the keys that reach over it
    assert needed <= sent["gather"] <= 1.05 * needed
    assert needed <= sent["reduce"] <= 1.05 * needed
    work = sum(tile.work for route in routes for visit in route.tiles.values() for tile in visit)
    assert work == int(work_by_token(mask, (length, length)).sum())
    assert imbalance(table, attending) <= 1.05


def test_imbalance_is_that_of_the_worse_side() -> None:
    """Every query attends to as many keys, but all of them are at the first rank."""
    table, mask = RouteTable(Topology(1, 4), Strategy(layout="contiguous")), Keys(((0, 16),))
    attending = Attending(Tokens(32), Tokens(64), mask)
    assert work_by_rank(table, attending, "q") == [128] * 4
    assert work_by_rank(table, attending, "kv") == [512, 0, 0, 0]
    assert imbalance(table, attending) == 4.0


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


def test_auto_considers_the_layouts_that_say_they_suit_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is best contiguous; where that does not suit windows, another layout is taken."""
    table, mask = RouteTable(Topology(2, 8), Strategy(layout="auto")), SlidingWindow(255)
    assert choose_tokens(table, 1 << 14, mask).layout == "contiguous"
    windows = replace(LAYOUTS["contiguous"], suits=lambda mask: not isinstance(mask, SlidingWindow))
    monkeypatch.setattr(balance, "LAYOUTS", {**LAYOUTS, "contiguous": windows})
    assert choose_tokens(table, 1 << 14, mask).layout == "zigzag"
    assert choose_tokens(table, 1 << 14, mask & Full()).layout == "contiguous", "which is no SlidingWindow"
