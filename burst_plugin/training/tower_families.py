"""Encoders of images and video, by the `model_type` of the model that they belong to, as numbers for a plan.

    tower = tower_of(model.config)
    tower.parameters, tower.tokens

A row of `TOWERS` has the function that reads a family's `vision_config` and other keys of the config.json.
Parameters are counted as in transformers' models; tests/planning/test_towers.py holds them to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from burst_plugin.checks import as_number, as_whole, shown

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The sizes of an encoder of images, with its projector to the language model.

    layers, hidden: of the encoder. ffn, matrices: the width of an MLP, and its matrices: gate, up and down, or 2.
    parameters: all of them, the projector's included.
    patch_weights, row_weights: weights outside layers that multiply each patch, and each row of features.
    pixels: numbers of a patch. merged: patches that make a row of features.
    width: numbers of a row; with DeepStack rows for further layers of the language model included.
    others: tokens of an image in the tower that are no patch, such as a class token.
    tokens: rows of each image or tile, 0 where images have any size.
    frames: frames of a video that are encoded at once, 0 where there is no video.
    windowed: how many layers let a patch attend to the `window` patches around it only, and not to all of the image.
    kept: how many tensors of 16 bits a layer keeps for its backward pass: (as wide as the tower, as wide as its MLP).
    row_kept: numbers of 16 bits kept per row: (by the projector, by projectors of layers before the last).
    """

    layers: int
    hidden: int
    ffn: int
    matrices: int
    parameters: int
    patch_weights: int
    row_weights: int
    pixels: int
    merged: int
    width: int
    row_kept: tuple[int, int] = (0, 0)
    others: int = 0
    tokens: int = 0
    frames: int = 0
    window: int = 0
    windowed: int = 0
    kept: tuple[int, int] = (8, 2)  # two norms' inputs and outputs, q, k, v and out; the MLP's before and after gelu

    @property
    def layer_weights(self) -> int:
        """Return the number of weights that multiply each patch in one layer: of projections and of the MLP."""
        return 4 * self.hidden**2 + self.matrices * self.hidden * self.ffn


@dataclass(frozen=True, kw_only=True)
class Media:
    """The images of one sequence, all alike: `units` images or tiles that `tower` encodes one by one.

    rows: rows of features that a unit becomes, each in the place of a token.
    frozen: the tower is not trained.
    """

    tower: Tower
    units: int
    rows: int
    frozen: bool = False

    @property
    def patches(self) -> int:
        """Return the number of patches in one unit, an image or a tile."""
        return self.rows * self.tower.merged

    @property
    def tokens(self) -> int:
        """Return how many tokens of a sequence stand for rows of features, for all units together."""
        return self.units * self.rows

    @property
    def trained(self) -> int:
        """Return the number of the tower's parameters that are trained."""
        return 0 if self.frozen else self.tower.parameters


class _Vision:
    """The sizes in a vision_config, with transformers' defaults for keys that are left out."""

    def __init__(self, config: Config, defaults: Config) -> None:
        self._values = {**defaults, **{key: value for key, value in config.items() if value is not None}}

    def __call__(self, *keys: str) -> int:
        """Return the size under the first of these keys that is there. Raise ValueError if invalid or absent."""
        for key in keys:
            if key in self._values:
                return _whole(key, self._values[key])
        raise ValueError(f"the config.json's vision_config has no {' or '.join(keys)}; add it")

    def area(self, key: str) -> int:
        """Return the product of a size along both sides of an image, which may be one number."""
        value = self._values.get(key)
        sides = value if isinstance(value, list | tuple) else (value, value)
        if len(sides) != 2:
            raise ValueError(f"the config.json's vision_config has {key}={shown(value)}, expected one number or two")
        return _whole(key, sides[0]) * _whole(key, sides[1])

    def get(self, key: str) -> Any:
        """Return the value of a key, None if it has none."""
        return self._values.get(key)


def _whole(key: str, value: object) -> int:
    number = as_whole(value)
    if number is None or number < 1:
        raise ValueError(
            f"the config.json's vision_config has {key}={shown(value)}, expected a positive whole number"
        )
    return number


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + outputs * bias


# -------------------------------------------------------------------------------------------------- Qwen's own towers

_QWEN = MappingProxyType(
    {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16}
    | {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584, "num_position_embeddings": 2304}
)
_QWEN_2_5 = MappingProxyType(
    {**_QWEN, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14, "window_size": 112}
)


