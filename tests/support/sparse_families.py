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
_MILD = {**_SHARED, "initializer_range": 0.06}  # with more, gradients of one rank round by 1e-4
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Blocks of 4 keys: documents, shards and what pads rows are no whole number of them.
_BLOCKS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 16,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",
}
# Other heads and ranks of latents than in layers with an indexer; by default a thousand times the rest of the model.
_SLIDING = {
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 20,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 12,
    "swa_qk_rope_head_dim": 4,
    "swa_v_head_dim": 10,
}
# Blocks of 4 of the tokens that a query sees, and n-grams of 2 and 3 tokens.
SEEN_BLOCKS: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "split_ngram_parts": 1,
}
_SEEN = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    **SEEN_BLOCKS,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "ngram_vocab_size_base": 150,  # with others, gates are so near 0 that rounding shows in their roots
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",
}
_FIELDS: dict[str, dict[str, Any]] = {
    "DeepseekV32Config": {},
    "AXK2Config": {},
    "Dots3NoteTextConfig": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "sliding_window": 9,
        "shared_experts_intermediate_size": 16,
        **_SLIDING,
    },
    "GlmMoeDsaConfig": {**_SHARED, "mlp_layer_types": ["dense", "sparse", "dense"]},
    "HYV4Config": _MILD,
    "HYV4VLConfig": {**_MILD, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "MistralLarge4Config": _MILD,
    "Glm5NextConfig": {  # pools of 4 tokens, in a layer after one that carries a state
        **_MILD,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "index_topk": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
    },
    "MiniMaxM3VLTextConfig": _BLOCKS,
    "MiniMaxM3VLConfig": _BLOCKS,
    "Qwen4ExpTextConfig": _SEEN,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
_WITH_TOWERS: dict[str, dict[str, Any]] = {
    "HYV4VLConfig": {"num_key_value_heads": 4, "out_hidden_size": 32},
    "MistralLarge4Config": {},
    "MiniMaxM3VLConfig": {},
    "Glm5NextConfig": {"depth": 1, "num_heads": 4, "out_hidden_size": 32},
}
# Of a fresh model they are all alike, or 0; alike streams of hyper-connections have gradients of rounding alone.
_DRAWN = {
    "k_norm.bias": 1.0,
    "q_input_norm.bias": 1.0,
    "sinks": 1.0,
    "softmax_scaling.scale": 0.4,
    "index_kpool_compress_ape": 1.0,
    "index_kpool_compress_gate": 0.3,
    "A_log": 0.5,
    "o_norm.weight": 1.0,
    "ple.conv1d.weight": 0.5,
    **{f"{name}.weight": 0.4 for name in ("q_layernorm", "k_layernorm", "norm_key", "norm_query", "norm_conv")},
}
_STREAMS = 0.6


def sparse_families() -> dict[str, Any]:
    """Configurations by model type, of the families that the release of transformers has."""
    found = {}
    for name, own in _FIELDS.items():
        kind, fields = getattr(transformers, name, None), own if "vocab_size" in own else {**_LATENT, **own}
        if name in _WITH_TOWERS:
            fields = {"text_config": fields, "vision_config": {**_TOWER, **_WITH_TOWERS[name]}}
        if kind is not None:
            config = kind(**fields)
            found[config.model_type] = config
    return found


def build(config: Any) -> Any:
    """A model in float32 with eager attention, the same on every rank."""
    torch.manual_seed(0)
    has_tower = type(config).__name__ in _WITH_TOWERS
    kind = transformers.AutoModelForImageTextToText if has_tower else transformers.AutoModelForCausalLM
    model = kind.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = next((size for end, size in _DRAWN.items() if name.endswith(end)), 0.0)
            size = _STREAMS if "hc" in name.split(".")[-2] else drawn
            if size:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model.train()
