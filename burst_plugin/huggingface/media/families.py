"""Families of models that take images, video and audio: how they differ, and whether ranks may share the encoding.

A family is here once losses and gradients of its tiny models, towers trained, have been equal to one rank's, for one
modality at a time: a tower's code does not tell what it does to several images at once. `python -m tools.families`
says of every family whether it is here.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from burst_plugin.huggingface.walks import modules_in

MODALITIES = ("image", "video", "audio")
PLURALS = {"image": "images", "video": "videos", "audio": "audio"}
_PUTS = ("get_placeholder_mask", "inputs_merger")  # methods of modules that put features in the places of tokens
# Names under which configurations have the placeholder tokens of features.
_TOKENS = ("{}_token_id", "{}_token_index")
_VIDEOS_AS_IMAGES = (
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
    "glmga",
    "nemotron_h_omni",
)  # in places of image tokens
# Towers in which frames do not attend to each other, and whose positions do not count them.
_BY_FRAME = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "molmo2",
)
_WITH_IMAGES = (
    "apertus1p5", "aria", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "gemma3", "gemma4",
    "glm5_next", "got_ocr2", "granite4_vision", "granite_docling", "hunyuan_vl", "idefics2", "idefics3", "inkling2",
    "inkling2_loop", "inkling_mm_model", "internvl", "janus", "lfm2_vl", "lighton_ocr", "llava", "llava_next",
    "mistral3", "ovis2", "paddleocr_vl", "paligemma", "pp_chart2table", "qianfan_ocr", "shieldgemma2", "smolvlm",
    "step3p7", "vipllava",
)  # fmt: skip
_WITH_IMAGES_AND_VIDEO = (
    "cohere_compass", "cosmos3_edge", "cosmos3_omni", "ernie4_5_vl_moe", "exaone4_5", "glm46v", "glm4v", "glm4v_moe",
    "glm_ocr", "glmga", "hyperclovax_vision_v2", "kimi_k25", "lfm3_vl", "llava_next_video", "llava_onevision",
    "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "molmo2", "muse_glimmer", "muse_spark",
    "nemotron_h_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
    "qwen4_exp", "video_llama_3", "video_llava",
)  # fmt: skip
EXAMINED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_WITH_IMAGES, ("image",)),
    **dict.fromkeys(_WITH_IMAGES_AND_VIDEO, ("image", "video")),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), MODALITIES),
    **dict.fromkeys(("audioflamingo3", "glmasr", "qwen3_asr", "voxtral"), ("audio",)),
}
_INSTEAD = "train on text alone"
_REASONS = {
    "fun_asr_nano": "its adaptor has attention of its own that transformers cannot set",
    "llama4": "transformers, at least until 5.24, fails on its images",
    "musicflamingo": "a clip's features depend on where its tokens are in a text",
}


def modalities_of(module: torch.nn.Module) -> list[str]:
    """Return the modalities that a module encodes in its own forward and puts in the places of placeholder tokens.

    They are "image", "video" or "audio"; empty for a module that encodes none.
    """
    kind: Any = type(module)
    return list(_modalities_of_class(kind))


@cache
def _modalities_of_class(kind: Any) -> tuple[str, ...]:
    forward: Any = inspect.unwrap(kind.forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    puts = any(hasattr(kind, each) for each in _PUTS)
    return tuple(m for m in MODALITIES if f"get_{m}_features" in names and puts)


def why_not(module: Any, modality: str) -> str:
    """Return why ranks cannot share the encoding of a module's media of one modality; "" if they can.

    modality: "image", "video" or "audio".
    """
    family = module.config.model_type
    if modality not in EXAMINED.get(family, ()):
        reason = _REASONS.get(family, f"how ranks could share {PLURALS[modality]} has not been examined")
        return f"{reason}; {_INSTEAD}"
    if any(isinstance(each, _BatchNorm) and each.training for each in modules_in(module)):
        return "a BatchNorm of its tower averages over all of them, and a rank has only a part; set it to eval()"
    return ""


def shared_by(model: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Return the modalities ("image", "video", "audio") whose encoding ranks share, and reasons why not others."""
    found = [(each, why_not(module, each)) for module in model.modules() for each in modalities_of(module)]
    shared = [modality for modality, reason in found if not reason]
    return shared, list(dict.fromkeys(reason.removesuffix(f"; {_INSTEAD}") for _, reason in found if reason))


def check_examined(module: Any, modality: str) -> None:
    """Raise ValueError if ranks cannot share the encoding of a module's media of one modality.

    modality: "image", "video" or "audio".
    """
    reason = why_not(module, modality)
    if reason:
        raise ValueError(
            f"{type(module).__name__} of family {module.config.model_type!r} got {PLURALS[modality]} in a batch that "
            f"is cut: {reason}"
        )


def by_frame(module: Any) -> bool:
    """Return whether a model's tower encodes each frame of a video by itself, so that ranks may divide frames."""
    return module.config.model_type in _BY_FRAME


def by_row(module: torch.nn.Module, modality: str) -> bool:
    """Return whether a model takes images by batch row, equally many for each, with zeros for missing ones.

    modality: "image", "video" or "audio", whose method `get_<modality>_features` is looked at.
    """
    code = inspect.unwrap(getattr(type(module), f"get_{modality}_features")).__code__
    return "real_images_inds" in code.co_varnames


def token_of(module: Any, modality: str) -> int:
    """Return the id of the placeholder token whose places a modality's features take.

    modality: "image", "video" or "audio". Raises ValueError if the module's configuration does not name it.
    """
    token = known_token(module, modality)
    if token is None:
        raise ValueError(
            f"{type(module).__name__}'s configuration has no {_TOKENS[0].format(modality)}, which says where "
            f"features of {modality}s go in a text; train on text alone"
        )
    return token


def known_token(module: Any, modality: str) -> int | None:
    """Return the id of the placeholder token whose places a modality's features take; None if not configured.

    modality: "image", "video" or "audio".
    """
    if modality == "video" and module.config.model_type in _VIDEOS_AS_IMAGES:
        modality = "image"
    names = [name.format(modality) for name in _TOKENS]
    token = next((each for name in names if (each := getattr(module.config, name, None)) is not None), None)
    return None if token is None else int(token)
