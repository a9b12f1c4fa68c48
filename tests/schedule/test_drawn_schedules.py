"""Drawn topologies and required rows: every schedule is exact and sends nothing in vain."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from burst_plugin import Topology
from burst_plugin.planning.buffer_count import most_held
from burst_plugin.schedule.rings import SCHEDULES


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
    ranks = range(topology.ranks)
    required = [{owner: ((0, owner + 1),) for owner in ranks if random.random() < density} for _ in ranks]
    pairs = sum(owner != rank for rank, wanted in enumerate(required) for owner in wanted)
    for name, make in SCHEDULES.items():
        schedule = make(topology, reduces, required).validate(required)
        dense = make(topology, reduces, None)
        assert len(schedule.gather) <= len(dense.gather)
        assert len(schedule.reduce) <= len(dense.reduce)
        sent, worked_on = {(t.src, t.block) for t in schedule.gather}, {(r, o) for r in ranks for o in required[r]}
        assert all((t.dst, t.block) in sent | worked_on for t in schedule.gather), "a block is sent in vain"
        arrived = {(t.dst, t.block) for t in schedule.reduce}
        assert all((t.src, t.block) in arrived | worked_on for t in schedule.reduce)
        if name == "direct":
            held = most_held(schedule)
            operands, sums_held = (5, 7) if schedule.by_link else (3, 3)
            assert held.operands <= operands
            assert held.results <= sums_held
            if not schedule.by_link:
                assert len(schedule.gather) == pairs
                assert len(schedule.reduce) == pairs * reduces
