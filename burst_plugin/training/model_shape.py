"""The sizes of a language model that a plan needs: of well-known models by name, of others from a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from burst_plugin.checks import as_whole, did_you_mean, shown
from burst_plugin.training.attention_families import ATTENTION_FAMILIES
from burst_plugin.training.expert_layers import COUNT, experts, sparse_layers, unread_key
from burst_plugin.training.hybrid_families import HYBRIDS, STREAM_IN_FLOAT32, Layer, dense, nemotron_kinds
from burst_plugin.training.latent_families import (
    LATENT_FAMILIES,
    LATENT_HYBRIDS,
    IndexerSizes,
    LatentSizes,
    latent_sizes,
)
from burst_plugin.training.mixers import TokenMixer
from burst_plugin.training.model_families import (
    ACTIVATIONS_KEEP,
    NORMALIZING,
    NORMS,
    ROUTED_IN_16_BITS,
    TIED_BY_DEFAULT,
    UNGATED,
    WHOLE_HEADS,
    WHOLE_LAYERS,
    WIDE_NORMS,
    defaults_of,
)
from burst_plugin.training.tower_families import Media, text_of
from burst_plugin.training.windows import layer_windows


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder, whose layers have attention, another mixer, or both, and an MLP or experts.

    ffn: width of the MLP, 0 for none; with experts each one's. matrices: its projections: gate, up and down, or 2.
    experts: experts of a layer, 0 for a plain MLP; `active` of them, each `ffn` wide, see a token.
    shared_ffn: width of the experts that see every token, together.
    plain_activation: whether transformers' code of the activation is in single operations, as gpt-oss's is.
    activation_kept: how many tensors as wide as the MLP these keep, besides what every MLP keeps.
    routed_in_16_bits: whether routing weights, which multiply results of experts, are in 16 bits; else in float32.
    kv_matrices: projections to keys and values: 2, 1 where values are keys, 0 where another layer's are taken.
    qk_norm: whether queries and keys are normalized, head by head. value_norm: whether values are.
    query_gate: whether queries come with a gate.
    hands_on: whether the last layer of its kind leaves its keys and values to others, whether or not these take them.
    mlp_norms: norms around experts that are beside an MLP.
    norms: "before" attention and the MLP, "after" them, or "both".
    wide_norms: whether transformers' code multiplies by the weights of norms in float32.
    wide_stream: whether hidden states are float32 between layers.
    windowed: how many layers let a token attend to itself and the `window` - 1 tokens before it only; others to all.
    latent: the sizes of multi-head latent attention, where every head has keys of its own; None for other attention.
    indexer: the sizes of what selects the keys that queries attend to; None where they attend to all.
    mixer: the token mixer beside attention, or in its place, where `attends` is False.
    in_chunks: which parts of layers, "mlp" and "heads", can run in chunks; experts never do.
    extra: further parameters of a layer, which are in no product: biases, other norms.
    input_width: numbers per token that each layer takes of an embedding of its own, as in Gemma 4's small models.
    kinds: where layers are not alike, a shape for each kind of them; the hidden size is the same. Else ().
    media: the images of each sequence and their tower; None for a language model alone.
    config: the config.json that it was read from, or the keys that one would have beside sizes; see `model_features`.
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
    plain_activation: bool = False
    activation_kept: int = 0
    routed_in_16_bits: bool = False
    matrices: int = 3
    kv_matrices: int = 2
    qk_norm: bool = False
    value_norm: bool = False
    hands_on: bool = False
    query_gate: bool = False
    mlp_norms: int = 0
    norms: str = "before"
    wide_norms: bool = False
    wide_stream: bool = False
    window: int = 0
    windowed: int = 0
    attends: bool = True
    latent: LatentSizes | None = None
    indexer: IndexerSizes | None = None
    mixer: TokenMixer | None = None
    in_chunks: tuple[str, ...] = ("mlp", "heads")
    extra: int = 0
    input_width: int = 0
    kinds: tuple[ModelShape, ...] = ()
    media: Media | None = None
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def by_kind(self) -> tuple[ModelShape, ...]:
        """Return, for each kind of layers, the model as if all its layers were of this kind."""
        return self.kinds or (self,)

    @property
    def attending(self) -> tuple[ModelShape, ...]:
        """Return the kinds of layers that have attention, each as in `by_kind`."""
        return tuple(kind for kind in self.by_kind if kind.attends)

    @property
    def attention_layers(self) -> int:
        """Return the number of layers that have attention."""
        return sum(kind.layers for kind in self.attending)

    @property
    def mixers(self) -> tuple[tuple[TokenMixer, int], ...]:
        """Return (token mixer, number of layers that have it) for all mixers other than attention."""
        return tuple((kind.mixer, kind.layers) for kind in self.by_kind if kind.mixer is not None)

    @property
    def has_experts(self) -> bool:
        """Return whether any layer has experts."""
        return any(kind.experts for kind in self.by_kind)

    @property
    def layers_by_window(self) -> tuple[tuple[int | None, int], ...]:
        """Return (tokens of the window, number of layers) of all layers that attend; (None, n): n without one."""
        windowed = sum(kind.windowed for kind in self.attending)
        kinds = ((None, self.attention_layers - windowed), (self.window, windowed))
        return tuple((window, layers) for window, layers in kinds if layers)

    @property
    def value_dim(self) -> int:
        """Return the dim of values and of attention's output, which may differ from the dim of queries and keys."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def attention_parameters(self) -> int:
        """Return how many weights one layer's attention has: projections to q, k, v and the gate, and back."""
        if not self.attends:
            return 0
        if self.latent is not None:
            indexer = 0 if self.indexer is None else self.indexer.weights(self.hidden, self.latent.q_rank)
            return self.latent.weights(self.hidden, self.heads) + indexer
        heads = self.heads * (2 + self.query_gate) + self.kv_heads * self.kv_matrices
        return self.hidden * self.head_dim * heads

    @property
    def mlp_parameters(self) -> int:
        """Return how many weights one layer's MLP has, or all its experts, shared ones too, and their router."""
        if not self.experts:
            return self.matrices * self.hidden * self.ffn
        return self.hidden * (self.matrices * (self.experts * self.ffn + self.shared_ffn) + self.experts)

    @property
    def active_mlp_parameters(self) -> int:
        """Return how many weights of one layer's MLP, or of its experts and router, multiply one token."""
        if not self.experts:
            return self.mlp_parameters
        return self.hidden * (self.matrices * (self.active * self.ffn + self.shared_ffn) + self.experts)

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer, norms included; of the largest if layers differ."""
        if self.kinds:
            return max(kind.layer_parameters for kind in self.kinds)
        norms = self.hidden * ((self.attends or self.mixer is not None) + bool(self.ffn))
        norms *= 2 if self.norms == "both" else 1
        norms += self.head_dim * (1 + bool(self.kv_matrices)) if self.qk_norm else 0
        mixer = 0 if self.mixer is None else self.mixer.parameters
        return self.attention_parameters + mixer + self.mlp_parameters + norms + self.extra

    @property
    def embedding_parameters(self) -> int:
        """Return the number of parameters of the embedding, which the head has as well."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of all parameters, a tower's included; a head that is the embedding counts once."""
        tables = 1 if self.tied else 2
        layers = sum(kind.layers * kind.layer_parameters for kind in self.by_kind)
        tower = 0 if self.media is None else self.media.tower.parameters
        inputs = self.layers * self.input_width
        of_layers = inputs * (self.vocab + self.hidden) + self.input_width  # an embedding, a projection and its norm
        return layers + tables * self.embedding_parameters + self.hidden + of_layers + tower

    @property
    def trained_parameters(self) -> int:
        """Return the number of parameters that are trained: all but a frozen tower's."""
        return self.parameters - (0 if self.media is None else self.media.tower.parameters - self.media.trained)

    @property
    def mlp_width(self) -> int:
        """Return the width of the MLP that one token passes: of all experts together that see it."""
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
    """Return the sizes of the model that `name` names: a built-in one, or the path of a config.json or its folder.

    Raises ValueError for a name that is not known, a file that cannot be read, and a model that cannot be planned.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file() and (path.suffix == ".json" or len(path.parts) > 1):
        raise ValueError(f"{path}: no such file; give the path of a config.json, or one of {', '.join(MODELS)}")
    if not path.is_file():
        nearest = did_you_mean(name.lower().replace("-", "_"), MODELS, 0.5)
        raise ValueError(
            f"model {name!r} is not known{nearest}: use one of {', '.join(MODELS)}, or the path of a config.json"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; give the config.json of a model") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {shown(config)}, expected an object; give the config.json of a model")
    return shape_of(config, str(path))


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the sizes of the model that `config`, the content of a config.json, describes; `name` is for errors.

    Raises ValueError for a model that cannot be planned.
    """
    text = text_of(config)
    known = defaults_of(str(text.get("model_type")))
    return replace(_from_config({**known, **text}, name), config=config)


