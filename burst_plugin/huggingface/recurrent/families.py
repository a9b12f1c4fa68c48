"""Layers of transformers that carry a state or convolve along the sequence: which are known, and their hooks.

    family                         layers                     what is replaced
    Qwen3-Next, Bamba, Mamba, ...  functions of their file    these, once per file: `functions.py`
    MiniMax, Zaya, xLSTM, ...      code of their own          `forward` of the class: `modules.py`

A family that calls known functions needs one line in `MIXERS`. What a layer calls is looked up in its code: a release
of transformers that calls something else is refused by name.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules import batchnorm, instancenorm, padding, pooling
from transformers import PreTrainedModel

from burst_plugin import recurrent
from burst_plugin.huggingface.known_code import is_replaced, lacks, replace_once
from burst_plugin.huggingface.recurrent import forward, modules
from burst_plugin.huggingface.recurrent.functions import FUNCTIONS
from burst_plugin.huggingface.recurrent.states import own_arguments, put_states, take_states
from burst_plugin.huggingface.text_only import named_text_modules, text_modules, text_part
from burst_plugin.huggingface.walks import modules_in, names_and_modules, once

if TYPE_CHECKING:
    from burst_plugin.huggingface.ring_cache import RingCache

LAYER_TYPES = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "moe", "mlp")
_MASKS = "create_recurrent_attention_mask"
_CONV = "causal_conv1d_fn"
_EPS = 1e-6  # what `recurrent.mlstm` adds to denominators
_ALONG_THE_SEQUENCE = (torch.nn.RNNBase, torch.nn.Conv1d, torch.nn.ConvTranspose1d)
_STATISTICS = (batchnorm._BatchNorm, instancenorm._InstanceNorm)
# Around a language model these may be of images.
_ALONG_SEVERAL = (
    *(torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
    *(padding._ConstantPadNd, padding._ReflectionPadNd, padding._ReplicationPadNd, padding._CircularPadNd),
    *(pooling._AvgPoolNd, pooling._MaxPoolNd, pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd),
    *(*_STATISTICS, pooling._LPPoolNd, torch.nn.MultiheadAttention),
)
_CALLS_OF_A_RING = dict(inspect.getmembers(recurrent, inspect.isfunction))


class Mixer(NamedTuple):
    """A description of a class of layers that carry a state or convolve along the sequence, to put them on the ring.

    calls: names that the code of its `forward` has to use: functions that are replaced or, with `on_shard`, what the
        replacement repeats.
    on_shard: the replacement of its `forward` on a shard, called with the module, the shard, and the arguments by
        name; None if functions are replaced instead.
    method: the name of the method that `on_shard` replaces, if `forward` calls one for every step that mixes tokens.
    replaced: child modules to be replaced: their names, and the classes of their replacements.
    takes_mask: whether it gets the mask of padding as its model does, rather than one that transformers has made of
        it.
    keeps: the name of the attribute in which it keeps its state; empty if it keeps none.
    """

    calls: tuple[str, ...]
    on_shard: Callable[..., Any] | None = None
    method: str = "forward"
    replaced: tuple[tuple[str, Callable[..., torch.nn.Module]], ...] = ()
    takes_mask: bool = False
    keeps: str = ""


_DELTA = Mixer((_CONV, "torch_chunk_gated_delta_rule"))
_KIMI = Mixer((_CONV, "chunk_kimi_delta_attention"))
_MAMBA = Mixer((_CONV, "mamba_selective_scan"))
_WHOLE_MAMBA = Mixer(("mamba_inner_fn", *_MAMBA.calls), takes_mask=True)
_MAMBA2 = Mixer(("mamba2_split_conv1d_scan_combined", _CONV, "mamba2_chunk_scan"))
_SHORT = Mixer((_CONV,))
_DYNAMIC = Mixer(("weight_proj", "num_heads", "conv_kernel_size", "static_weight"), modules.dynamic_convolution)
_SHIFT = (("time_shift", modules.TimeShift),)

MIXERS = {
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "Qwen4ExpTextGatedDeltaNet": _DELTA,
    "Qwen4ExpTextNGramEmbedding": Mixer(
        ("context_len", "eos_token_id", "layer_multipliers", "ngram_embedding"), modules.ngram_embedding
    ),
    "Qwen4ExpTextPLELayer": Mixer(
        ("_short_conv", "short_conv_state_len", "conv1d"), modules.dilated_convolution, method="_short_conv"
    ),
    "OlmoHybridGatedDeltaNet": _DELTA,
    "LaraMiniGatedDeltaNet": _DELTA,
    "KimiLinearDeltaAttention": _KIMI,
    "BailingHybridDeltaAttention": _KIMI,
    "Glm5NextTextLinearAttention": _KIMI,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Mamba2Mixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
    "MambaMixer": _WHOLE_MAMBA,
    "FalconMambaMixer": _WHOLE_MAMBA,
    "JambaMambaMixer": _MAMBA,
    "ZambaMambaMixer": _MAMBA,
    "Lfm2ShortConv": _SHORT,
    "Lfm2MoeShortConv": _SHORT,
    "Lfm3ShortConv": _SHORT,
    "InklingShortConvolution": _SHORT,
    "Inkling2ShortConvolution": _SHORT,
    "Inkling2LoopShortConvolution": _SHORT,
    "Inkling2DynamicShortConvolution": _DYNAMIC,
    "Inkling2LoopDynamicShortConvolution": _DYNAMIC,
    "MiniMaxLightningAttention": Mixer(
        ("qkv_proj", "act_fn", "slope_rate", "norm", "output_gate", "out_proj"), modules.lightning_attention
    ),
    "RecurrentGemmaRecurrentBlock": Mixer(
        ("linear_y", "act_fn", "linear_x", "conv_1d", "rg_lru", "linear_out"),
        modules.recurrent_block,
        keeps="conv1d_state",
    ),
    "RecurrentGemmaRglru": Mixer(
        ("input_gate_weight", "recurrent_gate_bias", "recurrent_param", "SqrtBoundDerivative", "_rnn_scan"),
        modules.recurrent_unit,
        keeps="recurrent_states",
    ),
    "RwkvSelfAttention": Mixer(("rwkv_linear_attention",), replaced=_SHIFT),
    "RwkvFeedForward": Mixer(("time_shift",), replaced=_SHIFT),
    "xLSTMBackend": Mixer(("_train_fn", "_inference_fn"), modules.mlstm),
    "ZayaCCAProjection": Mixer(
        ("q_proj", "k_proj", "conv_qk_depthwise", "conv_qk_grouped", "v_proj_current", "v_proj_delayed"),
        modules.compressed_projection,
    ),
}


@once
def mixers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Mixer]]:
    """Return each layer of a model that carries a state or convolves along the sequence, with its class's `Mixer`.

    Only classes named in `MIXERS` are known.
    """
    known = ((module, _known(type(module))) for module in text_modules(model))
    return [(module, mixer) for module, mixer in known if mixer is not None]


def is_mixer(module: torch.nn.Module) -> bool:
    """Return whether a module is a known layer that carries a state or convolves along the sequence."""
    return _known(type(module)) is not None


def _known(kind: type) -> Mixer | None:
    return next((MIXERS[each.__name__] for each in kind.__mro__ if each.__name__ in MIXERS), None)


def problems_of_mixers(pretrained: PreTrainedModel, kinds: set[str]) -> list[str]:
    """Return the reasons why a model's layers that carry a state cannot run on a ring; empty if they can.

    kinds: the types of layers that its configuration names, besides types of attention.
    """
    mixer_kinds = {type(module): known for module, known in mixers(pretrained)}
    told = [problem for kind, known in mixer_kinds.items() for problem in _problems_of_code(kind, known)]
    # Other values change gradients by way of exponents, which have no gradient on a ring.
    cells: list[Any] = [module for module, _ in mixers(pretrained) if type(module).__name__ == "xLSTMBackend"]
    added = {cell.config.eps for cell in cells}
    told += [
        f"its mLSTM adds eps={eps} to denominators, and on a ring {_EPS}; set eps to that" for eps in added - {_EPS}
    ]
    unknown = _unknown(pretrained, kinds, bool(mixer_kinds))
    mixing = _unknown_mixing(pretrained)
    if unknown:
        told.append(
            f"it carries a state along the sequence (in {unknown}) in a way that is not known; use a family that "
            "docs/families.md accepts, or call burst_plugin.recurrent in a layer of your own (docs/your_own.md)"
        )
    elif mixing:
        (name, module), *others = mixing
        told.append(
            f"its {_called(name, module, len(others))} would join tokens, of which another rank may have some; "
            f"{_instead_of(module)} there (docs/your_own.md), or move it out of the language model"
        )
    return told


def _called(name: str, module: torch.nn.Module, others: int) -> str:
    return f"{name} ({type(module).__name__})" + (f" and {others} more like it" if others else "")


def _instead_of(module: torch.nn.Module) -> str:
    """Return the advice for a module of PyTorch that mixes tokens: the function or norm to use in its place."""
    if isinstance(module, _STATISTICS):
        return "use LayerNorm or RMSNorm"
    is_attention = isinstance(module, torch.nn.MultiheadAttention)
    return f"call burst_plugin.{'burst_attention' if is_attention else 'recurrent'}"


def _problems_of_code(kind: type[torch.nn.Module], known: Mixer) -> list[str]:
    """Return the reasons why the code of a class is not the code that `known` describes."""
    function: Any = inspect.unwrap(kind.forward)
    home = function.__globals__
    if not str(home.get("__name__")).startswith("transformers.models."):
        return [
            f"its {kind.__name__} is not that of transformers, and how it carries its state is not known; call "
            "burst_plugin.recurrent there"
        ]
    method: Any = inspect.unwrap(getattr(kind, known.method, kind.forward))
    missing = [name for name in known.calls if name not in function.__code__.co_names + method.__code__.co_names]
    missing += [name for name in known.calls if name in FUNCTIONS and not callable(home.get(name))]
    return [lacks(kind, missing)] if missing else []


def _unknown(pretrained: PreTrainedModel, kinds: set[str], has_known: bool) -> str:
    """Return the classes of layers that may carry a state and are not known; empty if all layers are.

    What such layers have in common is a convolution over neighbouring tokens.
    """
    is_stateful = getattr(pretrained, "_is_stateful", False)
    if not (is_stateful or kinds & set(LAYER_TYPES)):
        return ""
    handled = _handled_parts(pretrained)
    names = {
        type(module).__name__
        for module in text_modules(pretrained)
        for child in module.children()
        if isinstance(child, torch.nn.Conv1d | torch.nn.RNNBase) and id(child) not in handled
    }
    names_layers = bool(getattr(pretrained.config.get_text_config(), "layer_types", None))
    if not names and not has_known and not handled and (kinds or not names_layers):
        names = {type(pretrained).__name__}
    return ", ".join(sorted(names))


def _unknown_mixing(pretrained: PreTrainedModel) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules of PyTorch that mix tokens in layers that are not known, with their names.

    Models inside of `pretrained` are left out, which are examined by themselves; in a model around a language model,
    so is what may be of images.
    """
    kinds = _ALONG_THE_SEQUENCE if text_part(pretrained.config) else (*_ALONG_THE_SEQUENCE, *_ALONG_SEVERAL)
    inner = [module for module in text_modules(pretrained) if isinstance(module, PreTrainedModel)]
    left_out = {id(part) for model in inner if model is not pretrained for part in modules_in(model)}
    return _mixing(named_text_modules(pretrained), kinds, left_out | _handled_parts(pretrained))


