"""What a language model computes beyond its sizes: biases, positions, windows, norms, routing, from a config.json.

    features = model_features(model_shape("path/to/config.json"))
    features.rotary_base, features.windows

A config.json says only part of it: that Qwen2 has biases in its projections, or Gemma norms after its layers, is in
the code of its `model_type`. So only families in `FAMILIES` are read, and a key that neither says something known nor
is known to change nothing is an error. Values of keys that are left out are transformers' defaults, which differ
between families, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from burst_plugin.checks import as_number, shown
from burst_plugin.training.model_families import DEFAULTS, FAMILIES, Family, defaults_of
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.windows import layer_windows


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched beyond the tokens of pretraining, as `rope_scaling` in a config.json says.

    kind: the `rope_type` of transformers. Other fields are parameters of the kinds "llama3" and "yarn"; of other
        kinds they are not read.
    factor, attention_factor, mscale, mscale_all_dim, beta_fast, beta_slow: as in the config.json.
    original_tokens: original_max_position_embeddings.
    low_frequency, high_frequency: low_freq_factor and high_freq_factor. rounds: truncate.
    """

    kind: str
    factor: float = 1.0
    original_tokens: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounds: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFeatures:
    """The features of a decoder that change what its layers compute. Defaults are Llama 2's.

    rotary_base, local_rotary_base: the bases of rotary embedding; the latter of layers with a window, if it is
        another.
    windows: for each layer, how many keys a query sees, itself among them; 0: all. (): all in every layer.
    qkv_bias, output_bias, mlp_bias, expert_bias: whether there are biases in projections to q, k and v, in
        attention's output projection, in the MLP, and in the router and all experts.
    qk_norm: "", "heads" (each head by itself) or "projections" (all heads together).
    norms: "before" attention and the MLP, "after" them, or "both".
    sinks: whether each head has a logit without a value in its softmax.
    score_scale: the factor on scores, None for 1 / sqrt(head_dim).
    score_cap, logit_cap: the limits to which tanh caps attention's scores, and logits; None for none.
    clamped_swiglu: the limit of gpt-oss's activation, x * sigmoid(1.702 x) with clamped inputs, 0 for none.
    bidirectional: whether tokens attend to later ones. scaled_embedding: whether embeddings are times sqrt(hidden
        size).
    renormalized: the weights of a token's experts sum to 1.
    router_noise: the jitter on the router's inputs. weight_std: the standard deviation of initial weights.
    towers: whether there are encoders of images or sound beside the language model.
    sources: by the name of a field that was read, the key and value in config.json that say so, or the model_type.
    """

    norm_epsilon: float
    rotary_base: float
    local_rotary_base: float | None = None
    rotary_scaling: RotaryScaling | None = None
    activation: str = "silu"
    clamped_swiglu: float = 0.0
    windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    expert_bias: bool = False
    qk_norm: str = ""
    norms: str = "before"
    sinks: bool = False
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    bidirectional: bool = False
    scaled_embedding: bool = False
    renormalized: bool = True
    gated_shared_expert: bool = False
    router_noise: float = 0.0
    attention_dropout: float = 0.0
    weight_std: float = 0.02
    towers: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def unusual(self) -> list[str]:
        """Return the names of the fields that are not at Llama 2's values, without norm_epsilon and rotary_base."""
        return [
            entry.name
            for entry in fields(self)
            if entry.name not in ("norm_epsilon", "rotary_base", "windows", "sources")
            and getattr(self, entry.name) != entry.default
        ] + (["windows"] if any(self.windows) else [])


# Keys that `model_shape` reads.
_SIZES = frozenset(
    """
    model_type num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
    vocab_size tie_word_embeddings
    """.split()  # noqa: SIM905
)
# Keys that change nothing in what is trained: names, tokens, generation, how weights are stored, what is returned.
_IRRELEVANT = frozenset(
    """
    architectures transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id
    sep_token_id unk_token_id _name_or_path name_or_path max_position_embeddings output_attentions
    output_hidden_states return_dict use_return_dict id2label label2id problem_type chunk_size_feed_forward
    pretraining_tp torchscript tokenizer_class quantization_config _attn_implementation attn_implementation
    _attn_implementation_autoset do_sample temperature top_p top_k max_length finetuning_task is_encoder_decoder
    """.split()  # noqa: SIM905
)
_ROTARY_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"})
_WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window"})


def model_features(model: ModelShape) -> ModelFeatures:
    """Return the features of `model`, read from its config.json, or from the keys of a built-in model.

    Raises ValueError for a family that is not known, and for a key or a value whose effect is not known.
    """
    outer = model.config
    config = outer.get("text_config", outer)
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise ValueError(
            f"the config.json has model_type={shown(kind)}, of which it is not known what its layers compute; known "
            f"are {', '.join(FAMILIES)}"
        )
    if family.experts != model.has_experts:
        raise ValueError(
            f"the config.json has model_type={kind} {'without' if family.experts else 'with'} a number of experts; "
            "expected another model_type, or another number"
        )
    complete = {**defaults_of(str(kind)), **config}
    features = _Features(f"model_type={kind}")
    for name, value in family.features.items():
        features.add(name, value)
    _read_rest(features, complete, family)
    _read_rotary(features, complete)
    _read_windows(features, complete, family, model.layers)
    _refuse_unknown_keys(config, family)
    if config is not outer:
        features.add("towers", True, "text_config")
    return ModelFeatures(**features.values, sources=features.sources)


class _Features:
    """Values of features, each with its source."""

    def __init__(self, family: str) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self._family = family

    def add(self, name: str, value: Any, key: str = "", entry: Any = None) -> None:
        """Set a feature. key, entry: the key that gives it, and the value there; without a key, the family does."""
        self.values[name] = value
        self.sources[name] = (f"{key}={shown(entry)}" if entry is not None else key) or self._family