_FAMILIES = MappingProxyType({**HYBRIDS, **LATENT_FAMILIES, **ATTENTION_FAMILIES})
# Keys of a config.json that say that a model is not what `ModelShape` describes; some of them only where the
# `model_type` is not one of `LATENT_FAMILIES`, or of `HYBRIDS`.
_REFUSED_UNLESS_LATENT = MappingProxyType({"kv_lora_rank": "latent attention"})
_REFUSED = MappingProxyType(
    {
        "attention_chunk_size": "attention in chunks",
        "altup_num_inputs": "several streams of hidden states",
        "is_encoder_decoder": "an encoder",
        "H_cycles": "layers that run several times",
    }
)
_REFUSED_UNLESS_HYBRID = MappingProxyType(
    {
        "attn_layer_period": "layers without attention",
        "enable_moe_block": "experts beside an MLP",
        "hidden_size_per_layer_input": "embeddings for every layer",
        "num_kv_shared_layers": "layers that share keys and values",
        "hybrid_override_pattern": "layers without attention",
        "linear_num_value_heads": "layers with linear attention",
        "lru_width": "layers with linear recurrent units",
        "ssm_state_size": "state-space layers",
        "mamba_d_state": "state-space layers",
    }
)
_OTHER_EXPERTS = MappingProxyType(
    {
        "jetmoe": "experts of attention",
        "doge": "experts of one neuron each",
        "hunyuan_v1_moe": "an MLP beside experts",
    }
)
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")
_OF_LATENTS = (*_ATTENTION_LAYERS, "indexed_attention")


