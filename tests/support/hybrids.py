"""Tiny random models of families whose layers carry a state along the sequence, or a convolution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.support.deepspeed_run import SHAPE

_SHAPE = {**SHAPE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BARE = {name: _SHAPE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
_BARE |= {"initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_BOTH = ["linear_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}
_SHARED = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
_DELTA = {  # heads of keys and values unlike each other in number and size, so that swapped axes are found
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": _BOTH,
}
_LATENT = {
    "num_key_value_heads": 4,
    "layer_types": _BOTH,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    **_EXPERTS,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_ALONE2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 8}
_MILD = {"initializer_range": 0.08}  # of families whose gradients rounding is plain to see in otherwise
_ZAMBA = {
    **_MILD,
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "hybrid", "mamba"],
    "attention_head_dim": 16,
}
_SHORT = {"layer_types": ["conv", "full_attention"]}

_FIELDS: dict[str, dict[str, Any]] = {
    "Qwen3NextConfig": {**_SHAPE, **_SHARED, **_DELTA, "head_dim": 8},
    "Qwen3_5TextConfig": {**_SHAPE, **_DELTA, "head_dim": 8},
    "Qwen3_5MoeTextConfig": {**_SHAPE, **_SHARED, **_DELTA, "head_dim": 8},
    "OlmoHybridConfig": {**_SHAPE, **_DELTA, "linear_allow_neg_eigval": True},
    "LaraMiniConfig": {**_SHAPE, **_DELTA, "head_dim": 8},
    "KimiLinearConfig": {**_SHAPE, **_LATENT, "q_lora_rank": None, "n_routed_experts": 4},
    "BailingHybridConfig": {**_SHAPE, **_LATENT, "q_lora_rank": 16},
    "BambaConfig": {**_SHAPE, **_MAMBA2, "attn_layer_indices": [1], "attn_rotary_emb": 8},
    "FalconH1Config": {**_SHAPE, **_MAMBA2, "head_dim": 8, "mamba_d_ssm": 64},
    "GraniteMoeHybridConfig": {
        **_SHAPE,
        **_MAMBA2,
        "layer_types": _BOTH,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "experts_implementation": "eager",
    },
    "NemotronHConfig": {
        **{name: value for name, value in _SHAPE.items() if name != "num_hidden_layers"},
        **_EXPERTS,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "layers_block_type": [*_BOTH, "moe"],
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
    },
    "Mamba2Config": {**_BARE, **_ALONE2},
    "Zamba2Config": {
        **_SHAPE,
        **_ZAMBA,
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
    },
    "MambaConfig": {**_BARE, "state_size": 8},
    "FalconMambaConfig": {**_BARE, "state_size": 8},
    "JambaConfig": {
        **_SHAPE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "experts_implementation": "eager",
    },
    "ZambaConfig": {**_SHAPE, **_ZAMBA, "mamba_d_state": 8, "n_mamba_heads": 2, "mamba_dt_rank": 4},
    "MiniMaxConfig": {
        **_SHAPE,
        "layer_types": _BOTH,
        "block_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "experts_implementation": "eager",
    },
    "RecurrentGemmaConfig": {
        **_SHAPE,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 9,
        "block_types": ("recurrent", "attention"),
    },
    "RwkvConfig": {**_BARE, "attention_hidden_size": 32, "intermediate_size": 48, "context_length": 256},
    "xLSTMConfig": {
        **_BARE,
        "embedding_dim": 32,
        "num_blocks": 2,
        "num_heads": 2,
        "chunk_size": 8,
        "autocast_kernel_dtype": "float32",
        "norm_eps": 0.1,  # else the norm of heads divides by values of almost 0
    },
    "Lfm2Config": {**_SHAPE, **_SHORT},
    "Lfm2MoeConfig": {**_SHAPE, **_SHORT, **_EXPERTS, "num_experts": 4, "num_dense_layers": 1},
    "Lfm3Config": {**_SHAPE, **_SHORT},
    "ZayaConfig": {
        **_SHAPE,
        **_MILD,
        "head_dim": 8,
        "layer_types": ["hybrid", "hybrid"],
        "num_experts": 4,
        "experts_implementation": "eager",
    },
}


def hybrids() -> dict[str, Any]:
    """Configurations by model type, of the families that the release of transformers has."""
    kinds = {name: getattr(transformers, name, None) for name in _FIELDS}
    found = [kind(**copy.deepcopy(_FIELDS[name])) for name, kind in kinds.items() if kind is not None]
    return {config.model_type.removesuffix("_text"): config for config in found}


def build(config: Any) -> Any:
    """A model in float32 with eager attention, the same on every rank."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    )
    return randomised(model).train()


def randomised(model: Any) -> Any:
    """The model with gates, decays and convolutions drawn at random, so that faults in states are plain to see.

    As they are initialised, steps and decays are so mild that a state which is lost changes little.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = _drawn(name.rpartition(".")[0].rpartition(".")[2], name.rpartition(".")[2])
            if draw is not None:
                parameter.copy_(draw(torch.rand(parameter.shape, generator=generator)))
    return model


def _drawn(owner: str, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """How a parameter is made of numbers from 0 to 1; None if it stays as it is."""
    between = _BETWEEN.get(name) or _BETWEEN.get(f"{owner}.{name}")
    if between is None and owner.startswith(("conv", "depthwise")):
        between = (-0.8, 0.8)
    if between is None:
        return None
    low, high = between
    return lambda x: low + (high - low) * x


_BETWEEN = {
    "A_log": (-2.0, 0.5),
    "D": (0.5, 1.5),
    "dt_bias": (-2.5, 1.0),
    "dt_proj_bias": (-2.5, 1.0),
    "dt_proj_weight": (-0.5, 0.5),
    "x_proj_weight": (-0.5, 0.5),
    "dt_proj.bias": (-2.5, 1.0),
    "recurrent_param": (-4.0, 0.0),
    "input_gate_weight": (-0.5, 0.5),
    "input_gate_bias": (-1.0, 1.0),
    "recurrent_gate_weight": (-0.5, 0.5),
    "recurrent_gate_bias": (-1.0, 1.0),
    "time_decay": (-3.0, 0.5),
    "time_first": (-1.0, 1.0),
    "time_mix_key": (0.1, 0.9),
    "time_mix_value": (0.1, 0.9),
    "time_mix_receptance": (0.1, 0.9),
    "igate_preact.weight": (-0.2, 0.2),
    "igate_preact.bias": (-2.0, 0.0),
    "fgate_preact.weight": (-0.5, 0.5),
    "fgate_preact.bias": (0.0, 4.0),
    "proj_up_gate.weight": (-0.5, 0.5),  # 0 as it is initialised
    "temp": (-0.3, 0.3),
}
