"""Presets: what they set, where they are named, and that each is exact and sends what docs/systems.md says."""

from __future__ import annotations

import argparse
import functools
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import (
    Causal,
    ContextParallel,
    Full,
    Link,
    Mask,
    Strategy,
    Topology,
    VirtualRing,
    burst_attention,
)
from burst_plugin.comm.buffers import LABEL_BYTES
from burst_plugin.compute.shapes import Shapes
from burst_plugin.deepspeed.config import BLOCK, Block
from burst_plugin.megatron.flags import arguments
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.measured import planned
from burst_plugin.planning.price import has_price, pass_price
from burst_plugin.strategy import PLANNED
from burst_plugin.strategy.presets import PRESETS
from burst_plugin.types import DIRECTIONS
from tests.planning.test_choice import PROFILE
from tests.support.ranks import run_ranks
from tests.support.reference import Problem, Result, errors, reference
from tools.systems import sent_bytes

HEADS = (8, 4)
SHAPES = Shapes(2, 4, 4, *HEADS, 8, 8, torch.float32)  # of a rank
WITHOUT_GROUPS = (
    "burst, ring, zigzag_ring, striped, double_ring, all_gather, dist_flash, ring_self_attention, pass_kv, pass_q"
)
OF_ANY_HEADS = WITHOUT_GROUPS.replace("all_gather", "mesh, all_gather")


# ----------------------------------------------------------------------------------------------------- what they set


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_open_only_how_many_parts_there_are(name: str) -> None:
    preset = PRESETS[name]
    assert set(PLANNED) - {"parts"} <= set(preset.options)
    assert "auto" not in preset.options.values()
    assert re.fullmatch(r"\d{4}\.\d{5}", preset.arxiv)
    strategy = Strategy.preset(name)
    assert strategy == Strategy(**preset.options)
    assert strategy == Strategy.of(None, preset=name)


def test_options_beside_a_preset_override_it() -> None:
    found = Strategy.preset("ring", layout="zigzag", parts=2, backward="q")
    assert found == Strategy(layout="zigzag", schedule="flat_ring", forward="kv", backward="q", parts=2)
    assert ContextParallel(hierarchy=[1], preset="usp", parts=2).strategy == Strategy.preset("zigzag_ring", parts=2)


def test_what_is_wrong_with_a_preset_is_said() -> None:
    with pytest.raises(ValueError, match=r"preset='USP' is not valid; use one of: .* \(did you mean usp\?\)"):
        Strategy.preset("USP")
    with pytest.raises(ValueError, match=f"preset='usb' is not valid; use one of: {', '.join(PRESETS)}"):
        Strategy.preset("usb")
    with pytest.raises(ValueError, match="preset=None is not valid"):
        Strategy.of(None, preset=None)
    with pytest.raises(ValueError, match=r"there is no option head; the options are: .*, preset"):
        Strategy.preset("usp", head=2)
    with pytest.raises(ValueError, match="got strategy= and also preset"):
        Strategy.of(Strategy(), preset="usp")


def test_groups_by_a_word_are_counted_when_the_topology_is_known() -> None:
    topology = Topology(2, 4)
    assert [Strategy.preset(name).on(topology).degree for name in ("usp", "ulysses", "loongtrain", "ring")] == [
        4,
        8,
        2,
        1,
    ]
    assert Strategy.preset("usp").on(Topology(3, 1)).degree == 1
    plain = Strategy(ulysses_degree=2)
    assert plain.on(topology) is plain
    with pytest.raises(ValueError, match=r"ulysses_degree='node' depends on the ring: use strategy.on\(topology\)"):
        _ = Strategy.preset("usp").degree
    with pytest.raises(
        ValueError, match="ulysses_degree='nodes' is not valid; use a positive number or 'node' or 'all'"
    ):
        Strategy(ulysses_degree="nodes")


