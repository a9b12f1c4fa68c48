"""The sizes of a language model that a plan needs: of well-known models by name, of others from a config.json.

Also which of its layers have a sliding window, and how long it is. Files from before transformers wrote `layer_types`
leave both to the model's code, whose rules and defaults are here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from burst_plugin.checks import as_whole, shown
from burst_plugin.planning.model_families import defaults_of


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with attention in every layer, and a gated MLP (gate, up, down) or experts of that kind.

    experts: experts of a layer, 0 for a plain MLP; `active` of them, each `ffn` wide, see a token.
    shared_ffn: width of the experts that see every token, together.
    qk_norm: whether queries and keys are normalized, head by head.
    windowed: layers in which a token attends to itself and the `window` - 1 tokens before it; in others to all.
    config: the config.json that it was read from, or what one would say beside the sizes; see `model_features`.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    experts: int = 0
    active: int = 0
    shared_ffn: int = 0
    qk_norm: bool = False
    window: int = 0
    windowed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def layers_by_window(self) -> tuple[tuple[int | None, int], ...]:
        """Return (window, number of layers) of every kind of layer there is; window None for all tokens before."""
        kinds = ((None, self.layers - self.windowed), (self.window, self.windowed))
        return tuple((window, layers) for window, layers in kinds if layers)

    @property
    def attention_parameters(self) -> int:
        """Return how many weights a layer's projections have, to q, k, v and back."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Return how many weights a layer's MLP has, or all its experts and their router."""
        if not self.experts:
            return 3 * self.hidden * self.ffn
        return self.hidden * (3 * (self.experts * self.ffn + self.shared_ffn) + self.experts)

    @property
    def active_mlp_parameters(self) -> int:
        """Return how many of `mlp_parameters` a token meets."""
        if not self.experts:
            return self.mlp_parameters
        return self.hidden * (3 * (self.active * self.ffn + self.shared_ffn) + self.experts)

    @property
    def layer_parameters(self) -> int:
        """Return how many parameters one layer has, norms included."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.attention_parameters + self.mlp_parameters + norms

    @property
    def embedding_parameters(self) -> int:
        """Return how many parameters the embedding has, and the head as well."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return how many parameters there are, of which tied ones count once."""
        tables = 1 if self.tied else 2
        return self.layers * self.layer_parameters + tables * self.embedding_parameters + self.hidden

    @property
    def mlp_width(self) -> int:
        """Return how wide the MLP is for one token: experts that see it side by side."""
        return self.active * self.ffn + self.shared_ffn if self.experts else self.ffn


# Of the families of built-in models, by the first part of their names: the vocabulary, and what a config.json says.
_BUILT_IN_FAMILIES: Mapping[str, tuple[int, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama2": (32000, {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}),
        "llama3": (128256, {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}),
        "qwen3": (151936, {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6}),
    }
)


def _built_in(name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int = 8) -> ModelShape:
    family = name.split("_")[0]
    vocab, config = _BUILT_IN_FAMILIES[family]
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        vocab=vocab,
        qk_norm=family == "qwen3",
        config=config,
    )


_BUILT_IN = (
    _built_in("llama2_7b", 32, 4096, 11008, 32, kv_heads=32),
    _built_in("llama3_8b", 32, 4096, 14336, 32),
    _built_in("llama3_70b", 80, 8192, 28672, 64),
    _built_in("qwen3_8b", 36, 4096, 12288, 32),
    _built_in("qwen3_14b", 40, 5120, 17408, 40),
    _built_in("qwen3_32b", 64, 5120, 25600, 64),
)
MODELS: Mapping[str, ModelShape] = MappingProxyType({model.name: model for model in _BUILT_IN})


def model_shape(name: str) -> ModelShape:
    """Return the sizes of a built-in model, or of the model with its config.json, or its folder, at the path `name`.

    Raises ValueError for a name that is not known, a file that cannot be read, and a model that cannot be planned.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        close = get_close_matches(name.lower().replace("-", "_"), MODELS, 1, 0.5)
        nearest = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(
            f"model {name!r} is not known{nearest}: use one of {', '.join(MODELS)}, or the path of a config.json"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; give the config.json of a model") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {shown(config)}, expected an object; give the config.json of a model")
    text = config.get("text_config", config)
    known = defaults_of(str(text.get("model_type")))
    return replace(_from_config({**known, **text}, str(path)), config=config)


# Keys of a config.json that say that a model is not what `ModelShape` describes.
_REFUSED = MappingProxyType(
    {
        "kv_lora_rank": "latent attention",
        "attention_chunk_size": "attention in chunks",
        "attn_layer_period": "layers without attention",
        "hybrid_override_pattern": "layers without attention",
        "linear_num_value_heads": "layers with linear attention",
        "ssm_state_size": "state-space layers",
        "mamba_d_state": "state-space layers",
        "is_encoder_decoder": "an encoder",
        "first_k_dense_replace": "experts in some layers only",
        "mlp_only_layers": "experts in some layers only",
        "num_kv_shared_layers": "layers that share keys and values",
    }
)
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")


def _from_config(config: Mapping[str, Any], path: str) -> ModelShape:
    others = [f"{what} ({key}={shown(config[key])})" for key, what in _REFUSED.items() if config.get(key)]
    if config.get("decoder_sparse_step", 1) not in (None, 1):
        others.append(f"{_REFUSED['mlp_only_layers']} (decoder_sparse_step={shown(config['decoder_sparse_step'])})")
    kinds = {kind for kind in config.get("layer_types") or () if kind not in _ATTENTION_LAYERS}
    others += [f"layers of the type {kind}" for kind in sorted(map(str, kinds))]
    if others:
        raise ValueError(
            f"{path} describes a model with {others[0]}, whose memory is not known; a plan takes decoders with "
            "attention and a gated MLP, or experts, in every layer"
        )
    size = _Sizes(config, path)
    heads, hidden, experts = size("num_attention_heads"), size("hidden_size"), size(*_EXPERTS, default=0)
    ffn = size("moe_intermediate_size", "intermediate_size") if experts else size("intermediate_size")
    layers = size("num_hidden_layers")
    window, windowed = windowed_layers(config, layers, path)
    shared = size("n_shared_experts", default=0) * ffn or size("shared_expert_intermediate_size", default=0)
    return ModelShape(
        name=str(config.get("model_type", "model")),
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        active=size("num_experts_per_tok") if experts else 0,
        shared_ffn=shared if experts else 0,
        window=window,
        windowed=windowed,
        qk_norm=str(config.get("model_type", "")).startswith(("qwen3", "gemma3", "olmo2")),
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class _Sizes:
    """Sizes out of a config.json."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self._config, self._path = config, path

    def __call__(self, *keys: str, default: int | None = None) -> int:
        """Return the first size of these keys that is there; raise ValueError if it is none, or there is none."""
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            number = as_whole(value)
            if number is None or number < (1 if default is None else 0):
                raise ValueError(f"{self._path} has {key}={shown(value)}, expected a positive whole number")
            return number
        if default is None:
            raise ValueError(
                f"{self._path} has no {' or '.join(keys)}; expected the config.json of a decoder with the sizes "
                "num_hidden_layers, hidden_size, intermediate_size, num_attention_heads and vocab_size"
            )
        return default


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
    """Return for each layer the keys of its window, the token itself included, 0 for none.

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


def windowed_layers(config: Mapping[str, Any], layers: int, path: str) -> tuple[int, int]:
    """Return (keys of the window; layers that have it), (0, 0) for none. Raises as `layer_windows` does."""
    windows = layer_windows(config, layers, path)
    return max(windows), sum(map(bool, windows))