def _mixing(
    named_modules: Iterable[tuple[str, torch.nn.Module]], kinds: tuple[type, ...], left_out: set[int]
) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules of some kinds that mix tokens, but none whose `id` is in `left_out`."""
    return [
        (name, module)
        for name, module in named_modules
        if isinstance(module, kinds) and id(module) not in left_out and not _is_of_single_tokens(module)
    ]


def warn_of_mixing_around(model: torch.nn.Module) -> None:
    """Warn of modules along the sequence beside the model of transformers in a user's: they may be of audio."""
    inner = [module for module in modules_in(model) if isinstance(module, PreTrainedModel)]
    left_out = {id(part) for each in inner for part in modules_in(each)} | _handled_parts(model)
    mixing = _mixing(names_and_modules(model).items(), _ALONG_THE_SEQUENCE, left_out)
    if mixing:
        (name, module), *others = mixing
        warnings.warn(
            f"{_called(name, module, len(others))} of {type(model).__name__} is outside of its model of "
            "transformers, and has not been examined: if it gets the tokens of a shard, it joins those of one rank "
            f"alone; {_instead_of(module)} there (docs/your_own.md)",
            stacklevel=4,
        )


@once
def _handled_parts(pretrained: torch.nn.Module) -> set[int]:
    """Return the `id` of each module in a layer that carries its state over a ring, known or by code of its own."""
    parts: set[int] = set()
    calling = {kind for kind in {type(module) for module in text_modules(pretrained)} if _calls_ring(kind)}
    for module in text_modules(pretrained):
        if is_mixer(module) or type(module) in calling:
            parts |= {id(part) for part in (module.children() if module is pretrained else module.modules())}
    return parts


