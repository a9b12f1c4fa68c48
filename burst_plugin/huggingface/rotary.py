"""Rotary embeddings that depend on the longest position of a batch: dynamic NTK, longrope's two sets, and PhiMoE's.

A rank has the positions of its own tokens. So these embeddings get the longest position of the whole batch as well,
behind the positions of the rank's tokens, and its embedding is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.mask_recipes import forward_in_progress
from burst_plugin.huggingface.text_only import text_modules

_KINDS = ("dynamic", "longrope")
_FIXED = "ntk_alpha"  # what HunYuan's modules make of "dynamic" with a fixed `alpha`
_ADDED = "_burst_plugin_added_position"  # of a module in the middle of a forward


def problem_of_rotary(model: PreTrainedModel) -> str:
    """Return why a model's rotary embedding cannot be told a batch's longest position; "" if it can or need not."""
    is_fixed = any(getattr(module, "rope_type", None) == _FIXED for module in text_modules(model))
    kinds = _rope_types(model.config.get_text_config(), is_fixed) & set(_KINDS)
    if not kinds or any(True for _ in _dependent(model)):
        return ""
    return (
        f"its rotary embedding ({', '.join(sorted(kinds))}) depends on the longest position of each rank, and no "
        "module of it takes position_ids; use another rope_type, such as linear, yarn or llama3"
    )


def use_longest_positions(model: torch.nn.Module) -> None:
    """Add hooks that give a model's rotary embeddings the longest position of the whole batch.

    Only embeddings that depend on it are hooked. Repeated calls change nothing.
    """
    for module in _dependent(model):
        if _add_position not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_add_position, with_kwargs=True)
            module.register_forward_hook(_drop_embedding)


def _dependent(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the rotary embeddings that depend on the longest position."""
    for module in text_modules(model):
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind in str(name) for name in names for kind in _KINDS) or _has_two_scales(module):
            yield module


def _has_two_scales(module: torch.nn.Module) -> bool:
    """Return whether an embedding has one scale up to a length and another beyond it, as PhiMoE's of any kind."""
    rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    return hasattr(module, "rope_type") and "long_mscale" in rope and rope.get("rope_type", "default") != "default"


def _rope_types(config: Any, is_fixed: bool) -> set[str]:
    """Return the kinds of rotary embedding in a configuration, of all its layer types.

    is_fixed: whether embeddings with an `alpha` are scaled by that number, whatever their kind, and left out here.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    nested = [each for each in nested if not (is_fixed and each.get("alpha"))]
    return {str(each.get("rope_type", each.get("type", "default"))) for each in nested}


def _longest_position() -> int | None:
    """Return the longest position of the batch that is cut in the forward in progress; None for a whole batch."""
    forward = forward_in_progress()
    if forward is None:
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "a rotary embedding that depends on the longest position of a batch is computed again in a backward "
                "pass, where that position is not known; switch off gradient checkpointing"
            )
        return None
    if forward.cache is not None:
        return forward.cache.longest
    return None if forward.shard is None or forward.shard.as_given else forward.shard.longest


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _add_position(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add the longest position of the batch behind the positions of this rank's tokens."""
    longest = _longest_position()
    setattr(module, _ADDED, longest is not None)
    if longest is None:
        return None
    arguments = by_name(module.forward, args, kwargs)
    positions: Tensor = arguments["position_ids"]
    last = positions.new_full((*positions.shape[:-1], 1), longest)
    return (), {**arguments, "position_ids": torch.cat([positions, last], -1)}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drop_embedding(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Drop the embedding of the position that was added, from cosines and sines [B, S + 1, D] or their pairs."""
    if not vars(module).pop(_ADDED, False):
        return None
    return tuple(x[..., :-1, :] for x in output) if isinstance(output, tuple) else output[..., :-1, :]
