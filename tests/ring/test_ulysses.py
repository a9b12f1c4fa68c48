"""Heads exchanged inside groups: which rows a group holds, the exchange itself, and rings of groups over processes.

What attention gives with it, for drawn shapes, masks and options, is in `test_drawn_calls.py`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Keys,
    Link,
    PerRow,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    Traffic,
    VirtualRing,
    burst_attention,
    key_padding,
)
from burst_plugin.assignment.balance import choose_tokens
from burst_plugin.comm.buffers import Packing
from burst_plugin.comm.in_process import HostileNetwork
from burst_plugin.comm.transport import Channel
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.ring.systems.rank_groups import RankGroup, group_block
from burst_plugin.ring.systems.ulysses import HeadExchange
from burst_plugin.sequence.layout import LAYOUTS, Run, positions
from burst_plugin.strategy.presets import presets_with
from tests.support.ranks import error_of_survivor, run_ranks, run_ranks_outcomes
from tests.support.reference import Problem, Result, errors, reference, reference_lse, relative

SCORES = Scores(dropout=0.2, seed=5, alibi_slopes=(0.1, 0.2, 0.3, 0.4))


def test_a_group_holds_in_zigzag_what_one_rank_of_fewer_would() -> None:
    shards = [LAYOUTS["zigzag"].runs(rank, 8, Tokens(64)) for rank in range(8)]
    for degree in (2, 4, 8):
        groups = [group_block(shards[first : first + degree]).runs for first in range(0, 8, degree)]
        for rank, runs in enumerate(groups):
            expected = LAYOUTS["zigzag"].runs(rank, len(groups), Tokens(64))
            assert torch.equal(positions(runs), positions(expected))
    assert groups == [(Run(0, 64),)], "one run of all: one kernel call"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [Tokens(24), Tokens(23), Tokens(3), Tokens(24, (0, 5, 5, 24))], ids=str)
def test_joined_rows_say_where_each_came_from(layout: str, tokens: Tokens) -> None:
    shards = [LAYOUTS[layout].runs(rank, 4, tokens) for rank in range(4)]
    for degree in (1, 2, 4):
        group = group_block(shards[:degree])
        assert sum(group.counts) == group.length
        at = positions(group.runs)
        for member, runs in enumerate(shards[:degree]):
            for local, joint, length in group.spans[member]:
                assert at[joint : joint + length].tolist() == positions(runs)[local : local + length].tolist()


@pytest.mark.parametrize(
    ("topology", "degree", "ring"),
    [
        (Topology(2, 4), 1, Topology(2, 4)),
        (Topology(2, 4), 2, Topology(2, 2)),
        (Topology(2, 4), 4, Topology(2, 1)),
        (Topology(2, 4), 8, Topology(1, 1)),
        (Topology(4, 2), 4, Topology(2, 1)),
    ],
    ids=str,
)
def test_a_ring_of_groups(topology: Topology, degree: int, ring: Topology) -> None:
    assert topology.of_ulysses_groups(degree) == ring


def test_groups_that_would_straddle_nodes_are_refused_with_what_is_possible() -> None:
    with pytest.raises(ValueError, match=r"ulysses_degree=3 .* use one of \[1, 2, 4, 8\]"):
        Topology(2, 4).of_ulysses_groups(3)
    with pytest.raises(ValueError, match=r"ulysses_degree=2 .* use one of \[1, 3, 6\]"):
        Topology(2, 3).of_ulysses_groups(2)
    with pytest.raises(ValueError, match="ulysses_degree=0 is not valid; use a positive number"):
        Strategy(ulysses_degree=0)


def test_what_is_exchanged_comes_back_and_is_counted() -> None:
    """Three ranks with 3, 2 and 2 of 7 tokens, 6 and 3 heads, in a network that delays and reorders."""
    topology, tokens = Topology(1, 3), Tokens(7)
    shards = [LAYOUTS["zigzag"].runs(rank, 3, tokens) for rank in range(3)]
    group = group_block(shards)
    transports, expected = HostileNetwork(3).transports(), [Counter[Channel]() for _ in range(3)]
    whole = [torch.randn(2, 7, heads, dim) for heads, dim in ((6, 4), (3, 5))]
    local = [[x[:, positions(runs)] for x in whole] for runs in shards]

    def run(to_heads: bool, tensors: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        exchanges = [
            HeadExchange(
                RankGroup(topology, range(3), rank), wires, {"q": group, "kv": group}, expected[rank], Packing
            )
            for rank, wires in enumerate(transports)
        ]
        return lockstep([e.run(to_heads, mine, ("q", "kv")) for e, mine in zip(exchanges, tensors, strict=True)])

    there = run(True, local)
    for rank, (q, k) in enumerate(there):
        order = positions(group.runs)
        assert torch.equal(q, whole[0][:, order, 2 * rank : 2 * rank + 2])
        assert torch.equal(k, whole[1][:, order, rank : rank + 1])
    for mine, back in zip(local, run(False, there), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, back, strict=True))
    for rank in range(3):
        assert expected[rank] == transports[rank].sent_bytes
        assert set(expected[rank]) == {Channel(traffic, Link.INTRA) for traffic in Traffic}


class _Written(TorchDispatchMode):
    """Counts operators that write to tensors, but for those of the network, of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = any(x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments)
        self.count += writes and args[0].dtype != torch.uint8
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((8, 4), {"ulysses_degree": 4}),
        ((8, 8), {"ulysses_degree": 8, "backward": "q"}),
        ((4, 2), {"ulysses_degree": 2, "layout": "striped"}),
        ((4, 2), {"ulysses_degree": 2, "tokens": Tokens(64, (0, 16, 64)), "mask": Causal() & Documents((0, 16, 64))}),
        ((4, 2), {"ulysses_degree": 2, "ulysses_placement": "context_first"}),
        ((4, 4), {"ulysses_degree": 2, "bias": (2, 4)}),
        ((4, 4), {"ulysses_degree": 2, "bias": (1, 1)}),
    ],
    ids=str,
)
def test_all_messages_are_filled_at_once_as_on_gpus(
    heads: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits and buffers, by four launches per tensor: to the ranks before and after, two with an index."""
    at_once, written = [], _Written()
    begin, finish = HeadExchange.begin_at_once, HeadExchange.finish_at_once

    def begun(exchange: HeadExchange, *args: Any) -> Any:
        at_once.append(len(args[1]))
        with written:
            return begin(exchange, *args)

    def finished(exchange: HeadExchange, *args: Any) -> None:
        with written:
            finish(exchange, *args)

    monkeypatch.setattr(HeadExchange, "begin_at_once", begun)
    monkeypatch.setattr(HeadExchange, "finish_at_once", finished)
    terms = {name: options.pop(name) for name in ("mask", "tokens") if name in options}
    problem, shape = Problem.draw(64, heads, dtype=torch.float64), options.pop("bias", None)
    found = []
    for has_labels in (True, False):
        if not has_labels:  # as on GPUs
            monkeypatch.setattr(Plan, "label", lambda *_: None)
        ring = VirtualRing(Topology(1, 8), Strategy(**options))
        drawn = problem if shape is None else problem.with_bias(shape)
        q, k, v, dout, *bias = (x.clone().requires_grad_() for x in drawn if x is not None)
        if bias:
            terms["bias"] = bias[0]
        out, lse = ring.attention(q, k, v, **terms)
        grads = torch.autograd.grad(out, (q, k, v, *bias), dout.detach())
        assert bool(at_once) != has_labels
        bytes_leased = [state.ulysses_transport.pool.allocated_bytes for state in ring.rank_states]
        assert ring.traffic(0) == ring.expected_traffic(0)
        found.append((out.detach(), lse, *grads, torch.tensor(bytes_leased)))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert written.count <= 4 * sum(at_once)


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(2, 3)], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "auto"])
def test_groups_of_ranks_far_apart_are_exact_with_all_that_depends_on_heads_and_positions(
    topology: Topology, layout: str
) -> None:
    """By documents, with a sink and a bias per head, and dropout; and lengths that do not divide."""
    starts = (0, 5, 6, 23, 32, 47)
    mask, scores = Causal() & Documents(starts), SCORES
    problem = Problem.draw(47, (4, 2), seed=1).with_sink().with_bias((1, 4))
    ring = VirtualRing(topology, Strategy(layout=layout, ulysses_degree=2, ulysses_placement="context_first"))
    tokens = choose_tokens(ring.rank_states[0].route_table, 47, mask) if layout == "auto" else Tokens(47, starts)
    q, k, v, dout, sink, bias = (x.clone().requires_grad_() for x in problem if x is not None)
    out, _ = ring.attention(q, k, v, mask=mask, scores=scores, tokens=tokens, sink=sink, bias=bias)
    grads = torch.autograd.grad(out, (q, k, v, sink, bias), dout.detach())
    assert max(errors(Result(out.detach(), *grads), reference(problem, mask, scores)).values()) < 2e-6
    assert all(ring.traffic(rank) == ring.expected_traffic(rank) for rank in range(topology.ranks))


LENGTH = 64
FEW_PAIRS = [
    SlidingWindow(3),
    SlidingWindow(7),
    SlidingWindow(12),
    SlidingWindow(2, 2),
    Causal() & Documents((*range(0, LENGTH, 5), LENGTH)),
    Causal() & Documents((*range(0, LENGTH, 17), LENGTH)),
    Documents((*range(0, LENGTH, 3), LENGTH)),
    Documents((*range(0, LENGTH, 9), LENGTH)),
    SlidingWindow(5) & Documents((*range(0, LENGTH, 11), LENGTH)),
    Documents((*range(0, LENGTH + 1, 8),), (5,) * (LENGTH // 8)),
    Causal() & Keys(((5, 9), (30, 33))),
    Causal() & key_padding(torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[10], [40]])),
    SlidingWindow(4) & key_padding(torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[3], [20]])),
    PerRow((Causal() & Documents((*range(0, LENGTH, 5), LENGTH)), SlidingWindow(2))),
]


@functools.cache
def _problem_and_truths() -> tuple[Problem, list[tuple[Result, torch.Tensor]]]:
    problem = Problem.draw(LENGTH, (4, 4), dtype=torch.float64)
    return problem, [(reference(problem, mask), reference_lse(problem, mask)) for mask in FEW_PAIRS]


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [("striped", "auto"), ("striped", "direct"), ("zigzag", "direct"), ("contiguous", "direct")],
)
@pytest.mark.parametrize(
    ("topology", "degree"),
    [
        *((topology, degree) for topology in (Topology(2, 2), Topology(4, 2), Topology(2, 4)) for degree in (2, 4)),
        (Topology(3, 2), 2),
        (Topology(1, 8), 2),
    ],
    ids=str,
)
def test_exact_where_few_pairs_attend(layout: str, schedule: str, topology: Topology, degree: int) -> None:
    """Blocks travel cut to the required rows: 14 masks on 8 rings, with striped layouts by both schedules."""
    problem, truths = _problem_and_truths()
    ring = VirtualRing(topology, Strategy(layout=layout, ulysses_degree=degree, schedule=schedule))
    for mask, (truth, truth_lse) in zip(FEW_PAIRS, truths, strict=True):
        inputs = [x.clone().requires_grad_() for x in problem[:3]]
        out, lse = ring.attention(*inputs, mask=mask)
        found = Result(out.detach(), *torch.autograd.grad(out, inputs, problem.dout))
        assert max(errors(found, truth).values()) < 1e-12, mask
        assert torch.allclose(lse.double(), truth_lse, 1e-12, 1e-12), mask


# --------------------------------------------------------------------------------------------- over processes


def _train(rank: int, strategy: Strategy, problem: Problem, length: int) -> tuple[Result, bool, list[torch.Tensor]]:
    """Whole results of the last of three steps; if bytes and buffers are what they should be; lse, largest scores."""
    nodes = 2 if strategy.ranks_per_node == 2 else 1
    levels = None
    if nodes == 2:
        inner, outer = ([dist.new_group(ranks) for ranks in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
        levels = [inner[rank // 2], outer[rank % 2]]
    cp = ContextParallel(dist.group.WORLD, hierarchy=levels, strategy=strategy)
    tokens, buffers = Tokens(length), []
    for _ in range(3):
        q, k, v = (cp.shard(x, tokens=tokens).requires_grad_() for x in problem[:3])
        assert problem.sink is not None
        sink = problem.sink.clone().requires_grad_()
        options: dict[str, Any] = {"scores": SCORES, "sink": sink, "tokens": tokens}
        out, lse, largest = burst_attention(q, k, v, cp, return_lse=True, return_max_logits=True, **options)
        *grads, dsink = torch.autograd.grad(out, (q, k, v, sink), cp.shard(problem.dout, tokens=tokens))
        buffers.append(cp.allocated_bytes())
    dist.all_reduce(dsink)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    whole = [cp.unshard(x, tokens=tokens) for x in (out.detach(), *grads)]
    right = cp.traffic() == cp.expected_traffic() and buffers[1] == buffers[2]
    assert cp.describe().get("ulysses_degree", "1") == str(strategy.ulysses_degree)
    return Result(*whole, dsink), right, [cp.unshard(lse.detach(), 2, tokens), largest]


@functools.cache
def _scores_without_exchange(kv_heads: int) -> list[torch.Tensor]:
    """Return lse and the largest scores of a ring that exchanges no heads."""
    problem = Problem.draw((26, 26), (4, kv_heads)).with_sink()
    return run_ranks(_train, 4, Strategy(ranks_per_node=4), problem, 26)[0][2]


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize(
    ("degree", "per_node", "kv_heads"), [(2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 2, 4), (2, 2, 1), (4, 4, 2), (4, 2, 1)]
)
def test_exact_over_gloo(degree: int, per_node: int, kv_heads: int, backward: str) -> None:
    problem = Problem.draw((26, 26), (4, kv_heads)).with_sink()
    truth = reference(problem, Causal(), SCORES)
    strategy = Strategy(ulysses_degree=degree, backward=backward, ranks_per_node=per_node)
    for found, right, scores in run_ranks(_train, 4, strategy, problem, 26):
        assert right
        assert max(errors(found, truth).values()) < 2e-6
        assert all(torch.allclose(x, y) for x, y in zip(scores, _scores_without_exchange(kv_heads), strict=True))


def _with_and_without_lse(rank: int, differ: bool) -> list[int]:
    """Bytes sent by a call that asks for lse, and by one that does not; or a call in which rank 1 alone asks."""
    cp = ContextParallel(dist.group.WORLD, strategy=Strategy(ulysses_degree=2))
    x, sent = torch.randn(1, 4, 2, 8), []
    for wants in (rank == 1,) if differ else (True, False):
        cp.reset_traffic()
        burst_attention(x, x, x, cp, return_lse=wants)
        sent.append(sum(sum(kinds.values()) for kinds in cp.traffic().values()))
    return sent


def test_lse_is_exchanged_only_where_it_is_asked_for() -> None:
    """A rank of two sends that of the other's 4 tokens for its own head, in float32."""
    for with_lse, without in run_ranks(_with_and_without_lse, 2, False):
        assert with_lse - without == 4 * 4
    for outcome in run_ranks_outcomes(_with_and_without_lse, 2, True):
        assert outcome.error is not None
        assert "rank 0: return_lse=False; rank 1: return_lse=True" in outcome.error


def _wrong(rank: int, degree: int, heads: int) -> None:
    x = torch.randn(1, 4, heads, 8)
    burst_attention(x, x, x, ContextParallel(dist.group.WORLD, strategy=Strategy(ulysses_degree=degree)))


def test_heads_that_do_not_divide_are_one_error_on_every_rank() -> None:
    for outcome in run_ranks_outcomes(_wrong, 2, 2, 3):
        assert outcome.error is not None
        assert outcome.error.rstrip().splitlines()[-1] == (
            "ValueError: ulysses_degree=2 ranks cannot share the 3 query heads and 3 key/value heads of this rank; "
            f"use one of [1, 3], or a preset for any number of heads: {presets_with(ulysses_degree=1, parts=1)}"
        )


def test_ranks_with_unlike_key_value_heads_are_told_though_they_work_with_one_each() -> None:
    plans = [
        make_plan(VirtualRing(Topology(1, 4), Strategy(ulysses_degree=4)).rank_states[0], inputs, Request(), {})
        for heads in (1, 2)
        for inputs in [Inputs(*(torch.randn(1, 4, n, 8) for n in (4, heads, heads)))]
    ]
    assert plans[0].shapes == plans[1].shapes
    assert [plan.signature["kv_heads"] for plan in plans] == [1, 2]


def test_gradients_of_shared_heads_are_added_up_in_float32() -> None:
    """Eight ranks work with one key/value head in bfloat16: as near to float32 as a ring, which rounds once."""
    problem = Problem.draw((64, 64), (8, 1), dtype=torch.bfloat16)
    truth = reference(Problem(*(x if x is None else x.float() for x in problem)), Causal())
    error = {}
    for degree in (1, 8):
        q, k, v = (x.clone().requires_grad_() for x in problem[:3])
        out, _ = VirtualRing(Topology(1, 8), Strategy(ulysses_degree=degree)).attention(q, k, v)
        _, dk, dv = torch.autograd.grad(out, (q, k, v), problem.dout)
        error[degree] = max(relative(dk.float(), truth.dk), relative(dv.float(), truth.dv))
    assert error[8] < 1.1 * error[1], error


def test_a_rank_that_is_lost_is_named() -> None:
    error = error_of_survivor(ulysses_degree=2)
    missed = (
        r"rank 1 of the context-parallel group \(global rank 1 on .*\) was missed at the exchange of heads of call 3"
    )
    assert re.search(missed, error)
