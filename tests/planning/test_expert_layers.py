"""Which layers of a config.json have experts, and how many: parameters as transformers counts them, and refusals."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from burst_plugin.training.model_shape import shape_of

_SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
_ERNIE = {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 32}
_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("ernie4_5_moe", _ERNIE),
    ("ernie4_5_moe", {**_ERNIE, "moe_layer_start_index": 2, "moe_layer_end_index": 4, "moe_layer_interval": 2}),
    ("aria_text", {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2}),
    (
        "hy_v3",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "sparse"],
        },
    ),
    (
        "minimax_m3_vl_text",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "dense_intermediate_size": 160,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse", "sparse"],
        },
    ),
]
_UNGATED = ("apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi", "starcoder2")


@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("kind", "sizes"), [*_CONFIGS, *((kind, {}) for kind in _UNGATED)])
def test_parameters_are_as_many_as_transformers_counts(kind: str, sizes: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = {"num_key_value_heads": 4} if kind in ("gpt_neox", "persimmon") else {}  # which have one kind of heads
    config = AutoConfig.for_model(kind, **{**_SIZES, **heads, **sizes}, pad_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict(), kind)
    experts = [name for name, _ in model.named_parameters() if name.endswith(".experts.down_proj")]
    assert sum(each.layers for each in shape.by_kind if each.experts) == len(experts)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters == pytest.approx(counted, rel=0.02)  # norms and biases apart


@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", ["cohere2", "ernie4_5", "smollm3", "starcoder2", "llama", "qwen3"])
def test_heads_are_tied_as_by_default_where_a_file_does_not_say(kind: str) -> None:
    from transformers import AutoConfig

    sizes = {name: value for name, value in _SIZES.items() if name != "tie_word_embeddings"}
    config = AutoConfig.for_model(kind, **sizes, pad_token_id=None)
    written = {name: value for name, value in config.to_dict().items() if name != "tie_word_embeddings"}
    assert shape_of(written, kind).tied is config.tie_word_embeddings


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("mine", {"moe_experts": 8}, r"experts and the key moe_experts=8, whose memory is not known"),
        ("mine", {"num_experts": 8, "num_experts_per_tok": 2, "moe_hidden_size": 32}, "the key moe_hidden_size=32"),
        ("mine", {"num_shared_expert": [1, 1]}, r"the key num_shared_expert=\[1, 1\]"),
        ("ernie4_5_vl_moe_text", {**_ERNIE, "moe_intermediate_size": [32, 16]}, r"moe_intermediate_size=\[32, 16\]"),
        ("jetmoe", {"num_local_experts": 8, "num_experts_per_tok": 2}, "experts of attention"),
        ("hunyuan_v1_moe", {**_ERNIE}, "an MLP beside experts"),
        ("mine", {"hidden_size_per_layer_input": 32}, "embeddings for every layer"),
        ("hrm_text", {"H_cycles": 2}, "layers that run several times"),
        ("gemma3n_text", {"altup_num_inputs": 4}, "several streams of hidden states"),
        ("mine", {"global_head_dim": 512}, "heads of two sizes"),
        ("mine", {"enable_moe_block": True, **_ERNIE}, "experts beside an MLP"),
        ("mine", {**_ERNIE, "moe_layer_freq": [0, 1]}, r"moe_layer_freq is \[0, 1\], expected a list with 0 or 1"),
        (
            "mine",
            {**_ERNIE, "mlp_layer_types": ["moe"] * 6},
            r'expected a list with "dense" or "sparse" for each of 6',
        ),
    ],
)
def test_experts_that_are_not_read_are_refused_by_name(kind: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of({**_SIZES, "model_type": kind, **sizes}, "config.json")


def test_keys_that_count_no_parameters_change_nothing() -> None:
    sparse = {**_SIZES, "model_type": "mine", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    more = {"moe_layer_freq": 1, "num_expert_group": 4, "moe_norm_min": 1e-12, "moe_router_scaling_factor": 1.0}
    assert shape_of({**sparse, **more}, "config.json") == shape_of(sparse, "config.json")
