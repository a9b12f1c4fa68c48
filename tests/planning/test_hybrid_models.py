"""The sizes of models whose layers are not alike: parameters are those of transformers' own models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_plugin.huggingface.chunked_modules import chunk_modules
from burst_plugin.strategy import Strategy
from burst_plugin.training.attention_families import ATTENTION_FAMILIES
from burst_plugin.training.hybrid_families import HYBRIDS
from burst_plugin.training.latent_families import LATENT_FAMILIES
from burst_plugin.training.model_families import FAMILIES
from burst_plugin.training.model_shape import ModelShape, model_shape, shape_of
from burst_plugin.training.tower_families import TEXT_DEFAULTS

transformers = pytest.importorskip("transformers")
hybrids = pytest.importorskip("tests.support.hybrids").hybrids

pytestmark = pytest.mark.huggingface

# By model_type, changes that give every kind of layer and every bias that a family may have.
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [1], "attention_bias": True},
    "qwen3_5_text": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {"attention_bias": True},
    "olmo_hybrid": {"attention_bias": True},
    "bamba": {"mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
    "falcon_h1": {
        "mlp_bias": True,
        "attention_bias": True,
        "mamba_rms_norm": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
    },
    "granitemoehybrid": {"num_local_experts": 0, "attention_bias": True, "mamba_proj_bias": True},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "mlp_bias": True,
        "attention_bias": True,
        "use_bias": True,
        "use_conv_bias": False,
    },
    "mamba2": {"use_bias": True, "use_conv_bias": False},
    "mamba": {"use_bias": True, "use_conv_bias": False},
    "falcon_mamba": {"use_bias": True},
    "jamba": {"num_hidden_layers": 6, "mamba_proj_bias": True},
    "minimax": {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]},
    "lfm2": {"conv_bias": True, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"conv_bias": True, "num_dense_layers": 0},
}
# By model_type, changes that leave no experts, whose layers never run in chunks.
WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts": 0},
    "granitemoehybrid": {"num_local_experts": 0},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    "jamba": {"num_experts": 1},
}
DEFAULTS: dict[str, Any] = {
    **TEXT_DEFAULTS,
    **{kind: family.defaults for kind, family in FAMILIES.items()},
    **{kind: family.defaults for kind, family in {**HYBRIDS, **LATENT_FAMILIES, **ATTENTION_FAMILIES}.items()},
}
# By model_type, further names of keys that transformers takes besides those in its `attribute_map`.
FURTHER_NAMES = {
    "nemotron_h": {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel"},
    "lfm2": {"tie_embedding": "tie_word_embeddings"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "deepseek_v32": {"num_experts": "n_routed_experts"},
    "glm_moe_dsa": {"num_experts": "n_routed_experts"},
}
NAMES = [
    (kind, name, key)
    for kind, defaults in DEFAULTS.items()
    for name, key in {**transformers.CONFIG_MAPPING[kind].attribute_map, **FURTHER_NAMES.get(kind, {})}.items()
    if name in defaults or key in defaults
]
# What has no default in transformers.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}


def counted(config: Any) -> int:
    """The parameters of transformers' own model."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def read(config: Any, directory: Path, **options: Any) -> ModelShape:
    """The sizes that a plan reads from what transformers writes."""
    (directory / "config.json").write_text(config.to_json_string(**options))
    return model_shape(str(directory))


def tiny() -> dict[str, Any]:
    """Tiny configurations by `model_type`."""
    return {config.model_type: config for config in hybrids().values()}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_parameters_are_those_of_tiny_models(kind: str, tmp_path: Path) -> None:
    config = tiny()[kind]
    assert read(config, tmp_path, use_diff=False).parameters == counted(config)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_parameters_are_those_of_models_with_biases_and_other_layers(kind: str, tmp_path: Path) -> None:
    fields = {**tiny()[kind].to_dict(), **VARIANTS[kind]}
    for key in ("layer_types", "layers_block_type", "num_hidden_layers"):
        if "layers_block_type" in VARIANTS[kind] and key not in VARIANTS[kind]:
            fields.pop(key, None)
    if kind == "jamba":
        fields.pop("layer_types", None)
    config = type(tiny()[kind])(**fields)
    assert read(config, tmp_path, use_diff=False).parameters == counted(config)


@pytest.mark.parametrize("whole", [True, False], ids=["all keys", "keys that are not at their defaults"])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_parameters_are_those_of_default_models(kind: str, whole: bool, tmp_path: Path) -> None:
    """A key that is left out means what transformers takes it for."""
    more = NEEDED.get(kind, {})
    config = transformers.AutoConfig.for_model(kind, **more)
    shape = read(config, tmp_path, use_diff=False)
    assert shape.parameters == counted(config)
    left_out = json.loads((tmp_path / "config.json").read_text())
    named = (
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
    )
    named += tuple(more)
    if not whole:
        (tmp_path / "config.json").write_text(json.dumps({key: left_out[key] for key in named if key in left_out}))
        assert model_shape(str(tmp_path)) == shape


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", sorted({*HYBRIDS, *LATENT_FAMILIES, *ATTENTION_FAMILIES} - {"mistral4"}))
def test_heads_are_tied_where_transformers_ties_them(kind: str, is_tied: bool, tmp_path: Path) -> None:
    """Which it never does in some families, whatever the file says."""
    config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=is_tied, **NEEDED.get(kind, {}))
    assert read(config, tmp_path, use_diff=False).parameters == counted(config)


