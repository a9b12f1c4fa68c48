"""Tiny models that take images, and batches for them; images have one row of features for each of their tokens.

family     pixels                              places of images in texts
qwen3_vl   patches of all images, and grids    as many tokens as patches, less those that are merged
llava      images of one size                  4 tokens each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers

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
    "gemma3": Family(
        lambda: transformers.Gemma3Config(
            text_config={**_TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            vision_config={**_SIGLIP, "patch_size": 4},
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=102,
            eoi_token_index=103,
        ),
        lambda image: 4,
        lambda images, ids: {**_alike(images, ids), "token_type_ids": (ids == IMAGE).int()},
    ),
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
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
}


def tiny_model(family: str) -> Any:
    """A model of a family, the same on every rank, with eager attention."""
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[family])(FAMILIES[family].config())
    model.set_attn_implementation("eager")
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
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= IMAGE, -100), **of.media(images, ids)}


def of_document(whole: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """A document of a batch of one row as a batch of its own, with the images of its tokens."""
    ids = whole["input_ids"]
    starts = (ids[0] == IMAGE) & (torch.nn.functional.pad(ids[0, :-1], (1, 0)) != IMAGE)
    before, here = int(starts[:begin].sum()), int(starts[begin:end].sum())
    found = {}
    for name, x in whole.items():
        grid = whole.get("image_grid_thw")
        if x.shape[:2] == ids.shape:
            found[name] = x[:, begin:end]
        elif name == "pixel_values" and grid is not None:
            ends = [0, *grid.prod(-1).cumsum(0).tolist()]
            found[name] = x[ends[before] : ends[before + here]]
        else:
            found[name] = x[before : before + here]
    return {name: x for name, x in found.items() if len(x)}
