"""Indexers are told the shard that the layer around them was called with, which the layer does not pass on to them.

layer(..., burst=shard) -> hook of the layer notes it -> indexer(hidden_states, ...) -> shard_of_indexer(indexer)
"""

from __future__ import annotations

from typing import Any

import torch

from burst_plugin.batch import SequenceShard
from burst_plugin.huggingface.mask_recipes import shard_among

SHARD_ATTRIBUTE = "_burst_plugin_shard"  # of an indexer, in the middle of its layer's forward


def watch_layer(layer: torch.nn.Module) -> None:
    """Add hooks to a layer that tell its `indexer` which shard it is called with; repeated calls change nothing."""
    if _note_shard not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_note_shard, with_kwargs=True)
        layer.register_forward_hook(_forget_shard, always_call=True)


def shard_of_indexer(indexer: torch.nn.Module) -> SequenceShard | None:
    """Return the shard that the layer around an indexer has been called with; None for a whole batch."""
    return vars(indexer).get(SHARD_ATTRIBUTE)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_shard(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell an indexer the shard that its layer is given, also where a checkpoint computes it again."""
    setattr(layer.indexer, SHARD_ATTRIBUTE, shard_among(args, kwargs))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forget_shard(layer: Any, args: tuple[Any, ...], output: Any) -> None:
    """Note the end of a layer, also of one that failed."""
    vars(layer.indexer).pop(SHARD_ATTRIBUTE, None)
