"""Arguments and settings of a forward on a shard that would give wrong results in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.huggingface.router_losses import asks_for_router_loss
from burst_plugin.huggingface.text_only import text_modules


def check_forward(pretrained: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for what a forward on a shard would compute wrongly.

    That is logits of the last tokens only, which are other tokens on every rank, and layers whose other results than
    hidden states need gradients, in reentrant checkpoints, with or without a ring.
    """
    kept = kwargs.get("logits_to_keep")
    if kept is not None and (isinstance(kept, Tensor) or kept != 0):
        raise ValueError(
            f"{type(pretrained).__name__} got logits_to_keep with a shard, of which every rank would keep its own "
            "last tokens; leave it out, and pick logits of the whole sequence out of cp.unshard(logits, dim=1)"
        )
    if not (pretrained.training and torch.is_grad_enabled() and _is_reentrant(pretrained)):
        return
    config = pretrained.config.get_text_config()
    passed = []
    if getattr(config, "num_kv_shared_layers", 0):
        passed.append(f"keys and values of other layers (num_kv_shared_layers={config.num_kv_shared_layers})")
    if asks_for_router_loss(pretrained, kwargs):
        passed.append("router logits (output_router_logits)")
    if passed:
        raise ValueError(
            f"{type(pretrained).__name__} has gradient checkpointing with use_reentrant=True, which gives no "
            f"gradient to {' and '.join(passed)}; pass gradient_checkpointing_kwargs={{'use_reentrant': False}}"
        )


def _is_reentrant(pretrained: PreTrainedModel) -> bool:
    """Return whether layers are in checkpoints with `use_reentrant=True`."""
    for module in text_modules(pretrained):
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is None or not getattr(module, "gradient_checkpointing", False):
            continue
        while checkpoint is not None:
            keywords = getattr(checkpoint, "keywords", {})
            if "use_reentrant" in keywords:
                return bool(keywords["use_reentrant"])
            checkpoint = next(iter(getattr(checkpoint, "args", ())), None)
        return False
    return False
