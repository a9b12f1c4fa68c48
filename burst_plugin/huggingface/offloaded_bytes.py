"""What the checkpoints of a model of transformers will offload in a step, compared with the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from burst_plugin.activations.host_memory import host_memory
from burst_plugin.batch import SequenceShard
from burst_plugin.huggingface.auto_memory import recomputes
from burst_plugin.huggingface.recurrent import is_recurrent_alone


def expect_on_host(model: PreTrainedModel, shard: SequenceShard, batch: Mapping[str, Any]) -> None:
    """Raise MemoryError if host memory does not suffice for what a model's checkpoints will offload in a step.

    Does nothing in evaluation, or without `Strategy.offload` or gradient checkpointing.

    batch: the keyword arguments of the forward on `shard`.
    """
    strategy = shard.cp.strategy
    tokens = batch.get("input_ids") if batch.get("inputs_embeds") is None else batch["inputs_embeds"][..., 0]
    if not (strategy.offload and model.training and recomputes(model)) or tokens is None:
        return
    memory, config = host_memory(tokens.device), model.config.get_text_config()
    if memory is None or not torch.is_grad_enabled() or is_recurrent_alone(model):
        return
    kind, share, token_bytes = tokens.device.type, strategy.kept_share, list[float]()
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    for heads, dim in _heads_by_layer(config):
        chunks = heads // (strategy.head_chunk or heads)
        chunk_heads = share * heads / chunks
        of_chunk = [chunk_heads * dim * dtype.itemsize, chunk_heads * torch.float32.itemsize]
        token_bytes += [config.hidden_size * model.dtype.itemsize, *(of_chunk * chunks)]
    memory.expect([tokens.numel() * each for each in token_bytes], 1, shard.cp.topology.ranks_per_node)


def _heads_by_layer(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Return the number of query heads of each layer, and the dim of a head's output."""
    layers, heads_by_layer = range(config.num_hidden_layers), []
    differ = getattr(config, "per_layer_attributes", None)  # of which transformers gives no value for all layers
    for of_layer in (config.per_layer_config[layer] if differ else config for layer in layers):
        heads: int = of_layer.num_attention_heads
        dims = (getattr(of_layer, name, None) for name in ("v_head_dim", "head_dim"))  # the first in latent attention
        heads_by_layer.append((heads, next(filter(None, dims), of_layer.hidden_size // heads)))
    return heads_by_layer
