"""Models of transformers and of Megatron from one config.json, made small, to compare their logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from burst_plugin.training.model_shape import MODELS, ModelShape, model_shape
from tests.support.megatron_arguments import parse
from tests.support.megatron_weights import copy_weights
from tests.support.model_configs import PUBLISHED, SMALL, VARIANTS, built_by_transformers, small

TOKENS = 64


def read(config: dict[str, Any], directory: Path) -> ModelShape:
    (directory / "config.json").write_text(json.dumps(config))
    return model_shape(str(directory))


def built_by_megatron(words: list[str]) -> torch.nn.Module:
    """Return the GPTModel that Megatron-LM's pretrain_gpt.py builds from flags, on one rank, in float32."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
    fields, args = parse(words)
    fusions = {"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "bias_dropout_fusion": False}
    config = TransformerConfig(**fields, **fusions, hidden_dropout=0.0)
    if args.position_embedding_type == "yarn":
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "correction_range_round_to_int"):
            setattr(config, f"yarn_{name}", getattr(args, f"yarn_{name}"))
        config.yarn_rotary_scaling_factor = args.rotary_scaling_factor
        config.yarn_mscale, config.yarn_mscale_all_dim = args.mscale, args.mscale_all_dim
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization),
        vocab_size=args.vocab_size,
        max_sequence_length=TOKENS,
        position_embedding_type=args.position_embedding_type,
        rotary_base=getattr(args, "rotary_base", 10000),
        rope_scaling="use_rope_scaling" in args,
        share_embeddings_and_output_weights="untie_embeddings_and_output_weights" not in args,
    )


def gap(target: torch.nn.Module, config: dict[str, Any]) -> float:
    """Return by how much the logits of Megatron's model differ from those of transformers'; inf for other weights."""
    source = built_by_transformers(config)
    tokens = torch.randint(128, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    target.eval()
    try:
        copy_weights(source, target)
    except AssertionError:
        return float("inf")
    with torch.no_grad():
        logits = target(tokens, torch.arange(TOKENS).expand(2, -1), None)
        expected = source(tokens).logits
    return float((logits[..., : expected.shape[-1]] - expected).abs().max())


def small_named(name: str) -> tuple[ModelShape, dict[str, Any]]:
    """Return a model that is known by name, made small, and its config.json."""
    sizes = {"layers": 4, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 128}
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    config = {key: SMALL[key] for key in ("num_hidden_layers", *keys)}
    return replace(MODELS[name], **sizes), {**config, **MODELS[name].config, "pad_token_id": 0}


def cases(directory: Path) -> dict[str, tuple[ModelShape, dict[str, Any]]]:
    """Return small models, and their config.json: all that have names, and those that a plan takes."""
    found = {name: small_named(name) for name in MODELS}
    for name, config in {**PUBLISHED, **VARIANTS}.items():
        if "kv_lora_rank" not in config:
            found[name] = (read(small(config), directory), small(config))
    return found


# Models of which Megatron has not all, and what it lacks.
LACKS = {
    "gemma_2": (
        "capped scores (attn_logit_softcapping=50.0)",
        "capped logits (final_logit_softcapping=30.0)",
        "norms after attention and MLP (model_type=gemma2)",
        "embeddings scaled by sqrt(hidden size) (model_type=gemma2)",
        "a gated MLP with gelu_pytorch_tanh (hidden_activation='gelu_pytorch_tanh')",
    ),
    "gemma_3": (
        "another rotary base in layers with a window (rope_local_base_freq=10000)",
        "norms after attention and MLP (model_type=gemma3_text)",
    ),
    "olmo_2": (
        "norms of queries and keys over all heads together (model_type=olmo2)",
        "norms after attention and MLP (model_type=olmo2)",
    ),
}
BEFORE_0_19 = {"gpt_oss": "YaRN, which came with 0.19 (rope_scaling=", "qwen2_yarn": "YaRN, which came with 0.19"}
