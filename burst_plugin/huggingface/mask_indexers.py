"""Indexers of transformers' models that return a mask (Qwen4): on shards they select among the blocks of all ranks.

    layer, given a `ShardMask`
          -> indexer(hidden_states, ...)    returns a `PoolChoice`, in place of a mask
          -> mask & choice                  is the choice
          -> attention(..., choice)         `attention.forward` gives its keys to the ring

A block is a pool: so many of the tokens that a query may attend to. Blocks begin anew with every document and after
padding, as transformers has them where its mask keeps documents apart. Whole batches get a mask of queries by keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.attention import mask_of_call, problem_of_call
from burst_plugin.huggingface.known_code import of_file, problem_of_code, replace_once
from burst_plugin.huggingface.mask_recipes import (
    NO_CACHE,
    MaskRecipe,
    cache_of_forward,
    shard_among,
    shard_of_forward,
)
from burst_plugin.huggingface.pool_indexers import PoolChoice
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.sparse import keys_of_pools, pool, select_pools

KINDS = ("Qwen4ExpTextQSAIndexer",)
_ROTARY = "apply_rotary_pos_emb"
_USED = ("index_qk_proj", "q_layernorm", "k_layernorm", _ROTARY, "compress_ratio", "block_topk", "relu", "mean")


class ShardMask:
    """A placeholder for a layer's bool mask on a shard, until the layer's indexer has selected keys.

    Combined with a selection by `&`, it is that selection.

    recipe: the mask that the model asked for. shard: the shard that the layer was called with.
    """

    dtype = torch.bool

    def __init__(self, recipe: MaskRecipe, shard: SequenceShard) -> None:
        self.recipe, self.shard = recipe, shard

    def __and__(self, choice: PoolChoice) -> PoolChoice:
        """Return the selection as it is, since the mask allows all of it."""
        return choice


def mask_indexers(model: torch.nn.Module) -> Iterator[Any]:
    """Yield a model's mask indexers: modules that select keys for each query, and return them as a mask."""
    return (each for each in text_modules(model) if _is_known(type(each)))


def _is_known(kind: type) -> bool:
    return any(each.__name__ in KINDS for each in kind.__mro__)


def problems_of_mask_indexers(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's mask indexers cannot run on a ring; empty if they can.

    The only reason is that their code differs from known releases of transformers.
    """
    kinds = {type(module): problem_of_code(type(module), _USED) for module in mask_indexers(pretrained)}
    return [*filter(None, kinds.values())]


def use_mask_indexers(pretrained: PreTrainedModel) -> None:
    """Have the mask indexers of a model select among the blocks of all ranks in all its forwards on shards.

    Replaces the `forward` of their classes, and adds hooks to the layers around them. Classes whose code is not known
    are left as they are; repeated calls change nothing.
    """
    for module in mask_indexers(pretrained):
        if not problem_of_code(type(module), _USED):
            replace_once(type(module), "forward", _take_over)
    for layer in text_modules(pretrained):
        if _is_known(type(getattr(layer, "indexer", None))) and _give_mask not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_give_mask, with_kwargs=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _give_mask(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give a layer a mask in place of a recipe: on a shard a `ShardMask`, which has a mask's type."""
    recipe = kwargs.get("attention_mask")
    if not isinstance(recipe, MaskRecipe):
        return None
    if cache_of_forward() is not None:
        raise ValueError(NO_CACHE.format(type(layer).__name__))
    shard = shard_among((), kwargs) or shard_of_forward()
    mask = recipe.tensor(always=True) if shard is None else ShardMask(recipe, shard)
    return args, {**kwargs, "attention_mask": mask}


def _take_over(original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Take the place of an indexer's `forward`. Return a `PoolChoice` on shards, and a mask otherwise."""
    arguments = by_name(partial(original, module), args, kwargs)
    mask = arguments["attention_mask"]
    return _select(module, mask, arguments) if isinstance(mask, ShardMask) else original(module, *args, **kwargs)


@torch.no_grad()
def _select(module: Any, given_mask: ShardMask, arguments: Mapping[str, Any]) -> PoolChoice:
    """Return the blocks that the queries of a shard select among all ranks' blocks, and the tokens after these."""
    shard, recipe, size = given_mask.shard, given_mask.recipe, module.compress_ratio
    problem = problem_of_call(module, recipe, {})
    if problem:
        raise ValueError(problem)
    name = f"indexer of layer {module.layer_idx}"
    terms: dict[str, Any] = {"mask": mask_of_call(module, shard, recipe, {}), "tokens": shard.tokens}
    q, raw, angles = _queries_and_raw_keys(module, arguments)
    keys = pool(partial(_keys, module), [raw, *angles], size, shard.cp, tag=(f"keys of {name}", shard), **terms)
    kind = torch.promote_types(q.dtype, keys.dtype)  # autocast widens what is normed
    weights = torch.ones(q.shape[:3], device=q.device)
    starts = select_pools(
        q.to(kind), keys.to(kind), weights, size, module.block_topk, shard.cp, tag=(name, shard), **terms
    )
    return PoolChoice(starts, partial(keys_of_pools, size=size, cp=shard.cp, **terms))


def _queries_and_raw_keys(module: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return queries [B, S, H, D], raw keys [B, S, D], and the cosines and sines of tokens."""
    hidden, (cos, sin) = arguments["hidden_states"], arguments["position_embeddings"]
    heads, size = module.index_n_heads, module.index_head_dim
    q, raw = module.index_qk_proj(hidden).split([heads * size, size], -1)
    q = module.q_layernorm(q.unflatten(-1, (heads, size)))
    return of_file(module, _ROTARY)(q, cos=cos, sin=sin, unsqueeze_dim=2), raw, (cos, sin)


def _keys(module: Any, tokens: list[Tensor]) -> Tensor:
    """Return the keys of blocks, [blocks, D], each rotated as its first token is."""
    raw, cos, sin = tokens
    mean = module.k_layernorm(raw.float().mean(1).to(raw.dtype))
    rotated: Tensor = of_file(module, _ROTARY)(mean.unsqueeze(1), cos=cos[:, 0], sin=sin[:, 0])
    return rotated.squeeze(1)
