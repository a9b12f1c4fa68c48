"""Tiny random models of several families, with every attention feature that tells them apart."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.support.deepspeed_run import SHAPE, VOCAB, llama

NEWER = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)  # earlier ones name layers otherwise
SINCE_5_24 = pytest.mark.skipif(not NEWER, reason="other releases have other default configurations")
_SHAPE = {**SHAPE, "pad_token_id": 0}
_ALTERNATING = ["sliding_attention", "full_attention"]


def shape() -> dict[str, Any]:
    """Fields that most configurations have, of a tiny model."""
    return {**_SHAPE}


def experts(**changes: Any) -> Any:
    """Return the configuration of a Qwen3-MoE."""
    fields = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeConfig(**{**_SHAPE, **fields, "experts_implementation": "eager", **changes})


def families() -> dict[str, Any]:
    """Configurations by name."""
    t = transformers
    return {
        "llama": llama(),
        "qwen3": t.Qwen3Config(**_SHAPE, head_dim=16),
        "mistral": t.MistralConfig(**_SHAPE, head_dim=8, sliding_window=9),
        "gemma2": t.Gemma2Config(
            **_SHAPE,
            head_dim=16,
            sliding_window=9,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
            layer_types=_ALTERNATING,
        ),
        "gemma3": t.Gemma3TextConfig(
            **_SHAPE, head_dim=16, sliding_window=9, query_pre_attn_scalar=16, layer_types=_ALTERNATING
        ),
        "gpt_oss": t.GptOssConfig(
            **_SHAPE,
            head_dim=16,
            sliding_window=9,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=_ALTERNATING,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            experts_implementation="eager",
        ),
        "phi": t.PhiConfig(**_SHAPE, partial_rotary_factor=0.5),
        "phi3": t.Phi3Config(**_SHAPE, sliding_window=9, eos_token_id=1, bos_token_id=1),
        "qwen2_moe": t.Qwen2MoeConfig(  # whose layers have their windows from the mask alone
            **_SHAPE,
            use_sliding_window=True,
            sliding_window=9,
            layer_types=_ALTERNATING,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            experts_implementation="eager",
        ),
        "deepseek_v3": t.DeepseekV3Config(
            **{**_SHAPE, "num_key_value_heads": 4},
            moe_intermediate_size=16,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
        ),
        "nemotron": t.NemotronConfig(**_SHAPE),  # whose layers hand nothing but the mask to their attention
        "stablelm": t.StableLmConfig(**_SHAPE, qk_layernorm=True),  # nor do these
        "dbrx": t.DbrxConfig(
            vocab_size=VOCAB,
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=256,
            attn_config={"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4},
            ffn_config={"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            initializer_range=0.15,
            pad_token_id=0,
        ),
    }


def mla_families() -> dict[str, Any]:
    """Return configurations of tiny models with multi-head latent attention by their families."""
    import transformers as t

    mla = {
        **_SHAPE,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    }
    experts = {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    longcat = {"ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return {
        "deepseek_v2": t.DeepseekV2Config(**mla, **experts),
        "deepseek_v3": families()["deepseek_v3"],
        "glm4_moe_lite": t.Glm4MoeLiteConfig(**mla, **experts),
        "longcat_flash": t.LongcatFlashConfig(**mla, **longcat, moe_topk=2, head_dim=8),
        "minicpm3": t.MiniCPM3Config(**mla),
        "youtu": t.YoutuConfig(**mla, **tokens),
        "axk1": t.AXK1Config(**mla, **experts, **tokens),
    }


def hybrids(kinds: list[str] | None = None) -> dict[str, Any]:
    """Families that may have recurrent layers; without any, unless `kinds` says so of the two layers."""
    t, kinds = transformers, kinds or ["full_attention"] * 2
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "experts_implementation": "eager",
    }
    scanning = {"mamba_n_heads": 8, "mamba_d_head": 8}
    attention = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    return {
        "qwen3_next": t.Qwen3NextConfig(**_SHAPE, **experts, head_dim=16, layer_types=kinds),
        "qwen3_5": t.Qwen3_5TextConfig(**_SHAPE, head_dim=16, layer_types=kinds),
        "bamba": t.BambaConfig(**_SHAPE, **scanning, attn_layer_indices=attention, attn_rotary_emb=8),
        "granitemoehybrid": t.GraniteMoeHybridConfig(
            **_SHAPE,
            **scanning,
            layer_types=kinds,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=16,
        ),
    }


_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True}


def counting() -> dict[str, Any]:
    """Families that count positions by themselves, unless they are given some."""
    t = transformers
    decoder = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "init_std": 0.15,
    }
    decoder |= {"decoder_ffn_dim": 48, "pad_token_id": 0, **_NO_DROPOUT}
    learned = {**decoder, "max_position_embeddings": 256}
    return {
        "opt": t.OPTConfig(**_without("intermediate_size"), ffn_dim=48, init_std=0.15, **_NO_DROPOUT),
        "biogpt": t.BioGptConfig(**_SHAPE, **_BERT, activation_dropout=0.0),
        "roberta": t.RobertaConfig(**_SHAPE, **_BERT),
        "xmod": t.XmodConfig(**_SHAPE, **_BERT, languages=["en_XX"], default_language="en_XX"),
        "roberta-prelayernorm": t.RobertaPreLayerNormConfig(**_SHAPE, **_BERT),
        "xlm-roberta": t.XLMRobertaConfig(**_SHAPE, **_BERT),
        "xlm-roberta-xl": t.XLMRobertaXLConfig(**_SHAPE, **_BERT),
        "camembert": t.CamembertConfig(**_SHAPE, **_BERT),
        "data2vec-text": t.Data2VecTextConfig(**_SHAPE, **_BERT),
        "bart": t.BartConfig(**learned),
        "mbart": t.MBartConfig(**learned),
        "plbart": t.PLBartConfig(**learned),
        "blenderbot": t.BlenderbotConfig(**learned),
        "blenderbot-small": t.BlenderbotSmallConfig(**learned),
        "bigbird_pegasus": t.BigBirdPegasusConfig(**learned),
        "pegasus": t.PegasusConfig(**learned),
        "marian": t.MarianConfig(**learned),
        "whisper": t.WhisperConfig(**decoder, max_target_positions=256),
    }


def old_attention() -> dict[str, Any]:
    """Families whose attention modules compute scores by themselves."""
    t = transformers
    alibi = {
        "vocab_size": VOCAB,
        "initializer_range": 0.15,
        "pad_token_id": 0,
    }  # of six heads, which no power of two is
    return {
        "falcon": t.FalconConfig(**_SHAPE),
        "falcon_new": t.FalconConfig(**_SHAPE, new_decoder_architecture=True, num_kv_heads=2, bias=True),
        "falcon_each": t.FalconConfig(**_SHAPE, multi_query=False, parallel_attn=False),
        "bloom": t.BloomConfig(**alibi, hidden_size=48, n_layer=2, n_head=6),
        "bloom_exact": t.BloomConfig(
            **alibi, hidden_size=48, n_layer=2, n_head=6, slow_but_exact=True, pretraining_tp=2
        ),
        "mpt": t.MptConfig(**alibi, d_model=48, n_layers=2, n_heads=6, max_seq_len=64),
        "gpt_neo": t.GPTNeoConfig(
            **_SHAPE, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=9
        ),
        "xglm": t.XGLMConfig(
            vocab_size=VOCAB, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, init_std=0.15, pad_token_id=0,
            **_NO_DROPOUT,
        ),
        "gpt_neox_japanese": t.GPTNeoXJapaneseConfig(**_without("intermediate_size"), attention_dropout=0.0),
    }  # fmt: skip


def _without(name: str) -> dict[str, Any]:
    return {each: value for each, value in _SHAPE.items() if each != name}
