"""What a plan says that layers with a state send, against what they send; their time, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burst_plugin import Strategy, Topology, VirtualRing, recurrent
from burst_plugin.planning.cluster import Cluster
from burst_plugin.training.layer_memory import moments
from burst_plugin.training.mixers import FP32, TokenMixer, channel_delta_rule, delta_rule, selective_scan, state_space
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.recurrent_time import (
    KERNELS,
    MESSAGES,
    can_exchange_heads,
    hops,
    recurrent_seconds,
    sent_bytes,
)
from burst_plugin.training.setting import Code, Setting
from burst_plugin.types import DIRECTIONS

CODE = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False)
DELTA = delta_rule(hidden=64, keys=(8, 16), values=(16, 32), width=4)
KIMI = channel_delta_rule(hidden=64, heads=8, head_dim=32, width=4)
SPACE = state_space(hidden=64, heads=16, head_dim=16, groups=8, size=32, width=4)
TINY = {"name": "tiny", "layers": 1, "hidden": 64, "ffn": 0, "heads": 1, "kv_heads": 1, "head_dim": 64, "vocab": 8}


def setting(ranks: int, inner: int, tokens: int = 2**20, **more: object) -> Setting:
    return Setting(tokens=tokens, code=CODE, context=ranks, inner=inner, zero=3, **more)  # type: ignore[arg-type]


def measured(mixer: TokenMixer, topology: Topology, how: str, tokens: int) -> dict[str, list[int]]:
    """The bytes that each rank of a virtual ring sends in the passes of one call."""
    ring = VirtualRing(topology, Strategy(recurrent=how, layout="zigzag"))
    xs = [
        (0.1 * torch.randn((1, tokens, heads, dim) if dim > 1 else (1, tokens, heads))).to(
            torch.float32 if nbytes == FP32 else torch.bfloat16
        )
        for _, heads, dim, nbytes in mixer.tensors
    ]
    place = recurrent.Placement(ring)
    for x in xs:
        x.requires_grad_()
    if mixer is not SPACE:
        v, q, k, g, beta = xs
        out = recurrent.gated_delta_rule(q, k, v, -g.abs(), beta, place)
    else:
        x, dt, B, C = xs
        out = recurrent.state_space(x, dt.abs(), -torch.ones(16), B, C, place)
    forward = [sum(state.expected_bytes.values()) for state in ring.rank_states]
    out.sum().backward()
    both = [sum(state.expected_bytes.values()) for state in ring.rank_states]
    return {"forward": forward, "backward": [b - f for b, f in zip(both, forward, strict=True)]}


@pytest.mark.parametrize("how", ["state", "heads"])
@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(1, 4), Topology(2, 4)], ids=str)
@pytest.mark.parametrize("mixer", [DELTA, KIMI, SPACE], ids=lambda mixer: mixer.kind)
def test_ranks_send_the_bytes_of_the_plan(mixer: TokenMixer, topology: Topology, how: str) -> None:
    tokens = 16 * topology.ranks
    counted = measured(mixer, topology, how, tokens)
    planned = setting(topology.ranks, topology.ranks_per_node, tokens, recurrent=how)
    for direction in DIRECTIONS:
        said = sent_bytes(replace(mixer, conv=0), planned, direction)
        print(mixer.kind, topology, how, direction, said, counted[direction])
        for mine, theirs in zip(said, counted[direction], strict=True):  # which have labels besides
            assert mine == pytest.approx(theirs, rel=0.03, abs=512)
    if how == "heads":  # inputs leave and arrive, of as many bytes
        work = moments(ModelShape(**TINY, attends=False, mixer=mixer), planned)["mixer, backward"]
        outputs = 2 * tokens * mixer.tensors[0][1] * mixer.tensors[0][2]
        sent = sum(counted["backward"]) * topology.ranks / (topology.ranks - 1) - outputs
        assert work["heads of the mixer, exchanged"] * topology.ranks == pytest.approx(2 * sent, rel=0.03, abs=512)


def test_a_scan_takes_twice_the_depth_of_the_tree() -> None:
    """On 8 ranks there are 15 pieces, since neighbours in the middle are on one rank: a tree of 4 levels."""
    forward = hops(replace(DELTA, conv=0), setting(8, 8), "forward")
    assert len(forward) <= 2 * 4
    assert len(hops(DELTA, setting(8, 8), "forward")) == len(forward) + 1, "with the tokens before each piece"
    assert hops(DELTA, setting(1, 1), "forward") == []


def test_seconds_are_those_of_operations_hops_and_bytes() -> None:
    cluster = Cluster(recurrent_share=0.1, hop_s=0.0)
    plan = setting(8, 8)
    spent = recurrent_seconds(DELTA, plan, cluster)
    unit_s = 2**20 / 8 / (0.1 * cluster.peak_flops)
    forward_s = (DELTA.flops + DELTA.on_ring) * unit_s
    assert DELTA.on_ring_backward is not None
    backward_s = (2.2 * DELTA.flops + DELTA.on_ring_backward) * unit_s
    assert spent[KERNELS] == pytest.approx(2 * forward_s + backward_s)
    without = recurrent_seconds(DELTA, replace(plan, recompute="none"), cluster)
    assert without[KERNELS] == pytest.approx(forward_s + backward_s)
    by_heads = recurrent_seconds(DELTA, replace(plan, recompute="none", recurrent="heads"), cluster)
    assert by_heads[KERNELS] == pytest.approx(3.2 * DELTA.flops * unit_s)
    times = [
        recurrent_seconds(SPACE, replace(plan, recurrent=how, recompute="none"), cluster)[KERNELS]
        for how in ("state", "heads")
    ]
    assert times[0] / times[1] == pytest.approx(1 + SPACE.on_ring / SPACE.flops)
    exchanged_s = (DELTA.exchanged + 2 * 16 * 32) * 2**20 / 8 * 7 / 8 / cluster.intra_bytes_per_s
    assert by_heads[MESSAGES] == pytest.approx(2 * exchanged_s, rel=0.01)
    assert without[MESSAGES] < 0.01 * by_heads[MESSAGES]
    sends_again = spent[MESSAGES] - without[MESSAGES]
    assert recurrent_seconds(DELTA, replace(plan, keep=1.0), cluster)[MESSAGES] == without[MESSAGES]
    assert sends_again > 0
    at_once = replace(cluster, recurrent_share=1e9)  # kernels that hide nothing
    times = [recurrent_seconds(DELTA, plan, replace(at_once, hop_s=each))[MESSAGES] for each in (0.0, 1.0)]
    hop_s = times[1] - times[0]
    assert hop_s == pytest.approx(2 * len(hops(DELTA, plan, "forward")) + len(hops(DELTA, plan, "backward")))


def test_half_of_an_exchange_hides_behind_half_of_the_kernels() -> None:
    mixer = delta_rule(hidden=64, keys=(16, 16), values=(16, 32), width=0)
    slow = replace(cluster := Cluster(hop_s=0.0), recurrent_share=1e-9)
    by_heads = setting(8, 8, recompute="none", recurrent="heads")
    nbytes = mixer.exchanged + 2 * 16 * 32
    exchanged_s = 2 * nbytes * 2**20 / 8 * 7 / 8 / cluster.intra_bytes_per_s  # both ways

    assert recurrent_seconds(mixer, by_heads, slow)[MESSAGES] == pytest.approx(exchanged_s / 2, rel=0.01)
    fast = recurrent_seconds(mixer, by_heads, replace(cluster, recurrent_share=1e9))
    assert fast[MESSAGES] == pytest.approx(exchanged_s, rel=0.01)
    few = recurrent_seconds(mixer, setting(8, 8, 8192 - 8, recompute="none", recurrent="heads"), slow)
    assert few[MESSAGES] == pytest.approx(exchanged_s * (8192 - 8) / 2**20, rel=0.01)


def test_states_of_one_half_of_the_heads_hide_behind_the_other() -> None:
    mixer = delta_rule(hidden=64, keys=(16, 16), values=(16, 32), width=0)
    cluster, plan = Cluster(hop_s=0.0), setting(8, 8, recompute="none")
    slow, fast = (recurrent_seconds(mixer, plan, replace(cluster, recurrent_share=x))[MESSAGES] for x in (1e-9, 1e9))

    assert slow == pytest.approx(fast / 2, rel=0.01)


def test_heads_are_exchanged_where_ranks_can_share_them() -> None:
    mamba = selective_scan(hidden=64, inner=128, size=16, rank=4, width=4)
    assert can_exchange_heads([DELTA, mamba], 8, 1)
    assert not can_exchange_heads([mamba], 8, 1)
    assert not can_exchange_heads([DELTA], 1, 1)
    assert not can_exchange_heads([DELTA], 5, 1)
    assert not can_exchange_heads([DELTA], 32, 1)
