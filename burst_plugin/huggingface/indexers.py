"""Indexers of transformers' models with sparse attention: on shards they select among the keys of all ranks.

    layer -> indexer(hidden_states, ..., attention_mask[:, 0])      the `forward` of its class is replaced
                 shard:       queries, keys and weights as the family computes them, then sparse.select_keys
                 `RingCache`: likewise, and it keeps the keys, `RingCache.select`
                 whole batch: the family's own
          -> attention(..., indices=selected)                       `attention.forward` hands them to the ring

transformers trains no indexer: nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.attention import mask_of_call, problem_of_call
from burst_plugin.huggingface.block_indexers import LAYER_TYPE as BLOCK_LAYER_TYPE
from burst_plugin.huggingface.block_indexers import block_indexers, problems_of_block_indexers, use_block_indexers
from burst_plugin.huggingface.indexer_shards import shard_of_indexer, watch_layer
from burst_plugin.huggingface.known_code import of_file, problem_of_code, replace_once
from burst_plugin.huggingface.mask_indexers import mask_indexers, problems_of_mask_indexers, use_mask_indexers
from burst_plugin.huggingface.mask_recipes import MaskRecipe, cache_of_forward, shard_of_forward
from burst_plugin.huggingface.pool_indexers import (
    is_pool_indexer,
    pool_indexers,
    problems_of_pool_indexers,
    use_pool_indexers,
)
from burst_plugin.huggingface.ring_cache import RingCache
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.sparse import Indexed, select_cached, select_keys

LAYER_TYPE = "indexed_attention"
_USED = ("wq_b", "wk", "k_norm", "weights_proj", "n_heads", "softmax_scale", "index_topk", "topk")


class Indexer(NamedTuple):
    """A description of one class of indexers, the modules that select for each query the keys to attend to.

    rotary: the name of the function in the class's file that applies rotary embeddings to queries and keys.
    rotates_last: whether rotary embeddings go to the last numbers of each head, rather than to the first.
    widens_keys: whether keys are cast to the type of their norm's weight before they are normed.
    reads: the argument of `forward` that queries are projected from. If it is "hidden_states", these are normed
        first, and queries are scaled by a factor that depends on their positions.
    """

    rotary: str = "apply_rotary_pos_emb"
    rotates_last: bool = False
    widens_keys: bool = False
    reads: str = "q_resid"


_INTERLEAVED = "apply_rotary_pos_emb_interleave"
INDEXERS = {
    "DeepseekV32Indexer": Indexer(),
    "AXK2Indexer": Indexer(),
    "Dots3NoteTextIndexer": Indexer(_INTERLEAVED),
    "GlmMoeDsaIndexer": Indexer(_INTERLEAVED),
    "HYV4Indexer": Indexer(rotates_last=True, widens_keys=True),
    "HYV4VLIndexer": Indexer(rotates_last=True, widens_keys=True),
    "MistralLarge4TextIndexer": Indexer(_INTERLEAVED, reads="hidden_states"),
}


def indexers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Indexer]]:
    """Yield each indexer of a model whose class is known, with the `Indexer` that describes its class."""
    for module in text_modules(model):
        known = _known(type(module))
        if known is not None:
            yield module, known


def _known(kind: type) -> Indexer | None:
    return next((INDEXERS[each.__name__] for each in kind.__mro__ if each.__name__ in INDEXERS), None)


def layer_types_of_indexers(pretrained: PreTrainedModel) -> tuple[str, ...]:
    """Return the types, as in the `layer_types` of configurations, of a model's layers with indexers.

    Returns () if the model has no indexer, or one of an unknown class.
    """
    named = {type(module) for module in text_modules(pretrained) if type(module).__name__.endswith("Indexer")}
    of_blocks = {type(module) for module in block_indexers(pretrained)}
    of_keys = {kind for kind in named if _known(kind) is not None}
    of_keys |= {type(module) for module in (*pool_indexers(pretrained), *mask_indexers(pretrained))}
    if named > of_keys | of_blocks:
        return ()
    return (*((LAYER_TYPE,) if of_keys else ()), *((BLOCK_LAYER_TYPE,) if of_blocks else ()))


def problems_of_indexers(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's indexers, of any kind, cannot run on a ring; empty if they can.

    Their code may differ from known releases of transformers, or an option of theirs does not suit a ring.
    """
    problems = {type(module): _problem(type(module), known) for module, known in indexers(pretrained)}
    return [
        *problems_of_block_indexers(pretrained),
        *problems_of_pool_indexers(pretrained),
        *problems_of_mask_indexers(pretrained),
        *filter(None, problems.values()),
    ]


def _problem(kind: type[torch.nn.Module], known: Indexer) -> str:
    extra = ("q_input_norm", "softmax_scaling", "use_rope") if known.reads == "hidden_states" else ()
    return problem_of_code(kind, (*_USED, known.rotary, *extra))


def use_indexers(pretrained: PreTrainedModel) -> None:
    """Have the indexers of a model, of any kind, select among the keys of all ranks in all its forwards on shards.

    Replaces the `forward` of their classes, and adds hooks to the layers around them. Classes whose code is not known
    are left as they are; repeated calls change nothing.
    """
    use_block_indexers(pretrained)
    use_pool_indexers(pretrained)
    use_mask_indexers(pretrained)
    for module, known in indexers(pretrained):
        if not _problem(type(module), known):  # of a ring of one rank, which gives it whole batches
            replace_once(type(module), "forward", partial(_take_over, known))
    for layer in text_modules(pretrained):
        indexer = getattr(layer, "indexer", None)
        if _known(type(indexer)) is not None or is_pool_indexer(indexer):
            watch_layer(layer)


