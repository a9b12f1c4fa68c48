"""The images of some rows of a batch: the places of images in texts tell which rows they belong to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any

import torch

from burst_plugin.batch import MEDIA
from burst_plugin.huggingface.media.families import by_row, known_token, modalities_of
from burst_plugin.huggingface.media.units import units_of

_PIXELS = "pixel_values"
_VALUES = (_PIXELS, "input_features", "input_values")  # beginnings of the names of entries that a tower encodes


def is_of_media(name: str) -> bool:
    """Return whether an entry of a batch holds images, video or audio, or says how they are put together."""
    return name.startswith(MEDIA)


def media_of_rows(model: torch.nn.Module, batch: Mapping[str, Any], rows: Collection[int]) -> dict[str, Any] | None:
    """Return a batch's entries of images for some of its rows, none if these rows have no image.

    Args:
        model: the model that takes the batch, or a module around it.
        batch: has `input_ids` [B, S], and images that follow each other as their tokens do.
        rows: the numbers of the rows.

    Returns None if it cannot be told which images belong to these rows: for video and audio, for images with numbers
    of features that do not follow from their patches, and for images that do not fit the tokens.
    """
    media = {name: x for name, x in batch.items() if is_of_media(name) and x is not None}
    module = next((each for each in model.modules() if "image" in modalities_of(each)), None)
    token = None if module is None else known_token(module, "image")
    if module is None or token is None or by_row(module, "image"):
        return None
    if "input_ids" not in batch or [name for name in media if name.startswith(_VALUES)] != [_PIXELS]:
        return None
    try:
        units = units_of(_PIXELS, media, by_frame=False)
    except ValueError:  # which the model will say, on all ranks
        return None
    tokens = (batch["input_ids"] == token).sum(1).tolist()
    of_all, patches = sum(tokens), sum(units.patches)
    if not units.in_proportion or any(of_all * size % patches for size in units.patches):
        return None
    ends_of_units = [*accumulate(of_all * size // patches for size in units.patches)]
    ends_of_rows = [*accumulate(tokens)]
    if not {0, *ends_of_units}.issuperset(ends_of_rows):
        return None
    kept = [number for number, end in enumerate(ends_of_units) if bisect_left(ends_of_rows, end) in rows]
    return units.take(kept) if kept else {}
