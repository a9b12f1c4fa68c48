"""Positions in three axes (mRoPE) of a batch that is cut: those of the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard

_METHOD = "compute_3d_position_ids"


def with_media_positions(model: PreTrainedModel, shard: SequenceShard, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a forward on a shard with this rank's positions, if images give them axes.

    Raises ValueError for packed documents, whose positions begin anew.
    """
    grids = [name for name in kwargs if name.endswith("grid_thw")]
    inner = next((module for module in model.modules() if hasattr(module, _METHOD)), None)
    if not shard.whole or not grids or inner is None or kwargs["position_ids"].dim() == 3:
        return dict(kwargs)
    if shard.counted is None:
        raise ValueError(
            f"{type(model).__name__} got images with position_ids of two dimensions: give those of mRoPE, [4, B, S] "
            "with the positions in the text first, or none if texts are not packed"
        )
    method: Any = getattr(inner, _METHOD)
    names = inspect.signature(method).parameters
    given = {name: shard.whole.get(name, kwargs.get(name) if name in grids else None) for name in names}
    known = {name: x for name, x in kwargs.items() if name in names and given.get(name) is None and name not in _CUT}
    found = method(**{**{name: x for name, x in given.items() if x is not None}, **known, **_nothing(names, given)})
    if found is None:
        return dict(kwargs)
    missing = shard.tokens.length - found.shape[-1]
    whole = torch.cat([found, found[..., -1:].expand(*found.shape[:-1], missing)], -1) if missing else found
    return {**kwargs, "position_ids": shard.cp.shard(whole, whole.dim() - 1, shard.tokens)}


_CUT = frozenset({"input_ids", "inputs_embeds", "attention_mask", "mm_token_type_ids", "position_ids"})


def _nothing(names: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, None]:
    """Return None for parameters that have to be given, and are not there."""
    empty = inspect.Parameter.empty
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {n: None for n, p in names.items() if p.default is empty and given.get(n) is None and p.kind not in kinds}
