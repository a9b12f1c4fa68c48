"""Schedules, required rows, tiles and buffers of drawn topologies, layouts and masks, and the error of bfloat16.

Whole attention calls are drawn in `test_drawn_calls.py`.
`BURST_SOAK=2000 bash tests/run.sh tests/test_properties.py` draws that many cases instead of 150.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burst_plugin import (
    BlockMask,
    Causal,
    Documents,
    Mask,
    PrefixLM,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    key_padding,
)
from burst_plugin.comm.buffers import Packing
from burst_plugin.planning.buffer_count import most_held
from burst_plugin.ring.routes import Attending, Pairs
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.sequence import required_rows
from burst_plugin.sequence.layout import LAYOUTS
from burst_plugin.sequence.regions import work_by_token
from burst_plugin.sequence.tiles import Regions, tiles_of
from burst_plugin.types import SIDES, Side, merged
from tests.support.draws import cu_seqlens, layouts, masks, runnable
from tests.support.reference import Problem, Result, errors, reference

SOAK = int(os.environ.get("BURST_SOAK", "0"))
DRAWN = settings(
    max_examples=SOAK or 150, deadline=None, derandomize=not SOAK, suppress_health_check=[HealthCheck.too_slow]
)
RUNNABLE = runnable(torch.float64)


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
def test_schedules_of_required_rows_are_exact(topology: Topology, reduces: bool, density: float, random: Any) -> None:
    everyone = range(topology.ranks)
    required = [{owner: ((0, owner + 1),) for owner in everyone if random.random() < density} for _ in everyone]
    pairs = sum(owner != rank for rank, wanted in enumerate(required) for owner in wanted)
    for name, make in SCHEDULES.items():
        schedule = make(topology, reduces, required).validate(required)
        dense = make(topology, reduces, None)
        assert len(schedule.gather) <= len(dense.gather)
        assert len(schedule.reduce) <= len(dense.reduce)
        sent, worked_on = {(t.src, t.block) for t in schedule.gather}, {(r, o) for r in everyone for o in required[r]}
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
    mask = data.draw(masks(size, size, per_row=False))
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
        with mock.patch.object(required_rows, "_MOST_ROWS", 2.0):  # not even all of them
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
