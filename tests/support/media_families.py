"""Small batches with images, videos and sound for tiny models of any family, made of what its methods take."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from burst_plugin.huggingface.media.families import by_row, modalities_of, token_of
from burst_plugin.huggingface.media.features import OutputRows
from burst_plugin.huggingface.media.units import units_of
from tests.support.wrappers import tiny_wrapper

FIRST_OF_MEDIA = 80  # tokens below it are of text
_NUMBERS = {"image": 90, "video": 91, "audio": 92}
_TOKEN = re.compile(r"(image|video|audio)_(?:context_)?token(?:_id|_index)?")
LENGTH = 128


def tiny_media_model(family: str) -> Any:
    """A tiny model of a family whose tokens of images are within its vocabulary, the same on every rank."""

    def adjust(fields: dict[str, Any]) -> None:
        _small_images(fields)
        for name in fields:
            kind = _TOKEN.fullmatch(name)
            if kind and (isinstance(fields[name], int) or fields[name] is None):
                fields[name] = _NUMBERS[kind.group(1)]
            elif re.fullmatch(r"(vision|image|video|audio)_(start|end)_token_id", name) and fields[name] is not None:
                fields[name] = 93 + ("end" in name)
        for name, value in _CHANGES.get(family, {}).items():
            _put(fields, name, value)

    model = tiny_wrapper(_VARIANTS.get(family, family), adjust)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # of which no tower would have a gradient
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def _put(fields: dict[str, Any], name: str, value: Any) -> None:
    *inner, last = name.split(".")
    for each in inner:
        fields = fields[each]
    fields[last] = value


def _small_images(fields: dict[str, Any]) -> None:
    """Make images of 4 x 4 patches of what towers take by default."""
    for value in fields.values():
        if isinstance(value, dict):
            _small_images(value)
    size, patch = fields.get("image_size"), fields.get("patch_size")
    if isinstance(size, int) and isinstance(patch, int):
        fields["image_size"] = 4 * patch
    elif isinstance(size, list | tuple) and isinstance(patch, list | tuple):
        fields["image_size"] = [4 * each for each in patch]


_VARIANTS = {"gemma4": "gemma4 with images"}  # whose tokens of an image attend to each other
# Fields of configurations, by family.
_CHANGES: dict[str, dict[str, Any]] = {
    "idefics2": {"perceiver_config.resampler_n_latents": 8},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"vision_config.num_key_value_heads": 4, "vision_config.head_dim": 8},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "kimi_k25": {"projection_hidden_size": 32},
    "glm5_next": {"video_start_token_id": 86, "video_end_token_id": 87},  # images and videos have one token
    "nemotron_h_omni": {"vision_hidden_size": 32},
    "deepseek_vl_hybrid": {
        "vision_config.image_size": 64,
        "high_res_vision_config.image_size": 64,
        "high_res_vision_config.global_attn_indexes": [0],
        "high_res_vision_config.initializer_range": 0.15,
        "high_res_vision_config.window_size": 2,
    },
    "minicpmv4_6": {"vision_config.insert_layer_id": 0, "insert_layer_id": 0},
    "minicpmv4_7": {"vision_config.insert_layer_id": 0, "insert_layer_id": 0},
    "voxtral": {"audio_config.intermediate_size": 128, "audio_config.max_source_positions": 32},
    "glmasr": {"audio_config.intermediate_size": 128, "audio_config.max_source_positions": 32},
    "audioflamingo3": {"audio_config.max_source_positions": 32},
    "qwen2_5_omni_thinker": {
        "audio_config.output_dim": 32,
        "audio_config.max_source_positions": 32,
        "audio_config.n_window": 8,
        "audio_start_token_id": 88,
        "audio_end_token_id": 89,
    },
    "qwen3_omni_moe_thinker": {
        "audio_config.output_dim": 32,
        "audio_config.n_window_infer": 200,
        "audio_start_token_id": 88,
        "audio_end_token_id": 89,
    },
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "use_spatial_sampling": True,
        "vision_config.hidden_size": 64,
        "vision_feature_layer": -1,
    },
    "qianfan_ocr": {"vision_config.drop_path_rate": 0.0},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "molmo2": {"image_patch_id": 90, "vision_config.num_position_embeddings": 16},
    "qwen3_asr": {"audio_config.output_dim": 32, "audio_config.n_window_infer": 200},
}


def encoder(model: Any, modality: str) -> Any:
    """The module of a model that puts features of images, or of videos or sound, in the places of tokens."""
    return next(module for module in model.modules() if modality in modalities_of(module))


def media_batch(model: Any, modality: str = "image") -> dict[str, torch.Tensor]:
    """Texts of which the first has two images, the second one, and the third none, and their labels."""
    module = encoder(model, modality)
    pixels = _PIXELS.get(model.config.model_type, _pixels)(model, module, modality)
    names = inspect.signature(getattr(module, f"get_{modality}_features")).parameters
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60, (3, LENGTH), generator=generator)
    counts = _counts(module, modality, {name: x for name, x in pixels.items() if name in names})
    at, token = {0: 5, 1: 9 + counts[0], 2: 23}, token_of(module, modality)
    for number, count in enumerate(counts):
        assert at[number] + count <= LENGTH, counts
        row = number // 2
        frames = int(_frames(pixels)[number]) if modality == "video" else 1
        if modality == "video" and model.config.model_type in _FRAMES_APART:
            first = at[number]
            for _ in range(frames):
                ids[row, first : first + count // frames] = token
                first += count // frames + 1
        else:
            ids[row, at[number] : at[number] + count] = token
        ids[row, at[number] - 1] = 88 if modality == "audio" else 93
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids >= FIRST_OF_MEDIA, -100), **pixels}
    methods = [each.compute_3d_position_ids for each in model.modules() if hasattr(each, "compute_3d_position_ids")]
    if methods and "mm_token_type_ids" not in inspect.signature(methods[0]).parameters:
        batch["attention_mask"] = torch.ones_like(ids)
    elif methods and "mm_token_type_ids" in inspect.signature(methods[0]).parameters:
        kinds = {"image": 1, "video": 2, "audio": 3}
        batch["mm_token_type_ids"] = (ids == token).int() * kinds[modality]
    if model.config.model_type in ("gemma4", "molmo2"):
        batch["mm_token_type_ids"] = (ids == token).int()
    if model.config.model_type in ("gemma3", "paligemma"):  # whose masks follow images, or the whole prompt
        marks = (ids == token).int()
        batch["token_type_ids"] = (
            marks if model.config.model_type == "gemma3" else marks.flip(1).cumsum(1).flip(1) == 0
        )
    return batch


def joined_batch(model: Any, modalities: Sequence[str]) -> dict[str, torch.Tensor]:
    """The texts of batches of several modalities, one behind the other."""
    batches = [media_batch(model, modality) for modality in modalities]
    shape = batches[0]["input_ids"].shape
    found = {name: x for each in batches for name, x in each.items()}
    of_tokens = [name for name, x in batches[0].items() if x.shape == shape]
    return {**found, **{name: torch.cat([each[name] for each in batches], 1) for name in of_tokens}}


def _frames(pixels: Mapping[str, torch.Tensor]) -> torch.Tensor:
    grid = next((x for name, x in pixels.items() if "grid" in name), None)
    return torch.ones(3) if grid is None else grid[:, 0]


def _counts(module: Any, modality: str, pixels: Mapping[str, torch.Tensor]) -> list[int]:
    """How many tokens each image has, found by encoding them one at a time."""
    with torch.no_grad():
        units = units_of(next(iter(pixels)), pixels, False, by_row(module, modality))
        found = []
        for number in range(len(units.patches)):
            out = getattr(module, f"get_{modality}_features")(**units.take([number]), return_dict=True)
            found.append(len(OutputRows.of(out).tensors[0]))
    assert len(found) == 3, found
    return found


def drawn(*shape: int) -> torch.Tensor:
    """Numbers, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _vision(model: Any) -> Any:
    names = ("vision_config", "perception_config")
    return next(getattr(model.config, name) for name in names if hasattr(model.config, name))


