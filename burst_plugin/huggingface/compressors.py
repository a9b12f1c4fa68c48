"""Compressors of DeepSeek V4: on shards they make the entries of windows whose last tokens this rank holds.

    layer -> compressor(hidden_states, ...)              the `forward` of its class is replaced
                 shard:       entries, by sparse.Entries; which of them an indexer selects, by sparse.select_pools
                 whole batch: the family's own
          -> attention(..., keys of tokens and entries)  `attention.forward` asks for what queries attend to

transformers counts windows from the first slot of a row, and compares them with position_ids. On a ring they begin
anew with every document and after padding, so that each text has the entries that it would have alone. transformers
would add to a mask tensor which entries a query attends to; there is no mask tensor here, so the compressor holds
them from one call to the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.known_code import of_file, problem_of_code, replace_once
from burst_plugin.huggingface.mask_recipes import MaskRecipe, cache_of_forward, shard_among
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.sparse import Entries, select_pools

KINDS = {
    "DeepseekV4HCACompressor": "heavily_compressed_attention",
    "DeepseekV4CSACompressor": "compressed_sparse_attention",
}
_CALL, _HELD = "_burst_plugin_call", "_burst_plugin_entries"  # in the middle of a layer's forward
_ROTARY = "apply_rotary_pos_emb"
_USED = (
    "kv_proj",
    "gate_proj",
    "position_bias",
    "kv_norm",
    "rotary_emb",
    "rope_layer_type",
    "compress_rate",
    _ROTARY,
)
_USED_BY_INDEXER = (*_USED, "q_b_proj", "scorer", "index_topk")


class _LayerCall(NamedTuple):
    """The shard and the mask that the layer of a compressor is given."""

    shard: SequenceShard | None
    recipe: Any


class _IndexerCall(NamedTuple):
    """What a compressor hands to its indexer, besides arguments."""

    shard: SequenceShard
    entries: Entries


class EntriesOfShard(NamedTuple):
    """The compressed entries, one for each window of tokens, that queries of a shard attend to besides tokens.

    size: how many of this rank's keys are entries; they come after its tokens.
    entries: says which tokens of all ranks each entry is made of, and computes the attention.
    starts: where the windows of selected entries start in the whole sequence, int32 [B, S_local, k], -1 for none;
        None if queries attend to all entries of earlier windows.
    """

    size: int
    entries: Entries
    starts: Tensor | None

    def attend(self, q: Tensor, k: Tensor, mask: Mask, window: int, terms: Mapping[str, Any]) -> Tensor:
        """Return attention [B, S_local, H, D] of this rank's queries to all ranks' tokens and entries; collective.

        q: [B, S_local, H, D]. k: [B, S_local + size, 1, D], keys that are values as well, of tokens, then of entries.
        mask: which tokens a query attends to, with documents and padding. window: how many tokens back, itself
            included.
        terms: keyword arguments of `burst_attention`, of which `scores`, `sink` and `tag` are used.
        """
        kept = {name: terms[name] for name in ("scores", "sink", "tag")}
        return self.entries.attend(q, k, mask, starts=self.starts, window=window, **kept)


class EntriesOfBatch(NamedTuple):
    """A mask that says which compressed entries each query of a whole batch attends to besides tokens.

    seen: bool [B, 1, queries, entries], True where the query attends to the entry.
    """

    seen: Tensor

    @property
    def size(self) -> int:
        """Return the number of entries in a batch row."""
        return self.seen.shape[3]


def compressors(model: torch.nn.Module) -> Iterator[Any]:
    """Yield a model's compressors: modules of known classes that make one key (an entry) of each window of tokens."""
    return (each for each in text_modules(model) if _kind(type(each)) is not None)


def _kind(kind: type) -> str | None:
    """Return the type of the layers whose compressors are of a class; None if it is not known."""
    return next((KINDS[each.__name__] for each in kind.__mro__ if each.__name__ in KINDS), None)


def layer_types_of_compressors(pretrained: PreTrainedModel) -> tuple[str, ...]:
    """Return the types, as in the `layer_types` of configurations, of a model's layers with compressors."""
    return tuple(sorted({_kind(type(each)) or "" for each in compressors(pretrained)}))


