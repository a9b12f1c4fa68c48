"""Entries of a batch that hold images, video or audio: which a model takes, and whether they fit its tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard
from burst_plugin.huggingface.media.families import PLURALS, by_frame, by_row, known_token, modalities_of, why_not
from burst_plugin.huggingface.media.units import units_of
from burst_plugin.huggingface.walks import modules_in

_PIXELS = ("pixel_values", "input_features")


def entries_of(module: torch.nn.Module, modality: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a forward that go to a module's tower; {} if the batch has none for it.

    module: has a method `get_<modality>_features`, whose parameters they are. modality: "image", "video" or "audio".
    """
    names = _parameters(module, modality)
    entries = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    return entries if any(name.startswith(_PIXELS) for name in entries) else {}


def check_entries(model: PreTrainedModel, shard: SequenceShard, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError, on every rank alike, if images, video or audio of a batch are missing or do not fit together.

    Whether there are as many features as placeholder tokens is known, and checked, only after a tower has run.

    shard: has the ids of the whole batch, in which placeholder tokens need media.
    kwargs: the keyword arguments of the forward.
    """
    absent: dict[int, str] = {}  # by token, what has no entries
    tokens_with_media: set[int | None] = set()
    for module in modules_in(model):
        for modality in modalities_of(module):
            if why_not(module, modality):
                continue
            entries, token = entries_of(module, modality, kwargs), known_token(module, modality)
            if entries:
                tokens_with_media.add(token)
                _check_missing(module, modality, entries)
                units_of(next(iter(entries)), entries, by_frame(module), by_row(module, modality))
            elif token is not None:
                absent.setdefault(token, PLURALS[modality])
    ids = shard.whole.get("input_ids")
    if ids is None:
        return
    for token in absent.keys() - tokens_with_media:
        count, media = int((ids == token).sum()), absent[token]
        if count:
            raise ValueError(
                f"{type(model).__name__} got {count} tokens of {media} (input_ids {token}) in a batch without the "
                f"{media}: give shard_batch all that a processor returns, or texts without these tokens"
            )


def _check_missing(module: torch.nn.Module, modality: str, entries: Mapping[str, Any]) -> None:
    """Raise ValueError if pixels come without the entries that tell their grids or sizes."""
    forward: Any = inspect.unwrap(type(module).forward)
    taken = inspect.signature(forward).parameters
    needed = [
        name
        for name, parameter in _parameters(module, modality).items()
        if name in taken and (parameter.default is inspect.Parameter.empty or "_grid_" in name)
    ]
    missing = [name for name in needed if name not in entries and not name.startswith(_PIXELS)]
    if missing:
        raise ValueError(
            f"{type(module).__name__} got {next(iter(entries))} without {', '.join(missing)}: give shard_batch all "
            "that a processor returns"
        )


def _parameters(module: torch.nn.Module, modality: str) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(getattr(module, f"get_{modality}_features")).parameters
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: each for name, each in parameters.items() if each.kind not in variadic}