def _qwen(v: _Vision, *, deepstack: int = 0) -> Tower:
    """Return the tower of Qwen3-VL and Qwen3.5, whose features go to `deepstack` layers besides."""
    layers, h, ffn = v("num_hidden_layers", "depth"), v("hidden_size"), v("intermediate_size")
    merged, out = v("spatial_merge_size") ** 2, v("out_hidden_size")
    pixels = v("in_channels") * v("temporal_patch_size") * v.area("patch_size")
    wide = h * merged
    layer = 4 * h + _linear(h, 3 * h) + _linear(h, h) + _linear(h, ffn) + _linear(ffn, h)
    merger = _linear(wide, wide) + _linear(wide, out)
    mergers = 2 * h + merger + deepstack * (2 * wide + merger)
    embedded = _linear(pixels, h) + v("num_position_embeddings") * h
    return Tower(
        layers=layers,
        hidden=h,
        ffn=ffn,
        matrices=2,
        parameters=embedded + layers * layer + mergers,
        patch_weights=pixels * h,
        row_weights=(1 + deepstack) * wide * (wide + out),
        pixels=pixels,
        merged=merged,
        width=out * (1 + deepstack),
        row_kept=(4 * wide, deepstack * 4 * wide),
        frames=v("temporal_patch_size"),
        kept=(10, 2),  # queries and keys before rotation too, since v is a part of one tensor with them
    )


def _qwen3_vl(config: Config) -> Tower:
    v = _Vision(config["vision_config"], {**_QWEN, "deepstack_visual_indexes": (8, 16, 24)})
    return _qwen(v, deepstack=len(v.get("deepstack_visual_indexes")))


def _qwen3_5(config: Config) -> Tower:
    return _qwen(_Vision(config["vision_config"], _QWEN))


