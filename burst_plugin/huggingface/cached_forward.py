"""A forward with a `RingCache`: ranks share its new tokens, and gather the outputs of the model's body.

    ids [B, n]  ->  this rank's  ->  layers, which attend on the ring  ->  hidden [B, of all, H]  ->  head  ->  logits

The body's output is gathered, and not the logits: it is smaller, and every rank then computes the same logits, of the
tokens that were asked for. Padding is left out, so that rows of the cache are as long as their texts.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import MEDIA, SHARD_KEY
from burst_plugin.checks import shown
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.block_indexers import block_indexers
from burst_plugin.huggingface.cached_media import FEATURES, features_of_rank, marked_turn
from burst_plugin.huggingface.image_groups import group_rule
from burst_plugin.huggingface.indexers import indexers
from burst_plugin.huggingface.mask_recipes import cache_of_forward
from burst_plugin.huggingface.positions import problem_with_cache
from burst_plugin.huggingface.recurrent import begin_turn, end_turn, is_recurrent_alone, mixers
from burst_plugin.huggingface.recurrent.states import attending_layers, states_of
from burst_plugin.huggingface.ring_cache import CACHES, RingCache, ring_cache_of, tell
from burst_plugin.inference import Turn
from burst_plugin.inference.columns import Columns

_TYPES = ("token_type_ids", "mm_token_type_ids")
_TOKENS = ("input_ids", "inputs_embeds", *_TYPES)  # tensors [B, n, ...] that are cut
_KNOWN = (*_TOKENS, "attention_mask", "position_ids")
_SLIDING = "sliding_attention"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by their bytes


def watch_turns(model: PreTrainedModel) -> None:
    """Add hooks to a model that let its forward take a `RingCache`; call it once for a model.

    Before a forward they cut the arguments to this rank's share of the new tokens. After the model's body they gather
    its output from all ranks, and after the forward they end the turn of the cache. Forwards without a `RingCache`
    are not changed.
    """
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.base_model.register_forward_hook(_bring_together, with_kwargs=True)
    model.register_forward_hook(_end, with_kwargs=True, always_call=True)


class _NewTokens(NamedTuple):
    """The new tokens of a forward.

    given: the arguments of the forward by name.
    real: which of the tokens are no padding, [B, n], bool on the CPU.
    longest: the largest position in a row.
    """

    given: dict[str, Any]
    real: Tensor
    longest: int

    @classmethod
    def of(cls, model: PreTrainedModel, arguments: dict[str, Any], cache: RingCache) -> _NewTokens:
        """Return the new tokens of a forward. Raise ValueError for a forward that cannot run on a ring."""
        problem = _problem(model, arguments)
        if problem:
            raise ValueError(f"{type(model).__name__} with a RingCache: {problem}")
        tokens: Tensor = arguments["input_ids"] if "input_ids" in arguments else arguments["inputs_embeds"]
        # Gemma 3 has types of the whole text.
        arguments = {name: x[:, -tokens.shape[1] :] if name in _TYPES else x for name, x in arguments.items()}
        mask = arguments.get("attention_mask")
        if mask is None and len(cache.seen) and is_recurrent_alone(model):  # generate leaves the mask out
            mask = torch.nn.functional.pad(cache.seen, (0, tokens.shape[1]), value=True)
        real = _real(mask, tokens, cache.seen)
        _check_padding(model, torch.cat([cache.seen, real], 1) if len(cache.seen) else real)
        _check_positions(arguments.get("position_ids"), real, cache.seen)
        counts = real.sum(1) + (cache.seen.sum(1) if len(cache.seen) else 0)
        return cls(arguments, real, int(counts.max()) - 1)

    @property
    def ids(self) -> Tensor:
        """Integers [number of tokens, ...] that ranks compare: ids, or the bits of embeddings; without padding."""
        name = "input_ids" if "input_ids" in self.given else "inputs_embeds"
        x: Tensor = self.given[name]
        real = x[self.real.to(x.device)]
        return real.view(_BITS[x.element_size()]) if x.is_floating_point() else real

    def types(self, model: PreTrainedModel) -> Tensor | None:
        """Return the types of all new tokens, [B, n], which tell a model its groups of tokens; None for no groups."""
        rule = group_rule(model)
        return None if rule is None else self.given.get(rule.name)

    def cut(self, model: PreTrainedModel, turn: Turn | Columns) -> dict[str, Any]:
        """Return the arguments with this rank's tokens alone, and their positions."""
        cut = {name: x for name, x in self.given.items() if name not in ("attention_mask", "position_ids")}
        order = None if bool(self.real.all()) else (~self.real).to(torch.uint8).argsort(dim=1, stable=True)

        def take(x: Tensor) -> Tensor:
            rows = x if order is None else torch.stack([row[at] for row, at in zip(x, order, strict=True)])
            return turn.take(rows)

        if cut.get(FEATURES):
            cut[FEATURES] = features_of_rank(model, cut, take)
        for name in cut.keys() & set(_TOKENS):
            cut[name] = take(cut[name])
        if "position_ids" in inspect.signature(model.forward).parameters:
            tokens = cut["input_ids"] if "input_ids" in cut else cut["inputs_embeds"]
            positions = self.given.get("position_ids")
            if positions is not None and positions.dim() == 3:
                cut["position_ids"] = torch.stack([take(axis.expand(self.real.shape)) for axis in positions])
            else:
                cut["position_ids"] = turn.positions.to(tokens.device)
        return cut


