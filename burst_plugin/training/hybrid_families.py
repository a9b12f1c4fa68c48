"""The layers of hybrid models, which are not all alike, or partly without attention, by `model_type`.

A row of `HYBRIDS` has the defaults of transformers for keys that a config.json leaves out, and a function that
returns the layers. A layer is fields of `ModelShape` that differ from the model's own: whether it attends, its mixer,
its MLP or experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from burst_plugin.checks import shown
from burst_plugin.training.expert_layers import sparse_layers
from burst_plugin.training.mixers import (
    TokenMixer,
    decay_attention,
    delta_rule,
    selective_scan,
    short_convolution,
    state_space,
)

Config = Mapping[str, Any]
Size = Callable[..., int]
"""Returns the first size of some keys of a config.json that is there; see `model_shape`."""
Layer = Mapping[str, Any]
_NO_MLP: Layer = MappingProxyType({"ffn": 0, "experts": 0, "active": 0, "shared_ffn": 0})
_NO_ATTENTION: Layer = MappingProxyType({"attends": False, "qk_norm": False, "query_gate": False})


@dataclass(frozen=True, kw_only=True)
class HybridFamily:
    """The layers and defaults that all models of one `model_type` have.

    layers: a function from a config.json and its `Size` function to the layers, each as fields of `ModelShape` by
        name.
    wide_norms, in_chunks: fields of `ModelShape`.
    windows: whether layers of the type sliding_attention have a window.
    names: further names of keys in a config.json, each with the key that it stands for, as transformers takes them.
    ignored: keys that transformers does not read in this family.
    defaults: values of keys that a config.json may leave out.
    """

    layers: Callable[[Config, Size], list[Layer]]
    wide_norms: bool = False
    windows: bool = False
    in_chunks: tuple[str, ...] = ("mlp", "heads")
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def complete(self, config: Config) -> tuple[Config, Mapping[str, str]]:
        """Return a config.json with defaults, under the keys that are read, and {key: its further name there}."""
        renamed = {self.names[name]: name for name in config if name in self.names}
        plain = {key: value for key, value in config.items() if key not in (*self.names, *self.ignored)}
        return {**self.defaults, **plain, **{key: config[name] for key, name in renamed.items()}}, renamed


def dense(width: int, more: int = 0) -> Layer:
    """Return the fields of `ModelShape` for a layer with a plain MLP of this width, in place of experts.

    more: further parameters of the layer that take part in no matrix product, such as biases.
    """
    return {**_NO_MLP, "ffn": width, "extra": more}


def _experts(size: Size, width: str, count: str, shared: int = 0, more: int = 0) -> Layer:
    """Return experts, whose width and number are under these keys, with `more` parameters that are in no product."""
    active = size("num_experts_per_tok")
    return {"ffn": size(width), "experts": size(count), "active": active, "shared_ffn": shared, "extra": more}


def layer_kinds(config: Config, layers: int) -> list[str] | None:
    """Return the kind of every layer that a config.json lists; None if it lists none.

    Kinds are named as transformers names them now, "linear_attention" for "mamba" of older files. Raises ValueError
    for a list whose length is not `layers`.
    """
    key = "layers_block_type" if config.get("layer_types") is None else "layer_types"
    if (listed := config.get(key)) is None:
        return None
    if not isinstance(listed, list | tuple) or len(listed) != layers:
        raise ValueError(f"{key} is {shown(listed)}, expected a list with the kind of each of {layers} layers")
    return [_RENAMED.get(str(kind), str(kind)) for kind in listed]


_RENAMED = MappingProxyType({"mamba": "linear_attention", "attention": "full_attention"})


def _joined(*parts: Layer) -> Layer:
    """Return the layer that these parts make up; their further parameters are added up."""
    layer: dict[str, Any] = {}
    for part in parts:
        layer |= {**part, "extra": layer.get("extra", 0) + part.get("extra", 0)}
    return layer


def _mixing(mixer: TokenMixer) -> Layer:
    return {**_NO_ATTENTION, "mixer": mixer}


def _attention(config: Config, size: Size, **features: Any) -> Layer:
    """Return a layer's attention, with biases in its projections if the file says so."""
    more = features.pop("extra", 0)
    if config.get("attention_bias"):
        more += _head_dim(size) * (size("num_attention_heads") + 2 * _kv_heads(size)) + size("hidden_size")
        more += _head_dim(size) * size("num_attention_heads") * bool(features.get("query_gate"))
    return {**features, "extra": more}


