"""Tiny models that take images, and batches for them; images have one row of features for each of their tokens.

family     pixels                              places of images in texts
qwen3_vl   patches of all images, and grids    as many tokens as patches, less those that are merged
llava      images of one size                  4 tokens each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.huggingface import layer_mask, prepare
from tests.support.deepspeed_run import worst
from tests.support.ring_steps import Step, over_ranks, step

VOCAB, IMAGE, VIDEO = 128, 100, 101
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.15,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 102, "vision_end_token_id": 103}


class Image(NamedTuple):
    """An image in a text. row, at: its first token; size: its height and width, in patches of the tower."""

    row: int
    at: int
    size: tuple[int, int] = (4, 4)
    frames: int = 1


class Family(NamedTuple):
    """A family of models.

    config: a tiny configuration; tokens: how many an image has; media: entries of a batch with images; frames_apart:
    whether there is a token between the frames of a video.
    """

    config: Callable[[], Any]
    tokens: Callable[[Image], int]
    media: Callable[[Sequence[Image], torch.Tensor], dict[str, torch.Tensor]]
    frames_apart: bool = False


def _patches(images: Sequence[Image], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Patches of images one after another, as Qwen's processors return them."""
    found = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    for name, grid_name, of_kind in (
        ("pixel_values", "image_grid_thw", [each for each in images if each.frames == 1]),
        ("pixel_values_videos", "video_grid_thw", [each for each in images if each.frames > 1]),
    ):
        if of_kind:
            grid = torch.tensor([[each.frames, *each.size] for each in of_kind])
            found |= {name: _drawn(int(grid.prod(-1).sum()), 96), grid_name: grid}
    return found


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _merged(image: Image) -> int:
    return image.frames * image.size[0] * image.size[1] // 4


def _alike(images: Sequence[Image], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": _drawn(len(images), 3, 16, 16)}


def _types(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"token_type_ids": (ids == IMAGE).int()}


def _gemma3(tokens: int) -> Any:
    """A configuration of images of so many tokens."""
    return transformers.Gemma3Config(
        text_config={**_TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**_SIGLIP, "patch_size": 4},
        mm_tokens_per_image=tokens,
        image_token_index=IMAGE,
        boi_token_index=102,
        eoi_token_index=103,
    )


FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        lambda: transformers.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": _MROPE},
            vision_config={**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
            **_TOKENS,
        ),
        _merged,
        _patches,
    ),
    "qwen3_vl": Family(
        lambda: transformers.Qwen3VLConfig(
            text_config={**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
            vision_config={**_QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            **_TOKENS,
        ),
        _merged,
        _patches,
        frames_apart=True,
    ),
    "llava": Family(
        lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**_TEXT),
            vision_config=transformers.CLIPVisionConfig(**_SIGLIP, projection_dim=32),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        lambda image: 4,
        _alike,
    ),
    "gemma3": Family(lambda: _gemma3(4), lambda image: 4, lambda images, ids: {**_alike(images, ids), **_types(ids)}),
    "gemma3_large": Family(
        lambda: _gemma3(16), lambda image: 16, lambda images, ids: {**_alike(images, ids), **_types(ids)}
    ),  # images have more tokens than windows
    "mistral3": Family(
        lambda: transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**_TEXT, sliding_window=None),
            vision_config=transformers.PixtralVisionConfig(
                **{**_SIGLIP, "image_size": 64, "patch_size": 4, "head_dim": 8}
            ),
            image_token_index=IMAGE,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        ),
        _merged,
        lambda images, ids: {
            "pixel_values": _drawn(len(images), 3, 32, 32),
            "image_sizes": torch.tensor([[4 * each.size[0], 4 * each.size[1]] for each in images]),
        },
    ),
    "internvl": Family(
        lambda: transformers.InternVLConfig(
            text_config=transformers.Qwen2Config(**_TEXT),
            vision_config=transformers.InternVLVisionConfig(
                **{**_SIGLIP, "patch_size": [4, 4], "image_size": [16, 16]}
            ),
            image_token_id=IMAGE,
        ),
        lambda image: 4,
        _alike,
    ),
}
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_large": "Gemma3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
}


