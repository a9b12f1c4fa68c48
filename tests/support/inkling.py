"""Tiny models of Inkling, whose attention has a bias by distance; distances and sizes are unlike each other."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.deepspeed_run import VOCAB

_SHAPE = {
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB - 3,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 12,
    "sliding_window_size": 5,
    "rel_extent": 7,
    "d_rel": 3,
    "log_scaling_n_floor": 6,
    "log_scaling_alpha": 0.5,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LOOPS = {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2, "loop_gate_rank": 4}
_KINDS = {"inkling": "InklingTextConfig", "inkling2": "Inkling2TextConfig", "inkling2_loop": "Inkling2LoopTextConfig"}
_FIELDS: dict[str, dict[str, Any]] = {
    "inkling": {
        "intermediate_size": 48,
        "n_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    },
    "inkling2": {"n_layers_per_attn_res_block": 2, "qk_l2_clip_threshold": 4.0, "rel_l2_clip_threshold": 1.0},
}
_FIELDS["inkling2_loop"] = {**_FIELDS["inkling2"], **_LOOPS}
FAMILIES: dict[str, Any] = {
    name: getattr(transformers, kind)(**_SHAPE, **_FIELDS[name])
    for name, kind in _KINDS.items()
    if hasattr(transformers, kind)
}
"""Configurations by family, of the families that the release of transformers has."""
