"""A check, when a rank's first layer of Megatron gets its input, of the host memory that its step will need."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from burst_plugin.activations.host_memory import host_memory
from burst_plugin.megatron.registry import Registry


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_host_memory_budget(registry: Registry, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise MemoryError if this host has no room for the tensors that a step offloads: a forward pre-hook of layers.

    It counts the tensors of all ranks on the host until the first backward pass. It looks at full recomputation only,
    which keeps inputs of layers and, with `keep_attention`, outputs of attention. It does nothing in evaluation.

    Args:
        registry: the rings and their options.
        layer: the `TransformerLayer` that is called.
        args, kwargs: of its forward; its input is [S/CP, B, H].
    """
    config, hidden = layer.config, args[0] if args else kwargs["hidden_states"]
    if config.recompute_granularity != "full" or not layer.training:
        return
    memory = host_memory(hidden.device)
    if memory is None:
        return
    layers, inputs = _layers_of_chunk(config)
    attention = [registry.asked().kept_share * each for each in _attention_bytes(config, hidden)]
    nbytes = [hidden.nbytes * inputs / layers, *attention]
    ranks = max((cp.topology.ranks_per_node for cp in registry.contexts()), default=1)
    memory.expect(nbytes, layers * _chunks_that_wait(config, registry.identity.microbatches), ranks)


def _layers_of_chunk(config: Any) -> tuple[int, int]:
    """Return how many layers of a model chunk are recomputed, and of how many of them the input is kept."""
    layers = ceil(config.num_layers / config.pipeline_model_parallel_size / _chunks(config))
    at_once = config.recompute_num_layers or 1
    if config.recompute_method == "block":  # the first ones, each by itself
        return min(layers, at_once), min(layers, at_once)
    return layers, ceil(layers / at_once)


def _chunks(config: Any) -> int:
    return config.virtual_pipeline_model_parallel_size or 1


def _chunks_that_wait(config: Any, microbatches: int) -> int:
    """Return how many forward passes of model chunks this pipeline stage is ahead of their backward passes."""
    stages, chunks = config.pipeline_model_parallel_size, _chunks(config)
    later = stages - parallel_state.get_pipeline_model_parallel_rank() - 1
    ahead: int = later + 1 if chunks == 1 else 2 * later + (chunks - 1) * stages + 1
    return min(ahead, microbatches * chunks)


def _attention_bytes(config: Any, hidden: Tensor) -> tuple[float, float]:
    """Return the bytes of what attention returns in a layer: out and lse."""
    ranks = config.tensor_model_parallel_size
    rows = hidden.shape[0] * hidden.shape[1] * (ranks if config.sequence_parallel else 1)
    heads = config.num_attention_heads / ranks
    head_dim = getattr(config, "v_head_dim", None) or config.kv_channels
    return rows * heads * head_dim * config.params_dtype.itemsize, rows * heads * torch.float32.itemsize
