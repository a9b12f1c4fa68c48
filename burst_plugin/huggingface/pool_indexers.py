"""Indexers of transformers' models that select pools of keys (GLM-5-Next): on shards among the pools of all ranks.

    layer -> indexer(hidden_states, ...)                          on shards returns a `PoolChoice`
          -> build_attention_mask_from_topk(topk_indices=choice)  hands it on in place of a mask of queries by keys
          -> attention(..., choice)                               `attention.forward` gives its keys to the ring
    next layer (prev_topk_indices=choice)                         which may share the selection

transformers begins pools at the first real token of a row, whatever documents the row has. On a ring they begin anew
with every document, so that each text has the pools that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.weak import TensorWeakRef
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.indexer_shards import shard_of_indexer
from burst_plugin.huggingface.known_code import problem_of_code, replace_once
from burst_plugin.huggingface.mask_recipes import NO_CACHE, cache_of_forward
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.sequence.masks import Causal
from burst_plugin.sparse import keys_of_pools, pool, select_pools

KINDS = ("Glm5NextTextIndexer",)
_USED = (
    *("wq_b", "wk", "k_norm", "weights_proj", "n_heads", "softmax_scale", "index_topk", "index_kpool", "topk"),
    *("index_kpool_compress_gate", "get_pooled_states", "append_visible_tail"),
)
_MAKES_MASK = "build_attention_mask_from_topk"


class PoolChoice:
    """The pools, runs of equally many consecutive keys, that the queries of a shard select; layers may share it.

    starts: where the selected pools start in the whole sequence, int32 [B, S_local, n], -1 for none.
    keys_of: takes `starts`, and returns the positions of all keys that queries attend to, int32 [B, S_local, m], -1
        for none: the keys of the selected pools, and of a query's own, unfinished pool.
    """

    def __init__(self, starts: Tensor, keys_of: Callable[[Tensor], Tensor]) -> None:
        self._starts, self._keys_of = starts, keys_of
        self._last: Callable[[], Tensor | None] = lambda: None

    def keys(self) -> Tensor:
        """Return the positions of the keys that queries attend to, int32 [B, S_local, m], -1 for none.

        The tensor is made anew unless an earlier caller, such as autograd, still has it.
        """
        positions = self._last()
        if positions is None:
            positions = self._keys_of(self._starts)
            self._last = TensorWeakRef(positions)
        return positions


def pool_indexers(model: torch.nn.Module) -> Iterator[Any]:
    """Yield a model's pool indexers: the modules that select for each query whole pools of keys to attend to."""
    return (each for each in text_modules(model) if is_pool_indexer(each))


def is_pool_indexer(module: Any) -> bool:
    """Return whether a module is an indexer that selects pools of keys, of a class that is known."""
    return any(each.__name__ in KINDS for each in type(module).__mro__)


def problems_of_pool_indexers(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's pool indexers cannot run on a ring; empty if they can.

    Their code may differ from known releases of transformers, or queries do not always attend to their own pool.
    """
    reasons = {}
    for module in pool_indexers(pretrained):
        name = type(module).__name__
        if problem := problem_of_code(type(module), _USED):
            reasons[name] = problem
        elif not module.index_kpool_always_select_tail and module.index_kpool > 1:
            reasons[name] = (
                f"its {name} has index_kpool_always_select_tail=False, by which the first tokens of a text select "
                "none, and transformers lets them attend to all tokens, later ones too; set it to True"
            )
    return list(reasons.values())


def use_pool_indexers(pretrained: PreTrainedModel) -> None:
    """Have the pool indexers of a model select among the pools of all ranks in all its forwards on shards.

    Replaces the `forward` of their classes, and the method of layers that makes a mask of a selection. Classes whose
    code is not known are left as they are; repeated calls change nothing.
    """
    for module in pool_indexers(pretrained):
        if not problem_of_code(type(module), _USED):
            replace_once(type(module), "forward", _take_over)
    for layer in text_modules(pretrained):
        if hasattr(type(layer), _MAKES_MASK):
            replace_once(type(layer), _MAKES_MASK, _hand_on)


def _hand_on(original: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Hand a shard's selection to attention as it is, without a mask; give other selections to the original."""
    arguments = by_name(partial(original, layer), args, kwargs)
    choice = arguments["topk_indices"]
    return choice if isinstance(choice, PoolChoice) else original(layer, **arguments)


def _take_over(original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Take the place of an indexer's `forward`. Return a `PoolChoice` on shards, and keys of its own otherwise."""
    shard = shard_of_indexer(module)
    if shard is not None:
        return _select(module, shard, by_name(partial(original, module), args, kwargs))
    if cache_of_forward() is not None:
        raise ValueError(NO_CACHE.format(type(module).__name__))
    return original(module, *args, **kwargs)


@torch.no_grad()
def _select(module: Any, shard: SequenceShard, arguments: Mapping[str, Any]) -> PoolChoice:
    """Return the pools that the queries of a shard select among the pools of all ranks."""
    hidden, name, size = arguments["hidden_states"], f"indexer of layer {module.layer_idx}", module.index_kpool
    cache = arguments.get("cache", arguments.get("past_key_values"))
    if cache is not None and cache.get_seq_length(module.layer_idx) > hidden.shape[1]:
        raise ValueError(
            f"{type(module).__name__} got a cache of earlier tokens with a sharded batch: give whole texts"
        )
    q = module.wq_b(arguments["q_resid"]).view(*hidden.shape[:2], module.n_heads, module.head_dim)
    k, gates = module.k_norm(module.wk(hidden)), linear(hidden, module.index_kpool_compress_gate)
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    kind = torch.promote_types(q.dtype, k.dtype)  # autocast widens what is normed
    terms: dict[str, Any] = {
        "mask": Causal() if shard.mask is None else Causal() & shard.mask,
        "tokens": shard.tokens,
    }

    def pooled(both: list[Tensor]) -> Tensor:
        keys, of_tokens = both
        shares = (of_tokens.float() + module.index_kpool_compress_ape.float()).softmax(1)
        mean: Tensor = (shares.to(keys.dtype) * keys).sum(1)
        return mean

    keys = pool(pooled, [k.to(kind), gates], size, shard.cp, tag=(f"keys of {name}", shard), **terms)
    starts = select_pools(
        q.to(kind),
        keys,
        weights,
        size,
        module.index_topk // size,
        shard.cp,
        scale=module.softmax_scale,
        tag=(name, shard),
        **terms,
    )
    return PoolChoice(starts, partial(keys_of_pools, size=size, cp=shard.cp, **terms))