def _first_weight(module: Any) -> torch.Tensor:
    """The weight that patches of an image meet first."""
    found = [
        (name, p)
        for name, p in module.named_parameters()
        if "patch" in name and p.dim() >= 2 and "audio" not in name and "position" not in name and "merge" not in name
    ]
    found = found or [(name, p) for name, p in module.named_parameters() if "vision" in name and p.dim() >= 4]
    return found[0][1]


def _pixels(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    """Pixels as a method's arguments tell."""
    method = getattr(module, f"get_{modality}_features")
    names = list(inspect.signature(method).parameters)
    if modality == "audio":
        return _sound(model, module, names)
    config = _vision(model)
    grid = next((name for name in names if "grid" in name), None)
    if grid is not None:
        sizes = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 8, 4]])
        if modality == "video":
            sizes[:: 1 if model.config.model_type == "ernie4_5_vl_moe" else 2, 0] = 2
        sizes = sizes[:, 1:] if grid.endswith("_hw") else sizes
        shape = tuple(_first_weight(module).shape[1:])
        wide = shape if model.config.model_type in _OF_PATCHES else (torch.Size(shape).numel(),)
        found = {names[0]: drawn(int(sizes.prod(-1).sum()), *wide), grid: sizes}
        merge = next((name for name in names if "merge_sizes" in name), None)
        if modality == "video" and model.config.model_type.endswith("_thinker"):
            found["video_second_per_grid"] = torch.tensor([1.0, 2.0, 1.0])
        return found | ({merge: torch.tensor([2, 2, 2])} if merge else {})
    if any(name.startswith("target_sizes") for name in names):
        sizes = torch.tensor([[4, 4], [4, 8], [8, 4]])
        side = config.patch_size
        return {names[0]: drawn(1, 3, side, side * int(sizes.prod(-1).sum())), names[1]: sizes}
    size = getattr(config, "image_size", None) or 4 * getattr(config, "patch_size", 8)
    h, w = (size, size) if isinstance(size, int) else size
    if modality == "video":
        return {names[0]: drawn(3, 2, 3, h, w)}
    if by_row(module, modality):
        pixels = drawn(3, 2, 3, h, w)
        pixels[1, 1] = 0
        pixels[2] = 0
        return {names[0]: pixels}
    if "image_sizes" in names and hasattr(model.config, "image_grid_pinpoints"):
        model.config.image_grid_pinpoints = [[h, 2 * w], [2 * h, w]]
        return {names[0]: drawn(3, 3, 3, h, w), "image_sizes": torch.tensor([[h, 2 * w], [2 * h, w], [h - 8, 2 * w]])}
    if "image_sizes" in names and model.config.model_type != "llava":
        return {names[0]: drawn(3, 3, h, w), "image_sizes": torch.tensor([[h, w], [h // 2, w], [h, w // 2]])}
    return {names[0]: drawn(3, 3, h, w)}


def _sound(model: Any, module: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    config = model.config.audio_config
    mel = next(getattr(config, n) for n in ("num_mel_bins", "input_dim", "n_mels") if hasattr(config, n))
    frames = 2 * getattr(config, "max_source_positions", 32)
    if model.config.model_type in ("qwen3_asr", "qwen3_omni_moe_thinker"):
        frames = 200
    if model.config.model_type == "fun_asr_nano":
        sound, frames = {names[0]: drawn(3, 16, mel * config.num_stacked_frames)}, 16
    else:
        sound = {names[0]: drawn(3, mel, frames)}
    mask = next((name for name in names if name.endswith("_mask")), None)
    if mask is not None:
        lengths = torch.tensor([frames, frames // 2, frames - 8])
        sound[mask] = (torch.arange(frames) < lengths[:, None]).long()
    return sound


_FRAMES_APART = (
    "qwen3_5", "qwen3_5_moe", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "qwen3_vl", "qwen3_vl_moe",
    "qwen4_exp", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga",
)  # fmt: skip
_OF_PATCHES = ("kimi_k25", "paddleocr_vl")


def _lfm2_vl(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    wide = _first_weight(module)[0].numel()
    shapes = torch.tensor([[4, 4], [4, 8], [8, 4]])
    mask = torch.arange(32) < shapes.prod(-1)[:, None]
    return {"pixel_values": drawn(3, 32, wide), "spatial_shapes": shapes, "pixel_attention_mask": mask.long()}


def _high_res(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    h, w = model.config.vision_config.image_size, model.config.high_res_vision_config.image_size
    return {"pixel_values": drawn(3, 3, h, h), "high_res_pixel_values": drawn(3, 3, w, w)}


def _with_views(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    """Images with closer views of their parts: of the first two, none, and three."""
    size = model.config.vision_config.image_size
    numbers = torch.tensor([2, 0, 3])
    return {
        "pixel_values": drawn(3, 3, size, size),
        "pixel_values_local": drawn(5, 3, size, size),
        "num_local_patches": numbers,
    }


def _tiles(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    size = model.config.vision_config.image_size
    return {
        "pixel_values": drawn(3, 2, 3, size, size),
        "pixel_attention_mask": torch.tensor([[True, True], [True, False], [True, False]]),
    }


def _apertus(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    return {"pixel_values": drawn(3, 3, 4, 4), "image_sizes": torch.tensor([[4, 4], [2, 4], [4, 2]])}


def _gemma4(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    """Patches of images of unlike sizes, filled up to one number, and their places; nine become a token."""
    sizes, wide = [(6, 6), (3, 6), (6, 3)], 3 * model.config.vision_config.patch_size**2
    places = torch.full((3, 36, 2), -1)
    for number, (h, w) in enumerate(sizes):
        places[number, : h * w] = torch.stack([torch.arange(h * w) % w, torch.arange(h * w) // w], 1)
    pixels = drawn(3, 36, wide) * (places[..., :1] >= 0)
    return {"pixel_values": pixels, "image_position_ids": places}


def _molmo2(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    """Crops of 4 x 4 patches, two by two of which become a token: of images, one of all, and others that overlap."""
    wide = 3 * model.config.vision_config.patch_size**2
    crop = torch.arange(16).view(4, 4)
    if modality == "video":
        pools = _pooled(crop, 2, 2)
        found = torch.cat([pools + 16 * frame for frame in range(4)])
        grids = torch.tensor([[2, 2, 2], [1, 2, 2], [1, 2, 2]])
        return {"pixel_values_videos": drawn(4, 16, wide), "video_token_pooling": found, "video_grids": grids}
    beside = torch.cat([crop[:, :3], crop[:, 1:] + 16], 1)  # a token has patches of both
    details = [crop, beside, beside.T]
    pooling, first = [], 0
    for detail in details:
        pooling += [_pooled(crop, 2, 2) + first, _pooled(detail, 2, 2) + first + 16]
        first += 16 * (2 + int(detail.numel() > 16))
    pooling[-1][-1, 3] = -1
    grids = torch.tensor([[2, 2, *(side // 2 for side in detail.shape)] for detail in details])
    return {
        "pixel_values": drawn(first // 16, 16, wide),
        "image_token_pooling": torch.cat(pooling),
        "image_grids": grids,
        "image_num_crops": torch.tensor([2, 3, 3]),
    }


def _inkling(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    """Patches that are a token each, over two frames."""
    return {"pixel_values": drawn(3, 2, 2, 2, 3)}


def _inkling2(model: Any, module: Any, modality: str) -> dict[str, torch.Tensor]:
    """Four patches for each token."""
    grids = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 2]])
    side = 2 * model.config.vision_config.patch_size
    return {"pixel_values": drawn(int(grids.prod(-1).sum()), side, side, 3), "image_grid_thw": grids}


def _pooled(patches: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """The numbers of patches of each token, [tokens, high * wide]."""
    h, w = patches.shape
    return patches.reshape(h // high, high, w // wide, wide).transpose(1, 2).reshape(-1, high * wide)


_PIXELS: dict[str, Any] = {
    "molmo2": _molmo2,
    "gemma4": _gemma4,
    "lfm2_vl": _lfm2_vl,
    "deepseek_vl_hybrid": _high_res,
    "step3p7": _with_views,
    "granite_docling": _tiles,
    "apertus1p5": _apertus,
    "inkling_mm_model": _inkling,
    "inkling2": _inkling2,
    "inkling2_loop": _inkling2,
}