def _qwen2_5_vl(config: Config) -> Tower:
    v = _Vision(config["vision_config"], {**_QWEN_2_5, "fullatt_block_indexes": (7, 15, 23, 31)})
    layers, h, ffn = v("num_hidden_layers", "depth"), v("hidden_size"), v("intermediate_size")
    merge, out, patch = v("spatial_merge_size"), v("out_hidden_size"), v("patch_size")
    pixels = v("in_channels") * v("temporal_patch_size") * patch**2
    wide = h * merge**2
    layer = 2 * h + _linear(h, 3 * h) + _linear(h, h) + 2 * _linear(h, ffn) + _linear(ffn, h)
    return Tower(
        layers=layers,
        hidden=h,
        ffn=ffn,
        matrices=3,
        parameters=pixels * h + layers * layer + h + _linear(wide, wide) + _linear(wide, out),
        patch_weights=pixels * h,
        row_weights=wide * (wide + out),
        pixels=pixels,
        merged=merge**2,
        width=out,
        row_kept=(6 * wide, 0),
        frames=v("temporal_patch_size"),
        window=(v("window_size") // patch // merge * merge) ** 2,
        windowed=layers - len(set(v.get("fullatt_block_indexes")) & set(range(layers))),
        kept=(14, 4),  # of norms in single operations 4 each: copies in float32
    )


# ---------------------------------------------------------------------------------- towers that several families have


def _encoder(v: _Vision, layer: int, further: int, **fields: Any) -> Tower:
    """Return a tower, without a projector, that has `layer` parameters in each layer and `further` others."""
    h, pixels = v("hidden_size"), v("num_channels") * v.area("patch_size")
    layers, ffn = v("num_hidden_layers"), v("intermediate_size")
    plain = Tower(
        layers=layers,
        hidden=h,
        ffn=ffn,
        matrices=2,
        parameters=pixels * h + layers * layer + further,
        patch_weights=pixels * h,
        row_weights=0,
        pixels=pixels,
        merged=1,
        width=h,
    )
    return replace(plain, **fields)


def _usual_layer(v: _Vision) -> int:
    """Return the parameters of a layer with biases and two layer norms."""
    h, ffn = v("hidden_size"), v("intermediate_size")
    return 4 * h + 4 * _linear(h, h) + _linear(h, ffn) + _linear(ffn, h)


def _patches_of_side(v: _Vision) -> int:
    return v("image_size") // v("patch_size")


_CLIP = MappingProxyType(
    {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    | {"num_channels": 3, "image_size": 224, "patch_size": 32}
)


def _clip(config: Config) -> Tower:
    v = _Vision(config, {**_CLIP, "hidden_act": "quick_gelu"})
    h, patches = v("hidden_size"), _patches_of_side(v) ** 2
    further = h + (patches + 1) * h + 2 * 2 * h
    wide = 3 if str(v.get("hidden_act")) == "quick_gelu" else 2  # whose sigmoid is kept
    return _encoder(v, _usual_layer(v), further, tokens=patches, others=1, kept=(8, wide))


def _siglip(config: Config) -> Tower:
    v = _Vision(config, {**_CLIP, "patch_size": 16, "vision_use_head": True})
    h, ffn, patches = v("hidden_size"), v("intermediate_size"), _patches_of_side(v) ** 2
    head = h + 4 * _linear(h, h) + 2 * h + _linear(h, ffn) + _linear(ffn, h)
    further = h + patches * h + 2 * h + head * bool(v.get("vision_use_head"))
    return _encoder(v, _usual_layer(v), further, tokens=patches)


def _pixtral(config: Config) -> Tower:
    usual = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    v = _Vision(config, {**_CLIP, **usual, "patch_size": 16})
    h, ffn = v("hidden_size"), v("intermediate_size")
    layer = 2 * h + 4 * h**2 + 3 * h * ffn
    return _encoder(v, layer, h, matrices=3, kept=(12, 4))


def _internvl_vision(config: Config) -> Tower:
    usual = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    usual |= {"image_size": 448, "patch_size": 14, "norm_type": "layer_norm"}  # type: ignore[dict-item]
    usual |= {"use_absolute_position_embeddings": True, "use_mean_pooling": True}
    v = _Vision(config, {**_CLIP, **usual})
    h, patches = v("hidden_size"), v.area("image_size") // v.area("patch_size")
    layer = _usual_layer(v) + 2 * h  # the scales of both parts
    layer -= 3 * h * (not v.get("attention_bias")) - 2 * h * bool(v.get("use_qk_norm"))
    layer -= 2 * h * (v.get("norm_type") == "rms_norm")
    further = h + h + h * bool(v.get("use_mask_token")) + 2 * h * (not v.get("use_mean_pooling"))
    further += (patches + 1) * h * bool(v.get("use_absolute_position_embeddings"))
    rows = 10 + 4 * (v.get("norm_type") == "rms_norm") + 6 * bool(v.get("use_qk_norm"))  # two before they are scaled
    return _encoder(v, layer, further, tokens=patches, others=1, kept=(rows, 2))


_ENCODERS: Mapping[str, Callable[[Config], Tower]] = MappingProxyType(
    {
        "clip_vision_model": _clip,
        "siglip_vision_model": _siglip,
        "pixtral": _pixtral,
        "internvl_vision": _internvl_vision,
    }
)


def _encoder_of(config: Config, usual: str) -> Tower:
    vision = config["vision_config"]
    kind = str(vision.get("model_type", usual))
    if kind not in _ENCODERS:
        raise ValueError(
            f"the config.json has a vision_config of model_type={kind!r}, whose sizes are not known; known are "
            f"{', '.join(_ENCODERS)}"
        )
    return _ENCODERS[kind](vision)


# ----------------------------------------------------------------------------------------- projectors of the families


def _projected(
    tower: Tower, config: Config, *, inputs: int, more: int = 0, row_weights: int = 0, row_kept: int = 0
) -> Tower:
    """Return a tower with two linear layers behind it, with `more` parameters, and further weights of a row.

    row_kept: numbers that are kept for a row besides.
    """
    text = _whole("text_config.hidden_size", config["hidden_size"])
    bias = bool(config["multimodal_projector_bias"])
    return replace(
        tower,
        parameters=tower.parameters + _linear(inputs, text, bias) + _linear(text, text, bias) + more,
        row_weights=text * (inputs + text) + row_weights,
        width=text,
        row_kept=(inputs + 2 * text + row_kept, 0),
    )


def _feature_layers(config: Config) -> int:
    chosen = config.get("vision_feature_layer")
    return len(chosen) if isinstance(chosen, list | tuple) else 1


def _llava(config: Config, *, usual: str = "clip_vision_model", newline: bool = False) -> Tower:
    tower = _encoder_of(config, usual)
    config = {"multimodal_projector_bias": True, **config}
    inputs = tower.hidden * _feature_layers(config)
    full_tower = _projected(tower, config, inputs=inputs, more=config["hidden_size"] * newline)
    is_whole = config.get("vision_feature_select_strategy") == "full" and tower.tokens > 0
    return replace(full_tower, tokens=full_tower.tokens + full_tower.others * is_whole)


def _llava_next(config: Config) -> Tower:
    return _llava(config, newline=True)


def _llava_onevision(config: Config) -> Tower:
    return _llava(config, usual="siglip_vision_model", newline=True)


def _mistral3(config: Config) -> Tower:
    tower = _encoder_of(config, "pixtral")
    h, merged = tower.hidden, _whole("spatial_merge_size", config.get("spatial_merge_size", 2)) ** 2
    config = {"multimodal_projector_bias": False, **config}
    inputs, merging = h * _feature_layers(config), h * merged * h
    found = _projected(tower, config, inputs=inputs, more=h + merging, row_weights=merging, row_kept=5 * h * merged)
    return replace(found, merged=merged)


def _gemma3(config: Config) -> Tower:
    tower = _encoder_of(config, "siglip_vision_model")
    text, tokens = config["hidden_size"], _whole("mm_tokens_per_image", config.get("mm_tokens_per_image", 256))
    parameters = tower.parameters + tower.hidden * text + tower.hidden
    merged = tower.tokens // tokens
    return replace(
        tower, parameters=parameters, row_weights=tower.hidden * text, tokens=tokens, merged=merged, width=text
    )


def _internvl(config: Config) -> Tower:
    tower = _encoder_of(config, "internvl_vision")
    ratio = as_number(config.get("downsample_ratio", 0.5))
    if not ratio or not 0 < ratio <= 1:
        raise ValueError(
            f"the config.json has downsample_ratio={shown(config['downsample_ratio'])}, expected a share"
        )
    merged = int(1 / ratio) ** 2
    wide = tower.hidden * merged
    config = {**config, "multimodal_projector_bias": True}
    found = _projected(tower, config, inputs=wide, more=2 * wide, row_kept=wide)
    return replace(found, merged=merged, tokens=tower.tokens // merged, frames=1)


TOWERS: Mapping[str, Callable[[Config], Tower]] = MappingProxyType(
    {
        "qwen2_5_vl": _qwen2_5_vl,
        "qwen3_vl": _qwen3_vl,
        "qwen3_vl_moe": _qwen3_vl,
        "qwen3_5": _qwen3_5,
        "qwen3_5_moe": _qwen3_5,
        "gemma3": _gemma3,
        "mistral3": _mistral3,
        "llava": _llava,
        "llava_next": _llava_next,
        "llava_onevision": _llava_onevision,
        "internvl": _internvl,
    }
)


def tower_of(config: Config, hidden: int) -> Tower:
    """Return the encoder of images of the model with this config.json, whose language model is `hidden` wide.

    Raises ValueError for a model without one, and for a `model_type` whose encoder is not known.
    """
    kind = str(config.get("model_type"))
    if not isinstance(config.get("vision_config"), Mapping):
        raise ValueError(f"the config.json of model_type={kind!r} has no vision_config, so there are no images")
    if kind not in TOWERS:
        raise ValueError(
            f"the config.json has model_type={kind!r}, whose tower is not known; known are {', '.join(TOWERS)}; its "
            "text alone is planned without images"
        )
    return TOWERS[kind]({**config, "hidden_size": hidden})


# ---------------------------------------------------------------------------------------------- their language models

# Families that say beside `text_config` whether the head is the embedding, with the default where they do not.
_TIED: Mapping[str, bool] = MappingProxyType(
    dict.fromkeys(("gemma3", "mistral3", "internvl"), True)
    | dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "llava_next"), False)
)

# By `model_type` of a text_config: transformers' defaults of sizes that are left out.
_QWEN_TEXT = MappingProxyType(
    {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 32}
)
TEXT_DEFAULTS: Mapping[str, Config] = MappingProxyType(
    {
        "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
        | {"num_attention_heads": 32},
        "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8},
        "qwen2": _QWEN_TEXT,
        "qwen3": {**_QWEN_TEXT, "head_dim": 128},
        "qwen2_5_vl_text": {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568}
        | {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
        "qwen3_vl_text": {**_QWEN_TEXT, "head_dim": 128},
        "qwen3_vl_moe_text": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632}
        | {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60}
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        "qwen3_5_text": {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288}
        | {"num_hidden_layers": 32, "num_attention_heads": 16},
        "qwen3_5_moe_text": {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40}
        | {"num_attention_heads": 16},
        "gemma3_text": {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216}
        | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    }
)


def text_of(config: Config) -> Config:
    """Return the configuration of a model's language model: its `text_config`, or, without one, all of the file.

    A `text_config` is completed by transformers' defaults, and by the file's `tie_word_embeddings`.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    known = TEXT_DEFAULTS.get(str(text.get("model_type")), {})
    if any(key in text for key in ("num_local_experts", "n_routed_experts")):
        known = {key: value for key, value in known.items() if key != "num_experts"}
    tied, kind = config.get("tie_word_embeddings"), str(config.get("model_type"))
    if kind in _TIED:
        tied = _TIED[kind] if tied is None else tied
        return {**known, **text, "tie_word_embeddings": tied}
    return {**known, **text, **({"tie_word_embeddings": True} if tied else {})}