def problems_of_compressors(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's compressors cannot run on a ring; empty if they can.

    The only reason is that the code of a compressor, or of its indexer, differs from known releases of transformers.
    """
    reasons = {}
    for module in compressors(pretrained):
        for part, used in _parts(module):
            reasons[type(part)] = problem_of_code(type(part), used)
    return [*filter(None, reasons.values())]


def _parts(module: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Return a compressor and its indexer, if it has one, with the names that their code uses."""
    indexer = getattr(module, "indexer", None)
    return [(module, _USED), *([] if indexer is None else [(indexer, _USED_BY_INDEXER)])]


def use_compressors(pretrained: PreTrainedModel) -> None:
    """Have the compressors of a model make entries on shards for the queries of all ranks, in all its forwards.

    Replaces the `forward` of the classes of compressors and of their indexers, and adds hooks to the layers around
    them. Classes whose code is not known are left as they are; repeated calls change nothing.
    """
    for layer in text_modules(pretrained):
        module: Any = getattr(layer, "compressor", None)
        if _kind(type(module)) is None or any(problem_of_code(type(part), used) for part, used in _parts(module)):
            continue
        replace_once(type(module), "forward", _compress)
        if hasattr(module, "indexer"):
            replace_once(type(module.indexer), "forward", _select)
        if _note_call not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_note_call, with_kwargs=True)
            layer.register_forward_hook(_forget_call, always_call=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_call(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a compressor the shard and the mask of its layer, also where a checkpoint computes the layer again."""
    recipe = next((each for each in (*args, *kwargs.values()) if isinstance(each, MaskRecipe)), None)
    setattr(layer.compressor, _CALL, _LayerCall(shard_among(args, kwargs), recipe))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forget_call(layer: Any, args: tuple[Any, ...], output: Any) -> None:
    """Note the end of a layer, also of one that failed."""
    vars(layer.compressor).pop(_CALL, None)
    vars(layer.compressor).pop(_HELD, None)


def held_entries(layer: torch.nn.Module) -> EntriesOfShard | EntriesOfBatch | None:
    """Return the compressed entries that a layer's compressor has appended to the layer's keys; None if it has none.

    layer: an attention layer. Its compressor has held the entries since it made them, and lets go of them.

    Returns an `EntriesOfShard` if the layer was called on a shard, an `EntriesOfBatch` on a whole batch.

    Raises ValueError if the compressor has made entries of this rank's tokens alone, since its `forward` was
    replaced.
    """
    module = getattr(layer, "compressor", None)
    call: _LayerCall | None = None if module is None else vars(module).get(_CALL)
    if call is None:
        return None
    if call.shard is not None and _HELD not in vars(module):
        raise ValueError(
            f"{type(module).__name__} got a sharded batch and has made entries of this rank's tokens alone: "
            "something has replaced its forward; call burst_plugin.huggingface.prepare after that"
        )
    found: EntriesOfShard | EntriesOfBatch | None = vars(module).pop(_HELD, None)
    return found


def _compress(original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Take the place of a compressor's `forward`. Return entries [B, 1, n, D], and a bias for whole batches alone."""
    call: _LayerCall | None = vars(module).get(_CALL)
    if call is None or (call.shard is None and call.recipe is None):  # of another implementation of attention
        whole: tuple[Tensor, Any] = original(module, *args, **kwargs)
        return whole
    name = type(module).__name__
    if call.shard is None:
        _check_whole_batch(name, call.recipe)
        made, bias = original(module, *args, **kwargs)
        seen = bias == 0 if bias is not None else made.new_ones((*made.shape[:2], 1, made.shape[2]), dtype=torch.bool)
        setattr(module, _HELD, EntriesOfBatch(seen))
        return made, bias
    own = partial(original, module)
    arguments: dict[str, Any] = {**dict.fromkeys(inspect.signature(own).parameters), **by_name(own, args, kwargs)}
    cache = arguments.get("cache", arguments.get("past_key_values"))
    if cache is not None and cache.get_seq_length(arguments["layer_idx"]) > arguments["hidden_states"].shape[1]:
        raise ValueError(f"{name} got a cache of earlier tokens with a sharded batch: give whole texts")
    made, held = _of_shard(module, call.shard, arguments)
    setattr(module, _HELD, held)
    return made.unsqueeze(1), None


def _check_whole_batch(name: str, recipe: MaskRecipe) -> None:
    """Raise ValueError for a whole batch that a compressor of transformers would compute wrongly."""
    if cache_of_forward() is not None:
        raise ValueError(
            f"{name} makes entries of the tokens of all ranks, which a RingCache does not hold; generate with a "
            "cache of transformers, on one rank"
        )
    if recipe.keeps_documents_apart:
        raise ValueError(
            f"{name} got packed documents as a whole batch, where transformers makes entries across documents; give "
            "what burst_plugin.shard_batch(batch, cp) returns, or a row for each document"
        )


def _of_shard(
    module: Any, shard: SequenceShard, arguments: Mapping[str, Any]
) -> tuple[Tensor, EntriesOfShard | None]:
    """Return the entries of this rank [B, n, D], and what queries attend to; nothing if no window is complete."""
    hidden: Tensor = arguments["hidden_states"]
    indexer = getattr(module, "indexer", None)
    entries = Entries.known(
        shard.cp,
        module.compress_rate,
        indexer is not None,
        mask=shard.mask,
        tokens=shard.tokens,
        batch=hidden.shape[0],
    )
    if not entries.count:
        return hidden.new_empty((hidden.shape[0], 0, module.head_dim)), None
    tag = (f"compressor of layer {arguments['layer_idx']}", shard)
    made = _entries(module, entries, arguments, tag)
    starts = None
    if indexer is not None:
        setattr(indexer, _CALL, _IndexerCall(shard, entries))
        starts = indexer(**arguments)
    return made, EntriesOfShard(made.shape[1], entries, starts)


def _entries(module: Any, entries: Entries, arguments: Mapping[str, Any], tag: object) -> Tensor:
    """Return the entries that a compressor or an indexer makes, [B, n, D], as the family computes them."""
    hidden, positions = arguments["hidden_states"], arguments["position_ids"]
    pooled = entries.pooled(module.kv_proj(hidden), module.gate_proj(hidden), module.position_bias, tag)
    last = entries.last_tokens(hidden.device).clamp(min=0)
    starts = positions.expand(len(last), -1).gather(1, last) - (module.compress_rate - 1)
    return _rotated(module, module.kv_norm(pooled).unsqueeze(1), starts).squeeze(1)


def _rotated(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Return x [B, H, S, D] rotated by positions [B, S]."""
    rotate = of_file(module, _ROTARY)
    cos, sin = module.rotary_emb(x, position_ids=positions, layer_type=module.rope_layer_type)
    rotated: Tensor = rotate(x, cos, sin)
    return rotated


@torch.no_grad()
def _select(original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    """Take the place of an indexer's `forward`.

    Return where the windows that queries of a shard select start, int32 [B, S_local, n].
    """
    call: _IndexerCall | None = vars(module).pop(_CALL, None)
    if call is None:
        own: Tensor = original(module, *args, **kwargs)
        return own
    (shard, entries), arguments = call, by_name(partial(original, module), args, kwargs)
    hidden, tag = arguments["hidden_states"], (f"indexer of layer {arguments['layer_idx']}", shard)
    keys = entries.at_last_tokens(_entries(module, entries, arguments, tag))
    q = module.q_b_proj(arguments["q_residual"]).view(*hidden.shape[:2], -1, module.head_dim).transpose(1, 2)
    q = _rotated(module, q, arguments["position_ids"]).transpose(1, 2)
    weights = module.scorer.weights_proj(hidden).float() * module.scorer.weights_scaling
    kind = torch.promote_types(q.dtype, keys.dtype)
    return select_pools(
        q.to(kind),
        keys.to(kind),
        weights,
        module.compress_rate,
        module.index_topk,
        shard.cp,
        mask=Causal() if shard.mask is None else Causal() & shard.mask,
        tokens=shard.tokens,
        scale=module.scorer.softmax_scale,
        tag=tag,
    )
