"""Batches whose images do not fit are refused, with the same error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import prepare
from burst_plugin.towers import rows
from tests.support.families import SINCE_5_24
from tests.support.media import IMAGE, Image, batch, tiny_model
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.huggingface,
    SINCE_5_24,
]
IMAGES = (Image(0, 3, (4, 4)), Image(0, 20, (4, 8)), Image(0, 40, (4, 4)))
Change = Callable[[dict[str, Any]], object]


def _without(*names: str) -> Change:
    return lambda whole: [whole.pop(name) for name in names]


def _as_text(begin: int, end: int) -> Change:
    """Tokens of images become text, and are marked as such."""

    def change(whole: dict[str, Any]) -> None:
        for name, text in (("input_ids", 5), ("token_type_ids", 0), ("mm_token_type_ids", 0)):
            if name in whole:
                whole[name][0, begin:end] = text

    return change


def _one_more(whole: dict[str, Any]) -> None:
    whole["input_ids"][0, 60] = IMAGE


def _smaller_grid(whole: dict[str, Any]) -> None:
    whole["image_grid_thw"][1, 2] = 4


def _fewer(name: str) -> Change:
    return lambda whole: whole.update({name: whole[name][:2]})


ALL = ("qwen3_vl", "gemma3", "llava", "mistral3")
# What is done to a batch, for which families, and a part of the error.
BAD: list[tuple[str, Change, Sequence[str], str]] = [
    ("one token more", _one_more, ALL[1:], "tokens of images, but .* makes .* features"),
    ("one token less", _as_text(20, 21), ALL[1:], "tokens of images, but .* makes .* features"),
    ("one token less", _as_text(20, 21), ALL[:1], "input_ids do not match image_grid_thw"),
    ("an image without tokens", _as_text(40, 44), ALL, "tokens of images, but .* makes .* features"),
    ("images without tokens", _as_text(0, 64), ALL, "the batch has 0 tokens of images, but .* makes"),
    ("no pixels", _without("pixel_values"), ALL, r"1[26] tokens of images \(input_ids 100\) in a batch without"),
    (
        "tokens alone",
        lambda whole: [whole.pop(name) for name in whole.keys() - {"input_ids"}],
        ALL,
        r"1[26] tokens of images \(input_ids 100\) in a batch without",
    ),
    ("no grid", _without("image_grid_thw"), ALL[:1], "got pixel_values without image_grid_thw"),
    ("a smaller grid", _smaller_grid, ALL[:1], "there are 48 patches, but pixel_values has 64"),
    ("a grid less", _fewer("image_grid_thw"), ALL[:1], "there are 48 patches, but pixel_values has 64"),
    ("no sizes", _without("image_sizes"), ALL[3:], "got pixel_values without image_sizes"),
    ("a size less", _fewer("image_sizes"), ALL[3:], "image_sizes has 2 sizes, but pixel_values has 3 images"),
]


def _errors(rank: int) -> list[str]:
    cp, found = ContextParallel(dist.group.WORLD), []
    models = {family: prepare(tiny_model(family)) for family in ALL}
    rows.to_holders = None  # type: ignore[assignment]  # nothing is to be sent
    for what, change, families, message in BAD:
        for family in families:
            whole = batch(family, IMAGES)
            change(whole)
            with pytest.raises(ValueError, match=message) as caught:
                models[family](**shard_batch(whole, cp), use_cache=False)
            found.append(f"{family}, {what}: {caught.value}")
    x = shard_batch(batch("llava", ()), cp)  # the ring is as before
    assert torch.isfinite(models["llava"](**x, use_cache=False).logits).all()
    return found


def test_images_that_do_not_fit_are_refused_alike_on_every_rank() -> None:
    first, second = run_ranks(_errors, 2)
    assert first == second
    assert len(first) == sum(len(families) for _, _, families, _ in BAD)
