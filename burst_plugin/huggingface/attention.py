"""The attention function of `attn_implementation="burst"`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from burst_plugin.activations.replaced_forward import ReplacedForward
from burst_plugin.attention import burst_attention
from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.huggingface.block_indexers import BlockChoice
from burst_plugin.huggingface.compressors import EntriesOfBatch, EntriesOfShard, held_entries
from burst_plugin.huggingface.latents import attend_to_latents, held_latents, up_weight
from burst_plugin.huggingface.llama4 import chunk_mask, with_temperature
from burst_plugin.huggingface.mask_recipes import ATTN_IMPLEMENTATION as ATTN_IMPLEMENTATION
from burst_plugin.huggingface.mask_recipes import (
    MaskRecipe,
    cache_of_forward,
    mask_recipe,
    shard_among,
    shard_of_forward,
)
from burst_plugin.huggingface.pool_indexers import PoolChoice
from burst_plugin.inference.attending import CachedExtras
from burst_plugin.scores import Scores
from burst_plugin.sequence.masks import Causal, Full, Keys, Mask, SlidingWindow

# An attribute of modules, in models where tokens meet in attention only: the number of the module in the model.
EXAMINED = "_burst_plugin_examined"

_MARK = "_burst_plugin_wrapped"

# Tensors that layers hand on and that are used, or that change nothing. Others might change what is computed.
_KNOWN_TENSORS = frozenset(
    {
        "s_aux",
        "position_ids",
        "cache_position",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "input_ids",
        "indices",
        "labels",
        "shift_labels",
        "num_items_in_batch",
        "token_type_ids",
        "margin",  # TRL's RewardTrainer hands the model all that a batch has
    }
)
_REFUSED = ("position_bias", "head_mask", "cache", "block_mask", "alibi")  # even if they are not tensors


def register_attention() -> str:
    """Register the attention and mask functions of `attn_implementation="burst"` with transformers.

    With transformers 5, attention functions of other implementations raise ValueError from now on if they get a
    sharded batch. Repeated calls change nothing. Returns a line that says what was done. Raises ImportError if
    transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTN_IMPLEMENTATION, forward)
    AttentionMaskInterface.register(ATTN_IMPLEMENTATION, mask_recipe)
    usual = getattr(AttentionInterface, "get_interface", None)  # none in transformers 4
    if usual is not None and not hasattr(usual, _MARK):
        setattr(wrap(AttentionInterface, "get_interface", _refusing_shards), _MARK, True)
    return f'transformers knows attn_implementation="{ATTN_IMPLEMENTATION}"'


