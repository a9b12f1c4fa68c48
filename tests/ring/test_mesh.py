"""Tiles in which both sides move: blocks gathered in groups, rings of one rank of each, results reduced.

What attention gives with it, for drawn shapes, masks and options, is in `test_drawn_calls.py`.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Full,
    Keys,
    PerRow,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    burst_attention,
)
from burst_plugin.comm.buffers import LABEL_BYTES
from burst_plugin.compute.shapes import Shapes
from burst_plugin.kernels import Grads, How, Queries
from burst_plugin.kernels.reference import ReferenceKernel
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.planner import PricedPlan, buffer_bytes, plans
from burst_plugin.planning.price import pass_price
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.ring.systems.mesh import MeshExchange
from burst_plugin.topology import Link
from burst_plugin.types import DIRECTIONS, OTHER_SIDE, Direction, Side
from tests.support.ranks import error_of_survivor, run_ranks, run_ranks_outcomes
from tests.support.reference import Problem, Result, errors, reference


@pytest.mark.parametrize("moving", ["q", "kv"])
@pytest.mark.parametrize(("topology", "degree"), [(Topology(1, 6), 2), (Topology(2, 4), 4), (Topology(2, 2), 4)])
def test_every_pair_of_blocks_is_met_by_one_rank_in_a_tile(topology: Topology, degree: int, moving: Side) -> None:
    """Rank r has the blocks of its group and those of its ring, each pair of them once, its own among them."""
    table = RouteTable(topology, Strategy(mesh_degree=degree, layout="contiguous"))
    tokens = Tokens(topology.ranks)  # one each, so that a token is a block
    met = {}
    for rank in range(topology.ranks):
        group, place = divmod(rank, degree)
        route = table.route(group, PassKey(Attending(tokens, tokens, Full()), moving, True, 1, place))
        held = {
            side: [run.start + n for runs in of_side.values() for run in runs for n in range(run.length)]
            for side, of_side in route.runs.items()
        }
        stays, around = sorted(set(held[OTHER_SIDE[moving]])), sorted(held[moving])
        assert stays == list(range(group * degree, (group + 1) * degree))
        assert around == list(range(place, topology.ranks, degree))
        for pair in ((s, m) for s in stays for m in around):
            assert pair not in met
            met[pair] = rank
    assert len(met) == topology.ranks**2
    assert all(met[rank, rank] == rank for rank in range(topology.ranks))


BLOCKS = {("forward", "q"): 2, ("forward", "kv"): 2, ("backward", "q"): 3, ("backward", "kv"): 4}  # q, out; k, v; ...
ROWS = {("forward", "q"): 1, ("forward", "kv"): 0, ("backward", "q"): 2, ("backward", "kv"): 0}  # lse; factor and lse


def bytes_of_pass(direction: Direction, moving: Side, tile: tuple[int, int], block: int, row: int) -> int:
    """Return what a rank sends for a tile of a x b blocks: (a - 1) S + (b - 1) M blocks of one tensor.

    S and M, of the side that stays and of the one that moves, are 2 forward (q and out, k and v), 3 backward for
    queries (q, dout, dq) and 4 for keys (k, v, dk, dv). Source: Mesh-Attention (arXiv 2512.20968), whose GPUs have
    tiles of a x b blocks, one of either side their own; these are the blocks of it that are not. Besides, queries are
    sent with lse, backward also with a factor, each `row` bytes; and every message has a label.
    """
    sent = 0
    for times, side in ((tile[0] - 1, OTHER_SIDE[moving]), (tile[1] - 1, moving)):
        messages = 1 if (direction, side) == ("forward", "kv") else 2  # operands there, results back
        each = BLOCKS[direction, side] * block + ROWS[direction, side] * row + messages * LABEL_BYTES
        sent += times * each
    return sent


@pytest.mark.parametrize("moving", [("kv", "kv"), ("q", "q"), ("kv", "q")])
@pytest.mark.parametrize(("topology", "degree"), [(Topology(1, 4), 2), (Topology(2, 4), 2), (Topology(2, 2), 4)])
def test_bytes_are_those_of_the_paper(topology: Topology, degree: int, moving: tuple[Side, Side]) -> None:
    rows = 16
    problem = Problem.draw(rows * topology.ranks, (4, 4), 16)  # float32: partial results are as wide as operands
    ring = VirtualRing(topology, Strategy(mesh_degree=degree, forward=moving[0], backward=moving[1]))
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])

    def sent() -> list[int]:
        return [sum(sum(link.values()) for link in ring.traffic(rank).values()) for rank in range(topology.ranks)]

    out, _ = ring.attention(q, k, v, mask=Full())
    after_forward = sent()
    out.backward(problem.dout)
    passes = after_forward, [both - one for both, one in zip(sent(), after_forward, strict=True)]
    tile, row = (degree, topology.ranks // degree), 2 * rows * 4 * 4
    for direction, side, of_ranks in zip(DIRECTIONS, moving, passes, strict=True):
        assert of_ranks == [bytes_of_pass(direction, side, tile, 16 * row, row)] * topology.ranks
    assert all(ring.traffic(rank) == ring.expected_traffic(rank) for rank in range(topology.ranks))


def test_traffic_grows_with_the_square_root_of_the_number_of_ranks() -> None:
    """With a = b = sqrt(P); a ring of keys has a = 1. 16 times as many ranks, blocks 16 times as short."""
    square = [bytes_of_pass("forward", "kv", (n, n), 1 << 30, 0) / 2**30 for n in (4, 16)]
    ring = [bytes_of_pass("forward", "kv", (1, n * n), 1 << 30, 0) / 2**30 for n in (4, 16)]
    assert [round(x) for x in (*square, *ring)] == [12, 60, 30, 510]


def test_auto_counts_what_is_gathered() -> None:
    """Keys of fewer heads are sent where there are more blocks to send: around a long ring, or in a large group."""
    few_keys = Shapes(1, 64, 64, 8, 2, 8, 8, torch.float32)
    sides = [
        choose_moving_side(Strategy(forward="auto", mesh_degree=degree), "forward", few_keys, 16 // degree)
        for degree in (1, 2, 8, 16)
    ]
    assert sides == ["kv", "kv", "q", "q"]


MASKS = {
    "causal": Causal(),
    "documents": Causal() & Documents((0, 5, 20, 31, 61)),
    "window": SlidingWindow(9),
    "rows": PerRow((Causal(), SlidingWindow(4, 4))),
}
OPTIONS: list[dict[str, Any]] = [
    {"mesh_degree": 2, "layout": "striped"},
    {"mesh_degree": 4, "forward": "q", "backward": "q"},
    {"mesh_degree": 2, "schedule": "direct", "backward": "q", "parts": 2},
    {"mesh_degree": 8, "forward": "q", "backward": "kv"},
]


@functools.cache
def _problem(mask: str) -> tuple[Problem, Result]:
    problem = Problem.draw(61, (4, 2), (6, 4), dtype=torch.float64).with_sink()
    scores = Scores(dropout=0.2, seed=5, softcap=2.0)
    return problem, reference(problem, MASKS[mask], scores)


@pytest.mark.parametrize("is_gpu_like", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_exact(mask: str, options: dict[str, Any], is_gpu_like: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of unlike lengths, chunks that were assigned, grouped heads; with labels, and as on GPUs without."""
    if is_gpu_like:
        monkeypatch.setattr(Plan, "label", lambda *_: None)
    problem, truth = _problem(mask)
    ring = VirtualRing(Topology(2, 4), Strategy(**options))
    assigned = Tokens(61, holders=(0, 1, 2, 3, 4, 5, 6, 7, 7, 5, 3, 0)) if mask == "documents" else Tokens(61)
    inputs = [x.clone().requires_grad_() for x in (*problem[:3], problem.sink) if x is not None]
    scores = Scores(dropout=0.2, seed=5, softcap=2.0)
    out, _ = ring.attention(*inputs[:3], sink=inputs[3], mask=MASKS[mask], tokens=assigned, scores=scores)
    found = Result(out.detach(), *torch.autograd.grad(out, inputs, problem.dout))
    assert max(errors(found, truth).values()) < 1e-12
    assert all(ring.traffic(rank) == ring.expected_traffic(rank) for rank in range(8))


