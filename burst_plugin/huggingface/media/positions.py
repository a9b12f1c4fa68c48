"""Positions in three axes (mRoPE) for batches that are cut: counted in the whole batch, each document by itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.huggingface.walks import modules_in

METHOD = "compute_3d_position_ids"
_OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_GRIDS = ("grid_thw", "target_sizes", "target_sizes_videos", "audio_feature_lengths")  # arguments with sizes of media


def with_media_positions(model: PreTrainedModel, shard: SequenceShard, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward on a shard, with mRoPE positions in three axes for this rank's tokens.

    The shard among them has the largest of these positions in the whole batch as its `longest`: an image takes fewer
    positions than it has tokens.

    kwargs: the keyword arguments of the forward. They are returned unchanged for models without such positions,
        batches without images, video or audio, and positions that are in several axes already.

    Raises ValueError if the placeholder tokens of the batch do not fit its images.
    """
    inner = next((module for module in modules_in(model) if hasattr(module, METHOD)), None)
    if not shard.has_media or inner is None or kwargs["position_ids"].dim() == 3:
        return dict(kwargs)
    method: Any = getattr(inner, METHOD)
    names, known = inspect.signature(method).parameters, dict(kwargs)
    if "audio_feature_lengths" in names and known.get("feature_attention_mask") is not None:
        known.setdefault("audio_feature_lengths", known["feature_attention_mask"].sum(1))
    if not any(name.endswith(_GRIDS) and known.get(name) is not None for name in names):
        return dict(kwargs)
    positions = positions_in_axes(method, shard.whole, known)
    if positions is None:
        return dict(kwargs)
    missing = shard.tokens.length - positions.shape[-1]
    padded = (
        torch.cat([positions, positions[..., -1:].expand(*positions.shape[:-1], missing)], -1)
        if missing
        else positions
    )
    local = shard.cp.shard(padded, padded.dim() - 1, shard.tokens)
    return {**kwargs, "position_ids": local, SHARD_KEY: replace(shard, longest=int(positions.max()))}


def positions_in_axes(method: Any, whole: Mapping[str, Tensor], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the positions of the whole batch, [3, B, S], as a model's own method counts them.

    It counts a row at a time, so that each document is given as a row, padded at its end.
    """
    ids, documents = whole["input_ids"], whole.get("position_ids")
    of_tokens = {name: whole[name] for name in _OF_TOKENS if name in whole}
    rows: dict[int, Tensor] = {}  # the places of each document's tokens, by its start
    if documents is not None:
        real = of_tokens.setdefault("attention_mask", torch.ones_like(ids)) != 0
        after_real = real.cumsum(1) > real.long()  # padding before a row's first token is no document
        starts = torch.nonzero((real & after_real & (documents == 0)).flatten()).flatten().tolist()
        bounds = sorted({*starts, *range(0, ids.numel() + 1, ids.shape[1])})
        rows = {a: torch.arange(a, b, device=ids.device) for a, b in pairwise(bounds)}
        counted = documents_with_media(of_tokens.get("mm_token_type_ids"), bounds)
        of_tokens = {
            name: pad_sequence([x.flatten()[rows[start]] for start in counted], batch_first=True)
            for name, x in of_tokens.items()
        }
    parameters = inspect.signature(method).parameters
    arguments = {
        name: of_tokens.get(name, kwargs.get(name) if name not in _OF_TOKENS else None) for name in parameters
    }
    arguments |= dict.fromkeys({"inputs_embeds", "cache", "past_key_values"} & parameters.keys())
    try:
        positions: Tensor | None = method(
            **{n: x for n, x in arguments.items() if x is not None or _is_required(parameters[n])}
        )
    except (IndexError, RuntimeError, StopIteration) as error:
        grids = [name for name in arguments if name.endswith(_GRIDS) and arguments[name] is not None]
        raise ValueError(
            f"tokens of images, videos or clips in input_ids do not match {', '.join(grids)}, so that positions "
            "cannot be counted; give what a processor returns for these texts"
        ) from error
    if positions is None or not rows:
        return positions
    by_start = {start: positions[:, n, : len(rows[start])] for n, start in enumerate(counted)}
    for start, row in rows.items():
        if start not in by_start:  # of text alone, which counts alike in all axes
            by_start[start] = (real.flatten()[row].cumsum(0) - 1).clamp(min=0).expand(len(positions), -1)
    return torch.cat([by_start[start] for start in rows], 1).view(len(positions), *ids.shape)


def documents_with_media(types: Tensor | None, bounds: Sequence[int]) -> list[int]:
    """Return the starts of documents that have tokens of images, video or audio; all starts if types are unknown.

    types: the type of each token, 0 for text. bounds: where documents begin, and the end. Many short documents of
        text would be padded to the longest one with images.
    """
    starts = list(bounds[:-1])
    if types is None:
        return starts
    at = torch.tensor(bounds, device=types.device)
    before = torch.nn.functional.pad((types.flatten() != 0).cumsum(0), (1, 0))[at]
    has_media = (before[1:] > before[:-1]).tolist()
    return [start for start, has in zip(starts, has_media, strict=True) if has] or starts


def _is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter has to be given."""
    named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return named and parameter.default is inspect.Parameter.empty
