"""Drawn shapes, topologies, masks and options: exact, and the schedule's bytes, whatever comes.

`BURST_SOAK=2000 bash tests/run.sh tests/test_properties.py` draws that many cases instead of 150.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burst_plugin import (
    BlockMask,
    Causal,
    CausalBottomRight,
    Documents,
    Full,
    Keys,
    Mask,
    PrefixLM,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    key_padding,
)
from burst_plugin.comm.buffers import Packing
from burst_plugin.compute import accumulators as sums
from burst_plugin.kernels import KERNELS, Case
from burst_plugin.planning.buffer_count import most_held
from burst_plugin.ring.routes import Attending, Pairs
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.sequence import required_rows as needs
from burst_plugin.sequence.layout import LAYOUTS, Layout, in_chunks
from burst_plugin.sequence.regions import work_by_token
from burst_plugin.sequence.tiles import Regions, tiles_of
from burst_plugin.types import SIDES, Side, merged
from tests.support.reference import NAMES, Problem, Result, errors, reference

SOAK = int(os.environ.get("BURST_SOAK", "0"))
DRAWN = settings(
    max_examples=SOAK or 150, deadline=None, derandomize=not SOAK, suppress_health_check=[HealthCheck.too_slow]
)
RUNNABLE = [name for name, kernel in KERNELS.items() if kernel.refuse(Case("cpu", torch.float64, 1, 1, 8, 8)) is None]


@dataclass(frozen=True)
class Drawn:
    """One case."""

    topology: Topology
    strategy: Strategy
    problem: Problem
    mask: Mask
    scores: Scores
    tokens: Tokens | tuple[Tokens, Tokens] | None
    seed: int
    at_once: int  # contributions that wait for each other, as on GPUs


@st.composite
def masks(draw: st.DrawFn, q_len: int, kv_len: int) -> Mask:
    """One mask, or two or three combined."""
    found = draw(_single(q_len, kv_len))
    if draw(st.booleans()):
        found = found & draw(_single(q_len, kv_len))
    if draw(st.integers(0, 3)) == 0:
        rows = st.lists(st.booleans(), min_size=kv_len, max_size=kv_len)
        found = found & key_padding(torch.tensor([draw(rows), draw(rows)]))
    return found


def _single(q_len: int, kv_len: int) -> st.SearchStrategy[Mask]:
    blocks = st.lists(st.booleans(), min_size=-(-kv_len // 3), max_size=-(-kv_len // 3)).map(tuple)
    found: list[st.SearchStrategy[Any]] = [
        st.sampled_from([Full(), Causal(), CausalBottomRight()]),
        st.builds(SlidingWindow, st.integers(0, kv_len), st.sampled_from([0, 0, 2, None])),
        st.builds(PrefixLM, st.integers(0, kv_len)),
        st.tuples(st.integers(0, kv_len), st.integers(0, kv_len)).map(lambda ends: Keys((tuple(sorted(ends)),))),
        st.lists(blocks, min_size=-(-q_len // 3), max_size=-(-q_len // 3)).map(lambda b: BlockMask(3, tuple(b))),
    ]
    if q_len == kv_len:
        found.append(cu_seqlens(q_len).map(Documents))
    return st.one_of(found)


def cu_seqlens(length: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Documents, some of them empty."""
    return st.lists(st.integers(0, length), max_size=4).map(lambda cuts: (0, *sorted(cuts), length))