def _kv_heads(size: Size) -> int:
    return size("num_key_value_heads", default=size("num_attention_heads"))


def _head_dim(size: Size) -> int:
    return size("head_dim", default=size("hidden_size") // size("num_attention_heads"))


def chosen(kinds: Sequence[str], by_kind: Mapping[str, Layer], mlps: Sequence[Layer]) -> list[Layer]:
    """Return layers of these kinds, each with its MLP. Raise ValueError for a kind that is not in `by_kind`."""
    unknown = sorted(set(kinds) - set(by_kind))
    if unknown:
        usual = " or ".join(by_kind)
        raise ValueError(f"layers of the type {unknown[0]} are not known; write {usual} in layer_types")
    return [_joined(by_kind[kind], mlp) for kind, mlp in zip(kinds, mlps, strict=True)]


# ---------------------------------------------------------------------------------------------------- delta rules


def _delta(size: Size) -> Layer:
    keys = size("linear_num_key_heads"), size("linear_key_head_dim")
    values = size("linear_num_value_heads"), size("linear_value_head_dim")
    return _mixing(
        delta_rule(hidden=size("hidden_size"), keys=keys, values=values, width=size("linear_conv_kernel_dim"))
    )


def _interleaved(config: Config, layers: int) -> list[str]:
    """Return the kinds of layers, every fourth of which attends unless the file says otherwise."""
    period = config.get("full_attention_interval") or 4
    usual = ["full_attention" if (layer + 1) % period == 0 else "linear_attention" for layer in range(layers)]
    return layer_kinds(config, layers) or usual


def _qwen_next(config: Config, size: Size) -> list[Layer]:
    layers = size("num_hidden_layers")
    attention = _attention(config, size, qk_norm=True, query_gate=True)
    by_kind = {"linear_attention": _delta(size), "full_attention": attention}
    mlps = [dense(size("intermediate_size", default=0))] * layers
    if size("num_experts", default=0):
        shared, gate = size("shared_expert_intermediate_size"), size("hidden_size")
        sparse = _experts(size, "moe_intermediate_size", "num_experts", shared, gate)
        has_experts = sparse_layers(config, size, layers)
        mlps = [sparse if has else mlp for has, mlp in zip(has_experts, mlps, strict=True)]
    return chosen(_interleaved(config, layers), by_kind, mlps)


def _olmo(config: Config, size: Size) -> list[Layer]:
    layers, heads = size("num_hidden_layers"), size("num_attention_heads")
    key_heads = size("linear_num_key_heads", default=heads)
    key_dim = size("linear_key_head_dim", default=3 * size("hidden_size") // (4 * key_heads))
    mixer = delta_rule(
        hidden=size("hidden_size"),
        keys=(key_heads, key_dim),
        values=(
            size("linear_num_value_heads", default=heads),
            size("linear_value_head_dim", default=2 * key_dim),
        ),
        width=size("linear_conv_kernel_dim"),
    )
    more = (heads + _kv_heads(size) - 2) * _head_dim(size)  # norms of all heads, not of one
    attention = _attention(config, size, qk_norm=True, extra=more)
    return chosen(
        _interleaved({**config, "full_attention_interval": None}, layers),
        {"linear_attention": _mixing(mixer), "full_attention": attention},
        [dense(size("intermediate_size"))] * layers,
    )


# ---------------------------------------------------------------------------------------------------- state spaces


def _mamba2(
    config: Config, size: Size, inner: int, *, has_norm: bool = True, output_bias: bool | None = None
) -> TokenMixer:
    heads = size("mamba_n_heads")
    head_dim = inner // heads if config.get("mamba_d_head") in (None, "auto") else size("mamba_d_head")
    bias = bool(config.get("mamba_proj_bias"))
    return state_space(
        hidden=size("hidden_size"),
        heads=heads,
        head_dim=head_dim,
        groups=size("mamba_n_groups"),
        size=size("mamba_d_state"),
        width=size("mamba_d_conv"),
        has_norm=has_norm,
        biases=(bool(config.get("mamba_conv_bias", True)), bias, bias if output_bias is None else output_bias),
    )


def _mamba2_of_its_own(config: Config, size: Size) -> TokenMixer:
    """Return the mixer of Mamba-2 and Nemotron-H, whose files give the size of heads."""
    bias = bool(config.get("use_bias"))
    return state_space(
        hidden=size("hidden_size"),
        heads=size("mamba_num_heads", "num_heads"),
        head_dim=size("mamba_head_dim", "head_dim"),
        groups=size("mamba_n_groups", "n_groups"),
        size=size("ssm_state_size", "state_size"),
        width=size("mamba_d_conv", "conv_kernel"),
        biases=(bool(config.get("mamba_conv_bias", config.get("use_conv_bias", True))), bias, bias),
    )


def _gated_mlp(config: Config, size: Size) -> Layer:
    width = size("intermediate_size")
    return dense(width, (2 * width + size("hidden_size")) * bool(config.get("mlp_bias")))


def _bamba(config: Config, size: Size) -> list[Layer]:
    layers, attending = size("num_hidden_layers"), config.get("attn_layer_indices") or ()
    mixer = _mamba2(config, size, size("mamba_expand") * size("hidden_size"))
    kinds = ["full_attention" if layer in attending else "linear_attention" for layer in range(layers)]
    by_kind = {"linear_attention": _mixing(mixer), "full_attention": _attention(config, size)}
    return chosen(kinds, by_kind, [_gated_mlp(config, size)] * layers)


def _falcon_h1(config: Config, size: Size) -> list[Layer]:
    inner = size("mamba_d_ssm", default=0) or size("mamba_expand") * size("hidden_size")
    has_norm, bias = bool(config.get("mamba_rms_norm")), bool(config.get("projectors_bias"))
    mixer = _mamba2(config, size, inner, has_norm=has_norm, output_bias=bias)
    layer = _joined(_attention(config, size), {"mixer": mixer}, _gated_mlp(config, size))
    return [layer] * size("num_hidden_layers")


def _granite(config: Config, size: Size) -> list[Layer]:
    layers, experts = size("num_hidden_layers"), size("num_local_experts", default=0)
    shared = size("shared_intermediate_size")
    mlp = _experts(size, "intermediate_size", "num_local_experts", shared) if experts else dense(shared)
    mixer = _mamba2(config, size, size("mamba_expand") * size("hidden_size"))
    by_kind = {"linear_attention": _mixing(mixer), "full_attention": _attention(config, size)}
    kinds = layer_kinds(config, layers) or ["linear_attention"] * layers
    return chosen(kinds, by_kind, [mlp] * layers)


_NEMOTRON_LETTERS = MappingProxyType({"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"})


def _nemotron(config: Config, size: Size) -> list[Layer]:
    kinds = nemotron_kinds(config)
    hidden, mixer = size("hidden_size"), _mamba2_of_its_own(config, size)
    width = size("intermediate_size")
    mlp = dense(width, (width + hidden) * bool(config.get("mlp_bias")))
    experts: Layer = {}
    if "moe" in kinds:
        if config.get("moe_latent_size"):
            raise ValueError(f"experts in a latent space (moe_latent_size={shown(config['moe_latent_size'])})")
        shared = size("moe_shared_expert_intermediate_size")
        more = (shared + hidden) * bool(config.get("mlp_bias"))
        experts = _experts(size, "moe_intermediate_size", "n_routed_experts", shared, more)
    by_kind = {
        "linear_attention": _joined(_mixing(mixer), _NO_MLP),
        "full_attention": _NO_MLP,  # whose projections have no biases, whatever the file says
        "mlp": _joined(_NO_ATTENTION, mlp, {"matrices": 2}),
        "moe": _joined(_NO_ATTENTION, experts, {"matrices": 2}),
    }
    return chosen(kinds, by_kind, [{}] * len(kinds))


def nemotron_kinds(config: Config) -> list[str]:
    """Return the kinds of Nemotron-H's layers: "linear_attention", "full_attention", "mlp" or "moe".

    A config.json has them as a list, or as a pattern of letters, M, *, - and E. Raises ValueError for other letters.
    """
    listed = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if listed is None and pattern is not None:
        unknown = sorted(set(pattern) - set(_NEMOTRON_LETTERS))
        if unknown:
            raise ValueError(f"hybrid_override_pattern has {unknown[0]!r}, expected {' '.join(_NEMOTRON_LETTERS)}")
        return [_NEMOTRON_LETTERS[letter] for letter in pattern]
    return [_RENAMED.get(kind, kind) for kind in listed or ("mamba", "moe", "attention", "mlp")]


def _mamba2_alone(config: Config, size: Size) -> list[Layer]:
    return [_joined(_mixing(_mamba2_of_its_own(config, size)), _NO_MLP)] * size("num_hidden_layers")


# ------------------------------------------------------------------------------------------- Mamba, and all others


def _rank(config: Config, size: Size, key: str) -> int:
    return math.ceil(size("hidden_size") / 16) if config.get(key) in (None, "auto") else size(key)


def _mamba_alone(config: Config, size: Size) -> list[Layer]:
    mixer = selective_scan(
        hidden=size("hidden_size"),
        inner=size("expand") * size("hidden_size"),
        size=size("state_size"),
        rank=_rank(config, size, "time_step_rank"),
        width=size("conv_kernel"),
        biases=(bool(config.get("use_conv_bias", True)), bool(config.get("use_bias"))),
    )
    return [_joined(_mixing(mixer), _NO_MLP)] * size("num_hidden_layers")


def _jamba(config: Config, size: Size) -> list[Layer]:
    layers = size("num_hidden_layers")
    mixer = selective_scan(
        hidden=size("hidden_size"),
        inner=size("mamba_expand") * size("hidden_size"),
        size=size("mamba_d_state"),
        rank=_rank(config, size, "mamba_dt_rank"),
        width=size("mamba_d_conv"),
        has_norms=True,
        biases=(bool(config.get("mamba_conv_bias", True)), bool(config.get("mamba_proj_bias"))),
    )
    width, experts = size("intermediate_size"), size("num_experts")
    sparse = _experts(size, "intermediate_size", "num_experts")
    period, offset = size("attn_layer_period"), size("attn_layer_offset", default=0)
    every, first = size("expert_layer_period"), size("expert_layer_offset", default=0)
    kinds = ["full_attention" if layer % period == offset else "linear_attention" for layer in range(layers)]
    mlps = [sparse if experts > 1 and layer % every == first else dense(width) for layer in range(layers)]
    return chosen(kinds, {"linear_attention": _mixing(mixer), "full_attention": _attention(config, size)}, mlps)


def _minimax(config: Config, size: Size) -> list[Layer]:
    layers = size("num_hidden_layers")
    mixer = decay_attention(hidden=size("hidden_size"), heads=size("num_attention_heads"), head_dim=_head_dim(size))
    usual = ["linear_attention" if layer % 2 else "full_attention" for layer in range(layers)]
    experts = _experts(size, "intermediate_size", "num_local_experts")
    by_kind = {"linear_attention": _mixing(mixer), "full_attention": {}}
    return chosen(layer_kinds(config, layers) or usual, by_kind, [experts] * layers)


def _lfm2(config: Config, size: Size) -> list[Layer]:
    layers, width = size("num_hidden_layers"), size("block_ff_dim", "intermediate_size")
    if config.get("block_auto_adjust_ff_dim", True):
        factor, multiple = config.get("block_ffn_dim_multiplier"), size("block_multiple_of")
        width = 2 * width // 3
        if factor is not None:
            width = multiple * -(-int(factor * width) // multiple)
    return _convolving(config, size, [dense(width)] * layers)


def _lfm2_moe(config: Config, size: Size) -> list[Layer]:
    experts = _experts(size, "moe_intermediate_size", "num_experts")
    if not config.get("layer_types"):
        raise ValueError("there is no layer_types; add a list with conv or full_attention for every layer")
    first = size("num_dense_layers", default=0)
    every = range(size("num_hidden_layers"))
    return _convolving(
        config, size, [dense(size("intermediate_size")) if layer < first else experts for layer in every]
    )


def _convolving(config: Config, size: Size, mlps: Sequence[Layer]) -> list[Layer]:
    attending = config.get("full_attn_idxs")
    usual = ["full_attention" if attending is None or layer in attending else "conv" for layer in range(len(mlps))]
    mixer = short_convolution(
        hidden=size("hidden_size"), width=size("conv_L_cache"), has_bias=bool(config.get("conv_bias"))
    )
    by_kind = {"conv": _mixing(mixer), "full_attention": {"qk_norm": True}}
    return chosen(layer_kinds(config, len(mlps)) or usual, by_kind, mlps)


# --------------------------------------------------------------------------------------------------------- the table

_DELTA = MappingProxyType(
    {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "head_dim": 256,
    }
)
_MAMBA2 = MappingProxyType(
    {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
)
_MAMBA = MappingProxyType(
    {"state_size": 16, "expand": 2, "conv_kernel": 4, "tie_word_embeddings": True, "residual_in_fp32": True}
)
_CONVOLVING = MappingProxyType({"num_key_value_heads": 8, "conv_L_cache": 3, "tie_word_embeddings": True})
_OF_LFM2 = MappingProxyType({"tie_embedding": "tie_word_embeddings"})
STREAM_IN_FLOAT32 = ("mamba", "mamba2", "falcon_mamba")
"""Those in which residual_in_fp32 changes something."""
_QWEN_EXPERTS = MappingProxyType(
    {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
)

HYBRIDS: Mapping[str, HybridFamily] = MappingProxyType(
    {
        "qwen3_next": HybridFamily(
            layers=_qwen_next,
            wide_norms=True,
            defaults={**_DELTA, **_QWEN_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
        ),
        "qwen3_5_text": HybridFamily(
            layers=_qwen_next, wide_norms=True, defaults={**_DELTA, "num_key_value_heads": 4}
        ),
        "qwen3_5_moe_text": HybridFamily(
            layers=_qwen_next,
            wide_norms=True,
            defaults={**_DELTA, **_QWEN_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
        ),
        "olmo_hybrid": HybridFamily(
            layers=_olmo, wide_norms=True, in_chunks=("mlp",), defaults={"linear_conv_kernel_dim": 4}
        ),
        "bamba": HybridFamily(layers=_bamba, defaults={**_MAMBA2, "num_key_value_heads": 8}),
        "falcon_h1": HybridFamily(
            layers=_falcon_h1, defaults={**_MAMBA2, "num_key_value_heads": 8, "mamba_d_ssm": 1024}
        ),
        "granitemoehybrid": HybridFamily(
            layers=_granite,
            in_chunks=("heads",),
            defaults={**_MAMBA2, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
        ),
        "nemotron_h": HybridFamily(
            layers=_nemotron,
            in_chunks=("heads",),
            wide_norms=True,
            names={"num_local_experts": "n_routed_experts"},
            ignored=("tie_word_embeddings",),
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 128,
                "ssm_state_size": 128,
                "mamba_num_heads": 128,
                "mamba_head_dim": 64,
                "n_groups": 8,
                "conv_kernel": 4,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 7688,
                "moe_shared_expert_intermediate_size": 7688,
            },
        ),
        "mamba2": HybridFamily(
            layers=_mamba2_alone,
            in_chunks=(),
            defaults={
                "num_heads": 128,
                "head_dim": 64,
                "state_size": 128,
                "n_groups": 8,
                "conv_kernel": 4,
                "residual_in_fp32": True,
            },
        ),
        "mamba": HybridFamily(layers=_mamba_alone, in_chunks=(), defaults=_MAMBA),
        "falcon_mamba": HybridFamily(layers=_mamba_alone, in_chunks=(), defaults=_MAMBA),
        "jamba": HybridFamily(
            layers=_jamba,
            names={"num_local_experts": "num_experts"},
            defaults={
                "num_key_value_heads": 8,
                "num_experts": 16,
                "num_experts_per_tok": 2,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
            },
        ),
        "minimax": HybridFamily(
            layers=_minimax,
            names={"num_experts": "num_local_experts"},
            defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        "lfm2": HybridFamily(
            layers=_lfm2,
            in_chunks=("mlp",),
            names=_OF_LFM2,
            defaults={**_CONVOLVING, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
        ),
        "lfm2_moe": HybridFamily(
            layers=_lfm2_moe,
            in_chunks=(),
            names=_OF_LFM2,
            defaults={
                **_CONVOLVING,
                "num_dense_layers": 2,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1792,
            },
        ),
    }
)
