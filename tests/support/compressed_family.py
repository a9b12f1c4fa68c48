"""A tiny random model of DeepSeek V4, whose attention has windows of tokens as further keys."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support.deepspeed_run import VOCAB

_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_topk": 2,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, some scores are 0 in every head, and transformers takes any of them
    "sliding_window": 6,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 5},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",
}
# Of a fresh model they are 0 or all alike; alike streams of hyper-connections have gradients of rounding alone.
_DRAWN = {"sinks": 1.0, "position_bias": 1.0, "kv_norm.weight": 0.5, "tid2eid": 0.0, "e_score_correction_bias": 0.1}
_STREAMS = 0.3


def config(**fields: Any) -> Any:
    """The configuration; transformers before 5.23 has none."""
    return transformers.DeepseekV4Config(**{**_FIELDS, **fields})


def drawn(model: Any) -> Any:
    """The model with random numbers where it begins with zeros or ones, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            size = next((size for end, size in _DRAWN.items() if name.endswith(end)), 0.0)
            size = _STREAMS if name.split(".")[-2] in ("attn_hc", "ffn_hc", "hc_head") else size
            if name.endswith("tid2eid"):
                x.copy_(torch.rand(len(x), 4, generator=generator).topk(x.shape[1]).indices)
            elif size:
                x.add_(size * torch.randn(x.shape, generator=generator))
    return model


def build(**fields: Any) -> Any:
    """A model in float32 with eager attention, the same on every rank."""
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    return drawn(kind.from_config(config(**fields), attn_implementation="eager", dtype=torch.float32)).train()