def _refusing_shards(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Replace `AttentionInterface.get_interface`, so that functions without the ring are not given shards."""
    attention = original(*args, **kwargs)
    return attention if attention is forward else partial(_on_whole_batches, attention)


def _on_whole_batches(attention: Callable[..., Any], module: torch.nn.Module, /, *args: Any, **options: Any) -> Any:
    """Call an attention function that attends to this rank's tokens only, on a whole batch."""
    if options.get(SHARD_KEY) is None:
        return attention(module, *args, **options)
    instead = "call burst_plugin.huggingface.prepare(model) first, on every model that is given shards"
    if hasattr(module, EXAMINED):
        instead = f"its attn_implementation is another one now; switch it back to {ATTN_IMPLEMENTATION!r}"
    raise ValueError(
        f"{type(module).__name__} got a sharded batch, but computes without the ring, so that ranks would attend to "
        f"their own tokens only: {instead}"
    )


def forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: on the ring for sharded batches, on this rank for whole ones.

    Args:
        module: the attention layer.
        query: [B, heads, S, D]; on a sharded batch S is the number of this rank's tokens.
        key, value: [B, KV heads, S, D].
        attention_mask: a `MaskRecipe`, which describes the layer's own mask, or the selection of the layer's indexer
            (a `PoolChoice`). On the ring padding and documents come from the batch's `SequenceShard`.
        options: `scaling`, `dropout`, `sliding_window`, `softcap`, `s_aux` (sinks), `is_causal`, `alibi_slopes` (on
            the ring only); `burst`, the `SequenceShard`, if the layer passes it on; other keyword arguments of the
            model.

    Returns:
        [B, S, heads, D], and None in place of weights.

    Raises:
        ValueError: an option is not supported, or a batch in training was not sharded.
    """
    if isinstance(attention_mask, PoolChoice):
        attention_mask, options = None, {**options, "indices": attention_mask.keys()}
    shard = _shard(attention_mask, options)
    if shard is None:
        if cache_of_forward() is not None:
            return _cached(module, (query, key, value), attention_mask, options), None
        check_not_training(module)
        return _whole(module, (query, key, value), attention_mask, options), None
    if not hasattr(module, EXAMINED):
        raise ValueError(
            f"{type(module).__name__} got a sharded batch, but it has not been checked that its model mixes tokens "
            "in attention only: call burst_plugin.huggingface.prepare(model) first"
        )
    entries = held_entries(module)
    behind = 0 if entries is None else entries.size  # further keys, which are no tokens
    problem = _problem_of_lengths(module, shard, (query.shape[2], key.shape[2] - behind))
    problem = problem or problem_of_call(module, attention_mask, options)
    if problem:
        raise ValueError(problem)
    dropout = _dropout(module, shard, options)
    scores = Scores(
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        alibi_slopes=options.get("alibi_slopes"),
        dropout=dropout,
        seed=_seed(shard, module) if dropout else 0,
    )
    query = with_temperature(module, query, shard)
    latents, mask = held_latents(module, key), mask_of_call(module, shard, attention_mask, options)
    q, k, v = (cast(x).transpose(1, 2) for x in (query, *(latents or (key, value))))
    terms: dict[str, Any] = {
        "mask": mask,
        "tokens": shard.tokens,
        "scores": scores,
        "sink": _sink(options, q),
        "selection": _selection(options, shard, mask),
        "tag": (f"layer {module.layer_idx}" if hasattr(module, "layer_idx") else None, shard),
    }
    if isinstance(entries, EntriesOfShard):
        return entries.attend(q, k, mask, options["sliding_window"], terms), None
    if latents is None:
        return burst_attention(q, k, v, shard.cp, **terms), None
    weight = cast(up_weight(module, latents.c))
    return attend_to_latents((q, k, v), weight, shard.cp, terms), None


def _selection(options: Mapping[str, Any], shard: SequenceShard, mask: Mask) -> Tensor | None:
    """Return the keys that a layer's indexer has selected; None if it has none."""
    choice = options.get("block_indices")
    selected: Tensor | None = options.get("indices")
    return choice.on_shard(shard, mask) if isinstance(choice, BlockChoice) else selected


def _problem_of_lengths(module: torch.nn.Module, shard: SequenceShard, lengths: tuple[int, int]) -> str:
    """Return the error if a layer on a shard has wrong numbers of queries and keys; empty if they are right."""
    (queries, keys), share = lengths, shard.tokens.length // shard.cp.ranks
    if keys != queries:
        return (
            f"{type(module).__name__} got {queries} queries on {keys} keys: past_key_values are not spread over "
            "ranks; give whole sequences, without past_key_values"
        )
    if queries != share:
        return (
            f"{type(module).__name__} got {queries} tokens, but a rank's share of the batch is {share}: something in "
            "the model adds or drops tokens, as prompt tuning does"
        )
    return ""


def _cached(
    module: torch.nn.Module, tensors: tuple[Tensor, Tensor, Tensor], recipe: Any, options: Mapping[str, Any]
) -> Tensor:
    """Attend to what the ranks of a `RingCache` hold, new tokens included."""
    cache = cache_of_forward()
    assert cache is not None
    options = {name: value for name, value in options.items() if value is not cache}
    problem = problem_of_call(module, recipe, options)
    if problem:
        raise ValueError(problem)
    q, k, v = (cast(x).transpose(1, 2) for x in tensors)
    mask = recipe.mask if isinstance(recipe, MaskRecipe) else _asked_mask(module, options)
    scores = Scores(scale=options.get("scaling"), softcap=options.get("softcap"))
    choice, selection = options.get("block_indices"), options.get("indices")
    if isinstance(choice, BlockChoice):
        selection = choice.in_cache(cache, mask)
    extras: CachedExtras = {"sink": _sink(options, q), "selection": selection}
    return cache.attend(type(module).__name__, (q, k, v), mask, scores, extras)


def _shard(attention_mask: Any, options: Mapping[str, Any]) -> SequenceShard | None:
    """Return the shard that a layer or its mask hands on; None for a whole batch."""
    return shard_among((attention_mask,), options)


def is_on_ring(values: Iterable[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a layer is called on a sharded batch, and so attends on the ring.

    values, options: the positional and keyword arguments of the call, which have the shard or a `MaskRecipe` with it.
    """
    return shard_among(values, options) is not None


def check_not_training(module: torch.nn.Module) -> None:
    """Raise ValueError if a layer that was called without a shard is in training mode, with gradients enabled."""
    if module.training and torch.is_grad_enabled():
        raise ValueError(f"{type(module).__name__} {_missing_shard()}")


def _missing_shard() -> str:
    """Return why a layer in training has no shard."""
    if shard_of_forward() is not None:
        return (
            "does not know the shard that its model got: the layers around it pass on neither their keyword "
            "arguments nor the mask (which is enough unless torch.compile is used); have them pass on the keyword "
            "arguments"
        )
    return (
        "got a batch that is not sharded: pass what burst_plugin.shard_batch(batch, cp) or "
        "burst_plugin.deepspeed.shard_batch(batch) returns; to train on whole sequences use another "
        "attn_implementation"
    )


def cast(x: Tensor) -> Tensor:
    """Return x in the type that autocast gives attention: rotary embeddings widen queries and keys, not values."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def _is_of_accelerate(hook: Any) -> bool:
    """Return whether a hook takes masks from attention, as Accelerate's for `cp_size` does."""
    return getattr(hook, "__qualname__", "").startswith("_attach_context_parallel_hooks")


def problem_of_call(module: torch.nn.Module, attention_mask: Any, options: Mapping[str, Any]) -> str:
    """Return why the ring cannot compute a call of an attention layer; an empty string if it can.

    module: the layer. attention_mask: its mask argument, a `MaskRecipe` or None; anything else is a problem.
    options: its keyword arguments, of which those with an unknown tensor or `output_attentions=True` are problems.
    """
    name, implementation = type(module).__name__, f'attn_implementation="{ATTN_IMPLEMENTATION}"'
    for option, value in options.items():
        strange = isinstance(value, Tensor) and option not in _KNOWN_TENSORS
        if strange or (option in _REFUSED and value is not None):
            return (
                f"{name} passes {option}, which {implementation} does not support; use another attn_implementation, "
                "or leave it out if the batch has it"
            )
    if any(_is_of_accelerate(hook) for hook in module._forward_pre_hooks.values()):
        return (
            f"{name} has lost its mask to Accelerate's own context parallelism; leave cp_size out of "
            "ParallelismConfig, and give the ranks of the ring the same batch"
        )
    if options.get("output_attentions"):
        return f"{name}: output_attentions=True is not supported by {implementation}; leave it out"
    if isinstance(attention_mask, MaskRecipe):
        unknown = attention_mask.unknown
        if unknown:
            return f"{name} uses masks that {implementation} does not know: {', '.join(unknown)}"
        window, seen = options.get("sliding_window"), attention_mask.window
        if window is not None and (seen is None or window not in (seen, seen + 1)):  # encoders add the token itself
            return (
                f"{name} passes sliding_window={window}, but the window of its mask is {seen}; set both by "
                "config.sliding_window"
            )
    elif attention_mask is not None:
        return (
            f"{name} got an attention_mask of its own, a {type(attention_mask).__name__}, with a sharded batch: give "
            "padding as attention_mask [batch, tokens] and documents as position_ids to shard_batch"
        )
    return ""


def mask_of_call(module: torch.nn.Module, shard: SequenceShard, recipe: Any, options: Mapping[str, Any]) -> Mask:
    """Return the layer's own mask combined with the mask of the batch, in positions of the whole sequence.

    module: the layer. recipe: its mask argument; if that is no `MaskRecipe`, `is_causal` and `sliding_window` among
        the keyword arguments `options` say what the layer's own mask is. Padding and documents are those of `shard`.

    Raises ValueError for a layer that attends to later tokens in a batch with prefix trees.
    """
    layer_mask = recipe.mask if isinstance(recipe, MaskRecipe) else _asked_mask(module, options)
    masks: list[Mask] = [layer_mask] if shard.mask is None else [layer_mask, shard.mask]
    if layer_mask.looks_ahead and shard.mask is not None and shard.mask.trees:
        raise ValueError(
            f"{type(module).__name__} attends to later tokens too, which are not defined in a tree: a token at a "
            "branch has several next ones; use a causal model, or leave the tree out"
        )
    if isinstance(recipe, MaskRecipe) and recipe.chunk is not None:
        masks.append(chunk_mask(shard, recipe.chunk))
    if layer_mask.looks_ahead and shard.tokens.length > shard.length:  # padding is not attended to
        masks.append(Keys(((0, shard.length),)))
    return reduce(and_, masks)


def _asked_mask(module: torch.nn.Module, options: Mapping[str, Any]) -> Mask:
    """Return the mask that a layer asks for by options, as for flash attention; a window counts the token itself."""
    causal, window = options.get("is_causal"), options.get("sliding_window")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if window is None:
        return Causal() if causal else Full()
    return SlidingWindow(window - 1, 0 if causal else window - 1)


def _sink(options: Mapping[str, Any], q: Tensor) -> Tensor | None:
    sink = options.get("s_aux")
    return None if sink is None else sink.to(q.dtype)


def _dropout(module: torch.nn.Module, shard: SequenceShard, options: Mapping[str, Any]) -> float:
    """Return the share of probabilities that a layer drops."""
    dropout = float(options.get("dropout") or 0.0) if module.training else 0.0
    if dropout and isinstance(vars(module).get("forward"), ReplacedForward):
        raise ValueError(
            f"{type(module).__name__} drops attention probabilities, which head_chunk={shard.cp.strategy.head_chunk} "
            "would repeat in every chunk of heads; use attention_dropout=0 in the model's config, or head_chunk=0"
        )
    return dropout


def _seed(shard: SequenceShard, module: torch.nn.Module) -> int:
    """Return dropout's seed: equal on all ranks and in recomputation, different for each forward and layer."""
    if shard.seed is None:
        raise ValueError(
            f"{type(module).__name__} drops attention probabilities in a checkpoint around the whole model, and its "
            "shard was used in several forwards, so it is not known which one is recomputed; call shard_batch again "
            "for each forward, or use the model's gradient_checkpointing_enable()"
        )
    return int((shard.seed * 1_000_003 + getattr(module, EXAMINED)) % (2**31 - 1))


def _whole(
    module: torch.nn.Module, tensors: tuple[Tensor, Tensor, Tensor], attention_mask: Any, options: Mapping[str, Any]
) -> Tensor:
    """Attend to whole sequences on this rank alone, for evaluation and generation."""
    selected, choice = options.get("indices"), options.get("block_indices")
    plain = all(options.get(name) is None for name in ("softcap", "s_aux", "sinks", "position_bias"))
    entries = held_entries(module)
    if isinstance(attention_mask, MaskRecipe):
        if choice is not None:
            _check_blocks(module, choice, attention_mask)
        attention_mask = attention_mask.tensor(always=not (plain and selected is None and choice is None))
    if isinstance(entries, EntriesOfBatch):
        seen = entries.seen.expand(*attention_mask.shape[:3], -1)
        attention_mask = torch.cat([attention_mask, seen], -1)
    if choice is not None:
        keeps = choice.on_whole_batch(tensors[0].shape[2], tensors[1].shape[2])
        attention_mask = attention_mask & keeps.repeat_interleave(tensors[0].shape[1] // keeps.shape[1], 1)
    if selected is not None:
        shape = (*selected.shape[:2], tensors[1].shape[2])
        keys = torch.zeros(shape, dtype=torch.bool, device=selected.device).scatter_(2, selected.long(), True)
        attention_mask = attention_mask & keys[:, None]
    if plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        known = {name: options.get(name) for name in ("dropout", "scaling", "is_causal")}
        given = {name: x for name, x in known.items() if x is not None}
        out: Tensor = sdpa_attention_forward(module, *tensors, attention_mask, **given)[0]
        return out
    return _written_out(tensors, attention_mask, options)


def _check_blocks(module: torch.nn.Module, choice: Any, recipe: MaskRecipe) -> None:
    """Raise ValueError where the layer's indexer cannot select blocks of a whole batch."""
    name = type(module).__name__
    if not isinstance(choice, BlockChoice):
        raise ValueError(f"{name} passes block_indices: call burst_plugin.huggingface.prepare(model) first")
    if recipe.keeps_documents_apart:
        raise ValueError(
            f"{name} got packed documents as a whole batch, in which its indexer takes position_ids for places in "
            "the row; give what burst_plugin.shard_batch(batch, cp) returns, or a row for each document"
        )


def _written_out(
    tensors: tuple[Tensor, Tensor, Tensor], attention_mask: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Compute attention by its definition, in float32 or wider, with softcap and sinks."""
    query, key, value = tensors
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1).to(wide) for x in (key, value))
    scaling = options.get("scaling")
    scores = query.to(wide) @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    softcap, sink, bias = options.get("softcap"), options.get("s_aux"), options.get("position_bias")
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    rest = options.get("sinks") if sink is None else sink.reshape(1, -1, 1, 1)  # of each query, or of each head
    if rest is not None:
        scores = torch.cat([scores, rest.to(wide).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]
    out: Tensor = (weights @ value).to(query.dtype).transpose(1, 2).contiguous()
    return out
