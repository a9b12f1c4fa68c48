"""`generate` of transformers with a `RingCache`: ranks compare settings at its beginning, and tokens at its end.

Between the two, each forward compares its tokens. So if a rank samples another token, or stops before the others, it
raises an error, and so do the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import GenerationMixin
from transformers.generation import GenerationMode

from burst_plugin.batch import MEDIA
from burst_plugin.comm.differences import TensorValues
from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import by_name, wrap
from burst_plugin.huggingface.attention import EXAMINED
from burst_plugin.huggingface.recurrent import mixers
from burst_plugin.huggingface.ring_cache import CACHES, OWN_NAME, RingCache, ring_cache_of, tell
from burst_plugin.ring.agreement import prepared_together

_MARK = "_burst_plugin_wrapped"
_MODES = {  # the modes that are right on a ring, and whether they may draw random numbers
    GenerationMode.GREEDY_SEARCH: False,
    GenerationMode.SAMPLE: True,
    GenerationMode.BEAM_SEARCH: False,
    GenerationMode.BEAM_SAMPLE: True,
    GenerationMode.ASSISTED_GENERATION: True,
}
_RING: ContextVar[ContextParallel | None] = ContextVar("burst_plugin_ring_for_generation")
_OPEN: dict[object, ContextParallel | None] = {}  # rings of all open blocks, for threads: they do not inherit _RING


@contextmanager
def ring_for_generation(cp: ContextParallel | None) -> Iterator[None]:
    """Have `generate` make a `RingCache(cp)` in this block if it is called without a cache; None: its usual one.

    This holds in other threads, too, unless they are in a block of their own: keep the block open until they end.
    """
    block, before = object(), _RING.set(cp)
    _OPEN[block] = cp
    try:
        yield
    finally:
        del _OPEN[block]
        _RING.reset(before)


def watch_generate(kind: type[Any]) -> None:
    """Replace `GenerationMixin.generate` of transformers by one that takes a `RingCache`, for models of class `kind`.

    Repeated calls change nothing. With such a cache it raises ValueError on every rank if ranks differ in settings,
    images or results, or if an option is not supported. Without one it runs as before, but for calls within
    `ring_for_generation`.
    """
    if not hasattr(GenerationMixin.generate, _MARK):
        setattr(wrap(GenerationMixin, "generate", _generate), _MARK, True)
    usual = GenerationMixin.prepare_inputs_for_generation
    prepare = getattr(kind, usual.__name__, usual)
    if prepare is not usual and not hasattr(prepare, _MARK):
        setattr(wrap(kind, usual.__name__, _prepare_inputs), _MARK, True)


def _generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `GenerationMixin.generate`."""
    cache, cp = ring_cache_of(kwargs.values()), _RING.get((None, *_OPEN.values())[-1])
    if cache is None and cp is not None and all(kwargs.get(name) is None for name in CACHES):
        cache = RingCache(cp)
        kwargs = {**{name: x for name, x in kwargs.items() if name not in CACHES}, name_of_cache(type(model)): cache}
    if cache is None:
        return original(model, *args, **kwargs)
    # A new thread has GPU 0 as its current one, but a group of processes communicates on the current GPU.
    with torch.cuda.device(model.device if model.device.type == "cuda" else -1):
        return _generate_on_ring(original, cache, model, *args, **kwargs)