def _check(config: Mapping[str, Any], path: str) -> None:
    """Raise ValueError if a config.json has a feature that no plan knows."""
    kind = str(config.get("model_type"))
    is_hybrid, has_latents = kind in (*HYBRIDS, *ATTENTION_FAMILIES, *LATENT_HYBRIDS), kind in LATENT_FAMILIES
    refused = _REFUSED if is_hybrid else {**_REFUSED, **_REFUSED_UNLESS_HYBRID}
    refused = refused if has_latents else {**_REFUSED_UNLESS_LATENT, **refused}
    others = [f"{what} ({key}={shown(config[key])})" for key, what in refused.items() if config.get(key)]
    if not is_hybrid:
        usual = _OF_LATENTS if has_latents else _ATTENTION_LAYERS
        listed = {str(each) for each in config.get("layer_types") or () if each not in usual}
        others += [f"layers of the type {each}" for each in sorted(listed)]
    if not is_hybrid and config.get("global_head_dim") not in (None, config.get("head_dim")):
        others.append(f"heads of two sizes (global_head_dim={shown(config['global_head_dim'])})")
    if kind in _OTHER_EXPERTS:
        others.append(f"{_OTHER_EXPERTS[kind]} (model_type={kind})")
    unread = unread_key(config)
    if unread:
        others.append(f"experts and the key {unread}")
    if others:
        raise ValueError(
            f"{path} describes a model with {others[0]}, whose memory is not known; a plan takes decoders with "
            f"attention and a gated MLP, or experts, in every layer, the hybrids {', '.join(HYBRIDS)}, latent "
            f"attention of {', '.join(LATENT_FAMILIES)}, and {', '.join(ATTENTION_FAMILIES)}"
        )