def tiny_model(family: str, **rope: Any) -> Any:
    """A model of a family, the same on every rank, with eager attention.

    rope: changes of its rotary embedding, which then was trained with 32 positions.
    """
    torch.manual_seed(0)
    config = FAMILIES[family].config()
    if rope:
        text = config.get_text_config()
        text.rope_parameters, text.max_position_embeddings = {**text.rope_parameters, **rope}, 32
    model = getattr(transformers, CLASSES[family])(config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # a projector of zeros, by which no image would matter
                parameter.normal_(std=0.1)
    return model.train()


def batch(family: str, images: Sequence[Image], rows: int = 1, length: int = 64) -> dict[str, torch.Tensor]:
    """Texts with images, and their labels; tokens of images have none."""
    generator, of = torch.Generator().manual_seed(3), FAMILIES[family]
    ids = torch.randint(1, 90, (rows, length), generator=generator)
    for image in images:
        per_frame, gap = of.tokens(image) // image.frames, int(of.frames_apart)
        for frame in range(image.frames):
            first = image.at + frame * (per_frame + gap)
            assert first + per_frame <= length
            ids[image.row, first : first + per_frame] = VIDEO if image.frames > 1 else IMAGE
    media = {name: x for name, x in of.media(images, ids).items() if len(x)}
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= IMAGE, -100), **media}


def of_document(
    whole: Mapping[str, torch.Tensor], images: Sequence[Image], begin: int, end: int
) -> dict[str, torch.Tensor]:
    """A document of a batch of one row as a batch of its own, with those of the images that begin in it."""
    shape, found = whole["input_ids"].shape, {}
    for name, x in whole.items():
        if x.shape[:2] == shape:
            found[name] = x[:, begin:end]
            continue
        of_kind = [each for each in images if (each.frames > 1) == ("video" in name)]
        grid = whole.get(
            name.replace("pixel_values_videos", "video_grid_thw").replace("pixel_values", "image_grid_thw")
        )
        sizes = [1] * len(of_kind) if grid is None or grid is x else grid.prod(-1).tolist()
        parts = zip(of_kind, x.split(sizes), strict=True)
        kept = [part for image, part in parts if begin <= image.at < end]
        if kept:
            found[name] = torch.cat(kept)
    return found


class Case(NamedTuple):
    """A batch of texts with images.

    padding: of each row, how many tokens before and after its text; documents: their lengths, in a single row;
    has_positions: whether the batch has position_ids, as it has with documents.
    """

    images: Sequence[Image] = ()
    rows: int = 1
    length: int = 64
    padding: Sequence[tuple[int, int]] = ()
    documents: Sequence[int] = ()
    has_positions: bool = False

    def batch(self, family: str) -> dict[str, torch.Tensor]:
        """The batch for a family of models."""
        found, tokens = batch(family, self.images, self.rows, self.length), torch.arange(self.length)
        labels = found["labels"]
        if self.padding:
            bounds = torch.tensor([(before, self.length - after) for before, after in self.padding])[:, :, None]
            real = (tokens >= bounds[:, 0]) & (tokens < bounds[:, 1])
            found["attention_mask"] = real.long()
            labels.masked_fill_(~real | (tokens == bounds[:, 0]), IGNORED_LABEL)  # padding predicts no token
            if self.has_positions:
                found["position_ids"] = (real.cumsum(1) - 1).clamp(0)
        if self.documents:
            positions = torch.cat([torch.arange(length) for length in self.documents])[None]
            found["position_ids"] = positions
            labels.masked_fill_(positions == 0, IGNORED_LABEL)
        return found

    def on_one_rank(self, model: Any, family: str) -> Step:
        """The loss and gradients of a model without a ring, to which each document is a batch of its own."""
        whole = self.batch(family)
        count = int((whole["labels"][:, 1:] != IGNORED_LABEL).sum())
        parts = [{name: x for name, x in whole.items() if name != "position_ids"}]
        if self.documents:
            bounds = [0, *accumulate(self.documents)]
            parts = [of_document(parts[0], self.images, a, b) for a, b in pairwise(bounds) if b - a > 1]
        losses = [model(**part, num_items_in_batch=count, use_cache=False).loss for part in parts]
        return step(model, torch.stack(losses).sum())


def step_on_ring(model: Any, whole: Mapping[str, torch.Tensor], cp: ContextParallel) -> Step:
    """The loss and the gradients of a model on a ring, added up over ranks; without gradients on all but rank 0."""
    local = shard_batch(whole, cp, layer_mask=layer_mask(model))
    count = local["burst"].valid_tokens
    out = prepare(model)(**local, labels=local["shift_labels"], num_items_in_batch=count, use_cache=False)
    found = over_ranks(*step(model, out.loss), cp.group)
    assert cp.traffic() == cp.expected_traffic()
    return found


def check_step(found: Step, expected: Step, case: object) -> None:
    """Compare a step on a ring with one of one rank: the loss, and each gradient."""
    (loss, grads), (true_loss, truths) = found, expected
    assert loss == pytest.approx(true_loss, rel=1e-5), case
    least = 1e-5 * max(float(x.norm()) for x in truths.values())  # less is rounding, as of biases of keys
    some = {name: x for name, x in truths.items() if float(x.norm()) > least}
    assert worst({name: grads[name] for name in some}, some)[0] < 1e-5, case
    assert all(float(grads[name].norm()) < 2 * least for name in truths.keys() - some.keys()), case
