"""What a plan says about memory of families whose layers are not Llama's: against steps of transformers' models.

The steps hold no values: see `measured_step`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from burst_plugin import Strategy
from burst_plugin.huggingface.chunked_modules import chunk_modules
from burst_plugin.planning.cluster import Cluster
from burst_plugin.training.memory import memory
from burst_plugin.training.model_shape import ModelShape, shape_of
from burst_plugin.training.setting import Code, Setting
from burst_plugin.training.step_time import step_seconds
from burst_plugin.training.training_plan import Goal, Space, settings
from tests.support.measured_step import activation_bytes, measured_code

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.huggingface

OF_STEP = (
    "inputs of layers",
    "attention, kept",
    "at work",
    "embeddings of layers",
    "keys and values that layers share",
)
SIZES = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Gemma 4 in the proportions of the models 31B, E4B and 26B-A4B.
LAYERS = [*["sliding_attention"] * 5, "full_attention"]
GEMMA4: dict[str, dict[str, Any]] = {
    "dense": {
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "intermediate_size": 2048,
    },
    "small": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 2048,
        "hidden_size_per_layer_input": 48,
        "vocab_size_per_layer_input": 256,
        "num_kv_shared_layers": 12,
    },
    "smallest": {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "intermediate_size": 2048,
        "hidden_size_per_layer_input": 96,
        "vocab_size_per_layer_input": 256,
        "num_kv_shared_layers": 12,
    },
    "experts": {
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "intermediate_size": 384,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 8,
        "moe_intermediate_size": 128,
    },
}
CODE = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False)


def gemma4(name: str) -> Any:
    depth = {"num_hidden_layers": 24, "layer_types": LAYERS * 4}
    heads = {"head_dim": 64, "global_head_dim": 128, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
    return transformers.AutoConfig.for_model("gemma4_text", **{**SIZES, **depth, **heads, **GEMMA4[name]})


def said_and_measured(config: Any, recompute: str, plain_norms: bool) -> tuple[float, float]:
    """The bytes of a step, of a plan and of the model."""
    shape = shape_of(config.to_dict(), config.model_type)
    code = replace(measured_code(), plain_norms=plain_norms)
    setting = Setting(tokens=4096, code=code, recompute=recompute)
    found = memory(shape, setting, Cluster())
    said = sum(found.gpu.get(name, 0.0) for name in OF_STEP)
    measured = activation_bytes(shape, setting, config=config).peak
    print(f"{config.model_type} {recompute} plain {plain_norms}: {said / measured:.4f} {found.fullest}")
    return said, measured


@pytest.mark.parametrize("plain_norms", [True, False])
@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize(
    "kind",
    [
        *("gemma", "gemma2", "gemma3_text", "glm4", "hyperclovax", "olmo2", "olmo3", "exaone4"),  # norms
        *("helium", "vaultgemma", "hunyuan_v1_dense"),
        *("apertus", "arcee"),  # activations
    ],
)
def test_a_step_of_a_family_takes_what_the_plan_says(kind: str, recompute: str, plain_norms: bool) -> None:
    said, measured = said_and_measured(transformers.AutoConfig.for_model(kind, **SIZES), recompute, plain_norms)
    assert said == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("plain_norms", [True, False])
@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("name", GEMMA4)
def test_a_step_of_gemma_4_takes_what_the_plan_says(name: str, recompute: str, plain_norms: bool) -> None:
    """A plan takes the largest layer for the one at work, even if it is the last, which leaves nothing behind."""
    said, measured = said_and_measured(gemma4(name), recompute, plain_norms)
    assert 0.97 * measured < said < 1.11 * measured


@pytest.mark.parametrize("name", [*GEMMA4, "default"])
def test_parameters_are_those_of_gemma_4(name: str) -> None:
    config = transformers.AutoConfig.for_model("gemma4_text") if name == "default" else gemma4(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(config.to_dict(), name).parameters == expected


def test_heads_of_two_sizes_are_read_as_published_files_and_as_transformers_writes_them() -> None:
    """google/gemma-4-31B-it's file gives the sizes of heads without a window once."""
    config = gemma4("dense")
    written = config.to_dict()
    once = {key: value for key, value in written.items() if key != "per_layer_config"}
    shape = shape_of({**once, "global_head_dim": 128, "num_global_key_value_heads": 2}, "once")
    assert shape == replace(shape_of(written, "written"), name=shape.name)
    sizes = {kind.window: (kind.layers, kind.heads, kind.kv_heads, kind.head_dim) for kind in shape.by_kind}
    assert sizes == {1024: (20, 12, 6, 64), 0: (4, 12, 2, 128)}


def dense() -> ModelShape:
    return shape_of(gemma4("dense").to_dict(), "gemma4")


def test_both_kinds_of_heads_count_in_the_time_of_attention() -> None:
    """Links are fast, so that attention takes what its operations take."""
    cluster = Cluster(peak_flops=1e12, attention_share=0.5, intra_bytes_per_s=1e15)
    setting = Setting(tokens=65536, context=4, inner=4, recompute="none", code=CODE)
    spent = step_seconds(dense(), setting, cluster)
    pairs = {1024: 65536 * 1024 - 1024 * 1023 / 2, 0: 65536**2 / 2}
    work = 20 * pairs[1024] * 12 * 64 + 4 * pairs[0] * 12 * 128  # pairs of all ranks, times heads and their dim
    assert spent["attention, forward"] == pytest.approx(4 * work / 4 / 0.5e12, rel=0.05)


def test_groups_of_ranks_can_share_the_heads_of_both_kinds() -> None:
    space = Space(code=CODE, zeros=(1, 3), tensor=True, pipeline=False, recompute=("full",), divides=False)
    goal = Goal(model=dense(), tokens=2**18, cluster=Cluster(gpus_per_node=12), space=space)
    tried = list(settings(goal))
    assert {setting.tensor for setting in tried} == {1, 2}, "2 key/value heads without a window, 6 with one"
    assert {setting.ulysses for setting in tried} >= {1, 2}
    assert not {setting.parts for setting in tried if setting.tensor == setting.ulysses == 1} - {1, 2}


def test_buffers_of_the_ring_are_for_the_larger_blocks() -> None:
    setting = Setting(tokens=2**18, context=8, inner=8, code=CODE)
    model = dense()
    alone = [memory(replace(kind, kinds=()), setting, Cluster()).gpu["ring buffers"] for kind in model.kinds]
    assert memory(model, setting, Cluster()).gpu["ring buffers"] == max(alone)


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "qwen3", "gemma2", "glm4", "phi3", "olmo2", "olmo3", "olmoe", "gpt_neox", "minimax_m2", "laguna"),
        *("hunyuan_v1_dense", "bert", "roberta", "gemma4"),
    ],
)
def test_parts_run_in_chunks_where_a_run_takes_that(kind: str) -> None:
    more = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = gemma4("dense") if kind == "gemma4" else transformers.AutoConfig.for_model(kind, **SIZES)
    for name in more.keys() & config.to_dict().keys():
        setattr(config, name, more[name])
    shape, taken = shape_of(config.to_dict(), kind), []
    for part, option in (("mlp", "mlp_chunk"), ("heads", "head_chunk")):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        try:
            chunk_modules(model, Strategy(**{option: 4}))
        except ValueError:
            continue
        taken.append(part)
    assert [part for part in shape.in_chunks if part != "mlp" or not shape.has_experts] == taken
