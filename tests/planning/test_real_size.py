"""A whole training step of Llama 3 8B at its real size, on tensors without values: what a plan promises holds."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from burst_plugin.deepspeed.planning import space
from burst_plugin.planning.memory import GIB, memory
from burst_plugin.planning.model_shape import MODELS
from burst_plugin.planning.setting import Cluster, Setting
from burst_plugin.planning.training_plan import Goal, plans_that_fit
from tests.support.real_step import step_bytes

pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

LLAMA = MODELS["llama3_8b"]
NODE = Cluster(gpu_gib=56)
MARGIN = "left for CUDA, NCCL and the allocator"


@cache
def planned() -> Setting:
    """Return the fastest way to train on 1M tokens with 56 GiB of each of 8 GPUs."""
    return plans_that_fit(Goal(model=LLAMA, tokens=2**20, cluster=NODE, space=space(fused_norms=False)))[0].setting


def gib_of_step(layers: int, **options: Any) -> float:
    """Run a step of so many layers, as planned but for `options`, held to the plan; return what it takes."""
    shape, setting = replace(LLAMA, layers=layers), replace(planned(), **options)
    live, parked = step_bytes(shape, setting)
    said = memory(shape, setting, NODE)
    tensors = said.gpu_bytes - said.gpu[MARGIN]
    print(f"{layers} layers: {live.peak / GIB:.2f} GiB of tensors, by plan {tensors / GIB:.2f}")
    assert tensors == pytest.approx(live.peak, rel=0.1)
    on_host = said.host["inputs of layers"] + said.host["attention, kept"]  # in whole pages
    assert on_host == pytest.approx(8 * parked, rel=0.02)
    return live.peak / GIB


def test_the_plan_shards_and_offloads() -> None:
    setting = planned()
    assert (setting.context, setting.zero, setting.recompute, setting.keep) == (8, 3, "full", 1.0)
    assert (setting.loss_chunk, setting.offload, setting.offload_optimizer) == (1024, True, True)


@pytest.mark.slow
def test_a_million_tokens_on_one_node() -> None:
    assert gib_of_step(layers=32) + NODE.margin_gib <= NODE.gpu_gib


def test_a_layer_adds_its_shard_of_weights_and_nothing_else() -> None:
    """All that it keeps for the backward pass waits on the host."""
    shard = LLAMA.layer_parameters / 8 * 2 / GIB
    assert gib_of_step(layers=5) - gib_of_step(layers=3) == pytest.approx(2 * shard, abs=0.01)


@pytest.mark.slow
def test_heads_are_exchanged_and_half_of_attention_is_kept() -> None:
    gib_of_step(layers=2, tokens=2**19, ulysses=8, keep=0.5, mlp_chunk=4096, loss_chunk=16384)