def _problem(model: PreTrainedModel, arguments: Mapping[str, Any]) -> str:
    """Return why a forward cannot run with a `RingCache`; empty if it can."""
    config = model.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its attention in chunks is not supported by the cache; generate on one rank"
    if getattr(config, "attn_temperature_tuning", None) and not all(getattr(config, "no_rope_layers", None) or (1,)):
        return "attn_temperature_tuning would count positions in this rank's part of a text; generate on one rank"
    if getattr(config, "ple_layer_ids", None):
        return "its n-grams look back at tokens that the cache does not have; generate on one rank, without the ring"
    if model.training or torch.is_grad_enabled():
        return (
            "a RingCache has no gradients and no dropout; call model.eval(), and run the model under torch.no_grad()"
        )
    if arguments.get("labels") is not None:
        return "labels would be compared with this rank's tokens; use burst_plugin.huggingface.log_likelihood"
    if SHARD_KEY in arguments:
        return "a RingCache takes whole batches, the same on every rank, and cuts them itself; leave shard_batch out"
    if arguments.get("use_cache") is False:
        return "use_cache=False would compute all tokens again; leave it out"
    for name in ("output_attentions", "output_hidden_states"):
        if arguments.get(name, getattr(config, name, False)):
            return f"{name}=True would return this rank's tokens only; leave it out"
    if arguments.get("return_dict") is False:
        return "return_dict=False is not supported; leave it out"
    if not any(name in arguments for name in ("input_ids", "inputs_embeds")):
        return "got neither input_ids nor inputs_embeds"
    media = sorted(name for name in arguments if name.startswith(MEDIA) and arguments[name] is not None)
    if media:
        return (
            f"got {', '.join(media)}, but each rank computes a part of the tokens only: give images to generate, "
            f"which encodes them first, or give a forward the features of all images ({FEATURES})"
        )
    if arguments.get(FEATURES) and hasattr(model.base_model, "compute_3d_position_ids"):
        positions = arguments.get("position_ids")
        if positions is None or positions.dim() != 3:
            return "got features of images without their position_ids in three axes; give these, as generate does"
    strange = sorted(name for name, x in arguments.items() if isinstance(x, Tensor) and name not in _KNOWN)
    if strange:
        return f"does not know how to cut {', '.join(strange)}; leave it out"
    return problem_with_cache(model)


def _windows(model: PreTrainedModel) -> dict[int, int | None]:
    """Return by layer how many tokens before itself a token attends to, None for all; only layers that attend."""
    config = model.config.get_text_config()
    if is_recurrent_alone(model):
        return {}
    layers = attending_layers(config) if mixers(model) else list(range(config.num_hidden_layers))
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return dict.fromkeys(layers)
    return {layer: window - 1 if not kinds or kinds[layer] == _SLIDING else None for layer in layers}


