"""Drawn shapes, topologies and options: exact, and the schedule's bytes, whatever comes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_plugin import Causal, Full, Strategy, Topology, VirtualRing, flat_ring, two_level_ring
from burst_plugin.executor import Packing
from burst_plugin.layout import LAYOUTS
from burst_plugin.mask import Mask, tiles
from burst_plugin.schedule import SCHEDULES
from tests.support.reference import Problem, Result, errors, reference

topologies = st.builds(Topology, st.integers(1, 4), st.integers(1, 4)).filter(lambda t: t.ranks <= 8)
masks = st.sampled_from([Causal(), Full()])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    topology=topologies,
    layout=st.sampled_from(sorted(LAYOUTS)),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    travellers=st.tuples(st.sampled_from(["q", "kv"]), st.sampled_from(["q", "kv"])),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    chunk=st.integers(1, 5),
    dim=st.integers(1, 9),
    mask=masks,
    seed=st.integers(0, 3),
)
def test_attention_is_exact(
    topology: Topology,
    layout: str,
    schedule: str,
    travellers: tuple[str, str],
    heads: tuple[int, int],
    chunk: int,
    dim: int,
    mask: Mask,
    seed: int,
) -> None:
    strategy = Strategy(layout=layout, schedule=schedule, forward=travellers[0], backward=travellers[1])
    ring = VirtualRing(topology, strategy, seed=seed)
    group, kv_heads = heads
    problem = Problem.draw(2 * topology.ranks * chunk, (group * kv_heads, kv_heads), dim, torch.float64, seed)
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = ring.attention(q, k, v, mask=mask)
    result = Result(out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout))
    truth = reference(problem, mask)
    for name, error in errors(result, truth).items():
        # a single key makes dq and dk exactly 0, of which a relative error says nothing
        size = float(getattr(truth, name).norm())
        assert error < 1e-13 or error * size < 1e-14, (name, error)
    for rank in range(topology.ranks):
        assert ring.traffic(rank) == ring.expected_traffic(rank)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(nodes=st.integers(1, 12), ranks_per_node=st.integers(1, 12))
def test_schedules_are_exact(nodes: int, ranks_per_node: int) -> None:
    topology = Topology(nodes, ranks_per_node)
    for schedule in (flat_ring(topology), two_level_ring(topology)):
        schedule.validate()
        assert len(schedule.gather) == len(schedule.reduce) == topology.ranks * (topology.ranks - 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layout=st.sampled_from(sorted(LAYOUTS)), mask=masks, ranks=st.integers(1, 9), chunk=st.integers(1, 7))
def test_tiles_are_all_of_the_work_and_nothing_else(layout: str, mask: Mask, ranks: int, chunk: int) -> None:
    size = 2 * ranks * chunk
    runs = [LAYOUTS[layout].runs(rank, ranks, size) for rank in range(ranks)]
    work = sum(tile.work for q in runs for k in runs for tile in tiles(mask, q, k))
    assert work == (size * (size + 1) // 2 if mask == Causal() else size * size)


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