def _is_of_single_tokens(module: torch.nn.Module) -> bool:
    """Return whether a module works on one token each, as a convolution of one, or adds up over all ranks."""
    size: Any = getattr(module, "kernel_size", ())
    return set(size if isinstance(size, tuple) else (size,)) == {1} or isinstance(module, torch.nn.SyncBatchNorm)


def _calls_ring(kind: type) -> bool:
    """Return whether code of a class, or a helper in the same file, calls functions of burst_plugin.recurrent."""
    members: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        members |= {} if each in (torch.nn.Module, object) else vars(each)
    for member in members.values():
        function: Any = inspect.unwrap(member.__func__ if isinstance(member, staticmethod) else member)
        if not inspect.isfunction(function):  # a decorator may name anything as what it wraps
            continue
        home = function.__globals__
        values: list[Any] = [home.get(name) for name in _names_in(function.__code__)]
        helpers: list[Any] = [inspect.unwrap(value) for value in values if inspect.isfunction(value)]
        codes = [helper.__code__ for helper in helpers if getattr(helper, "__globals__", None) is home]
        if any(_names_ring(_names_in(code), home) for code in (function.__code__, *codes)):
            return True
    return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code uses, also in functions inside of it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def _names_ring(names: set[str], home: dict[str, Any]) -> bool:
    """Return whether names, some of which `home` defines, are of functions of burst_plugin.recurrent."""
    values = [home[name] for name in names & home.keys()]
    has_module = {"recurrent", "burst_plugin.recurrent"} & names or any(value is recurrent for value in values)
    functions = {id(function) for function in _CALLS_OF_A_RING.values()}
    return bool(has_module and _CALLS_OF_A_RING.keys() & names) or any(id(value) in functions for value in values)


