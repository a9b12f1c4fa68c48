"""The releases of Megatron that were tested, and the version of a source tree. Imports no Megatron."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int, int]

_PACKAGE_INFO = Path("megatron", "core", "package_info.py")


@dataclass(frozen=True)
class Release:
    """A release of Megatron-LM that burst_plugin was tested with.

    tag: of the repository, or "main" for the commit of August 2026.
    versions: of its megatron.core, in the repository and on PyPI; the tag core_v0.19.0 says 0.19.1.
    """

    tag: str
    versions: tuple[Version, ...]


RELEASES = (
    Release("core_v0.16.1", ((0, 16, 1),)),
    Release("core_v0.17.1", ((0, 17, 1),)),
    Release("core_v0.18.2", ((0, 18, 2),)),
    Release("core_v0.19.0", ((0, 19, 0), (0, 19, 1), (0, 19, 2))),
    Release("main", ((0, 20, 0),)),
)


def parse_version(text: str) -> Version:
    """Return (major, minor, patch) of a version such as "0.16.1" or "0.17.0rc0". Raise ValueError for other text."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"got the version {text!r}, expected three numbers such as 0.16.1")
    major, minor, patch = map(int, match.groups())
    return major, minor, patch


def tree_version(tree: Path) -> Version:
    """Return the version of megatron.core in a Megatron-LM checkout, from its package_info.py.

    Raises ValueError if `tree` is not a checkout.
    """
    path = tree / _PACKAGE_INFO
    if not path.is_file():
        raise ValueError(f"got {tree}, expected the root of a Megatron-LM checkout: it has no {_PACKAGE_INFO}")
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", path.read_text(), re.MULTILINE))
    if len(numbers) != 3:
        raise ValueError(f"{path} does not set MAJOR, MINOR and PATCH to numbers")
    return int(numbers["MAJOR"]), int(numbers["MINOR"]), int(numbers["PATCH"])


def target_version() -> Version:
    """Return the version of the Megatron to write flags for, none of which is imported.

    That is a checkout in the current directory, else the installed megatron-core, else the oldest that was tested,
    whose flags later ones have as well.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    trees = [Path.cwd(), *([Path(spec.origin).parents[2]] if spec is not None and spec.origin else [])]
    found = [tree_version(tree) for tree in trees if (tree / _PACKAGE_INFO).is_file()]
    return found[0] if found else RELEASES[0].versions[0]


def about(version: Version) -> str:
    """Return a line that says whether this version was tested."""
    name = ".".join(map(str, version))
    tags = [release.tag for release in RELEASES if version in release.versions]
    if tags:
        return f"Megatron {name}: tested ({tags[0]})"
    tried = ", ".join(release.tag for release in RELEASES)
    return f"Megatron {name}: not tested; tested are {tried}"


# Fields of TransformerConfig since 0.17 that have no bearing on core attention. muP works through softmax_scale.
_NEWER = frozenset(
    """
    activation_offload_fraction batch_invariant_backend cpu_offloading_retain_pinned_cpu_buffers cuda_graph_modules
    delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
    dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend enable_mhc_connections
    experimental_attention_variant_loss_scale_func expert_gtp_weight_remat_size
    expert_tensor_parallel_num_weight_shards fine_grained_offloading_max_inflight_offloads
    fp8_output_proj fused_residual_rmsnorm gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute gdp_num_householder
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


def newer_and_irrelevant(name: str) -> bool:
    """Return whether a field of TransformerConfig is newer than 0.16, and known to have no bearing on core attention.

    A field of a release that has not been examined is not, whatever its name begins with.
    """
    return name in _NEWER