def _generate_on_ring(
    original: Callable[..., Any], cache: RingCache, model: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Call `generate` with a `RingCache` that is among its arguments, and compare settings and results of ranks."""
    # Releases name this argument differently, and warn of the names of other releases.
    name_here = name_of_cache(type(model))
    kwargs = {name_here if x is cache else name: x for name, x in kwargs.items()}
    arguments = by_name(original, (model, *args), kwargs)
    _compare_settings(cache.cp, model, arguments)
    cache.in_forward, cache.gets_all_tokens = False, name_here == OWN_NAME
    before = _RING.set(None)  # in this thread alone: a model that assists has a cache of its own
    try:
        result = original(model, *args, **kwargs)
    except Exception as error:  # of any kind: the other ranks must know of it
        if not cache.in_forward:  # else they do
            tell(cache.cp, error)
        raise
    finally:
        _RING.reset(before)
        cache.gets_all_tokens = False
    sequences = result if isinstance(result, Tensor) else result.sequences
    prompt = arguments.get("inputs", arguments.get("input_ids"))
    new = sequences[:, 0 if prompt is None else prompt.shape[1] :]
    compared = {"sequences": list(sequences.shape), "new tokens": TensorValues(new.flatten())}
    cache.cp.agree(compared, of="the end of generate")
    return result


def _prepare_inputs(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Replace a class's `prepare_inputs_for_generation`: put back a `RingCache` that the model leaves out, emptied.

    Phi-3 leaves it out where a text becomes longer than `original_max_position_embeddings`, to compute it again with
    other rotary embeddings. Raises ValueError if the beginning of the text is not there.
    """
    inputs: dict[str, Any] = original(model, *args, **kwargs)
    cache = ring_cache_of((*args, *kwargs.values()))
    if cache is None or ring_cache_of(inputs.values()) is not None:
        return inputs
    positions = inputs.get("position_ids")
    if positions is not None and bool(positions[..., :1].any()):  # the first token is not at 0
        raise ValueError(
            f"{type(model).__name__}.generate with a RingCache: the model leaves its cache to compute a text of this "
            "length again, with other rotary embeddings, but did not get its beginning; give generate input_ids of "
            "all tokens so far, and leave prefill_chunk_size out"
        )
    cache.reset()
    return {**inputs, name_of_cache(type(model)): cache}


def name_of_cache(kind: type[Any] = GenerationMixin) -> str:
    """Return the name of `generate`'s argument for a cache in this release of transformers, as "past_key_values".

    kind: the class of the model; by default the name for most models is returned.
    """
    prepare = getattr(kind, "prepare_inputs_for_generation", GenerationMixin.prepare_inputs_for_generation)
    parameters = inspect.signature(prepare).parameters
    if not any(name in parameters for name in CACHES):  # a model that hands on what it is given
        return name_of_cache()
    return next(name for name in CACHES if name in parameters)


def _compare_settings(cp: ContextParallel, model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError on every rank if any asks for something unsupported on a ring, or ranks differ; collective."""

    def prepared() -> dict[str, object]:
        known = inspect.signature(GenerationMixin.generate).parameters
        options = {name: x for name, x in arguments.items() if name not in known}
        config, _ = model._prepare_generation_config(arguments.get("generation_config"), **options)
        mode = config.get_generation_mode(arguments.get("assistant_model"))
        problem = _problem(model, arguments, config, mode)
        if problem:
            raise ValueError(f"{type(model).__name__}.generate with a RingCache: {problem}")
        compared = {"generation": mode.value, "config": config.to_json_string(use_diff=True)}
        compared |= {name: _digest(x) for name, x in arguments.items() if name.startswith(MEDIA) and x is not None}
        if _MODES[mode] and config.do_sample:
            compared["random numbers (torch.manual_seed(n) on every rank)"] = _random_state(model.device)
        return compared

    def agree(compared: dict[str, object] | None, problem: str) -> None:
        cp.agree(compared or {}, problem, of="the beginning of generate")

    prepared_together(prepared, agree)


def _problem(model: Any, arguments: Mapping[str, Any], config: Any, mode: GenerationMode) -> str:
    """Return why a ring cannot generate with these arguments; empty if it can."""
    if not hasattr(model, EXAMINED):
        return "the model is not on the ring; call burst_plugin.huggingface.prepare(model) first"
    if mode not in _MODES or arguments.get("custom_generate") is not None:
        names = ", ".join(each.value for each in _MODES)
        asked = mode.value if mode not in _MODES else "custom_generate"
        return f"{asked} is not supported; use one of {names}"
    if mode is GenerationMode.ASSISTED_GENERATION and mixers(model):
        return (
            f"{mode.value} drops drafted tokens that are not accepted, and the states of recurrent layers cannot go "
            "back; leave assistant_model and prompt_lookup_num_tokens out"
        )
    if config.use_cache is False:
        return "use_cache=False would compute all tokens again; leave it out"
    if config.max_time is not None:
        return "max_time would stop each rank by its own clock; use max_new_tokens"
    if getattr(config, "use_mtp", None) or getattr(config, "speculation_type", None) in ("mtp", "dflash"):
        return "drafts from the model's own hidden states are not supported; use assistant_model or prompt_lookup"
    return ""


def _random_state(device: torch.device) -> str:
    """Return a digest of the state of a rank's random numbers."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return _digest(state)


def _digest(x: Any) -> str:
    """Return a digest of the tensors in an argument, for ranks to compare images by."""
    digest = blake2b(digest_size=8)
    for leaf in tree_leaves(x):
        is_tensor = isinstance(leaf, Tensor)
        text = f"{leaf.dtype} {list(leaf.shape)}" if is_tensor else repr(leaf)
        digest.update(text.encode())
        if is_tensor:
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