def _from_config(config: Mapping[str, Any], path: str) -> ModelShape:
    _check(config, path)
    kind = str(config.get("model_type", "model"))
    family = _FAMILIES.get(kind)
    config, names = (config, {}) if family is None else family.complete(config)
    if kind == "nemotron_h":
        config = {**config, "num_hidden_layers": len(nemotron_kinds(config))}
    size = _Sizes(config, path, names)
    hidden, layers = size("hidden_size"), size("num_hidden_layers")
    heads = size("num_attention_heads", default=None if family is None else 1)
    latent = latent_sizes(config, size) if kind in LATENT_FAMILIES else None
    kept = ACTIVATIONS_KEEP.get(kind, ACTIVATIONS_KEEP.get(str(config.get("hidden_act"))))
    base = ModelShape(
        name=kind,
        layers=1,
        hidden=hidden,
        ffn=0,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads) if latent is None else heads,
        head_dim=size("head_dim", default=hidden // heads) if latent is None else latent.qk_dim,
        latent=latent,
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        wide_stream=bool(config.get("residual_in_fp32")) and kind in STREAM_IN_FLOAT32,
        plain_activation=kept is not None,
        activation_kept=kept or 0,
        matrices=2 if kind in UNGATED else 3,
        routed_in_16_bits=kind in ROUTED_IN_16_BITS,
        norms=next((where for where, kinds in NORMS.items() if kind in kinds), "before"),
        wide_norms=kind in WIDE_NORMS or (family is not None and family.wide_norms),
        input_width=size("hidden_size_per_layer_input", default=0),
        in_chunks=_in_chunks(kind) if family is None else family.in_chunks,
        qk_norm=family is None and (kind.startswith(NORMALIZING) or bool(config.get("use_qk_norm"))),
    )
    if family is None:
        more = _unmultiplied(base)
        mlps = [{**mlp, "extra": mlp.get("extra", 0) + more} for mlp in _mlps(config, size, layers)]
        return _of_layers(base, mlps, layer_windows(config, layers, path))
    try:
        every = family.layers(config, size)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(path) else f"{path}: {text}") from error
    return _of_layers(base, every, layer_windows(config, layers, path) if family.windows else (0,) * layers)


def _in_chunks(kind: str) -> tuple[str, ...]:
    """Return which parts of the layers of a family can run in chunks."""
    if kind in WHOLE_LAYERS:
        return ()
    return ("mlp",) if kind in WHOLE_HEADS else ("mlp", "heads")


def _unmultiplied(base: ModelShape) -> int:
    """Return the parameters of a layer that its family has in no product: the biases of Qwen2."""
    return (base.heads + 2 * base.kv_heads) * base.head_dim * base.name.startswith("qwen2")


def _mlps(config: Mapping[str, Any], size: _Sizes, layers: int) -> list[Layer]:
    """Return the MLP or the experts of every layer."""
    if not size(*COUNT, default=0):
        return [dense(size("intermediate_size"))] * layers
    sparse = experts(size)
    width = ("dense_intermediate_size", "intermediate_size")
    return [sparse if has_experts else dense(size(*width)) for has_experts in sparse_layers(config, size, layers)]


def _of_layers(base: ModelShape, layers: Sequence[Layer], windows: Sequence[int]) -> ModelShape:
    """Return the model with these windows and layers, each layer the fields that differ from `base`."""
    window, counts = max(windows, default=0), dict[ModelShape, list[int]]()
    for layer, has_window in zip(layers, windows, strict=True):
        count = counts.setdefault(replace(base, **layer), [0, 0])
        count[0] += 1
        count[1] += bool(has_window)
    kinds = tuple(
        replace(kind, layers=of_kind, windowed=windowed, window=window if windowed else 0)
        for kind, (of_kind, windowed) in counts.items()
    )
    if len(kinds) == 1:
        return kinds[0]
    windowed = sum(kind.windowed for kind in kinds)
    attends = any(kind.attends for kind in kinds)
    return replace(base, layers=len(layers), windowed=windowed, window=window, attends=attends, kinds=kinds)


class _Sizes:
    """The sizes in a config.json.

    names: by key, the name under which the file has it, where that is another one.
    """

    def __init__(self, config: Mapping[str, Any], path: str, names: Mapping[str, str]) -> None:
        self._config, self._path, self._names = config, path, names

    def __call__(self, *keys: str, default: int | None = None, least: int | None = None) -> int:
        """Return the size under the first of these keys that is there. Raise ValueError if invalid or absent.

        keys: that of an entry of an object is "object.key".
        least: the smallest number allowed, of one key that may not be null; if None, 1, or with a default 0.
        """
        smallest = (1 if default is None else 0) if least is None else least
        for key in keys:
            holder, _, entry = key.rpartition(".")
            config = self._config[holder] if holder else self._config
            value = config.get(entry)
            if value is None and least is None:
                continue
            number = as_whole(value)
            if number is None or number < smallest:
                expected = "a positive whole number" if smallest else "a whole number, 0 or more"
                name = self._names.get(key, key)
                raise ValueError(f"{self._path} has {name}={shown(value)}, expected {expected}")
            return number
        if default is None:
            raise ValueError(
                f"{self._path} has no {' or '.join(keys)}; expected the config.json of a decoder with the sizes "
                "num_hidden_layers, hidden_size, intermediate_size, num_attention_heads and vocab_size"
            )
        return default
