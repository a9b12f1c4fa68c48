"""Features that transformers' code gives all models of a `model_type`, and defaults of keys that files leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """The features that all models of one `model_type` have in common, and the meaning of keys in their config.json.

    defaults: values of keys that a config.json may leave out, as transformers has them.
    features: values of fields of `ModelFeatures` that do not depend on the config.json, by name.
    says: by key of a config.json, the fields of `ModelFeatures` that take its value.
    windows: whether layers may have a sliding window, which `layer_windows` reads.
    lists_layers: whether the key layer_types may say which layers have one.
    experts: whether every model of the family has experts.
    unused: keys that may be there, and say nothing about features: they change nothing, or only sizes.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    says: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    windows: bool = False
    lists_layers: bool = False
    experts: bool = False
    unused: frozenset[str] = frozenset()


_BIAS = MappingProxyType({"attention_bias": ("qkv_bias", "output_bias")})
_EXPERTS = frozenset(
    {"num_experts", "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits"}
)
# `model_shape` reads these.
_QWEN_EXPERTS = _EXPERTS | {"moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"}
_WINDOW = frozenset({"max_window_layers"})
_GEMMA: Mapping[str, Any] = MappingProxyType({"scaled_embedding": True})
_GEMMA_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
    }
)
_CAPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_logit_softcapping": ("score_cap",),
        "final_logit_softcapping": ("logit_cap",),
        "use_bidirectional_attention": ("bidirectional",),
    }
)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(says={**_BIAS, "mlp_bias": ("mlp_bias",)}),
        "mistral": Family(defaults={"num_key_value_heads": 8}, windows=True),
        "mixtral": Family(
            defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
            says={"router_jitter_noise": ("router_noise",)},
            windows=True,
            experts=True,
            unused=_EXPERTS,
        ),
        "qwen2": Family(
            defaults={"num_key_value_heads": 32},
            features={"qkv_bias": True},
            windows=True,
            lists_layers=True,
            unused=_WINDOW,
        ),
        "qwen2_moe": Family(
            defaults={
                "num_key_value_heads": 16,
                "norm_topk_prob": False,
                "qkv_bias": True,
            },
            features={"gated_shared_expert": True},
            says={"qkv_bias": ("qkv_bias",), "norm_topk_prob": ("renormalized",)},
            windows=True,
            lists_layers=True,
            experts=True,
            unused=_QWEN_EXPERTS | _WINDOW | {"shared_expert_intermediate_size"},
        ),
        "qwen3": Family(
            defaults={
                "num_key_value_heads": 32,
                "head_dim": 128,
            },
            features={"qk_norm": "heads"},
            says=_BIAS,
            windows=True,
            lists_layers=True,
            unused=_WINDOW,
        ),
        "qwen3_moe": Family(
            defaults={
                "num_key_value_heads": 4,
                "norm_topk_prob": False,
            },
            features={"qk_norm": "heads"},
            says={**_BIAS, "norm_topk_prob": ("renormalized",)},
            windows=True,
            experts=True,
            unused=_QWEN_EXPERTS | _WINDOW,
        ),
        "gpt_oss": Family(
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 64,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "attention_bias": True,
                "swiglu_limit": 7.0,
            },
            features={"sinks": True, "expert_bias": True, "mlp_bias": True},
            says={**_BIAS, "swiglu_limit": ("clamped_swiglu",)},
            windows=True,
            lists_layers=True,
            experts=True,
            unused=_EXPERTS | {"initial_context_length", "experts_per_token"},
        ),
        "gemma": Family(
            defaults={
                **_GEMMA_DEFAULTS,
                "hidden_activation": None,
                "hidden_act": "gelu_pytorch_tanh",
                "num_key_value_heads": 16,
                "query_pre_attn_scalar": None,
            },
            features=_GEMMA,
            says={**_BIAS, "use_bidirectional_attention": ("bidirectional",)},
        ),
        "gemma2": Family(
            defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            features={**_GEMMA, "norms": "both"},
            says={**_BIAS, **_CAPS},
            windows=True,
            lists_layers=True,
            unused=frozenset({"cache_implementation", "sliding_window_size"}),
        ),
        "gemma3_text": Family(
            defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
            features={**_GEMMA, "norms": "both", "qk_norm": "heads"},
            says={**_BIAS, **_CAPS},
            windows=True,
            lists_layers=True,
            unused=frozenset({"cache_implementation", "sliding_window_pattern", "_sliding_window_pattern"}),
        ),
        "olmo2": Family(
            defaults={"rms_norm_eps": 1e-5}, features={"norms": "after", "qk_norm": "projections"}, says=_BIAS
        ),
    }
)

