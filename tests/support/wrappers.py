"""Tiny random models of families that also take images, audio or video, made of their default configurations."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.support.deepspeed_run import VOCAB
from tests.support.hybrids import randomised
from tests.support.sparse_families import SEEN_BLOCKS

_LAYERS = 2
# Sizes by the names that families have for them, of the language model and of other parts.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size", "hidden_dim", "moe_hidden_size"), 32),
    **dict.fromkeys(("projection_dim", "projector_hidden_size", "text_hidden_size", "image_token_embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "dense_intermediate_size", "num_embeddings"), 48),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "depth", "num_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "max_position_embeddings": 256,
    "sliding_window": 9,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}}
_KINDS = ["sliding_attention", "full_attention"]
_PER_LAYER = {"text_config": {"per_layer_config": {"1": {"head_dim": 16}}, "layer_types": _KINDS}}
_RELATIVE = {
    "text_config": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 5,
        "rel_extent": 7,
        "d_rel": 3,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "experts_implementation": "eager",
    }
}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
# What is left to change, by family.
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl"), _MROPE),
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": 1},
    "glm4v_moe": {"text_config": {**_MROPE["text_config"], "head_dim": 16}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
            "moe_intermediate_size": [16, 12],
            "mlp_layer_types": ["dense", "sparse"],
        }
    },
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {kind: {**_ROPE, "mrope_section": [2, 1, 1]} for kind in _KINDS},
            "layer_types": _KINDS,
        }
    },
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]}}},
    "kimi_k25": {"text_config": {"num_key_value_heads": 4}},
    "glm5_next": {
        "text_config": {
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_kpool": 4,
            "index_topk": 16,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "initializer_range": 0.06,
        },
        "vision_config": {"projection_intermediate_size": 48},
    },
    "step3p7": {"text_config": {"layer_types": _KINDS, "sliding_window": 9}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma4": {**_PER_LAYER, "vision_config": _TOWER},
    "gemma4_unified": _PER_LAYER,
    "hrm_text": {"num_layers_per_stack": 1, "head_dim": 8},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "muse_spark": {
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [32] * 4, "depths": [1] * 4},
        "text_config": {"layer_types": _KINDS},
    },
    "qwen4_exp": {
        "text_config": {
            **SEEN_BLOCKS,
            "ngram_vocab_size_base": 64,
            "eos_token_id": 2,
        }
    },
    "inkling_mm_model": {
        "text_config": {**_RELATIVE["text_config"], "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
        "vision_config": {"patch_size": 2, "n_layers": 3},
    },
    "inkling2": {"text_config": {**_RELATIVE["text_config"], "n_layers_per_attn_res_block": 1}},
    "inkling2_loop": {
        "text_config": {
            **_RELATIVE["text_config"],
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_num_passes": 2,
            "loop_gate_rank": 4,
        }
    },
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1], "latent_channels": 8}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 1},
    "mllama": {
        "vision_config": {
            "num_global_layers": 1,
            "attention_heads": 4,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        "text_config": {"cross_attention_layers": [1], "num_hidden_layers": 3},
    },
    "apertus1p5": {
        "vision_config": {"codebook_size": 8, "base_channels": 32, "channel_multiplier": [1], "latent_channels": 32},
        "audio_config": {"codebook_size": 8, "codebook_dim": 32},
        "image_token_offset": 80,
        "audio_token_offset": 88,
        "image_token_id": 78,
        "audio_token_id": 79,
    },
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "paligemma2": ("paligemma", {"text_config": {"model_type": "gemma2"}}),
    "gemma4 with images": ("gemma4", {"text_config": {"use_bidirectional_attention": "vision"}}),
    "gemma4_unified with images": ("gemma4_unified", {"text_config": {"use_bidirectional_attention": "vision"}}),
}
"""Families with another default configuration."""
_CARRYING = [
    "inkling2", "inkling2_loop", "inkling_mm_model", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
    "nemotron_h_omni", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
]  # fmt: skip
"""Families whose language models have layers that carry a state along the sequence."""
WRAPPERS = [
    *_CARRYING,
    "apertus1p5", "aria", "audioflamingo3", "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge",
    "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid", "ernie4_5_vl_moe", "exaone4_5", "fun_asr_nano",
    "gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmasr", "got_ocr2",
    "granite_docling", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus",
    "kimi_k25", "lfm2_vl", "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision",
    "minimax_m3_vl", "mistral3", "mllama", "molmo2", "muse_glimmer", "muse_spark", "musicflamingo", "ovis2",
    "paddleocr_vl", "paligemma", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_asr",
    "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7", "video_llama_3",
    "video_llava", "vipllava", "voxtral",
]  # fmt: skip
"""Families that run on text alone; others have the same classes."""


def tiny_wrapper(family: str, adjust: Callable[[dict[str, Any]], None] = lambda fields: None) -> Any:
    """A model of a family, the same on every rank, with few of everything, eager attention and no dropout.

    adjust: changes the fields of its configuration, after they are made small.
    """
    family, given = _VARIANTS.get(family, (family, {}))
    default = transformers.CONFIG_MAPPING[family](**given)
    fields = default.to_dict()
    _shrink(fields)
    _change(fields, deepcopy(_CHANGES.get(family, {})))
    adjust(fields)
    config = type(default)(**fields)
    torch.manual_seed(0)
    model = getattr(transformers, class_name(family))(config)
    model.set_attn_implementation("eager")
    return (randomised(model) if family in _CARRYING else model).train()


def class_name(family: str) -> str:
    """Name of the class that makes text of images, audio or video and text."""
    mappings = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    names: list[Any] = [mapping[family] for mapping in mappings if family in mapping]
    return str(names[0])


def _shrink(fields: dict[Any, Any]) -> None:
    """Make sizes tiny, in inner configurations as well."""
    for name, value in list(fields.items()):
        if name == "per_layer_config":
            del fields[name]
        elif isinstance(value, dict):
            _shrink(value)
        elif name in _SIZES and isinstance(value, int):
            fields[name] = _SIZES[name]
        elif str(name).endswith("layer_types") and value:
            fields[name] = (list(dict.fromkeys(value)) * _LAYERS)[:_LAYERS]
        elif name == "mrope_section":
            fields[name] = [2, 1, 1]
        elif name == "pad_token_id" and value:
            fields[name] = 0
        elif name == "initializer_range":
            fields[name] = 0.15
        elif "dropout" in str(name) and isinstance(value, float):
            fields[name] = 0.0


def _change(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(fields.get(name), dict) and name.endswith("_config"):
            _change(fields[name], value)
        else:
            fields[name] = value
