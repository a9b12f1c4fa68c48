"""What a model of transformers parks in host memory in a step, known before its first forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from burst_plugin.activations.host_memory import host_memory
from burst_plugin.batch import SequenceShard


def expect_on_host(model: PreTrainedModel, shard: SequenceShard, batch: Mapping[str, Any]) -> None:
    """Raise MemoryError if this host has no room for what the checkpoints of `model` park of a sharded batch."""
    strategy = shard.cp.strategy
    tokens = batch.get("input_ids") if batch.get("inputs_embeds") is None else batch["inputs_embeds"][..., 0]
    if not (strategy.offload and model.training and _recomputes(model)) or tokens is None:
        return
    memory, config = host_memory(tokens.device), model.config.get_text_config()
    if memory is None or not torch.is_grad_enabled():
        return
    hidden, heads, share = config.hidden_size, config.num_attention_heads, strategy.kept_share
    kind = tokens.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    out = heads * (getattr(config, "head_dim", None) or hidden // heads) * dtype.itemsize
    chunks = heads // (strategy.head_chunk or heads)
    of_chunk = [share * out / chunks, share * heads * torch.float32.itemsize / chunks]
    nbytes = [tokens.numel() * each for each in (hidden * model.dtype.itemsize, *(of_chunk * chunks))]
    memory.expect(nbytes, config.num_hidden_layers, shard.cp.topology.ranks_per_node)


def _recomputes(model: Any) -> bool:
    """Return whether the model's layers are computed again; transformers 5.24 has given that another name."""
    found = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if found is None else found)