def test_a_refusal_names_the_presets_that_can() -> None:
    six = Problem.draw(24, (6, 6))
    for name in ("ulysses", "usp"):
        with pytest.raises(ValueError, match=rf"ulysses_degree=4 ranks cannot share the 6 .*: {OF_ANY_HEADS}$"):
            VirtualRing(Topology(1, 4), Strategy.preset(name)).attention(*six[:3])
    with pytest.raises(
        ValueError, match=rf"ulysses_degree=2 does not divide 2x3 .*; or a preset .*: {WITHOUT_GROUPS}$"
    ):
        VirtualRing(Topology(2, 3), Strategy.preset("loongtrain"))
    undivided = ", ".join(name for name in PRESETS if name != "tasp")
    with pytest.raises(ValueError, match=rf"parts=4 does not divide the 6 .*a preset without parts: {undivided}$"):
        VirtualRing(Topology(1, 4), Strategy.preset("tasp")).attention(*six[:3])
    can = ", ".join(name for name in PRESETS if name not in ("burst", "dist_flash", "pass_q"))
    bias = torch.zeros(1, 1, 24, 24)
    for name, direction in (("burst", "backward"), ("pass_q", "forward"), ("dist_flash", "forward")):
        side = getattr(Strategy.preset(name), direction)
        with pytest.raises(ValueError, match=rf"{direction}='{side}' cannot be combined with a bias.*: {can}$"):
            VirtualRing(Topology(1, 2), Strategy.preset(name)).attention(*six[:3], bias=bias)


# -------------------------------------------------------------------------------------------- where they are named


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> Strategy | None:
    args = arguments.add_arguments(argparse.ArgumentParser()).parse_args(words)
    monkeypatch.setattr(arguments, "parsed_arguments", lambda: args)
    return arguments.parsed_strategy()


@pytest.mark.parametrize("name", PRESETS)
def test_frameworks_take_a_preset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(monkeypatch, "--burst-preset", name) == Strategy.preset(name)
    assert arguments.parsed_layout() == Strategy.preset(name).layout
    block = Block.of({BLOCK: {"preset": name, "parts": 2}})
    assert block is not None
    assert block.strategy == Strategy.preset(name, parts=2)


def test_a_flag_overrides_a_preset_even_with_the_usual_value(monkeypatch: pytest.MonkeyPatch) -> None:
    preset, flags = (
        ["--burst-preset", "ring"],
        ["--burst-layout", "zigzag", "--burst-schedule", "auto", "--no-burst-abort"],
    )
    for words in (preset + flags, flags + preset):
        found = parsed(monkeypatch, *words)
        assert found == Strategy.preset("ring", layout="zigzag", schedule="auto", abort=False)
        assert arguments.parsed_layout() == "zigzag"
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--burst-preset", "usb")
    assert parsed(monkeypatch, "--burst-ulysses-degree", "node") == Strategy(ulysses_degree="node")
    with pytest.raises(ValueError, match=r"\"burst_attention\": preset='usb' is not valid; use one of: burst, ring"):
        Block.of({BLOCK: {"preset": "usb"}})


def test_with_a_profile_a_preset_stays_and_the_rest_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    topology, sizes = PROFILE.topology, {"q_heads": 8, "kv_heads": 8, "seq": 1 << 17}
    for name in ("burst", "usp", "pass_q"):
        measured = Strategy.from_profile(PROFILE.as_dict(), model=sizes, preset=name)
        found, said = planned(measured.on(topology), topology)
        assert found == Strategy.preset(name, parts=found.parts).on(topology)
        assert said
    measured = Strategy.from_profile(PROFILE.as_dict(), model=sizes, preset="tasp")
    assert planned(measured.on(topology), topology)[0] == Strategy.preset("tasp")
    with pytest.raises(ValueError, match=r"forward='both' cannot be planned: it has no price"):
        planned(Strategy.from_profile(PROFILE.as_dict(), model=sizes, preset="dist_flash"), topology)
    for more in ({"preset": "loongtrain_context_first"}, {"ulysses_placement": "context_first"}):
        with pytest.raises(ValueError, match="ulysses_placement='context_first' cannot be planned: it has no price"):
            planned(Strategy.from_profile(PROFILE.as_dict(), model=sizes, **more), topology)
    block = Block.of({BLOCK: {"profile": PROFILE.as_dict(), "preset": "pass_q", "seq_length": 1 << 17}})
    assert block is not None
    assert block.strategy == Strategy.from_profile(PROFILE.as_dict(), model={"seq": 1 << 17}, preset="pass_q")


