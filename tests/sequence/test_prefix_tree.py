"""Prefix trees: the mask's definition, path by path; what cannot be a tree is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from burst_plugin import (
    Causal,
    CausalBottomRight,
    Documents,
    Full,
    Keys,
    Mask,
    PerRow,
    PrefixLM,
    PrefixTree,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
)
from burst_plugin.assignment.balance import choose_tokens, imbalance
from burst_plugin.ring.routes import Attending
from burst_plugin.sequence.mask import Region, allowed, work_by_token
from tests.support.drawn import Drawn
from tests.support.reference import Problem, Result, errors, painted, reference

# Two prompts, of which the first has three answers, two of them alike at first; and an empty node.
TREE = PrefixTree((-1, 0, 1, 1, 0, None, 5, 6), (4, 1, 2, 2, 3, 0, 3, 2))  # type: ignore[arg-type]
LENGTH = 17
MASKS: list[Mask] = [
    TREE,
    TREE & SlidingWindow(2),
    SlidingWindow(1) & TREE & Keys(((2, 9),)),
    (TREE & Keys(((1, 12),))) & SlidingWindow(3, None),
    TREE & SlidingWindow(5) & SlidingWindow(3),
    TREE & PrefixLM(3) & SlidingWindow(0),
    CausalBottomRight() & (Full() & TREE),
    Documents(TREE.documents) & TREE & Causal(),
    PerRow((TREE, PrefixTree((-1,), (17,)) & SlidingWindow(1))) & SlidingWindow(3),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_regions_are_the_definition_path_by_path_and_disjoint(mask: Mask) -> None:
    expected = painted(mask, 2, LENGTH, LENGTH)
    found = allowed(mask, (LENGTH, LENGTH), torch.arange(LENGTH), torch.arange(LENGTH))
    assert torch.equal(found.expand_as(expected), expected)
    rows = expected if mask.rows else expected[:1]
    assert torch.equal(work_by_token(mask, (LENGTH, LENGTH)), rows.sum((0, 2)))
    assert torch.equal(work_by_token(mask, (LENGTH, LENGTH), "kv"), rows.sum((0, 1)))


def test_a_tree_is_one_region_per_node_and_with_a_window_one_per_node_that_it_reaches() -> None:
    tree = PrefixTree((-1, *[0] * 8), (400, *[100] * 8))
    assert len(tree.regions(1200, 1200)) == 9
    assert tree.regions(1200, 1200)[0] == Region(0, 1200, 0, 400, None, 0)
    assert len((tree & SlidingWindow(50)).regions(1200, 1200)) == 17
    deep = PrefixTree((-1, 0, 1, 2), (100,) * 4)
    assert len((deep & SlidingWindow(50)).regions(400, 400)) == 7  # each node and its parent


def test_logical_positions_and_the_token_before_count_along_a_path() -> None:
    assert TREE.logical(torch.arange(LENGTH)).tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 4, 5, 6, 0, 1, 2, 3, 4]
    assert TREE.before().tolist() == [-1, 0, 1, 2, 3, 4, 5, 4, 7, 3, 9, 10, -1, 12, 13, 14, 15]
    assert TREE.documents == (0, 12, 17)
    assert TREE.padded(20).documents == (0, 12, 17, 20)
    assert TREE.padded(17) == TREE


def ring_of(mask: Mask, length: int = 8, **scores: object) -> Callable[[], object]:
    """Return a call of attention by two ranks."""
    x = torch.zeros(2, length, 2, 4)
    return lambda: VirtualRing(Topology(1, 2), Strategy()).attention(
        x,
        x,
        x,
        mask=mask,
        scores=Scores(**scores),
        tokens=Tokens(length),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("schedule", "rows"), [("direct", 64), ("two_level_ring", 96)])
def test_a_prompts_keys_cross_to_a_node_once(schedule: str, rows: int) -> None:
    """Eight answers of 16 tokens to a prompt of 64; node 0 holds the prompt and two of them, node 1 the others.

    Of 96 rows in node 0 `direct` sends those of the prompt, a ring all.
    """
    tree = PrefixTree((-1, *[0] * 8), (64, *[16] * 8))
    problem = Problem.draw(tree.length, (4, 2))
    ring = VirtualRing(Topology(2, 2), Strategy(layout="contiguous", schedule=schedule, forward="kv"))
    out, _ = ring.attention(*problem[:3], mask=tree)
    assert errors(Result(out, *problem[:3]), reference(problem, tree))["out"] < 2e-6
    crossed = sum(ring.traffic(rank)["inter"]["gather"] for rank in range(4))
    row_bytes = 2 * (2 * 2 * 8) * 4  # two batch rows and two heads of 8 keys and 8 values in float32
    assert crossed // row_bytes == rows
    assert crossed % row_bytes < 100, "labels of messages"
    assert sum(ring.traffic(rank)["inter"]["reduce"] for rank in range(4)) == 0
    assert all(ring.traffic(rank) == ring.expected_traffic(rank) for rank in range(4))


@pytest.mark.parametrize("mask", [TREE & SlidingWindow(3), PerRow((TREE, TREE & Keys(((2, 9),))))], ids=str)
def test_scores_count_logical_positions_and_a_bias_those_of_the_sequence(mask: Mask) -> None:
    slopes = Scores(alibi_slopes=(0.1, 0.2, 0.3, 0.4), dropout=0.3, seed=0)
    tokens = Tokens(LENGTH)
    case = Drawn(Topology(2, 2), Strategy(), (LENGTH,) * 2, (4, 2), mask=mask, scores=slopes, tokens=tokens)
    assert not replace(case, bias=(2, 4)).check()
    assert not replace(case, strategy=Strategy(forward="q", backward="both"), has_sink=True).check()


@pytest.mark.parametrize("ranks", [(1, 4), (2, 4)])
def test_a_tree_is_assigned_by_its_work(ranks: tuple[int, int]) -> None:
    tree = PrefixTree((-1, *[0] * 8, -1, *[9] * 3), (4096, *[1024] * 8, 900, *[500, 1700, 20]))
    table = VirtualRing(Topology(*ranks), Strategy(layout="auto")).rank_states[0].route_table
    tokens = choose_tokens(table, tree.length, tree, False)
    assert imbalance(table, Attending(tokens, tokens, tree)) < 1.1


def test_keys_move_under_a_tree_unless_queries_are_asked_to() -> None:
    """Queries have even work in zigzag; of the keys, those of the prompt have the work of all answers."""
    tree, x = PrefixTree((-1, *[0] * 8), (64, *[32] * 8)), torch.zeros(1, 320, 4, 8)
    for backward, moving, uneven in (("auto", "kv", 1.14), ("q", "q", 2.26)):
        ring = VirtualRing(Topology(1, 8), Strategy(backward=backward))
        ring.attention(x, x, x, mask=tree)
        state = ring.rank_states[0]
        assert (state.choices["forward"], state.choices["backward"]) == ("kv", moving)
        found = imbalance(state.route_table, Attending(Tokens(320), Tokens(320), tree))
        assert found == pytest.approx(uneven, abs=0.005)
        ring.attention(x, x, x)
        assert state.choices["backward"] == "q", "which is less to send"


ONE, OTHER = PrefixTree((-1, 0, 0), (4, 2, 2)), PrefixTree((-1, 0, 0), (4, 1, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrefixTree((-1, 2, 1), (1, 1, 1)), "parent of node 1, 2, comes after it, or is itself"),
        (lambda: PrefixTree((0,), (1,)), "parent of node 0, 0, comes after it, or is itself"),
        (lambda: PrefixTree((-1, 7), (1, 1)), "parent of node 1, 7, does not exist"),
        (lambda: PrefixTree((-1, -2), (1, 1)), "parent of node 1, -2, does not exist"),
        (lambda: PrefixTree((-1, 0, 0, 1), (1,) * 4), "node 3 continues node 1, but other nodes come between"),
        (lambda: PrefixTree((-1, -1, 0), (1,) * 3), "node 2 continues node 0, but .* number nodes depth-first"),
        (lambda: PrefixTree((-1, 0), (1,)), "2 parents and 1 lengths; give one of each"),
        (lambda: PrefixTree((), ()), "at least one node"),
        (lambda: PrefixTree((-1, 0), (4, -1)), r"node 1 has -1 tokens; give 0 or more"),
        (lambda: PrefixTree((-1, 0.5), (4, 1)), r"PrefixTree\(parents=...\) is not valid: entry 1 is 0.5"),  # type: ignore[arg-type]
        (lambda: PrefixTree(-1, (4,)), r"PrefixTree\(parents=-1\) is not valid; give the parent of every node"),  # type: ignore[arg-type]
        (lambda: PrefixTree((-1,), "4"), r"PrefixTree\(lengths='4'\) is not valid"),  # type: ignore[arg-type]
        (ring_of(ONE, 9), "nodes of PrefixTree add up to 8 tokens, but the sequence has 9.*tree.padded"),
        (lambda: ONE.regions(8, 9), "there are 8 queries and 9 keys"),
        (lambda: ONE & OTHER, "two prefix trees do not combine"),
        (lambda: PerRow((ONE, Causal())) & (OTHER & SlidingWindow(2)), "two prefix trees do not combine"),
        (lambda: ONE & Documents((0, 8), None, (0, 8), (7,)) & OTHER, "two prefix trees do not combine"),
        (lambda: ONE & Documents((0, 4, 8), None, (0, 2, 8)), "have no common positions"),
        (
            ring_of(PerRow((ONE, OTHER)), dropout=0.1, seed=0),
            "which batch rows with different prefix trees do not share",
        ),
        (ring_of(PerRow((ONE, Causal())), alibi_slopes=(1.0, 2.0)), "batch rows with different prefix trees"),
    ],
)
def test_what_is_no_tree_or_cannot_combine_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
