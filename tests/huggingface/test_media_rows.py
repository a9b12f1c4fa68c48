"""Images of some rows of a batch, in families that lay them out in different ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burst_plugin.deepspeed.evaluation_turns import first_rows
from burst_plugin.huggingface.media.rows import media_of_rows
from tests.support.media import IMAGE, Image, batch, tiny_model

pytestmark = pytest.mark.huggingface
IMAGES = (Image(1, 3), Image(1, 20), Image(3, 5))  # rows 0 and 2 have none, row 1 has two
OF_ALL_SIZES = (Image(1, 3, (4, 8)), Image(1, 20), Image(3, 5, (8, 8)))


@pytest.mark.parametrize(
    ("family", "images", "parts"),
    [
        ("qwen2_5_vl", OF_ALL_SIZES, [32, 16, 64]),
        ("qwen2_5_vl", IMAGES[:1] + IMAGES[2:], [16, 16]),
        ("gemma3", IMAGES, [1, 1, 1]),
        ("internvl", IMAGES, [1, 1, 1]),
    ],
)
def test_rows_keep_their_images(family: str, images: tuple[Image, ...], parts: list[int]) -> None:
    model, whole = tiny_model(family), batch(family, images, rows=4)
    for rows in ([0], [1], [0, 1], [1, 2], [3], [0, 2], [0, 1, 2, 3]):
        found = media_of_rows(model, whole, rows)
        kept = [number for number, image in enumerate(images) if image.row in rows]
        if not kept:
            assert found == {}
            continue
        pixels = whole["pixel_values"].split(parts)
        assert found is not None
        assert torch.equal(found["pixel_values"], torch.cat([pixels[number] for number in kept]))
        if "image_grid_thw" in whole:
            assert torch.equal(found["image_grid_thw"], whole["image_grid_thw"][kept])


def _with_a_token_less(whole: dict[str, Any]) -> None:
    whole["input_ids"][whole["input_ids"] == IMAGE] = torch.tensor([5, *[IMAGE] * 11])


@pytest.mark.parametrize(
    ("family", "images", "change"),
    [
        ("qwen2_5_vl", (*IMAGES, Image(2, 30, (4, 4), frames=2)), None),
        ("mistral3", OF_ALL_SIZES, None),  # sizes decide how many features an image has
        ("gemma3", IMAGES, _with_a_token_less),
    ],
    ids=["video", "sizes", "misfit"],
)
def test_it_is_said_where_images_cannot_be_told_apart(family: str, images: Any, change: Any) -> None:
    whole = batch(family, images, rows=4)
    if change is not None:
        change(whole)
    assert media_of_rows(tiny_model(family), whole, [1]) is None
    assert first_rows(tiny_model(family), whole, 1, 2) is whole


def test_as_many_images_as_rows_are_not_one_for_each() -> None:
    """Two samples, of which the first has two images, in its chosen and in its rejected text."""
    images = (Image(0, 3), Image(0, 20), Image(2, 3), Image(2, 20))
    whole = batch("gemma3", images, rows=4)
    found = first_rows(tiny_model("gemma3"), whole, 1, 2)
    assert torch.equal(found["input_ids"], whole["input_ids"][[0, 2]])
    assert torch.equal(found["pixel_values"], whole["pixel_values"])


def test_batches_without_images_and_with_positions_of_several_axes() -> None:
    model, ids = tiny_model("qwen2_5_vl"), torch.ones(3, 6, dtype=torch.long)
    found = first_rows(model, {"input_ids": ids, "pixel_values": None}, 2, 3)
    assert found["input_ids"].shape == (2, 6)
    whole = {"input_ids": ids, "position_ids": torch.zeros(3, 3, 6)}
    assert first_rows(model, whole, 2, 3) is whole
