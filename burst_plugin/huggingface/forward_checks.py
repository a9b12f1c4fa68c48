"""Arguments and settings of a forward on a shard that would give wrong results in silence."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.auto_memory import recomputes
from burst_plugin.huggingface.router_losses import asks_for_router_loss
from burst_plugin.huggingface.text_only import text_modules

_OF_ENCODERS = ("encoder_hidden_states", "encoder_outputs")


def check_forward(pretrained: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for what a forward on a shard would compute wrongly.

    That is attention to an encoder, whose mask would be taken for one of the shard's tokens; logits of the last
    tokens only, which are other tokens on every rank of several; and layers whose other results than hidden states
    need gradients, in reentrant checkpoints, with or without a ring.
    """
    arguments = by_name(pretrained.forward, args, kwargs)
    for name in filter(arguments.__contains__, _OF_ENCODERS):
        raise ValueError(
            f"{type(pretrained).__name__} got {name} with a shard: it attends to an encoder, whose masks a shard "
            "does not have; leave it out"
        )
    if arguments[SHARD_KEY].cp.ranks > 1 and not _keeps_all(arguments.get("logits_to_keep", 0)):
        raise ValueError(
            f"{type(pretrained).__name__} got logits_to_keep with a shard, of which every rank would keep its own "
            "last tokens; leave it out, and pick logits of the whole sequence out of "
            f'batch["{SHARD_KEY}"].unshard(logits) (for gradients with loss="same"), where batch is what shard_batch '
            "returned"
        )
    config, passed = pretrained.config.get_text_config(), []
    if getattr(config, "num_kv_shared_layers", 0):
        passed.append(f"keys and values of other layers (num_kv_shared_layers={config.num_kv_shared_layers})")
    if asks_for_router_loss(pretrained, arguments):
        passed.append("router logits (output_router_logits)")
    if passed and pretrained.training and torch.is_grad_enabled() and _is_reentrant(pretrained):
        raise ValueError(
            f"{type(pretrained).__name__} has gradient checkpointing with use_reentrant=True, which gives no "
            f"gradient to {' and '.join(passed)}; pass gradient_checkpointing_kwargs={{'use_reentrant': False}} to "
            "model.gradient_checkpointing_enable, or to TrainingArguments"
        )


def _keeps_all(kept: Any) -> bool:
    """Return whether `logits_to_keep` of a forward asks for the logits of all tokens."""
    if isinstance(kept, slice):
        return kept.start in (None, 0) and kept.stop is None and kept.step in (None, 1)
    return isinstance(kept, int) and kept == 0


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


def warn_without_checkpoints(model: PreTrainedModel, shard: SequenceShard) -> None:
    """Warn on rank 0 if a model trains with options that act on its checkpoints, and has none."""
    strategy = shard.cp.strategy
    acts = strategy.offload or (strategy.kept_share > 0 and "keep_attention" not in shard.cp.chosen)
    if acts and model.training and torch.is_grad_enabled() and not recomputes(model) and not shard.cp.rank:
        warnings.warn(
            "offload and keep_attention act on activation checkpoints, but gradient checkpointing is off: set "
            "gradient_checkpointing=True, or call model.gradient_checkpointing_enable(), unless your code makes "
            "checkpoints itself",
            stacklevel=2,
        )
