"""Every field of Megatron's TransformerConfig that could affect attention: honoured, or refused by name.

A core attention that ignored a field would train on, wrongly. So each field of the dataclass is in one of the tables
of honoured, refused and irrelevant fields, and a test fails for a field that is in none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from burst_plugin.frameworks.options import Rule, off, one_of
from burst_plugin.megatron.flags.arguments import option_of, resets_attention_mask, unsupported

DELTA_NETS = ("gated_delta_net", "gdn")  # names of one kind of layer; the second since 0.20
SPARSE = "dsa"
HONOURED: Mapping[str, str] = MappingProxyType(
    {
        "num_attention_heads": "query heads, as the tensors come",
        "num_query_groups": "key/value heads, never expanded",
        "kv_channels": "head dim, as the tensors come",
        "softmax_scale": "1 / sqrt(head dim) if None",
        "apply_query_key_layer_scaling": "without effect: Megatron divides scores by the layer number and multiplies "
        "them back in float32; here scores never leave float32",
        "attention_softmax_in_fp32": "always so",
        "masked_softmax_fusion": "without effect: masks become tiles",
        "deterministic_mode": "with PyTorch's switch for it, or Strategy(deterministic=True); refused without",
        "window_size": "of self attention, as Transformer Engine has it: causal masks have no right side",
        "window_attn_skip_freq": "which layers have the window",
        "softmax_type": "vanilla, off-by-one or learnable",
        "attention_dropout": "depends on positions alone: the same for any context_parallel_size, and recomputed",
        "multi_latent_attention": "keys and values may differ in head dim",
        "qk_clip": "largest scores per head, in current_max_attn_logits",
        "log_max_attention_logit": "see qk_clip",
        "context_parallel_size": "the ring",
        "hierarchical_context_parallel_sizes": "the two levels of the ring",
        "hybrid_context_parallel": "a ring for every group that packed_seq_params bring",
        "cp_comm_type": "burst; in lists too",
        "recompute_granularity": "none, selective or full; with keep_attention the ring does not run again",
        "recompute_method": "see recompute_granularity",
        "recompute_num_layers": "see recompute_granularity",
        "recompute_modules": "see recompute_granularity",
        "fp16": "float16 tensors",
        "bf16": "bfloat16 tensors",
        "params_dtype": "any float type",
        "enable_autocast": "the tensors come in one type",
        "autocast_dtype": "the tensors come in one type",
        "variable_seq_lengths": "every call may have its own length, a multiple of 2 * context_parallel_size",
    }
)

REFUSED: Mapping[str, Rule] = MappingProxyType(
    {
        "experimental_attention_variant": Rule(
            one_of(*DELTA_NETS, SPARSE, None, ""),
            "use gated_delta_net or dsa, or leave it out, for standard attention",
        ),
        "attention_backend": Rule(
            one_of("auto", "flash", "fused", None),
            "use auto, flash or fused; kernels are chosen by --burst-kernel, or Strategy(kernel=...)",
        ),
        "fp8_dot_product_attention": Rule(off, "keep attention out of FP8; linear layers may use it"),
        "fp8_multi_head_attention": Rule(off, "keep attention out of FP8; linear layers may use it"),
        "use_kitchen_attention": Rule(off, "switch it off"),
        "enable_cuda_graph": Rule(off, "switch it off"),
        "external_cuda_graph": Rule(off, "switch it off"),
        "cuda_graph_impl": Rule(
            one_of("none"), "use none, which --enable-cuda-graph and --external-cuda-graph change"
        ),
        "batch_invariant_mode": Rule(off, "switch it off"),
        "flash_decode": Rule(off, "it is for inference on one rank; switch it off"),
        "cache_mla_latents": Rule(off, "it is for inference on one rank; switch it off"),
        "use_inference_optimized_layers": Rule(off, "it is for inference on one rank; switch it off"),
        "transformer_impl": Rule(one_of("local", "transformer_engine"), "use local or transformer_engine"),
        "overlap_moe_expert_parallel_comm": Rule(
            off, "alternating layers of two microbatches have not been tried on a ring; switch it off"
        ),
        "cpu_offloading": Rule(off, "switch it off"),
        "offload_modules": Rule(lambda names: "core_attn" not in (names or ()), "take core_attn out of it"),
    }
)

# Fields that Megatron-core 0.16 does not have. No release has the last two yet, which are of Megatron's branch `dev`.
REFUSED_LATER: Mapping[str, Rule] = MappingProxyType(
    {
        "flash_attention_version": Rule(one_of(None), "leave it out; kernels are chosen by --burst-kernel"),
        "dynamic_context_parallel": Rule(
            off,
            "its groups change with every microbatch, and rotate in another way; use --context-parallel-size with "
            "--burst-layout auto, by which short documents stay on one rank, and longer ones inside a node if they "
            "fit",
        ),
        "cp_partition_mode": Rule(one_of("zigzag", None), "batches are cut as releases do; use zigzag"),
    }
)

# Fields on what happens before or after the core attention, or outside attention altogether, in the releases that
# were examined; of refused variants, too. muP works through softmax_scale.
_IRRELEVANT = frozenset(
    """
    num_layers mtp_num_layers mtp_loss_scaling_factor num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split hidden_size ffn_hidden_size hidden_dropout fp32_residual_connection
    apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear
    add_qkv_bias gated_linear_unit activation_func activation_func_fp8_input_store glu_linear_offset
    activation_func_clamp_value num_moe_experts rotary_interleaved normalization qk_layernorm qk_l2_norm
    qk_clip_alpha qk_clip_threshold attention_output_gate test_mode calculate_per_token_loss no_rope_freq
    init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
    init_model_with_meta_device disable_bf16_reduced_precision_matmul bias_activation_fusion persist_layer_norm
    memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion use_fused_weighted_squared_relu
    fused_single_qkv_rope distribute_saved_activations fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin
    fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad tp_only_amax_red first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen kitchen_attention_backend fp4 fp4_recipe
    fp4_param fp4_quantizer_factory cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
    cuda_graph_warmup_steps cuda_graph_scope clone_scatter_output_in_embedding disable_parameter_transpose_cache
    config_logger_dir use_te_activation_func use_te_rng_tracker inference_rng_tracker inference_sampling_seed
    symmetric_ar_type inference_fuse_tp_communication mrope_section is_hybrid_model use_mamba_mem_eff_path
    mlp_chunks_for_prefill heterogeneous_block_specs hetereogenous_dist_checkpoint quant_recipe
    fine_grained_activation_offloading min_offloaded_tensor_size q_lora_rank kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent rotary_scaling_factor
    original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim tensor_model_parallel_size
    pipeline_model_parallel_comm_backend pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    sequence_parallel expert_model_parallel_size expert_tensor_parallel_size perform_initialization
    use_cpu_initialization timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func
    param_sync_func num_microbatches_with_partial_activation_checkpoints gradient_accumulation_fusion
    async_tensor_model_parallel_allreduce tp_comm_overlap cross_entropy_loss_fusion cross_entropy_fusion_impl
    delay_wgrad_compute ep_overlap_early_attn_memory_release pipeline_dtype overlap_p2p_comm batch_p2p_comm
    batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs defer_embedding_wgrad_compute
    wgrad_deferral_limit overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage mtp_standalone
    cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights
    cpu_offloading_double_buffering barrier_with_L1_time max_seqlen_per_dp_cp_rank moe_extended_tp
    tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
    tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
    tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_shared_expert_overlap moe_layer_freq moe_ffn_hidden_size
    moe_router_load_balancing_type moe_router_topk moe_enable_routing_replay moe_router_topk_limited_devices
    moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_num_groups moe_router_group_topk
    moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing moe_grouped_gemm
    moe_use_legacy_grouped_gemm moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dropping
    moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_per_layer_logging
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute
    moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms
    moe_hybridep_num_sms mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads dsa_indexer_n_heads
    dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads

    activation_offload_fraction batch_invariant_backend cpu_offloading_retain_pinned_cpu_buffers
    cuda_graph_modules delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
    dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend
    enable_mhc_connections experimental_attention_variant_loss_scale_func expert_gtp_weight_remat_size
    expert_tensor_parallel_num_weight_shards fine_grained_offloading_max_inflight_offloads fp8_output_proj
    fused_residual_rmsnorm gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute gdp_num_householder
    gtp_remat_opt_in_modules gtp_weight_remat_size high_priority_a2a_comm_stream inference_cuda_graph_scope
    inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
    inference_moe_token_dispatcher_type mamba_training_ssm_states_dtype mhc_init_gating_factor
    mhc_num_residual_streams mhc_recompute_layer_num mhc_sinkhorn_iterations mla_down_proj_fusion
    mlp_chunks_for_training moe_combine_bwd_dtype moe_dispatch_fwd_dtype moe_expert_rank_capacity_factor
    moe_flex_dispatcher_num_sms moe_grad_scale_func moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
    moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy
    moe_pad_experts_for_cuda_graph_inference moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_permute_fusion_into_hybridep
    moe_router_force_biased moe_router_quantile_balancing_ema moe_shared_expert_glu_interleave_size
    moe_single_grouped_bias moe_single_grouped_weight moe_use_grouped_tensor mtp_detach_heads mtp_grad_scale_func
    mtp_hsm mtp_hybrid_override_pattern mtp_use_repeated_layer mup_attn_scale_power mup_base_head_dim
    mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult nccl_all_reduce_for_prefill
    overlap_dispatch_backward_with_experts_wgrad tensor_parallel_num_weight_shards use_grouped_gemm_for_dense_mlp
    use_grouped_gemm_for_shared_expert use_mup use_transformer_engine_op_fuser
    """.split()  # noqa: SIM905
)


def is_irrelevant(name: str) -> bool:
    """Return whether a field of TransformerConfig is known not to affect core attention."""
    return name in _IRRELEVANT


def kinds_of(cp_comm_type: Any) -> list[Any]:
    """Return the items of a `cp_comm_type`: one for each layer if it is a list, else itself alone for all layers."""
    return cp_comm_type if isinstance(cp_comm_type, list) else [cp_comm_type]


def misspelt_kind(cp_comm_type: Any) -> str | None:
    """Return the first item of a `cp_comm_type` that is nearly, but not quite, "burst"; None if there is none."""
    for kind in kinds_of(cp_comm_type):
        if kind != "burst" and get_close_matches(str(kind).lower(), ["burst", "burst_attention", "burst_plugin"]):
            return str(kind)
    return None


def is_hybrid(config: Any) -> bool:
    """Return whether `hybrid_context_parallel` is on: each microbatch then brings its own process group."""
    return bool(getattr(config, "hybrid_context_parallel", False))


def brings_groups(config: Any) -> bool:
    """Return whether each microbatch brings its own process group, by hybrid or "dynamic" context parallelism.

    Megatron's branch `dev` has the latter. config: a TransformerConfig or Megatron's parsed arguments.
    """
    return is_hybrid(config) or bool(getattr(config, "dynamic_context_parallel", False))


def weighs_losses(config: Any) -> bool:
    """Return whether a model's losses are weighed by the tokens of all ranks of its ring.

    They are with burst attention, unless hybrid context parallelism is on.
    """
    return asks_for_burst(config) and not is_hybrid(config)


def spreads_sequences(config: Any) -> bool:
    """Return whether sequences may be spread over ranks, of a fixed group or of one that a microbatch brings.

    config: a TransformerConfig, or Megatron's parsed arguments.
    """
    return config.context_parallel_size > 1 or brings_groups(config)


def asks_for_burst(config: Any) -> bool:
    """Return whether a layer may be on a ring: sequences may be spread, and `cp_comm_type` names "burst"."""
    return spreads_sequences(config) and "burst" in kinds_of(config.cp_comm_type)


def problems(config: Any, windowed: bool, attention_type: str) -> list[str]:
    """Return a sentence for each field of a TransformerConfig that a layer on the ring cannot honour, and a way out.

    Args:
        config: of the layer.
        windowed: whether this layer has the sliding window `config.window_size`.
        attention_type: Megatron's, "self" or "cross".
    """
    reasons = unsupported({**REFUSED, **REFUSED_LATER}, config)
    window, softmax, dropout = (
        option_of(name, getattr(config, name)) for name in ("window_size", "softmax_type", "attention_dropout")
    )
    bounds = config.window_size
    is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2 and min(bounds) >= -1
    if windowed and attention_type == "cross":
        reasons.append(f"{window} is not supported in cross attention: leave it out")
    elif windowed and not is_pair:
        reasons.append(f"{window} is not valid: use a pair (left, right), each 0 or more, or -1 for no bound")
    if config.softmax_type not in ("vanilla", "off-by-one", "learnable"):
        reasons.append(f"{softmax} is not valid: use vanilla, off-by-one or learnable")
    if not 0 <= config.attention_dropout < 1:
        reasons.append(f"{dropout} is not valid: use a share from 0 to below 1")
    return reasons + (problems_of_changing_groups(config) if is_hybrid(config) else [])


def problems_of_changing_groups(config: Any) -> list[str]:
    """Return a sentence for each field of `config` that does not go with hybrid_context_parallel, and a way out.

    config: a TransformerConfig, or Megatron's parsed arguments, with hybrid_context_parallel.
    """
    hybrid, size = option_of("hybrid_context_parallel"), option_of("context_parallel_size")
    reasons = [
        f"{option_of(name, getattr(config, name))} is not supported with {hybrid}: outside of attention it takes a "
        f"rank's tokens for consecutive ones; use {size}"
        for name in ("mtp_num_layers", "is_hybrid_model")
        if getattr(config, name, None)
    ]
    if config.attention_dropout:
        reasons.append(
            f"{option_of('attention_dropout', config.attention_dropout)} is not supported with {hybrid}, whose ranks "
            "draw different numbers: set it to 0"
        )
    return reasons


def problems_of_own_batches(config: Any) -> list[str]:
    """Return the reasons why a model cannot run on batches without Megatron's loader and schedules; [] if none.

    config: the TransformerConfig of the model.
    """
    reasons = []
    if is_hybrid(config):
        reasons.append("hybrid_context_parallel is not supported; use context_parallel_size")
    if resets_attention_mask():
        reasons.append("--reset-attention-mask is for batches of Megatron's loader; drop it")
    return reasons


def unknown_fields(config: Any) -> list[str]:
    """Return the names of fields of a TransformerConfig that are not known here, and not at their defaults.

    Newer releases of Megatron may have such fields. Fields that are added by subclasses outside of megatron.core, as
    model providers of NeMo and Bridge do by dozens, are not looked at, since only those classes use them.
    """
    known = {*HONOURED, *REFUSED, *REFUSED_LATER}
    of_megatron = next((kind for kind in type(config).__mro__ if kind.__module__.startswith("megatron.core.")), None)
    return [
        field.name
        for field in dataclasses.fields(of_megatron or config)
        if field.name not in known
        and not is_irrelevant(field.name)
        and field.default is not dataclasses.MISSING
        and getattr(config, field.name) != field.default
    ]