# ------------------------------------------------------------------------------------- what they compute and send


@functools.cache
def problem_of(ranks: int, mask: Mask) -> tuple[Problem, Result]:
    problem = Problem.draw(SHAPES.q_len * ranks, HEADS)
    return problem, reference(problem, mask)


def sent(traffic: dict[str, dict[str, int]]) -> dict[str, int]:
    return {link: sum(by_traffic.values()) for link, by_traffic in traffic.items()}


def busiest(of_ranks: list[dict[str, int]]) -> dict[str, int]:
    return {link: max(each[link] for each in of_ranks) for link in of_ranks[0]}


def on_the_page(
    name: str, topology: Topology, dtype: torch.dtype = torch.float32, *, with_lse: bool = False
) -> dict[str, int]:
    """What `tools.systems`, of which the page is made, says of both passes, with the labels of messages on CPUs.

    with_lse: whether lse, too, is sent back where heads are exchanged, as in a virtual ring.
    """
    strategy = Strategy.preset(name).on(topology)
    first, *rest = strategy.groups(topology).members(0)
    others = Counter(topology.link(first, other) for other in rest)
    shapes = SHAPES._replace(dtype=dtype)
    passes = [sent_bytes(strategy, direction, topology, shapes, LABEL_BYTES) for direction in DIRECTIONS]
    both = [forward + backward for forward, backward in zip(*passes, strict=True)]
    with_lse = with_lse and strategy.mesh_degree == 1  # a mesh sends it anyway
    lse_bytes = with_lse * 4 * SHAPES.batch * SHAPES.q_len * SHAPES.q_heads // strategy.degree
    return {link.value: max(found[link] for found in both) + lse_bytes * others[link] for link in Link}


@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(2, 2), Topology(2, 4)], ids=str)
@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if has_price(Strategy(**preset.options))])
def test_the_planner_counts_the_bytes_of_the_page(name: str, topology: Topology) -> None:
    strategy, byte_per_s = Strategy.preset(name).on(topology), Links(1.0, 1.0)
    for direction in DIRECTIONS:
        price = pass_price(strategy, direction, topology, SHAPES, 0.0, byte_per_s)
        by_rank = sent_bytes(strategy, direction, topology, SHAPES)
        assert price.link_s == {link: pytest.approx(max(sent[link] for sent in by_rank)) for link in Link}


@pytest.mark.parametrize("ranks", [4, 5])
def test_where_both_sides_move_each_goes_half_way(ranks: int) -> None:
    """Of 4 ranks keys go to 2 and queries come to 1; of 5 it is 2 of either. Partial results go back."""
    rows = SHAPES.batch * SHAPES.q_len
    q, out, kv, lse = 4 * 8 * 8 * rows, 4 * 8 * 8 * rows, 2 * 4 * 4 * 8 * rows, 4 * 8 * rows
    forward = ranks // 2 * kv + (ranks - 1) // 2 * (q + out + lse)
    backward = ranks // 2 * 2 * kv + (ranks - 1) // 2 * (q + out + 2 * lse + q)  # with dout, and lse and a factor
    for direction, nbytes in zip(DIRECTIONS, (forward, backward), strict=True):
        by_rank = sent_bytes(Strategy.preset("dist_flash"), direction, Topology(1, ranks), SHAPES)
        assert by_rank == [{Link.INTRA: nbytes, Link.INTER: 0}] * ranks


