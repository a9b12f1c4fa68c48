"""How causal documents that fill a sequence are spread over ranks: even, within nodes, and soon decided."""

from __future__ import annotations

import time

import pytest

from burst_plugin import Causal, Documents, Full, Mask, PerRow, SlidingWindow, Strategy, Tokens, Topology
from burst_plugin.assignment.balance import choose_tokens, imbalance, work_by_rank
from burst_plugin.assignment.document_costs import DocumentCosts, causal_documents
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.sequence.layout import token_count
from burst_plugin.types import SIDES
from tests.support.packed import LENGTH, fewest_crossing, log_normal, rounded, rows_crossing

SIGMAS = (0.5, 1.0, 1.5)
SHAPES = {name: Topology(*map(int, name.split("x"))) for name in ("1x8", "2x4", "4x2", "4x4", "4x8", "8x8")}


def packed(seed: int, sigma: float) -> tuple[tuple[int, ...], Mask]:
    starts = log_normal(seed, sigma)
    return starts, Causal() & Documents(starts)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_have_as_many_tokens_and_even_work_and_few_rows_cross(shape: str, sigma: float) -> None:
    """A tenth of the rows of documents one by one in zigzag; where one needs several nodes, twice the fewest.

    Of documents that are about as long a fiftieth: nodes hold nearly all of them whole.
    """
    topology = SHAPES[shape]
    for seed in range(3):
        starts, mask = packed(seed, sigma)
        table = RouteTable(topology, Strategy(layout="auto"))
        tokens = choose_tokens(table, LENGTH, mask, alike=True)
        attending = Attending(tokens, tokens, mask)
        held = table.shards(tokens)
        assert {token_count(runs) for runs in held} == {LENGTH // topology.ranks}
        assert sum(map(len, held)) <= 64 + 6 * topology.ranks, "each cut makes a run or two"
        assert imbalance(table, attending) <= 1.05
        if topology.nodes > 1:
            zigzag = LENGTH * (topology.nodes - 1)
            allowed = max(zigzag / (50 if sigma == 0.5 else 10), 2 * fewest_crossing(starts, topology))
            assert rows_crossing(table, attending) <= allowed


def test_documents_one_by_one_in_zigzag_cross_to_every_node() -> None:
    """What the test above compares with."""
    starts = rounded(log_normal(0, 1.0), 2 * 8)
    mask, tokens, table = (
        Causal() & Documents(starts),
        Tokens(starts[-1], starts),
        RouteTable(Topology(4, 2), Strategy()),
    )
    assert rows_crossing(table, Attending(tokens, tokens, mask)) == 3 * starts[-1]
    assert abs(starts[-1] - LENGTH) < LENGTH / 500


@pytest.mark.alone
def test_choosing_takes_a_few_milliseconds() -> None:
    """For 64 ranks it is 4 to 5 ms of a processor's time."""
    for sigma in SIGMAS:
        _, mask = packed(0, sigma)

        def once(mask: Mask = mask) -> float:
            table = RouteTable(SHAPES["8x8"], Strategy(layout="auto"))
            start = time.process_time()
            choose_tokens(table, LENGTH, mask, alike=True)
            return time.process_time() - start

        assert min(once() for _ in range(5)) < 0.025


@pytest.mark.parametrize("layout", [None, "zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("shape", ["1x4", "2x3", "3x1", "4x2"])
def test_costs_in_closed_form_are_those_of_the_schedule(shape: str, layout: str | None) -> None:
    """Padded documents, and an empty one; in `direct` over counterparts, or straight where few meet."""
    topology = Topology(*map(int, shape.split("x")))
    mask: Mask = Causal() & Documents((0, 50, 50, 60, 200, 480), lengths=(50, 0, 7, 133, 280))
    documents = causal_documents(mask, 480)
    assert documents == [(0, 50), (50, 57), (60, 193), (200, 480)]
    table = RouteTable(topology, Strategy(layout="auto", schedule="direct"))
    tokens = choose_tokens(table, 480, mask) if layout is None else Tokens(480, layout=layout)
    attending = Attending(tokens, tokens, mask)
    costs = DocumentCosts(topology, table.runs(tokens), documents)
    assert costs.work().tolist() == [work_by_rank(table, attending, side) for side in SIDES]
    if layout != "striped":  # of which rows in between count as required, too
        assert costs.rows_visited().tolist() == table.rows_visited(attending)
        assert costs.most_rows_moved() == table.most_rows_moved(attending)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Causal(), [(0, 8)]),
        (Causal() & Documents((0, 3, 8)), [(0, 3), (3, 8)]),
        (Causal() & PerRow((Documents((0, 3, 8)),) * 2), [(0, 3), (3, 8)]),
        (Causal() & PerRow((Documents((0, 3, 8)), Full())), None),
        (Documents((0, 3, 8)), None),
        (SlidingWindow(2) & Documents((0, 3, 8)), None),
        (SlidingWindow(None, 1), None),
    ],
    ids=str,
)
def test_other_masks_are_not_taken_for_causal_documents(mask: Mask, expected: list[tuple[int, int]] | None) -> None:
    assert causal_documents(mask, 8) == expected


def test_the_bound_is_that_of_a_case_by_hand() -> None:
    """One document over two nodes in even shares: all behind 1 / sqrt(2) of it is as much as one may have."""
    assert fewest_crossing((0, 1000), Topology(2, 1), most=1.0) == pytest.approx(1000 / 2**0.5, rel=1e-3)
    assert fewest_crossing((0, 500, 1000), Topology(2, 1)) == 0


def test_all_ranks_choose_the_same() -> None:
    """Whatever they have chosen before."""
    _, mask = packed(4, 1.0)
    fresh, used = (RouteTable(Topology(2, 4), Strategy(layout="auto")) for _ in range(2))
    choose_tokens(used, LENGTH, packed(5, 1.0)[1], alike=True)
    assert repr(choose_tokens(fresh, LENGTH, mask, alike=True)) == repr(choose_tokens(used, LENGTH, mask, alike=True))
