"""Passes in which both sides move, each in half of the visits (DistFlashAttn's schedule), against float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    SlidingWindow,
    Strategy,
    Topology,
    VirtualRing,
)
from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.planner import Links, plans
from burst_plugin.ring.load_balance import imbalance, work_by_rank
from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.ring.systems.both_sides import half_of_visits, work_of_ranks
from burst_plugin.sequence.layout import Tokens
from burst_plugin.types import SIDES, Side
from tests.support.exactness import ring_errors, train_step
from tests.support.ranks import run_ranks
from tests.support.reference import Problem, Result, errors, reference

BALANCED = {"layout": "contiguous", "schedule": "direct", "forward": "both", "backward": "both"}


def run(ring: VirtualRing, problem: Problem, mask: Mask) -> Result:
    """Return out, dq, dk, dv; check that every rank sent what its schedules count."""
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = ring.attention(q, k, v, mask=mask)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    for rank in range(ring.network.ranks):
        assert ring.traffic(rank) == ring.expected_traffic(rank)
    return Result(out.detach(), *grads)


@pytest.mark.parametrize(
    ("topology", "mask", "options"),
    [
        (Topology(1, 2), Causal(), {}),
        (Topology(1, 4), Causal(), {}),
        (Topology(1, 5), Causal(), {"parts": 2}),
        (Topology(1, 8), Causal(), {}),
        (Topology(2, 4), Causal(), {}),
        (Topology(4, 2), Causal(), {"schedule": "two_level_ring"}),
        (Topology(1, 6), Full(), {"schedule": "flat_ring"}),
        (Topology(3, 2), Full(), {}),
        (Topology(1, 5), SlidingWindow(9), {"layout": "striped"}),
        (Topology(2, 3), Causal() & Documents((0, 7, 30, 48)), {"layout": "zigzag", "schedule": "auto"}),
        (Topology(1, 4), Causal(), {"forward": "kv"}),
        (Topology(1, 4), Causal(), {"backward": "q", "schedule": "tasp", "parts": 2}),
        (Topology(1, 8), Causal(), {"ulysses_degree": 2}),
    ],
    ids=str,
)
def test_it_is_exact(topology: Topology, mask: Mask, options: dict[str, Any]) -> None:
    problem = Problem.draw(48, (4, 2), dtype=torch.float64)
    ring = VirtualRing(topology, Strategy(**{**BALANCED, **options}))
    found = errors(run(ring, problem, mask), reference(problem, mask))
    assert max(found.values()) < 1e-13, found


def _over_gloo(rank: int, problem: Problem, truth: Result) -> dict[str, float]:
    return ring_errors(Strategy(**BALANCED, ranks_per_node=max(2, dist.get_world_size() // 2)), problem, truth)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_exact_over_gloo_and_bytes_as_counted(ranks: int) -> None:
    problem = Problem.draw(6 * ranks, (4, 2))
    for found in run_ranks(_over_gloo, ranks, problem, reference(problem, Causal())):
        assert max(found.values()) < 2e-6, found


def visits(table: RouteTable, rank: int, moving: Side) -> list[tuple[int, int] | None]:
    """By step: whose queries meet whose keys at a rank, of consecutive tokens under a causal mask."""
    tokens = Tokens(8 * table.ring_ranks)
    schedule = table.route(
        rank, PassKey(Attending(tokens, tokens, Causal()), moving, True, visits=half_of_visits)
    ).schedule
    met = [None if step.visit is None else (step.visit, rank) for step in schedule.steps]
    return met if moving == "q" else [pair and pair[::-1] for pair in met]


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_schedule_is_that_of_the_paper(ranks: int) -> None:
    """Step t: rank r works on the keys of rank r - t; if there is none, its keys on the queries of rank r - t + P."""
    table = RouteTable(Topology(1, ranks), Strategy(**BALANCED))
    met = Counter[tuple[int, int]]()
    for rank in range(ranks):
        at_step: dict[int, tuple[int, int]] = {}
        for moving in SIDES:
            for step, pair in enumerate(visits(table, rank, moving)):
                if pair is not None:
                    assert step not in at_step, "a rank has one visit at a time"
                    at_step[step] = pair
        expected = {}
        for step in range(ranks // 2 + 1):
            if rank >= step:
                expected[step] = (rank, rank - step)
            elif 2 * step < ranks:  # at the last of an even number, half of the ranks have nothing to do
                expected[step] = (rank - step + ranks, rank)
        assert at_step == expected
        met.update(at_step.values())
    assert met == {(q, k): 1 for q in range(ranks) for k in range(q + 1)}


@pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(20)], ids=str)
@pytest.mark.parametrize("ranks", [5, 8])
def test_work_is_more_even_than_where_one_side_moves(ranks: int, mask: Mask) -> None:
    tokens = Tokens(8 * ranks)
    attending = Attending(tokens, tokens, mask)
    tables = [
        RouteTable(Topology(1, ranks), Strategy(layout="contiguous", forward=side, backward=side))
        for side in ("both", "kv")
    ]
    even, plain = (imbalance(table, attending) for table in tables)
    halves, (local, _) = work_of_ranks(tables[0], attending), (work_by_rank(tables[1], attending, s) for s in SIDES)
    assert sum(halves) == sum(local)
    assert even <= plain
    if mask == Causal():  # blocks of 64 pairs, and 36 of a rank's own
        assert halves == ([2 * 64 + 36] * 5 if ranks == 5 else [3 * 64 + 36] * 4 + [4 * 64 + 36] * 4)
        assert even == pytest.approx(1.0 if ranks == 5 else 292 / 260)
        assert plain > 1.6


def test_bytes_are_those_of_the_pairs_that_meet() -> None:
    """5 ranks, causal: 7 blocks of keys and values go to queries, and 3 of queries to keys, each in one hop."""
    problem, rows = Problem.draw(40, (4, 2), dtype=torch.float64), 2 * 8
    ring = VirtualRing(Topology(1, 5), Strategy(**BALANCED))
    run(ring, problem, Causal())
    sent = Counter[str]()
    for rank in range(5):
        sent.update(ring.traffic(rank)["intra"])
    dim, label = problem.q.shape[-1], 16
    q, kv, row = (8 * rows * each for each in (4 * dim, 2 * 2 * dim, 4))
    near, far = 7, 3
    assert sent["gather"] == near * 2 * (kv + label) + far * ((q + label) + (2 * q + 2 * row + label))
    assert sent["reduce"] == near * (kv + label) + far * ((q + row + label) + (q + label))


def test_where_queries_would_have_to_take_a_bias_along_it_is_refused() -> None:
    x = torch.zeros(1, 24, 2, 4)
    ring = VirtualRing(Topology(1, 3), Strategy(**BALANCED))
    with pytest.raises(
        ValueError, match=r"forward='both' cannot be combined with a bias.*use forward='kv' or 'auto'"
    ):
        ring.attention(x, x, x, bias=torch.zeros(1, 1, 24, 24))


def test_there_is_no_price_of_it() -> None:
    shapes = Shapes(1, 64, 64, 4, 2, 16, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="backward='both' cannot be planned: it has no price"):
        plans(Topology(1, 4), shapes, (1.0, 1.0), Links(1e9, 1e9), fixed={"backward": "both"})


def _profiled(rank: int) -> tuple[dict[str, int], bool, dict[str, str]]:
    cp = ContextParallel(dist.group.WORLD, strategy=Strategy(**BALANCED))
    problem = Problem.draw(24, (4, 2))
    train_step(cp, problem)
    before = cp.traffic()["intra"]["gather"]
    with cp.profile() as profile:
        train_step(cp, problem)
    totals = profile.summary.totals
    sent = sum(sum(kinds.values()) for total in totals.values() for kinds in total.sent_bytes.values())
    traffic = cp.traffic()["intra"]
    said = cp.describe()
    cp.close()
    return {name: total.passes for name, total in totals.items()}, 2 * sent == sum(traffic.values()) > before, said


def test_both_halves_are_one_pass_of_a_profile() -> None:
    for passes, is_all, said in run_ranks(_profiled, 3):
        assert (passes["forward"], passes["backward"]) == (1, 1)
        assert is_all
        assert said["forward"] == said["backward"] == "kv and q"
