"""Which layers of a model have a sliding window, and how long it is, read from a config.json.

Files from before transformers wrote `layer_types` leave both to the model's code, whose rules and defaults are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from burst_plugin.checks import as_whole, shown

_WINDOWED = "sliding_attention"
_Rule = Callable[[int, Mapping[str, Any]], bool]
"""Whether a layer, counted from 0, has the window."""


def _every(layer: int, config: Mapping[str, Any]) -> bool:
    return True


def _other(layer: int, config: Mapping[str, Any]) -> bool:
    return layer % 2 == 0


def _all_but_one_in(usual: int) -> _Rule:
    """Return the rule that the last one of `usual` layers, or of as many as the file says, has no window."""

    def rule(layer: int, config: Mapping[str, Any]) -> bool:
        pattern = config.get("sliding_window_pattern") or usual
        if isinstance(pattern, str):  # of Exaone: L is a layer with the window
            return pattern[layer % len(pattern)] == "L"
        return bool((layer + 1) % pattern)

    return rule


def _from(usual: int) -> _Rule:
    """Return the rule that layers from `max_window_layers` on have the window."""
    return lambda layer, config: bool(layer >= config.get("max_window_layers", usual))


def _other_up_to(usual: int) -> _Rule:
    """Return the rule that every other layer before `max_window_layers` has the window."""
    return lambda layer, config: layer % 2 == 0 and layer < config.get("max_window_layers", usual)


# By model_type: the window where the file has no `sliding_window`, and which layers have it.
_RULES: Mapping[str, tuple[int | None, _Rule]] = MappingProxyType(
    {
        "mistral": (4096, _every),
        "ministral": (4096, _every),
        "mixtral": (None, _every),
        "phi3": (None, _every),
        "phimoe": (None, _every),
        "starcoder2": (None, _every),
        "gemma2": (4096, _other),
        "gemma3_text": (4096, _all_but_one_in(6)),
        "gemma4_text": (512, _all_but_one_in(6)),
        "gemma4_unified_text": (1024, _all_but_one_in(6)),
        "gpt_oss": (128, _other),
        "cohere2": (4096, _all_but_one_in(4)),
        "olmo3": (4096, lambda layer, config: layer % 4 != 3),
        "exaone4": (4096, _all_but_one_in(4)),
        "qwen2": (4096, _from(28)),
        "qwen2_moe": (4096, _other_up_to(28)),
        "qwen2_vl_text": (4096, _from(80)),
        "qwen2_5_vl_text": (4096, _from(80)),
        "qwen3": (4096, _from(28)),
        "qwen3_moe": (4096, _every),
    }
)


def layer_windows(config: Mapping[str, Any], layers: int, path: str) -> tuple[int, ...]:
    """Return for each layer how many keys a query sees in its window, its own token included; 0 for no window.

    layers: how many there are. path: the name of the config.json in errors.

    Raises ValueError for a window that is no positive number, and if it is not known which layers have one.
    """
    family = str(config.get("model_type", ""))
    usual, rule = _RULES.get(family, (None, None))
    types = config.get("layer_types")
    window = config.get("sliding_window", usual)
    if types is not None:
        windowed = [kind == _WINDOWED for kind in list(types)[:layers]]
    elif window is None or not config.get("use_sliding_window", not family.startswith("qwen")):
        windowed = [False] * layers
    elif rule is None:
        raise ValueError(
            f"{path} has sliding_window={shown(window)}, but in which layers of model_type {family!r} is not known; "
            f'add "layer_types" to it, a list with "{_WINDOWED}" or "full_attention" for every layer'
        )
    else:
        try:
            windowed = [rule(layer, config) for layer in range(layers)]
        except TypeError as error:
            raise ValueError(
                f"{path} does not say which layers have the window: {error}; write whole numbers for "
                "sliding_window_pattern and max_window_layers"
            ) from error
    if not any(windowed):
        return (0,) * layers
    length = as_whole(window)
    if length is None or length < 1:
        raise ValueError(
            f"{path} has layers with {_WINDOWED} and sliding_window={shown(window)}, expected a positive whole number"
        )
    return tuple(length if has else 0 for has in windowed)