def _indexed(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the numbers of the layers with an indexer of tokens or blocks, whose keys a cache keeps."""
    modules: list[Any] = [*(module for module, _ in indexers(model)), *block_indexers(model)]
    return tuple(sorted(module.layer_idx for module in modules))


def _real(mask: object, tokens: Tensor, seen: Tensor) -> Tensor:
    """Return which new tokens are no padding, [B, n]. Raise ValueError for masks that do not fit cached tokens."""
    batch, new = tokens.shape[:2]
    if mask is None and bool(seen.all()):
        return torch.ones(batch, new, dtype=torch.bool, device="cpu")
    before = seen.shape[1]
    size = [batch, before + new]
    if not isinstance(mask, Tensor) or list(mask.shape) != size:
        description = list(mask.shape) if isinstance(mask, Tensor) else shown(mask)
        raise ValueError(
            f"a RingCache with {before} tokens per row, padding included, got {new} more: it needs an "
            f"attention_mask {size} of ones and zeros, as tokenizers make, got {description}"
        )
    real = mask.cpu() != 0
    if before and (len(seen) != batch or not torch.equal(real[:, :before], seen)):
        raise ValueError(
            "attention_mask hides other tokens than when they were cached; give the earlier mask, continued "
            "by the new tokens"
        )
    if not bool(real[:, -1].all()):
        raise ValueError(
            "attention_mask has padding at the end of a row, after which nothing can follow; pad on the left, as "
            "padding_side='left' of a tokenizer does, and take a prefill_chunk_size longer than the padding"
        )
    return real[:, before:]


def _check_padding(model: PreTrainedModel, real: Tensor) -> None:
    """Raise ValueError for padding after the first token of a row that changes what transformers computes.

    real: which tokens of all turns are no padding, [B, T].
    """
    if not bool((real[:, :-1] & ~real[:, 1:]).any()):
        return
    windows = [before for before in _windows(model).values() if before is not None]
    if mixers(model):
        reason = "through which transformers carries the states of recurrent layers"
    elif windows and real.shape[1] > min(windows) + 1:
        reason = "which transformers counts in its sliding windows, but a RingCache does not"
    else:
        return
    raise ValueError(
        f"attention_mask has padding after the first token of a row, {reason}; pad rows on the left only, and give "
        "all rows equally many tokens in later turns"
    )


def _check_positions(positions: Tensor | None, real: Tensor, seen: Tensor) -> None:
    """Raise ValueError unless tokens are numbered in their rows, without padding."""
    if positions is None:
        return
    starts = seen.sum(1, keepdim=True) if len(seen) else torch.zeros(len(real), 1, dtype=torch.int64, device="cpu")
    expected = starts + real.cumsum(1) - 1
    if positions.dim() == 3 and len(positions) != 4:  # in three axes alone, in which images stand still
        return
    got = positions[0].cpu() if positions.dim() == 3 else positions.cpu()
    if got.dim() != 2 or got.shape[1] != expected.shape[1] or bool(((got != expected) & real).any()):
        raise ValueError(
            f"position_ids {shown(got.flatten()[:8].tolist())}... do not count the tokens of each row from "
            f"{starts.flatten().tolist()} on, the number of those that a RingCache holds; leave position_ids out, "
            "and give a cache that has the beginning of this text"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin the turn of a forward, and return its arguments with this rank's tokens."""
    cache = ring_cache_of((*args, *kwargs.values()))
    if cache is None:
        return None
    cache.in_forward = True
    try:
        arguments = _new_ones(by_name(model.forward, args, kwargs), cache)
        tokens = _NewTokens.of(model, arguments, cache)
    except Exception as error:  # of any kind: the other ranks must know of it
        tell(cache.cp, error)
        raise
    try:
        layers, kept = (_windows(model), _indexed(model)), arguments.get("logits_to_keep")
        last = kept if isinstance(kept, int) and kept > 0 else 0
        states = states_of(model.config.get_text_config()) if mixers(model) else None
        cache.longest = tokens.longest
        turn = cache.begin_turn(layers, states, tokens.real, tokens.ids, last)
    except ValueError as error:
        if "ids" in str(error):
            raise ValueError(
                f"{error}; where ranks sample, they need the same random numbers: torch.manual_seed(n) on every rank "
                "before generate"
            ) from error
        raise
    cache.mark(marked_turn(model, tokens.types(model), tokens.real, turn), group_rule(model))
    local = _named(tokens.cut(model, turn), cache, inspect.signature(model.forward).parameters)
    return (), begin_turn(model, cache, local)


def _new_ones(arguments: dict[str, Any], cache: RingCache) -> dict[str, Any]:
    """Return the arguments of a forward without the tokens that the cache has, if `generate` hands on all tokens."""
    seen, mask = cache.seen.shape[1], arguments.get("attention_mask")
    tokens = next((arguments[name] for name in _TOKENS[:2] if arguments.get(name) is not None), None)
    if not (cache.gets_all_tokens and seen and isinstance(mask, Tensor) and tokens is not None):
        return arguments
    if tokens.shape[1] != mask.shape[1] or tokens.shape[1] <= seen:
        return arguments
    return {**arguments, **{name: arguments[name][:, seen:] for name in _TOKENS if arguments.get(name) is not None}}


def _named(arguments: dict[str, Any], cache: RingCache, parameters: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a forward with the cache under its name in the model, whatever `generate` calls it."""
    known = [name for name in CACHES if name in parameters]
    if not known:  # of RWKV, which has no cache
        return arguments
    return {**{name: x for name, x in arguments.items() if x is not cache}, known[0]: cache}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _bring_together(body: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return the output of a model's body with the hidden states of the tokens whose logits are asked for."""
    cache = cache_of_forward()
    if cache is None or cache.turn is None:
        return None
    output["last_hidden_state"] = cache.gather(output["last_hidden_state"])
    return output


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """End the turn of a forward, also of one that failed."""
    cache = ring_cache_of((*args, *kwargs.values()))
    if cache is not None:
        end_turn(model, cache)
    if cache is not None and not cache.end_turn() and output is not None:
        raise ValueError(
            f"{type(model).__name__} computed logits without its layers, or without {model.base_model_prefix}, so "
            "they cover this rank's tokens only; a RingCache is for models that are built like LlamaForCausalLM"
        )