def holders(ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Of chunks: every rank holds one, and some hold more."""
    more = st.lists(st.integers(0, ranks - 1), max_size=2 * ranks)
    return more.flatmap(lambda extra: st.permutations([*range(ranks), *extra])).map(tuple)


def layouts(ranks: int) -> st.SearchStrategy[Layout]:
    """Any of the layouts, and chunks."""
    return st.one_of(st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__), holders(ranks).map(in_chunks))


def degrees(topology: Topology) -> list[int]:
    """Of teams that exchange heads: inside nodes, or of whole nodes."""
    several = [n for n in range(1, topology.ranks + 1) if topology.ranks % n == 0]
    return [n for n in several if topology.ranks_per_node % n == 0 or n % topology.ranks_per_node == 0]


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    """Everything that attention can be asked to do, at once."""
    topology = draw(st.builds(Topology, st.integers(1, 3), st.integers(1, 4)))
    q_len = draw(st.integers(1, 40))
    kv_len = draw(st.one_of(st.just(q_len), st.just(q_len), st.integers(1, 40)))
    kv_heads, group = draw(st.sampled_from([1, 2, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    heads = (kv_heads * group, kv_heads)
    dims = draw(st.sampled_from([(4, 4), (8, 8), (6, 3), (3, 5)]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    problem = Problem.draw((q_len, kv_len), heads, dims, dtype, draw(st.integers(0, 99)))
    problem = problem.with_sink() if draw(st.integers(0, 3)) == 0 else problem
    has_bias = draw(st.integers(0, 4)) == 0
    problem = problem.with_bias(draw(st.sampled_from([(1, 1), (2, heads[0])]))) if has_bias else problem
    scores = Scores(
        softcap=draw(st.sampled_from([None, None, 2.0])),
        alibi_slopes=draw(st.sampled_from([None, None, tuple(0.1 * n for n in range(heads[0]))])),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        seed=draw(st.integers(0, 1 << 40)),
    )
    plain = scores == Scores(seed=scores.seed) and not has_bias
    sides = st.just("kv") if has_bias else st.sampled_from(["q", "kv", "auto"])
    several = [n for n in degrees(topology) if kv_heads % n == 0 or (n % kv_heads == 0 and heads[0] % n == 0)]
    degree = draw(st.sampled_from(several))
    team_kv_heads = max(1, kv_heads // degree)
    strategy = Strategy(
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        ulysses_degree=degree,
        schedule=draw(st.sampled_from(["auto", *SCHEDULES])),
        forward=draw(sides),
        backward=draw(sides),
        kernel=draw(st.sampled_from(RUNNABLE)) if plain else "auto",
        parts=tuple(draw(st.sampled_from([n for n in (1, 2, 4) if team_kv_heads % n == 0])) for _ in range(2)),
    )
    documents = cu_seqlens(q_len).map(lambda cu: Tokens(q_len, cu))
    chunks = holders(topology.ranks).map(lambda holders: Tokens(q_len, holders=holders))
    tokens: Tokens | tuple[Tokens, Tokens] | None = draw(st.one_of(st.none(), documents, chunks))
    if q_len != kv_len:
        keys = holders(topology.ranks).map(lambda holders: Tokens(kv_len, holders=holders))
        tokens = draw(st.one_of(st.none(), st.tuples(chunks, keys)))
    seed, at_once = draw(st.integers(0, 9)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    return Drawn(topology, strategy, problem, draw(masks(q_len, kv_len)), scores, tokens, seed, at_once)


@pytest.mark.timeout(300 + SOAK)
@DRAWN
@given(cases())
@pytest.mark.filterwarnings("ignore")
def test_attention_is_exact(case: Drawn) -> None:
    ring = VirtualRing(case.topology, case.strategy, seed=case.seed)
    inputs = [None if x is None else x.clone().requires_grad_() for x in (*case.problem[:3], *case.problem[4:])]
    q, k, v, sink, bias = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    with mock.patch.object(sums, "at_once", return_value=case.at_once):
        out, _ = ring.attention(q, k, v, mask=case.mask, scores=case.scores, sink=sink, bias=bias, tokens=case.tokens)
        grads = iter(torch.autograd.grad(out, [x for x in inputs if x is not None], case.problem.dout))
    result = Result(out.detach(), *(None if x is None else next(grads) for x in inputs))
    truth = reference(case.problem, case.mask, case.scores)
    bound = 1e-12 if case.problem.q.dtype is torch.float64 else 2e-6
    for name in NAMES:
        got, expected = getattr(result, name), getattr(truth, name)
        if got is None:
            continue
        assert bool(got.isfinite().all()), name
        # Few keys make dq and dk small differences of numbers of size 1, a single one exactly 0: these numbers' size
        # is then what errors are relative to.
        error, size = float((got.double() - expected).norm()), float(expected.norm())
        assert error <= bound * max(size, 0.5 * expected.numel() ** 0.5), (name, error, size)
    for rank in range(case.topology.ranks):
        assert ring.traffic(rank) == ring.expected_traffic(rank)


BF16_MASKS = [
    Causal(),
    SlidingWindow(60),
    SlidingWindow(30, 20),
    Causal() & Documents((0, 100, 110, 400, 512)),
    PrefixLM(130),
    BlockMask.of(torch.rand(16, 16, generator=torch.Generator().manual_seed(3)) > 0.3, 32),
    Causal() & key_padding(torch.arange(512).expand(2, 512) >= torch.tensor([[0], [70]])),
]


@pytest.mark.parametrize("mask", BF16_MASKS, ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("kernel", RUNNABLE)
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_bf16_is_within_a_fifth_of_the_same_kernel_on_one_rank(mask: Mask, kernel: str, backward: str) -> None:
    problem = Problem.draw(512, (4, 2), dim=32, dtype=torch.bfloat16).with_sink()
    truth = reference(problem, mask)

    def error(topology: Topology, layout: str) -> dict[str, float]:
        ring = VirtualRing(topology, Strategy(kernel=kernel, backward=backward, layout=layout))
        inputs = [x.clone().requires_grad_() for x in (*problem[:3], problem.sink) if x is not None]
        out, _ = ring.attention(*inputs[:3], mask=mask, sink=inputs[3])
        return errors(Result(out.detach(), *torch.autograd.grad(out, inputs, problem.dout)), truth)

    alone = error(Topology(1, 1), "contiguous")
    for layout in LAYOUTS:
        for name, found in error(Topology(2, 2), layout).items():
            assert found <= 1.2 * alone[name], (layout, name, found, alone[name])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(nodes=st.integers(1, 12), ranks_per_node=st.integers(1, 12))
def test_schedules_are_exact(nodes: int, ranks_per_node: int) -> None:
    topology = Topology(nodes, ranks_per_node)
    for make in SCHEDULES.values():
        schedule = make(topology, True, None).validate()
        assert len(schedule.gather) == len(schedule.reduce) == topology.ranks * (topology.ranks - 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    topology=st.builds(Topology, st.integers(1, 4), st.integers(1, 4)),
    reduces=st.booleans(),
    density=st.sampled_from([0.05, 0.3, 0.8]),
    random=st.randoms(use_true_random=False),
)
def test_schedules_of_needs_are_exact(topology: Topology, reduces: bool, density: float, random: Any) -> None:
    everyone = range(topology.ranks)
    needs = [{owner: ((0, owner + 1),) for owner in everyone if random.random() < density} for _ in everyone]
    pairs = sum(owner != rank for rank, wanted in enumerate(needs) for owner in wanted)
    for name, make in SCHEDULES.items():
        schedule = make(topology, reduces, needs).validate(needs)
        dense = make(topology, reduces, None)
        assert len(schedule.gather) <= len(dense.gather)
        assert len(schedule.reduce) <= len(dense.reduce)
        sent, worked_on = {(t.src, t.block) for t in schedule.gather}, {(r, o) for r in everyone for o in needs[r]}
        assert all((t.dst, t.block) in sent | worked_on for t in schedule.gather), "nothing travels in vain"
        arrived = {(t.dst, t.block) for t in schedule.reduce}
        assert all((t.src, t.block) in arrived | worked_on for t in schedule.reduce)
        if name == "direct":
            held = most_held(schedule)
            operands, sums_held = (5, 7) if schedule.by_link else (3, 3)
            assert held.operands <= operands
            assert held.sums <= sums_held
            if not schedule.by_link:
                assert len(schedule.gather) == pairs
                assert len(schedule.reduce) == pairs * reduces


@DRAWN
@given(
    st.data(),
    st.integers(1, 9),
    st.integers(1, 60),
)
def test_tiles_are_all_of_the_work_and_nothing_else(data: st.DataObject, ranks: int, size: int) -> None:
    mask = data.draw(masks(size, size).filter(lambda mask: mask.rows is None))
    tokens = Tokens(size, data.draw(st.one_of(st.none(), cu_seqlens(size))))
    layout = data.draw(layouts(ranks))
    runs = [layout.runs(rank, ranks, tokens) for rank in range(ranks)]
    regions = Regions(mask.regions(size, size))
    work = sum(tile.work for q in runs for k in runs for tile in tiles_of(regions, q, k))
    assert work == int(work_by_token(mask, (size, size)).sum())


@DRAWN
@given(
    st.data(),
    st.integers(1, 9),
    st.integers(1, 60),
)
def test_needs_are_the_rows_of_the_tiles(data: st.DataObject, ranks: int, size: int) -> None:
    mask = data.draw(masks(size, size))
    tokens = Tokens(size, data.draw(st.one_of(st.none(), cu_seqlens(size))))
    layout = data.draw(layouts(ranks))
    runs = [layout.runs(rank, ranks, tokens) for rank in range(ranks)]
    pairs = Pairs(Attending(tokens, tokens, mask), {"q": runs, "kv": runs})
    side: Side
    for side in SIDES:
        with mock.patch.object(needs, "_MOST_ROWS", 2.0):  # not even all of them
            found = pairs.needs(side)
        visits = [[pairs.of_visit(side, owner, rank) for owner in range(ranks)] for rank in range(ranks)]
        assert found == [
            {
                owner: merged((tile.rows(side).start, tile.rows(side).stop) for tile in tiles)
                for owner, tiles in enumerate(by_owner)
                if tiles
            }
            for by_owner in visits
        ]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
            st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8]),
        ),
        max_size=4,
    )
)
def test_packed_sections_are_aligned_and_do_not_overlap(specs: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    packing = Packing(specs)
    buffer = torch.zeros(packing.nbytes, dtype=torch.uint8)
    views = packing.views(buffer)
    for number, (view, (shape, dtype)) in enumerate(zip(views, specs, strict=True), start=1):
        assert (tuple(view.shape), view.dtype) == (shape, dtype)
        assert view.numel() == 0 or (view.data_ptr() - buffer.data_ptr()) % 16 == 0
        view.fill_(number)
    for number, view in enumerate(views, start=1):
        assert bool((view == number).all())