def _take_over(known: Indexer, original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Take the place of an indexer's `forward`. Return positions of keys, int32 [B, S, top k]."""
    arguments = by_name(partial(original, module), args, kwargs)
    recipe, shard, cache = arguments["attention_mask"], shard_of_indexer(module), cache_of_forward()
    if (shard is not None or cache is not None) and not isinstance(recipe, MaskRecipe):
        shared = "a sharded batch" if cache is None else "a RingCache"
        raise ValueError(
            f"{type(module).__name__} got {shared} and a mask of its own, a {type(recipe).__name__}, with "
            "which it would select among this rank's tokens only; pass on the mask that the model has made"
        )
    if not isinstance(recipe, MaskRecipe):
        return original(module, *args, **kwargs)
    if cache is not None:
        return _select_cached(module, known, cache, arguments)
    shard = shard or recipe.shard or shard_of_forward()
    if shard is None:  # torch.compile hands on recipes of whole batches, too
        dense = recipe.tensor(always=True)
        assert dense is not None, "always"
        return original(module, **{**arguments, "attention_mask": dense[:, 0]})
    return _select(module, known, shard, arguments)


@torch.no_grad()
def _select(module: Any, known: Indexer, shard: SequenceShard, arguments: Mapping[str, Any]) -> Tensor:
    """Return the keys that the queries of a shard select among the keys of all ranks."""
    recipe = arguments["attention_mask"]
    problem = problem_of_call(module, recipe, {})
    cache = arguments.get("cache", arguments.get("past_key_values"))
    if cache is not None and cache.get_seq_length(module.layer_idx) > arguments["hidden_states"].shape[1]:
        problem = f"{type(module).__name__} got a cache of earlier tokens with a sharded batch: give whole texts"
    if problem:
        raise ValueError(problem)
    indexed, tag = _indexed(module, known, arguments), (f"indexer of layer {module.layer_idx}", shard)
    assert indexed.weights is not None
    return select_keys(
        indexed.q,
        indexed.k,
        indexed.weights,
        module.index_topk,
        shard.cp,
        mask=mask_of_call(module, shard, recipe, {}),
        tokens=shard.tokens,
        scale=module.softmax_scale,
        tag=tag,
    )


@torch.no_grad()
def _select_cached(module: Any, known: Indexer, cache: RingCache, arguments: Mapping[str, Any]) -> Tensor:
    """Return the keys that new tokens select among all tokens of a cache, which keeps the keys of the new ones."""
    problem = problem_of_call(module, arguments["attention_mask"], {})
    if problem:
        raise ValueError(problem)
    terms: dict[str, Any] = {"mask": arguments["attention_mask"].mask, "scale": module.softmax_scale}
    choose = partial(select_cached, given=_indexed(module, known, arguments), top_k=module.index_topk, **terms)
    return cache.select(module.layer_idx, choose)


def _indexed(module: Any, known: Indexer, arguments: Mapping[str, Any]) -> Indexed:
    """Return queries [B, S, H, D], keys [B, S, D] and weights [B, S, H] of an indexer."""
    q, k = _queries_and_keys(module, known, arguments)
    kind = torch.promote_types(q.dtype, k.dtype)  # autocast widens what is normed
    hidden = arguments["hidden_states"].to(module.weights_proj.weight.dtype)
    weights = module.weights_proj(hidden).float() * module.n_heads**-0.5
    return Indexed(q.to(kind), k.to(kind), weights)


def _queries_and_keys(module: Any, known: Indexer, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return queries [B, S, H, D] and keys [B, S, D] of an indexer."""
    hidden: Tensor = arguments["hidden_states"]
    by_positions = known.reads == "hidden_states"
    source = module.q_input_norm(hidden) if by_positions else arguments[known.reads]
    q = module.wq_b(source).view(*hidden.shape[:2], module.n_heads, module.head_dim)
    if by_positions:
        q = module.softmax_scaling(q, arguments["position_ids"], head_dim_first=False)
    k = module.wk(hidden)
    k = module.k_norm(k.to(module.k_norm.weight.dtype)).to(hidden.dtype) if known.widens_keys else module.k_norm(k)
    k = k.unsqueeze(2)
    if getattr(module, "use_rope", True):
        q, k = _rotated(module, known, (q, k), arguments["position_embeddings"])
    return q, k.squeeze(2)


def _rotated(
    module: Any, known: Indexer, both: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return queries and keys [B, S, H, D] with a part of each head rotated."""
    rotate = of_file(module, known.rotary)
    size, pass_size = module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim
    if known.rotates_last:
        (q_pass, q_rot), (k_pass, k_rot) = (torch.split(x, [pass_size, size], -1) for x in both)
    else:
        (q_rot, q_pass), (k_rot, k_pass) = (torch.split(x, [size, pass_size], -1) for x in both)
    q_rot, k_rot = rotate(q_rot, k_rot, *angles, unsqueeze_dim=2)
    if known.rotates_last:
        return torch.cat([q_pass, q_rot], -1), torch.cat([k_pass, k_rot], -1)
    return torch.cat([q_rot, q_pass], -1), torch.cat([k_rot, k_pass], -1)