def _read_rest(features: _Features, config: Mapping[str, Any], family: Family) -> None:
    """Read the features that one key each gives."""
    features.add(
        "norm_epsilon", _number(config["rms_norm_eps"], "rms_norm_eps"), "rms_norm_eps", config["rms_norm_eps"]
    )
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    activation = str(config[key])
    if config["model_type"] == "gemma" and activation == "gelu":  # by which its first files mean the approximation
        activation = "gelu_pytorch_tanh"
    features.add("activation", activation, key, config[key])
    for key, name in (("initializer_range", "weight_std"), ("attention_dropout", "attention_dropout")):
        if config.get(key) is not None:
            features.add(name, _number(config[key], key), key, config[key])
    scale = config.get("query_pre_attn_scalar")
    heads, head_dim = config.get("num_attention_heads"), config.get("head_dim")
    head_dim = head_dim or (config.get("hidden_size", 0) // heads if heads else None)
    if scale is not None and scale != head_dim:
        features.add("score_scale", scale**-0.5, "query_pre_attn_scalar", scale)
    if config.get("swiglu_alpha", 1.702) != 1.702:
        raise ValueError(f"the config.json has swiglu_alpha={shown(config['swiglu_alpha'])}, expected 1.702")
    for key, names in family.says.items():
        value = config.get(key)
        for name in names if value is not None else ():
            features.add(name, value, key, value)


def _read_rotary(features: _Features, config: Mapping[str, Any]) -> None:
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rotary = config.get(key) or {}
    if not isinstance(rotary, Mapping):
        raise ValueError(f"the config.json has {key}={shown(rotary)}, expected an object")
    local, local_key = config.get("rope_local_base_freq"), "rope_local_base_freq"
    if "full_attention" in rotary:  # by kind of layer
        if isinstance(rotary.get("sliding_attention"), Mapping):
            local, local_key = rotary["sliding_attention"].get("rope_theta"), f"{key}.sliding_attention.rope_theta"
        rotary = rotary["full_attention"] or {}
    base = rotary.get("rope_theta") or config["rope_theta"]
    features.add("rotary_base", _number(base, "rope_theta"), "rope_theta", base)
    if local is not None and local != base:
        features.add("local_rotary_base", _number(local, local_key), local_key, local)
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind in (None, "default"):
        _refuse_rotary_keys(rotary, key, ())
        return
    features.add("rotary_scaling", _scaling(str(kind), rotary, key, config), key, rotary)


# Of `RotaryScaling`: by the name of a parameter in config.json, its field.
_SCALING = MappingProxyType(
    {
        "factor": "factor",
        "original_max_position_embeddings": "original_tokens",
        "low_freq_factor": "low_frequency",
        "high_freq_factor": "high_frequency",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "rounds",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "attention_factor": "attention_factor",
    }
)


def _scaling(kind: str, rotary: Mapping[str, Any], key: str, config: Mapping[str, Any]) -> RotaryScaling:
    if kind not in ("llama3", "yarn"):  # as it is: of others no parameter is expressed anywhere
        return RotaryScaling(kind=kind)
    _refuse_rotary_keys(rotary, key, _SCALING)
    values: dict[str, Any] = {
        _SCALING[name]: value if isinstance(value, bool) else _number(value, f"{key}.{name}")
        for name, value in {"factor": None, **rotary}.items()
        if name in _SCALING and (value is not None or name == "factor")
    }
    original = values.get("original_tokens") or _number(
        config.get("max_position_embeddings"), "max_position_embeddings"
    )
    values["original_tokens"] = int(original)
    if not (values.get("mscale") and values.get("mscale_all_dim")):  # one alone is not used
        values = {name: value for name, value in values.items() if not name.startswith("mscale")}
    return RotaryScaling(kind=kind, **values)


def _refuse_rotary_keys(rotary: Mapping[str, Any], key: str, known: Iterable[str]) -> None:
    for name, value in rotary.items():
        if name not in ("rope_type", "type", "rope_theta", *known) and value is not None:
            raise _unknown(f"{key}.{name}", value)


def _read_windows(features: _Features, config: Mapping[str, Any], family: Family, layers: int) -> None:
    if not family.windows:
        return
    listed = config.get("layer_types") if family.lists_layers else None
    if listed is not None and len(listed) != layers:
        raise ValueError(f"the config.json has layer_types of {len(listed)} layers, expected {layers}")
    windows = layer_windows(config, layers, "the config.json")
    if not any(windows):
        return
    if not config.get("use_sliding_window", True):
        raise ValueError("the config.json has layer_types with sliding_attention, and no sliding_window in use")
    features.add("windows", windows, "sliding_window", max(windows))


def _refuse_unknown_keys(config: Mapping[str, Any], family: Family) -> None:
    known = {*_SIZES, *_IRRELEVANT, *_ROTARY_KEYS, *DEFAULTS, *family.defaults, *family.says, *family.unused}
    known |= {"initializer_range", "attention_dropout"}
    if family.windows:
        known |= _WINDOW_KEYS
    if family.lists_layers:
        known.add("layer_types")
    if "swiglu_limit" in family.says:
        known.add("swiglu_alpha")
    for key, value in config.items():
        if key not in known and value is not None:
            raise _unknown(key, value)


def _unknown(key: str, value: object) -> ValueError:
    return ValueError(
        f"the config.json has {key}={shown(value)}, of which it is not known what it changes in the model; remove it "
        "if it changes nothing"
    )


def _number(entry: object, key: str) -> float:
    value = as_number(entry)
    if value is None or value < 0:
        raise ValueError(f"the config.json has {key}={shown(entry)}, expected a number, 0 or more")
    return value
