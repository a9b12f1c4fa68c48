"""Options: which are valid, which bytes a hop has, and what is chosen by them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from burst_plugin import Strategy, Topology
from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.kernels import KERNELS
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from burst_plugin.ring.choices import choose_moving_side

MHA = Shapes(1, 1, 1, 32, 32, 128, 128, torch.bfloat16)
GQA = MHA._replace(kv_heads=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "zig"}, "layout='zig' is not valid; use one of: zigzag, striped, contiguous"),
        ({"schedule": "ring"}, "schedule='ring' .* use one of: flat_ring, two_level_ring, direct, tasp, auto"),
        ({"backward": "k"}, "backward='k' .* use one of: q, kv, both, auto"),
        ({"forward": ""}, "forward='' .* use one of: q, kv, both, auto"),
        ({"kernel": "fa9"}, "kernel='fa9' .* use one of: .*torch_cpu, reference, auto"),
        ({"kernel": 3}, "kernel=3 is not valid"),
        ({"ranks_per_node": 0}, "ranks_per_node=0 is not valid"),
        ({"ranks_per_node": "two"}, "ranks_per_node='two' is not valid"),
        ({"ranks_per_node": 2.5}, "ranks_per_node=2.5 is not valid"),
        ({"ranks_per_node": None}, "ranks_per_node=None is not valid"),
        ({"parts": 0}, "parts=0 is not valid; use a positive number"),
        ({"parts": 1.5}, "parts=1.5 is not valid"),
        ({"parts": (1, 0)}, r"parts=\(1, 0\) is not valid; use a positive number, or two: forward and backward"),
        ({"parts": [1, 2, 4]}, r"parts=\[1, 2, 4\] is not valid"),
        ({"parts": "2"}, "parts='2' is not valid"),
        ({"parts": True}, "parts=True is not valid"),
        ({"loss_chunk": -1}, "loss_chunk=-1 is not valid; use a number of tokens, or 0 for whole logits"),
        ({"loss_chunk": 0.5}, "loss_chunk=0.5 is not valid"),
        ({"loss_chunk": "1k"}, "loss_chunk='1k' is not valid"),
        ({"loss_chunk": True}, "loss_chunk=True is not valid"),
        ({"max_ctas": 10}, "max_ctas=10 is not valid; use a number of thread blocks, a power of two, or 0 for NCCL"),
        ({"max_ctas": -8}, "max_ctas=-8 is not valid; use a number of thread blocks"),
        ({"check": "never"}, "check='never' .* use one of: auto, always, sparse"),
    ],
)
def test_a_wrong_option_is_named_with_the_valid_ones(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Strategy(**options)


def test_a_strategy_cannot_be_changed_or_given_twice() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Strategy().layout = "striped"  # type: ignore[misc]
    with pytest.raises(ValueError, match="got strategy= and also kernel, layout"):
        Strategy.of(Strategy(layout="striped"), kernel="reference", layout="zigzag")
    with pytest.raises(ValueError, match=r"there is no option kernels \(did you mean kernel\?\); the .* are: layout"):
        Strategy.of(None, kernels="reference")
    assert Strategy.of(None, kernel="reference") == Strategy(kernel="reference")


def test_a_kernel_may_be_an_object_and_is_compared_by_name() -> None:
    one, other = (Strategy(kernel=TorchCpuKernel(), check="sparse") for _ in range(2))
    assert one.compared == other.compared == Strategy(kernel="torch_cpu", check="sparse").compared
    assert one.compared != Strategy(kernel=KERNELS["reference"], check="sparse").compared


def test_bytes_per_token_and_hop_are_those_of_the_design() -> None:
    assert hop_bytes(MHA, "backward", "q") == 32 * 256 * 2 + 2 * 32 * 4 + 32 * 128 * 4 == 33024
    assert hop_bytes(MHA, "backward", "kv") == 32 * 256 * 2 + 32 * 256 * 4 == 49152
    assert hop_bytes(GQA, "backward", "q") == 33024
    assert hop_bytes(GQA, "backward", "kv") == 12288
    assert hop_bytes(GQA, "forward", "kv") == 8 * 256 * 2


def test_the_side_with_fewer_bytes_travels_unless_one_is_forced() -> None:
    assert choose_moving_side(Strategy(), "backward", MHA) == "q"
    assert choose_moving_side(Strategy(), "backward", GQA) == "kv"
    assert choose_moving_side(Strategy(backward="q"), "backward", GQA) == "q"
    assert choose_moving_side(Strategy(forward="auto"), "forward", MHA._replace(q_len=1, kv_len=64)) == "q"
    assert choose_moving_side(Strategy(), "forward", MHA) == "kv"


def test_keys_and_values_travel_if_bytes_are_equal() -> None:
    tie = Shapes(1, 2, 3, 1, 1, 1, 1, torch.float32)
    assert hop_bytes(tie, "forward", "q") == hop_bytes(tie, "forward", "kv")
    assert choose_moving_side(Strategy(forward="auto"), "forward", tie) == "kv"


def test_float16_queries_take_their_output_along() -> None:
    operands, _ = MHA._replace(dtype=torch.float16).side("backward", "q")
    assert operands[2] == ((1, 1, 32, 128), torch.float16)


def test_auto_schedule_has_two_levels_where_the_topology_has() -> None:
    assert Strategy().schedule_for(Topology(2, 2)) == "two_level_ring"
    for topology in (Topology(1, 4), Topology(4, 1), Topology(1, 1)):
        assert Strategy().schedule_for(topology) == "flat_ring"
    assert Strategy(schedule="flat_ring").schedule_for(Topology(2, 2)) == "flat_ring"
