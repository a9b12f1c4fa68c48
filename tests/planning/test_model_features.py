"""What a config.json says that a model computes; what it leaves out is what transformers takes it for."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from burst_plugin.training.model_families import FAMILIES
from burst_plugin.training.model_features import ModelFeatures, RotaryScaling, model_features
from burst_plugin.training.model_shape import ModelShape, model_shape
from tests.support.model_configs import PUBLISHED

SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 32,
    "vocab_size": 128,
    "pad_token_id": 0,
}
EXPERTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 4},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    },
}


def read(config: dict[str, Any], directory: Path) -> ModelShape:
    (directory / "config.json").write_text(json.dumps(config))
    return model_shape(str(directory))


@pytest.mark.parametrize("windows", [{}, {"use_sliding_window": True, "max_window_layers": 3}])
@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_that_are_left_out_mean_what_transformers_takes_them_for(
    kind: str, windows: dict[str, Any], tmp_path: Path
) -> None:
    """transformers writes all keys, of which none is unknown."""
    transformers = pytest.importorskip("transformers")
    config = {"model_type": kind, **SIZES, **EXPERTS.get(kind, {})}
    if kind.startswith("qwen"):
        config |= windows if kind != "qwen3_moe" else {"use_sliding_window": bool(windows)}
    short = read(config, tmp_path)
    settings = {key: value for key, value in config.items() if key != "model_type"}
    complete = json.loads(transformers.AutoConfig.for_model(kind, **settings).to_json_string(use_diff=False))
    long = read(complete, tmp_path)
    assert short == long
    assert model_features(short) == model_features(long)
    assert any(model_features(long).windows) == bool(complete.get("sliding_window"))


def test_features_are_read(tmp_path: Path) -> None:
    features = model_features(read(PUBLISHED["gpt_oss"], tmp_path))
    assert (features.sinks, features.qkv_bias, features.output_bias, features.expert_bias) == (True,) * 4
    assert features.windows == (128, 0) * 12
    assert features.clamped_swiglu == 7.0
    yarn = RotaryScaling(kind="yarn", factor=32.0, original_tokens=4096, rounds=False)
    assert features.rotary_scaling == yarn
    assert features.sources["windows"] == "sliding_window=128"
    llama = model_features(read(PUBLISHED["llama_3_1"], tmp_path))
    assert llama.unusual() == ["rotary_scaling"]
    assert (llama.rotary_base, llama.norm_epsilon) == (500000.0, 1e-5)
    gemma = model_features(read(PUBLISHED["gemma_3"], tmp_path))
    assert (gemma.rotary_base, gemma.local_rotary_base) == (1e6, 1e4)
    assert [layer for layer, window in enumerate(gemma.windows) if not window] == [5, 11, 17, 23]
    beside_images = {"model_type": "gemma3", "vision_config": {}, "text_config": PUBLISHED["gemma_3"]}
    assert replace(model_features(read(beside_images, tmp_path)), towers=False) == gemma


@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_pytorch_tanh"])
def test_the_activation_of_gemma_is_the_one_that_transformers_takes(activation: str, tmp_path: Path) -> None:
    """Whose first files mean the approximation by "gelu", and have no hidden_activation."""
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "gemma", **SIZES, "hidden_act": activation}
    taken = transformers.AutoConfig.for_model(**config).hidden_act
    assert model_features(read(config, tmp_path)).activation == taken


LLAMA, QWEN, OSS = PUBLISHED["llama_3_1"], PUBLISHED["qwen2"], PUBLISHED["gpt_oss"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "cohere"}, "model_type='cohere', of which it is not known what its layers compute"),
        (LLAMA | {"residual_multiplier": 0.2}, "residual_multiplier=0.2, of which it is not known what it changes"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, of which it is not known"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor=None, expected a number"),
        (LLAMA | {"rope_theta": "1e6"}, "rope_theta='1e6', expected a number"),
        (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps=None, expected a number"),
        (LLAMA | {"num_experts": 8, "num_experts_per_tok": 2}, "model_type=llama with a number of experts"),
        (OSS | {"num_local_experts": None}, "model_type=gpt_oss without a number of experts"),
        (OSS | {"layer_types": ["full_attention"]}, "layer_types of 1 layers, expected 24"),
        (OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0, expected 1.702"),
        (QWEN | {"layer_types": ["sliding_attention"] * 28}, "and no sliding_window in use"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        model_features(read(config, tmp_path))


def test_every_feature_has_a_source(tmp_path: Path) -> None:
    """Messages name it."""
    named = {name for family in FAMILIES.values() for names in family.says.values() for name in names}
    named |= {name for family in FAMILIES.values() for name in family.features}
    assert named <= {field.name for field in fields(ModelFeatures)}
    for config in PUBLISHED.values():
        if "kv_lora_rank" not in config:
            features = model_features(read(config, tmp_path))
            assert set(features.unusual()) <= set(features.sources)
