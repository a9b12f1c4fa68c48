"""Megatron's multi-head latent attention on a ring that sends latents, not the keys and values made of them.

get_query_key_value_tensors    with `linear_kv_up_proj` switched off: it notes the latents and returns empty tensors;
                               hands on latents for keys, and the part of keys that heads share for values
core attention                 has the weight of `linear_kv_up_proj`, also where a checkpoint computes it again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.latents import sends_latents
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention

# Transformer Engine's, with and without the norm of latents in it.
_WITHOUT_NORM, _WITH_NORM = "TEColumnParallelLinear", "TELayerNormColumnParallelLinear"


def hook_latents() -> None:
    """Have layers of multi-head latent attention give the ring latents in place of keys and values.

    It wraps `MLASelfAttention.get_query_key_value_tensors`. Whether a layer does so follows from `Strategy.latents`.
    """
    wrap(MLASelfAttention, "get_query_key_value_tensors", _with_latents)


def _with_latents(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the arguments of a layer's core attention, with latents and shared keys for keys and values."""
    core = layer.core_attention
    if not isinstance(core, BurstCoreAttention) or core.attend is not None:
        return original(layer, *args, **kwargs)
    arguments = bind(original, layer, *args, **kwargs).arguments
    in_inference = arguments.get("inference_context") is not None or arguments.get("inference_params") is not None
    if in_inference or not sends_latents(core.context(arguments.get("packed_seq_params")), problem_of_latents(layer)):
        core.up_projection = ()
        return original(layer, *args, **kwargs)
    with _asleep(layer.linear_kv_up_proj) as noted:
        query, key, _, *others = original(layer, *args, **kwargs)
    core.up_projection = (layer.linear_kv_up_proj,)  # no module of the core attention's own
    shared = key[..., :1, layer.config.qk_head_dim :]
    return query, gather_latents(layer, noted[0]).unsqueeze(-2), shared, *others


@contextmanager
def _asleep(projection: Any) -> Iterator[list[Tensor]]:
    """Let a projection note its input and return an empty tensor, in this context."""
    noted: list[Tensor] = []
    ranks = projection.config.tensor_model_parallel_size if projection.config.sequence_parallel else 1

    def forward(latents: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        noted.append(latents)
        return latents.new_empty((latents.shape[0] * ranks, *latents.shape[1:-1], projection.weight.shape[0])), None

    projection.forward = forward
    try:
        yield noted
    finally:
        del projection.forward


def gather_latents(layer: Any, latents: Tensor) -> Tensor:
    """Return latents, normalised, of all tensor-parallel ranks, whose gradients add up."""
    projection, group = layer.linear_kv_up_proj, layer.tp_group
    if type(projection).__name__ == _WITH_NORM:
        scale = projection.layer_norm_weight
        if projection.zero_centered_gamma:
            scale = scale + 1
        latents = torch.nn.functional.rms_norm(latents, (latents.shape[-1],), scale, projection.eps)
    if layer.config.sequence_parallel:
        full_latents: Tensor = gather_from_sequence_parallel_region(
            latents, tensor_parallel_output_grad=True, group=group
        )
    else:
        full_latents = copy_to_tensor_model_parallel_region(latents, group=group)
    if full_latents.requires_grad:  # of a gradient that is not contiguous Megatron would add up a copy, and drop it
        full_latents.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return full_latents


def problem_of_latents(layer: Any) -> str:
    """Return the reason why a layer cannot send latents; "" if it can."""
    projection, config, name = layer.linear_kv_up_proj, layer.config, type(layer).__name__
    kind = type(projection).__name__
    if type(projection) is not ColumnParallelLinear and kind not in (_WITHOUT_NORM, _WITH_NORM):
        return f"linear_kv_up_proj of {name} is a {kind}, which is not known to be linear"
    if kind == _WITH_NORM and projection.normalization != "RMSNorm":
        return f"linear_kv_up_proj of {name} normalises latents by {projection.normalization}"
    bias = getattr(projection, "bias", None)
    if isinstance(bias, Tensor) and bias.numel():
        return f"linear_kv_up_proj of {name} has a bias"
    if config.fp8 or getattr(config, "fp4", None):
        return "the up-projection of latents is quantised"
    if getattr(config, "gtp_weight_remat_size", 1) > 1:
        return f"linear_kv_up_proj of {name} holds a shard of its weight (tensor_parallel_num_weight_shards)"
    if getattr(layer, "recompute_up_proj", False):
        return "recompute_modules has mla_up_proj, whose checkpoint does not see latents"
    if layer.num_attention_heads_per_partition == 1:
        return "a rank has one head, whose keys may be smaller than latents"
    return ""