def is_recurrent_alone(pretrained: PreTrainedModel) -> bool:
    """Return whether a model has layers that carry a state along the sequence, and no attention."""
    inside = {type(module).__name__ for module in text_modules(pretrained) if _known(type(module)) is None}
    return bool(mixers(pretrained)) and not any("Attention" in name for name in inside)


def use_recurrent(pretrained: PreTrainedModel) -> None:
    """Have the layers of a model that carry a state do so from rank to rank in all its forwards on shards.

    Replaces functions of their modeling files, or the `forward` of their classes, and adds hooks. Layers whose code
    is not known are left as they are; repeated calls change nothing.
    """
    for module, known in mixers(pretrained):
        if _problems_of_code(type(module), known):  # of a ring of one rank, which gives it whole batches
            continue
        for owner, name, around in _replacements(type(module), known):
            replace_once(owner, name, around)
        for name, kind in known.replaced:
            child = getattr(module, name)
            if not isinstance(child, modules.TimeShift):
                setattr(module, name, kind(child.padding))
        forward.watch_mixer(module)


def _replacements(kind: type[torch.nn.Module], known: Mixer) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what is replaced for a class of layers: its file or the class, the name there, and the replacement."""
    function: Any = inspect.unwrap(kind.forward)  # perhaps not that of transformers any more
    home = sys.modules.get(getattr(function, "__globals__", {}).get("__name__", ""))
    names = [name for name in (*known.calls, _MASKS) if name in FUNCTIONS and hasattr(home, name)]
    own = [] if known.on_shard is None else [(kind, known.method, partial(modules.take_over, known.on_shard))]
    return [*((home, name, FUNCTIONS[name]) for name in names), *own]


def _check_replacements(pretrained: PreTrainedModel) -> None:
    """Raise ValueError if some of what `use_recurrent` has replaced is in its place again."""
    kinds = {type(module): known for module, known in mixers(pretrained)}
    parts = [part for kind, known in kinds.items() for part in _replacements(kind, known)]
    lost = sorted({name for owner, name, _ in parts if not is_replaced(owner, name)})
    if lost:
        raise ValueError(
            f"{type(pretrained).__name__} got a batch that ranks share, but {', '.join(lost)} of its layers would "
            "carry no state from rank to rank: something has replaced it since "
            "burst_plugin.huggingface.prepare(model), which another process may have called; call that again"
        )


def begin(pretrained: PreTrainedModel, shard: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a forward on a shard, changed as layers that carry a state need it.

    They get `use_cache=False`, and the mask of padding where layers take it. kwargs: the arguments of the forward,
    which are returned as they are for a model without such layers. Raises ValueError for a model that would evaluate
    the shard in pieces (`max_inference_chunksize`), or whose functions have been put back.
    """
    known = [mixer for _, mixer in mixers(pretrained)]
    if not known:
        return kwargs
    _check_replacements(pretrained)
    return forward.begin(
        pretrained,
        shard,
        kwargs,
        takes_mask=any(mixer.takes_mask for mixer in known),
    )