@pytest.mark.parametrize(("kind", "name", "key"), NAMES)
def test_sizes_are_read_under_all_names_that_transformers_takes(kind: str, name: str, key: str) -> None:
    """No default of the key hides them, whatever the key is called in a plan."""
    usual = transformers.AutoConfig.for_model(kind)
    value = not getattr(usual, key) if isinstance(getattr(usual, key), bool) else 2 * getattr(usual, key)
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    fields: dict[str, Any] = {size: getattr(usual, size) for size in sizes}
    fields |= NEEDED.get(kind, {})

    def planned(**changes: Any) -> ModelShape:
        text = {"model_type": kind, **fields, **changes}
        return shape_of({"text_config": text} if kind in TEXT_DEFAULTS else text, kind)

    config = transformers.AutoConfig.for_model(kind, **fields, **{name: value})
    assert getattr(config, key) == value
    if kind not in TEXT_DEFAULTS and kind != "mistral4":  # of which there is no class for text alone
        assert planned(**{name: value}).parameters == counted(config)
    assert planned(**{name: value}) == planned(**{key: value}) != planned()


@pytest.mark.parametrize("kind", HYBRIDS)
def test_parts_run_in_chunks_where_a_run_takes_that(kind: str, tmp_path: Path) -> None:
    fields = {**tiny()[kind].to_dict(), **WITHOUT_EXPERTS.get(kind, {})}
    if kind == "nemotron_h":
        fields.pop("layer_types", None)
    config = type(tiny()[kind])(**fields)
    shape = read(config, tmp_path, use_diff=False)
    taken = []
    for part, option in (("mlp", "mlp_chunk"), ("heads", "head_chunk")):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
        try:
            chunk_modules(model, Strategy(**{option: 2}))
        except ValueError:
            continue
        taken.append(part)
    assert [part for part in shape.in_chunks if part != "mlp" or not shape.has_experts] == taken


CONFIGS = Path(__file__).parent / "configs"


def test_parameters_of_published_models() -> None:
    """As their names say, in billions; of Qwen3-Next without its prediction of further tokens."""
    qwen = model_shape(str(CONFIGS / "qwen3_next_80b_a3b.json"))
    nemotron = model_shape(str(CONFIGS / "nemotron_h_56b.json"))
    assert qwen.parameters / 1e9 == pytest.approx(79.7, abs=0.1)
    assert nemotron.parameters / 1e9 == pytest.approx(56.3, abs=0.1)
    assert (qwen.attention_layers, nemotron.attention_layers) == (12, 10)
    assert [(mixer.kind, layers) for mixer, layers in qwen.mixers] == [("gated delta net", 36)]
    assert [(mixer.kind, layers) for mixer, layers in nemotron.mixers] == [("Mamba-2", 54)]


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("bailing_hybrid", {"kv_lora_rank": 512}, r"latent attention \(kv_lora_rank=512\)"),
        ("zamba2", {"mamba_d_state": 64}, r"state-space layers \(mamba_d_state=64\)"),
        ("nemotron_h", {"hybrid_override_pattern": "M?"}, r"hybrid_override_pattern has '\?', expected M \* - E"),
        ("nemotron_h", {"hybrid_override_pattern": "ME", "moe_latent_size": 8}, "experts in a latent space"),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "expected a list with the kind of each of 2 layers"),
        ("jamba", {"num_local_experts": "8"}, "has num_local_experts='8', expected a positive whole number"),
        ("bamba", {"num_hidden_layers": None}, "has no num_hidden_layers"),
        ("minimax", {"layer_types": ["conv", "full_attention"]}, "layers of the type conv are not known"),
        ("lfm2_moe", {}, "there is no layer_types; add a list"),
    ],
)
def test_what_cannot_be_planned_is_refused(kind: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 128, **sizes, **more}))
    with pytest.raises(ValueError, match=message):
        model_shape(str(tmp_path))


def test_experts_in_some_layers_only(tmp_path: Path) -> None:
    """Qwen3's files say it in two ways, and others count dense layers in front."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, **sizes, **experts}
    for more in ({"mlp_only_layers": [0, 3]}, {"decoder_sparse_step": 2}):
        theirs = transformers.AutoConfig.for_model("qwen3_moe", **{**config, **more})
        shape = read(theirs, tmp_path, use_diff=False)
        assert shape.parameters == counted(theirs)
        assert [(kind.experts > 0, kind.layers) for kind in shape.by_kind] != [(True, 6)]
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "glm4_moe", "first_k_dense_replace": 1})
    )
    assert [(kind.experts, kind.layers) for kind in model_shape(str(tmp_path)).by_kind] == [(0, 1), (8, 5)]
