"""How Megatron's flags spell what a model computes, and which features a release of Megatron has no flags for.

    lines = model_flags(model_shape("path/to/config.json"), 1, (0, 16, 1))

Features have the names of fields of `ModelFeatures`, sizes come from `ModelShape`. `pretrain_gpt.py` of 0.16.1 to
main was examined: a flag that its parser accepts and its model ignores, such as --rope-scaling-factor, does not
count.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from burst_plugin.megatron.releases import Version
from burst_plugin.training.model_features import ModelFeatures, RotaryScaling, model_features
from burst_plugin.training.model_shape import ModelShape

_YARN_SINCE = (0, 19, 0)
# Megatron's fused kernel clamps before it adds a bias.
_CLAMPED = "--quick-geglu --no-bias-gelu-fusion --glu-linear-offset 1.0 --activation-func-clamp-value"


def model_flags(model: ModelShape, tensor: int, version: Version) -> list[str]:
    """Return the flags of a model for Megatron's `pretrain_gpt.py`, as lines of a few flags each.

    Args:
        model: the sizes of the model, from its config.json.
        tensor: tensor-parallel ranks.
        version: the release of Megatron, as (major, minor, patch).

    Raises:
        ValueError: the release has no flags for features of the model, which are named; or its config.json is not
            understood.
    """
    release = ".".join(map(str, version))
    if model.mixers or model.kinds:
        some = model.has_experts and not all(kind.experts for kind in model.kinds)
        unlike = "experts in some layers only" if some else "layers that are not alike"
        has = ", ".join(sorted({mixer.kind for mixer, _ in model.mixers})) or unlike
        raise ValueError(
            f"{model.name} cannot be written as flags of Megatron {release} yet, since it has {has}; write the flags "
            "of its layers by hand, or plan for deepspeed"
        )
    features = model_features(model)
    missing = _missing(model, features, version)
    if missing:
        raise ValueError(
            f"{model.name} cannot be written as flags of Megatron {release}, which has none for {', '.join(missing)}"
        )
    lines = [
        f"--num-layers {model.layers} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn} "
        f"--num-attention-heads {model.heads} --kv-channels {model.head_dim} --vocab-size {model.vocab}",
        f"--normalization RMSNorm --norm-epsilon {features.norm_epsilon}",
        *_attention(model, features),
        *_positions(features),
        f"{_CLAMPED} {features.clamped_swiglu}" if features.clamped_swiglu else "--swiglu",
    ]
    if not model.tied:
        lines.append("--untie-embeddings-and-output-weights")
    if features.weight_std != ModelFeatures.weight_std:
        lines.append(f"--init-method-std {features.weight_std}")
    return lines + (_experts(model, features, tensor) if model.experts else [])


def _attention(model: ModelShape, features: ModelFeatures) -> list[str]:
    lines = []
    if model.kv_heads != model.heads:
        lines.append(f"--group-query-attention --num-query-groups {model.kv_heads}")
    if features.qk_norm:
        lines.append("--qk-layernorm")
    if not features.output_bias:
        lines.append("--disable-bias-linear" + (" --add-qkv-bias" if features.qkv_bias else ""))
    if features.sinks:
        lines.append("--softmax-type learnable")
    if any(features.windows):
        # Megatron counts the keys before a query, transformers the query's own as well.
        flags = f"--window-size {max(features.windows) - 1},0"
        pattern = _pattern([bool(window) for window in features.windows])
        lines.append(f"{flags} --window-attn-skip-freq {pattern}" if pattern else flags)
    lines.append(f"--attention-dropout {features.attention_dropout:g}")
    return lines


def _pattern(windowed: list[bool]) -> str:
    """Return which layers have the window: "" for all, N if every Nth has not, else a list that Megatron evaluates.

    No list is written as [1,1,0], which a shell takes for names of files.
    """
    if all(windowed):
        return ""
    for period in range(2, len(windowed) + 1):
        if windowed == [(layer + 1) % period != 0 for layer in range(len(windowed))]:
            return str(period)
    runs: list[list[int]] = []
    for has in windowed:
        if runs and runs[-1][0] == has:
            runs[-1][1] += 1
        else:
            runs.append([int(has), 1])
    return "(" + "+".join(f"[{has}]*{count}" for has, count in runs) + ")"


def _positions(features: ModelFeatures) -> list[str]:
    lines = [f"--rotary-base {int(features.rotary_base)}"]
    scaling = features.rotary_scaling
    if scaling is None:
        return ["--position-embedding-type rope", *lines]
    if scaling.kind == "llama3":
        return ["--position-embedding-type rope", *lines, "--use-rope-scaling"]
    rounds = "" if scaling.rounds else "no-"
    return [
        "--position-embedding-type yarn",
        *lines,
        f"--rotary-scaling-factor {scaling.factor}",
        f"--mscale {scaling.mscale} --mscale-all-dim {scaling.mscale_all_dim}",
        f"--yarn-original-max-position-embeddings {scaling.original_tokens} --yarn-beta-fast {scaling.beta_fast} "
        f"--yarn-beta-slow {scaling.beta_slow} --{rounds}yarn-correction-range-round-to-int",
    ]


def _experts(model: ModelShape, features: ModelFeatures, tensor: int) -> list[str]:
    lines = [f"--num-experts {model.experts} --moe-router-topk {model.active} --moe-ffn-hidden-size {model.ffn}"]
    if not features.renormalized:
        lines.append("--moe-router-pre-softmax")
    if model.shared_ffn:
        lines.append(f"--moe-shared-expert-intermediate-size {model.shared_ffn}")
    if features.gated_shared_expert:
        lines.append("--moe-shared-expert-gate")
    if features.expert_bias and tensor > 1:  # experts with biases are not cut; as many bytes are on every rank
        lines.append(f"--expert-tensor-parallel-size 1 --expert-model-parallel-size {tensor}")
    return lines


# Fields of `ModelFeatures` that `model_flags` cannot write at all, and what they mean; and those that it always can.
_NOWHERE: Mapping[str, str] = MappingProxyType(
    {
        "local_rotary_base": "another rotary base in layers with a window",
        "score_scale": "a scale of scores other than 1 / sqrt(head dim)",
        "score_cap": "capped scores",
        "logit_cap": "capped logits",
        "bidirectional": "attention to later tokens",
        "scaled_embedding": "embeddings scaled by sqrt(hidden size)",
        "router_noise": "noise on what experts see",
        "towers": "images or audio beside text",
    }
)


def _of_scaling(scaling: RotaryScaling, version: Version) -> str:
    if scaling.kind == "llama3":
        known = RotaryScaling(kind="llama3", factor=8.0, original_tokens=8192)
        return (
            "" if scaling == known else "such frequencies: only those stretched by 8, from 8192 tokens on, are known"
        )
    if scaling.kind != "yarn":
        return f"frequencies stretched by {scaling.kind}"
    if scaling.attention_factor is not None:
        return "YaRN with an attention_factor"
    since = ".".join(map(str, _YARN_SINCE[:2]))
    return "" if version >= _YARN_SINCE else f"YaRN, which came with {since}"


_ALWAYS = frozenset(
    """
    clamped_swiglu windows qkv_bias sinks renormalized gated_shared_expert attention_dropout weight_std
    """.split()  # noqa: SIM905
)


def _unwritable(model: ModelShape, features: ModelFeatures, version: Version) -> Mapping[str, str]:
    """Return for every field of `ModelFeatures` why its value cannot be written; "" if it can."""
    biases = {features.output_bias, features.mlp_bias, features.expert_bias if model.experts else features.mlp_bias}
    has_all_or_none = len(biases) == 1 and features.qkv_bias >= features.output_bias
    of_biases = "" if has_all_or_none else "biases in only some of the output projection, MLP and router"
    scaling, has_silu = features.rotary_scaling, features.activation in ("silu", "swish")
    return {
        **dict.fromkeys(_ALWAYS, ""),
        **_NOWHERE,
        **dict.fromkeys(("output_bias", "mlp_bias", "expert_bias"), of_biases),
        "norms": "" if features.norms == "before" else "norms after attention and MLP",
        "qk_norm": "" if features.qk_norm in ("", "heads") else "norms of queries and keys over all heads together",
        "activation": "" if has_silu else f"a gated MLP with {features.activation}",
        "rotary_scaling": "" if scaling is None else _of_scaling(scaling, version),
    }


def _missing(model: ModelShape, features: ModelFeatures, version: Version) -> list[str]:
    """Return the features of a model that a release of Megatron has no flags for, each with its source."""
    unwritable = _unwritable(model, features, version)
    reasons: dict[str, str] = {}  # sources by reason
    for name in features.unusual():
        if unwritable[name]:
            reasons.setdefault(unwritable[name], features.sources[name])
    if model.experts and model.active == 1 and features.renormalized:
        reasons["one expert per token whose weight is 1"] = "num_experts_per_tok=1"
    if features.rotary_base != int(features.rotary_base):
        reasons["a rotary base that is no whole number"] = features.sources["rotary_base"]
    return [f"{reason} ({source})" for reason, source in reasons.items()]
