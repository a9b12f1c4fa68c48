"""Blocks that shed rows on their way: drawn calls in which they mostly do, against float64 on one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from burst_plugin import BlockMask, Causal, Documents, Mask, PrefixLM, SlidingWindow, Strategy, Tokens, Topology
from burst_plugin.ring import routes
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.schedule.schedule import Required, Schedule
from burst_plugin.schedule.trimming import shedding
from tests.support.drawn import Drawn

DRAWN = settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
TOPOLOGIES = [(1, 2), (1, 4), (1, 6), (1, 3), (1, 5), (1, 8)]
LEAST_SHED = 110  # of the calls


@st.composite
def masks(draw: st.DrawFn, length: int) -> Mask:
    """Draw a mask under which every rank works on some rows of every block, or nearly."""
    cut = draw(st.integers(1, max(1, length // 4)))
    ends = sorted({0, cut, length})
    windows = st.integers(length // 2, length).map(lambda width: SlidingWindow(width, 0))
    few = [Causal() & Documents(tuple(ends)), PrefixLM(cut), Causal() & SlidingWindow(length - cut, None)]
    generator, block = torch.Generator().manual_seed(draw(st.integers(0, 99))), -(-length // 16)
    blocks = -(-length // block)
    scattered = BlockMask.of(torch.rand(blocks, blocks, generator=generator) < 0.3, block)  # shed little by little
    return draw(st.one_of(st.just(Causal()), st.sampled_from(few), windows, st.just(scattered)))


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    """Draw a call in zigzag."""
    topology = Topology(*draw(st.sampled_from(TOPOLOGIES)))
    length = draw(st.sampled_from([8 * topology.ranks, 4 * topology.ranks + 1, 6 * topology.ranks - 1]))
    groups = draw(st.sampled_from(["", "", "", "ulysses_degree", "mesh_degree"]))
    sides = st.sampled_from(["kv", "q"] if groups == "mesh_degree" else ["kv", "q", "kv", "q", "both"])
    degrees = [n for n in topology.ulysses_degrees if n in (2, 4)]
    parts = st.sampled_from([1, 1, 2])
    strategy = Strategy(
        schedule=draw(st.sampled_from(["auto", *sorted(SCHEDULES)])),
        forward=draw(sides),
        backward=draw(sides),
        parts=(draw(parts), draw(parts)),
        **({groups: draw(st.sampled_from(degrees))} if groups and degrees else {}),
    )
    return Drawn(
        topology,
        strategy,
        (length, length),
        draw(st.sampled_from([(8, 8), (16, 8)])),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        mask=draw(masks(length)),
        tokens=Tokens(length, layout="zigzag"),
        has_sink=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        at_once=draw(st.sampled_from([1, 2, 4])),
        most_rows=draw(st.sampled_from([0.4, 0.0])),
    )


@pytest.mark.filterwarnings("ignore")
def test_attention_is_exact_where_blocks_shed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shed: Counter[str] = Counter()

    def noted(dense: Schedule, required: Required, lengths: Sequence[int]) -> Schedule | None:
        found = shedding(dense, required, lengths)
        shed["now"] += found is not None
        return found if found is None else found.validate(required)

    monkeypatch.setattr(routes, "shedding", noted)

    @DRAWN
    @given(calls())
    def check(case: Drawn) -> None:
        note(case.line)
        shed["now"] = 0
        assert case.check() == ""
        shed[case.strategy.backward] += shed["now"] > 0

    check()
    del shed["now"]
    assert shed.total() >= LEAST_SHED, shed
    assert set(shed) >= {"kv", "q"}