def begin_turn(pretrained: PreTrainedModel, cache: RingCache, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a forward with a `RingCache`, after states are put where layers look for them.

    kwargs: the keyword arguments for this rank's tokens, returned as they are for a model without recurrent layers.
    """
    states, shard = cache.states, cache.shard
    if states is None:
        return kwargs
    _check_replacements(pretrained)
    put_states(states, _holders(pretrained))
    if shard is not None:
        forward.check_pieces(pretrained, shard)
        if any(known.takes_mask for _, known in mixers(pretrained)):
            kwargs = {**kwargs, "attention_mask": forward.padding_of(shard)}
    like = pretrained.get_input_embeddings().weight
    return {**kwargs, **own_arguments(states, pretrained.config.get_text_config(), len(cache.lengths), like)}


def end_turn(pretrained: PreTrainedModel, cache: RingCache) -> None:
    """Move the states that layers left in their modules to the cache, at the end of a turn, also of a failed one."""
    if cache.states is not None and cache.turn is not None:
        take_states(cache.states, _holders(pretrained))


def _holders(pretrained: PreTrainedModel) -> list[tuple[torch.nn.Module, str]]:
    """Return the layers that keep a state in themselves, and the name of that state."""
    return [(module, known.keeps) for module, known in mixers(pretrained) if known.keeps]
