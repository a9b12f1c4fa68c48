"""Tiny random models of families with indexers, which select the keys that attention then computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from tests.support.deepspeed_run import VOCAB

_LATENT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "index_topk": 7,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, some scores are 0 in every head, and transformers takes any of them
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",
}
_SHARED = {"indexer_types": ["full", "shared", "full"], "num_hidden_layers": 3}
_FIELDS: dict[str, dict[str, Any]] = {
    "DeepseekV32Config": {},
    "AXK2Config": {},
    "Dots3NoteTextConfig": {"layer_types": ["indexed_attention", "sliding_attention"], "sliding_window": 9},
    "GlmMoeDsaConfig": {**_SHARED, "mlp_layer_types": ["dense", "sparse", "dense"]},
    "HYV4Config": {**_SHARED, "initializer_range": 0.06},  # with more, gradients of one rank round by 1e-4
    "MistralLarge4TextConfig": _SHARED,
}
_BODIES = {"MistralLarge4TextConfig": "MistralLarge4TextModel"}  # of families that have no head for text alone


def sparse_families() -> dict[str, Any]:
    """Configurations by model type, of the families that the release of transformers has."""
    kinds = {name: getattr(transformers, name, None) for name in _FIELDS}
    found = [kind(**{**_LATENT, **_FIELDS[name]}) for name, kind in kinds.items() if kind is not None]
    return {config.model_type.removesuffix("_text"): config for config in found}


# Of a fresh model they are all alike, or 0; alike streams of hyper-connections have gradients of rounding alone.
_DRAWN = ("k_norm.bias", "q_input_norm.bias", "sinks", "softmax_scaling.scale")


def build(config: Any) -> Any:
    """A model in float32 with eager attention, the same on every rank."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    body = _BODIES.get(type(config).__name__)
    kind = transformers.AutoModelForCausalLM if body is None else getattr(transformers, body)
    make = kind.from_config if body is None else kind._from_config
    model = make(copy.deepcopy(config), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(_DRAWN):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif "hc" in name.split(".")[-2]:
                parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def logits_of(output: Any) -> torch.Tensor:
    """What a model says of the next token; of a body, its hidden states times a fixed matrix."""
    found = getattr(output, "logits", None)
    if found is None:
        hidden = output.last_hidden_state
        found = hidden @ torch.randn(hidden.shape[-1], VOCAB, generator=torch.Generator().manual_seed(2))
    return found