# Families of transformers whose routers multiply results of experts by weights in 16 bits. Others' weights, and with
# them the products, are float32, whatever the type of the router's own parameters is.
ROUTED_IN_16_BITS = frozenset(
    """
    aria_text cohere2_moe ernie4_5_moe flex_olmo gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    jamba laguna mellum mistral4 olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe_text
    qwen3_vl_moe_text
    """.split()  # noqa: SIM905
)
# Tensors as wide as the MLP that activations in single operations keep, by a family or by the name of an activation:
# where gate and up are clamped, both before clamping, and the gate's sigmoid.
ACTIVATIONS_KEEP: Mapping[str, int] = MappingProxyType(
    {"gpt_oss": 3, "minimax_m3_vl_text": 3, "relu2": 0, "xielu": 4}
)
# Families of transformers with norms after attention and the MLP, alone or beside norms before them.
NORMS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "after": frozenset({"exaone4", "flex_olmo", "olmo2", "olmo3"}),
        "both": frozenset(
            """
            afmoe beam gemma2 gemma3_text gemma4_text gemma4_unified_text glm4 hyperclovax kolibri1
            """.split()  # noqa: SIM905
        ),
    }
)
# Families of transformers that multiply by the weights of norms in float32.
WIDE_NORMS = frozenset(
    """
    afmoe beam flex_olmo flint gemma gemma2 gemma3_text gpt_oss helium
    minimax_m3_vl_text olmo2 olmo3 vaultgemma
    """.split()  # noqa: SIM905
)
# Families of transformers whose heads cannot run in chunks: they are projected, or normalized, all at once.
WHOLE_HEADS = frozenset(
    """
    afmoe beam bitnet diffllama flex_olmo fuyu gpt_neox hunyuan_v1_dense laguna mimo_v2_flash minimax_m2
    modernbert-decoder olmo2 olmo3 olmoe persimmon phi3
    """.split()  # noqa: SIM905
)
# Families of transformers whose MLPs cannot run in chunks, nor their heads: they are parts of a layer.
WHOLE_LAYERS = frozenset(
    """
    bert bert-generation big_bird biogpt camembert data2vec-text electra ernie rembert roberta roberta-prelayernorm
    roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """.split()  # noqa: SIM905
)
# Families of transformers whose MLPs, or experts, have no gate.
UNGATED = frozenset(
    """
    apertus apertus1p5_text arcee bert bert-generation big_bird biogpt camembert data2vec-text electra ernie fuyu
    gpt_neox jais2 nanochat nemotron persimmon phi rembert roberta roberta-prelayernorm roformer
    starcoder2 xlm-roberta xlm-roberta-xl xmod
    """.split()  # noqa: SIM905
)
# Families of transformers whose head is the embedding unless their files say otherwise; `FAMILIES` names some more.
TIED_BY_DEFAULT = frozenset(
    """
    bert bert-generation big_bird biogpt camembert cohere cohere2 cohere2_moe cohere_compass_text data2vec-text
    electra ernie ernie4_5 ernie4_5_moe gemma4_text gemma4_unified_text got_ocr2 granite_swa
    modernbert-decoder roberta roberta-prelayernorm roc_bert roformer smollm3 starcoder2 vaultgemma xlm-roberta
    xlm-roberta-xl xmod
    """.split()  # noqa: SIM905
)
# Beginnings of families that normalize queries and keys in any case; others do where their files say use_qk_norm.
NORMALIZING = tuple(
    """
    afmoe apertus beam exaone4 exaone_moe flex_olmo flint gemma3 hunyuan hy_v3 kolibri1 laguna mellum minimax_m olmo2
    olmo3 olmoe qwen3
    """.split()  # noqa: SIM905
)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False}
)


def defaults_of(kind: str) -> Mapping[str, Any]:
    """Return the values of keys that a config.json of the `model_type` `kind` may leave out; {} if not known."""
    family = FAMILIES.get(kind)
    return {} if family is None else {**DEFAULTS, **family.defaults}