def step(name: str, topology: Topology, problem: Problem, mask: Mask) -> tuple[Result, dict[str, int]]:
    """The results of both passes, and the bytes that the busiest rank sent in them, by link."""
    ring = VirtualRing(topology, Strategy.preset(name))
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = ring.attention(q, k, v, mask=mask)
    found = Result(out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout))
    return found, busiest([sent(ring.traffic(rank)) for rank in range(topology.ranks)])


@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(2, 2), Topology(2, 4)], ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_exact_and_sends_what_the_page_says(name: str, topology: Topology) -> None:
    for mask in (Full(), Causal()):
        problem, truth = problem_of(topology.ranks, mask)
        found, nbytes = step(name, topology, problem, mask)
        assert max(errors(found, truth).values()) < 2e-6
        if mask == Full():
            assert nbytes == on_the_page(name, topology, with_lse=True)


@pytest.mark.parametrize("name", ["ulysses", "burst", "pass_q"])
def test_what_is_summed_up_is_sent_in_float32_as_the_page_says(name: str) -> None:
    """Partial results are, and gradients of a key head that several ranks have."""
    topology, whole = Topology(2, 4), problem_of(8, Full())[0]
    problem = Problem(*(x.bfloat16() for x in whole[:4]))
    _, nbytes = step(name, topology, problem, Full())
    assert nbytes == on_the_page(name, topology, torch.bfloat16, with_lse=True)


def _in_ranks(rank: int, names: list[str], per_node: int) -> dict[str, tuple[float, dict[str, int]]]:
    """The worst error of both masks, and the bytes that this rank sent without one."""
    found = {}
    for name in names:
        cp = ContextParallel(dist.group.WORLD, preset=name, ranks_per_node=per_node)
        worst, sent_here = 0.0, {}
        for mask in (Full(), Causal()):
            problem, truth = problem_of(cp.ranks, mask)
            q, k, v = (cp.shard(x).requires_grad_() for x in problem[:3])
            out = burst_attention(q, k, v, cp, mask=mask)
            grads = torch.autograd.grad(out, (q, k, v), cp.shard(problem.dout))
            sent_here = sent_here or sent(cp.traffic())
            got = Result(*(cp.unshard(x) for x in (out.detach(), *grads)))
            worst = max(worst, *errors(got, truth).values())
        assert cp.traffic() == cp.expected_traffic()
        cp.close()
        found[name] = worst, sent_here
    return found


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        (Topology(1, 2), list(PRESETS)),
        (Topology(2, 2), list(PRESETS)),
        (
            Topology(2, 4),
            ["burst", "usp", "loongtrain", "loongtrain_context_first", "all_gather", "tasp", "dist_flash"],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Topology) else f"{len(value)} presets",
)
def test_presets_over_gloo(topology: Topology, names: list[str]) -> None:
    for mask in (Full(), Causal()):
        problem_of(topology.ranks, mask)  # once, before ranks are forked
    of_ranks: list[dict[str, Any]] = run_ranks(_in_ranks, topology.ranks, names, topology.ranks_per_node)
    for name in names:
        assert max(found[name][0] for found in of_ranks) < 2e-6, name
        assert busiest([found[name][1] for found in of_ranks]) == on_the_page(name, topology), name


@pytest.mark.parametrize("degree", [2, 4])
def test_an_exchange_has_as_many_buffers_as_the_page_says(degree: int) -> None:
    ring = VirtualRing(Topology(1, 4), Strategy(ulysses_degree=degree))
    problem, _ = problem_of(4, Full())
    ring.attention(*problem[:3], mask=Full())
    own = sum(x.numel() * x.element_size() for x in problem[:3]) / 4
    held = [state.pools[1].allocated_bytes for state in ring.rank_states]
    assert held == pytest.approx([(2 - 2 / degree) * own] * 4, rel=0.2)