@pytest.mark.parametrize("is_gpu_like", [False, True])
def test_all_rows_are_moved_at_once_as_on_gpus(is_gpu_like: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal lengths, a bias that heads share: its rows are gathered, and its gradient is added up."""
    at_once = []
    begin = MeshExchange.begin_at_once
    monkeypatch.setattr(MeshExchange, "begin_at_once", lambda *args: at_once.append(args) or begin(*args))
    if is_gpu_like:
        monkeypatch.setattr(Plan, "label", lambda *_: None)
    problem = Problem.draw(64, (4, 2), dtype=torch.float64).with_bias((2, 1))
    assert problem.bias is not None
    inputs = [x.clone().requires_grad_() for x in (*problem[:3], problem.bias)]
    out, _ = VirtualRing(Topology(1, 8), Strategy(mesh_degree=4)).attention(*inputs[:3], bias=inputs[3])
    *grads, dbias = torch.autograd.grad(out, inputs, problem.dout)
    assert max(errors(Result(out.detach(), *grads, None, dbias), reference(problem, Causal())).values()) < 1e-12
    assert bool(at_once) == is_gpu_like


class _Narrow(ReferenceKernel):
    """Gives results in the type of q, as on GPUs."""

    name = "narrow"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(q, k, v, how)
        return out.to(q.dtype), lse

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        dq, dk, dv, dbias = super().backward(queries, k, v, how)
        return Grads(*(x.to(k.dtype) for x in (dq, dk, dv)), dbias)


def test_results_of_a_group_are_added_up_in_float32() -> None:
    """Out and dq are as near to float32 as in a ring, though one tile gives all of a partial result, in bfloat16."""
    problem = Problem.draw(64, (4, 4), dtype=torch.bfloat16)
    truth = reference(Problem(*(x if x is None else x.float() for x in problem)), Full())
    error = {}
    for degree in (1, 8):
        inputs = [x.clone().requires_grad_() for x in problem[:3]]
        ring = VirtualRing(Topology(1, 8), Strategy(mesh_degree=degree, layout="contiguous", kernel=_Narrow()))
        out, _ = ring.attention(*inputs, mask=Full())
        found = Result(out.detach(), *torch.autograd.grad(out, inputs, problem.dout))
        error[degree] = errors(Result(*(x.float() for x in found[:4])), truth)
    assert all(error[8][name] < 1.1 * error[1][name] for name in ("out", "dq")), error


def test_a_rank_without_work_sends_gradients_of_a_bias_as_the_others_do() -> None:
    """In float32: the first ranks' queries attend to few keys, so that most of their group have none of these."""
    bias = Problem.draw(32, (2, 2), dtype=torch.bfloat16).with_bias((1, 1)).bias
    assert bias is not None
    inputs = [torch.randn(2, 32, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    ring = VirtualRing(Topology(1, 4), Strategy(mesh_degree=4, layout="contiguous"))
    out, _ = ring.attention(*inputs, mask=Keys(((0, 3),)), bias=bias.requires_grad_())
    (dbias,) = torch.autograd.grad(out.float().sum(), bias)
    assert dbias.dtype == torch.bfloat16
    assert bool(dbias[..., 3:].eq(0).all())


# --------------------------------------------------------------------------------------------- over processes


def _train(rank: int, strategies: list[Strategy], problem: Problem, length: int) -> list[tuple[Result, bool, str]]:
    """Whole results of the last of three steps of each strategy; if bytes and buffers are what they should be."""
    found, tokens = [], Tokens(length)
    for strategy in strategies:
        cp, buffers = ContextParallel(dist.group.WORLD, strategy=strategy), []
        for _ in range(3):
            q, k, v = (cp.shard(x, tokens=tokens).requires_grad_() for x in problem[:3])
            out = burst_attention(q, k, v, cp, tokens=tokens)
            grads = torch.autograd.grad(out, (q, k, v), cp.shard(problem.dout, tokens=tokens))
            buffers.append(cp.allocated_bytes())
        whole = [cp.unshard(x, tokens=tokens) for x in (out.detach(), *grads)]
        right = cp.traffic() == cp.expected_traffic() and buffers[1] == buffers[2]
        found.append((Result(*whole), right, cp.describe()["mesh_degree"]))
        cp.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_exact_over_gloo(ranks: int) -> None:
    """All sides, in one node and in two, tiles of either shape, and one group of all ranks."""
    problem = Problem.draw(50, (4, 2))
    truth = reference(problem, Causal())
    degrees = {2: (2,), 4: (2, 4), 8: (4,)}[ranks]
    strategies = [
        Strategy(mesh_degree=degree, ranks_per_node=per_node, forward=forward, backward=backward)
        for degree in degrees
        for per_node, forward, backward in ((ranks, "kv", "q"), (ranks // 2, "q", "kv"))
    ]
    for of_rank in run_ranks(_train, ranks, strategies, problem, 50):
        for (found, right, said), strategy in zip(of_rank, strategies, strict=True):
            assert right, strategy
            assert said == str(strategy.mesh_degree)
            assert max(errors(found, truth).values()) < 2e-6, strategy


def _differ(rank: int) -> None:
    x = torch.randn(1, 4, 2, 8)
    strategy = Strategy(mesh_degree=2 if rank else 1, ranks_per_node=2, backward="q")
    burst_attention(x, x, x, ContextParallel(dist.group.WORLD, strategy=strategy))


def test_ranks_that_gather_in_unlike_groups_are_told() -> None:
    for outcome in run_ranks_outcomes(_differ, 2):
        assert outcome.error is not None
        assert "rank 0: mesh_degree=1; rank 1: mesh_degree=2" in outcome.error


def test_a_rank_that_is_lost_while_blocks_are_gathered_is_named() -> None:
    error = error_of_survivor(mesh_degree=2)
    assert re.search(r"rank 1 of .* was missed at the exchange of blocks of call 3", error)


def test_what_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"ulysses_degree=2 and mesh_degree=4 cannot be combined: .* leave one"):
        Strategy(ulysses_degree=2, mesh_degree=4)
    with pytest.raises(ValueError, match="ulysses_placement='context_first' and mesh_degree=2 cannot be combined"):
        Strategy(ulysses_placement="context_first", mesh_degree=2)
    for direction in DIRECTIONS:
        with pytest.raises(ValueError, match=f"{direction}='both' and mesh_degree=2 cannot be combined: .* use"):
            Strategy(**{direction: "both"}, mesh_degree=2)
    with pytest.raises(ValueError, match="mesh_degree=0 is not valid; use a positive number"):
        Strategy(mesh_degree=0)
    with pytest.raises(ValueError, match=r"mesh_degree=3 does not divide .* use one of \[1, 2, 4, 8\]"):
        VirtualRing(Topology(2, 4), Strategy(mesh_degree=3))


# -------------------------------------------------------------------------------------------------- the planner


def test_a_mesh_is_priced_by_its_blocks_and_compared_with_a_bound() -> None:
    """4 x 4 blocks on one node: 3 blocks of either side are sent, of which those of the group never hide."""
    topology, links, one_s = Topology(1, 16), Links(1e9, 1e9), 1e-3
    shapes = Shapes(1, 1000, 1000, 1, 1, 250, 250, torch.float32)  # q, k, v or out: 1 MB
    mesh = Strategy(mesh_degree=4, schedule="flat_ring")
    price = pass_price(mesh, "forward", topology, shapes, 0.0, links)
    lse_s = 3 * 1000 * 4 / 1e9
    assert price.time_s == pytest.approx((3 * 2 + 3 * 2) * one_s + lse_s)
    assert price.link_s[Link.INTRA] == pytest.approx(price.time_s)
    busy = pass_price(mesh, "forward", topology, shapes, 2 * one_s, links)  # a visit, of 4 blocks, hides a hop
    assert busy.compute_s == pytest.approx(16 * 2 * one_s)
    assert busy.time_s == pytest.approx(busy.compute_s + 3 * 2 * one_s + lse_s)
    found = plans(topology, shapes, (0.0, 0.0), links, fixed={"mesh_degree": 4})
    assert {plan.strategy.mesh_degree for plan in found} == {4}
    assert {plan.strategy.ulysses_degree for plan in found} == {1}
    assert all(plan.strategy.mesh_degree == 1 for plan in plans(topology, shapes, (0.0, 0.0), links))
    without = PricedPlan(mesh, price, price, ("kv", "kv"))
    more = buffer_bytes(without, topology, shapes) - buffer_bytes(
        without._replace(strategy=Strategy(schedule="flat_ring")), Topology(1, 4), shapes
    )
    assert more == 2 * 3 * 1000 * (2 * 250 + 2) * 4, "to send and to receive q and dout, lse and a factor"
    with pytest.raises(ValueError, match=r"no plan .* has mesh_degree=3; leave one of these options out"):
        plans(topology, shapes, (0.0, 0.0), links, fixed={"mesh_degree": 3})
