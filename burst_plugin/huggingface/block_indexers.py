"""Indexers of transformers' models that select blocks of keys (MiniMax M3): on shards among the blocks of all ranks.

    layer -> indexer(hidden_states, ...)       returns a `BlockChoice`, in place of blocks
          -> attention(..., block_indices=)    `attention.forward` knows the mask, and asks for what is selected
                 shard:       positions of the keys of blocks, by sparse.select_blocks
                 whole batch: the family's own blocks

transformers counts blocks from slot 0 of a row, and compares slots with position_ids. On a ring they begin anew with
every document and after padding, so that each text has the blocks that it would have alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.known_code import of_file, problem_of_code, replace_once
from burst_plugin.huggingface.mask_recipes import ATTN_IMPLEMENTATION
from burst_plugin.huggingface.ring_cache import RingCache
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.sequence.masks import Mask
from burst_plugin.sparse import Indexed, keys_of_blocks, select_blocks, select_cached_blocks

LAYER_TYPE = "minimax_m3_sparse"
KINDS = ("MiniMaxM3VLIndexer",)
_ROTARY = "apply_rotary_pos_emb"
_USED = ("q_proj", "k_proj", "q_norm", "k_norm", _ROTARY, "block_size", "topk_blocks", "local_blocks")


class BlockChoice:
    """The call of a block indexer, put off until attention knows the mask: blocks of keys are selected then.

    The arguments are the indexer's own `forward`, the indexer, and the inputs of the call by name.

    starts: where the blocks selected by the last call of `on_shard` start, in positions of the whole sequence, int32
        [B, groups of heads, S_local, blocks], -1 for none; None before.
    """

    def __init__(self, own: Callable[..., Tensor], module: Any, given: dict[str, Any]) -> None:
        self._own, self._module, self._given = own, module, given
        self.starts: Tensor | None = None

    @torch.no_grad()
    def on_shard(self, shard: SequenceShard, mask: Mask) -> Tensor:
        """Return the positions of the keys that a shard's queries select, int32 [B, groups, S_local, n]; collective.

        mask: which keys a query may select, the layer's mask and the batch's together. Positions are those of the
            whole sequence, -1 in places without a key. Without gradient.
        """
        module = self._module
        q, k = self._queries_and_keys()
        kind = torch.promote_types(q.dtype, k.dtype)
        self.starts = select_blocks(
            q.to(kind),
            k.to(kind),
            module.block_size,
            module.topk_blocks,
            shard.cp,
            forced=module.local_blocks,
            mask=mask,
            tokens=shard.tokens,
            tag=(f"indexer of layer {module.layer_idx}", shard),
        )
        return keys_of_blocks(self.starts, module.block_size, shard.tokens.length)

    @torch.no_grad()
    def in_cache(self, cache: RingCache, mask: Mask) -> Tensor:
        """Return the keys that new tokens select, positions in rows, int32 [B, groups, n, keys]; collective.

        cache: keeps the keys of the indexer. mask: the layer's own mask, in positions of a row.
        """
        module, (q, k) = self._module, self._queries_and_keys()
        kind = torch.promote_types(q.dtype, k.dtype)
        size, terms = module.block_size, {"forced": module.local_blocks, "mask": mask}
        choose = partial(
            select_cached_blocks, given=Indexed(q.to(kind), k.to(kind)), block=size, top_k=module.topk_blocks, **terms
        )
        self.starts = cache.select(module.layer_idx, choose)
        return keys_of_blocks(self.starts, size, max(cache.lengths))

    @torch.no_grad()
    def on_whole_batch(self, queries: int, keys: int) -> Tensor:
        """Return which keys the model's own indexer selects in a whole batch, bool [B, groups, queries, keys].

        queries, keys: the numbers of queries and keys of a batch row.
        """
        blocks, size = self._own(**self._given), self._module.block_size
        count = -(-keys // size)
        chosen = torch.zeros((*blocks.shape[:2], queries, count + 1), dtype=torch.bool, device=blocks.device)
        chosen.scatter_(3, blocks.masked_fill(blocks < 0, count), True)
        return chosen[..., :count].repeat_interleave(size, 3)[..., :keys]

    def _queries_and_keys(self) -> tuple[Tensor, Tensor]:
        """Return queries [B, S, H, D] and keys [B, S, D] as the family computes them."""
        module, hidden = self._module, self._given["hidden_states"]
        rotate = of_file(module, _ROTARY)
        shape = (*hidden.shape[:2], -1, module.head_dim)
        q, k = module.q_norm(module.q_proj(hidden).view(shape)), module.k_norm(module.k_proj(hidden).view(shape))
        angles = (x[..., : module.head_dim] for x in self._given["position_embeddings"])
        q, k = rotate(q, k, *angles, unsqueeze_dim=2)
        return q, k.squeeze(2)


def block_indexers(model: torch.nn.Module) -> Iterator[Any]:
    """Yield a model's block indexers: the modules that select for each query whole blocks of keys to attend to."""
    return (each for each in text_modules(model) if any(base.__name__ in KINDS for base in type(each).__mro__))


def problems_of_block_indexers(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's block indexers cannot run on a ring; empty if they can.

    Their code may differ from known releases of transformers, or their number of heads does not divide the number of
    key/value heads.
    """
    reasons = {}
    for module in block_indexers(pretrained):
        name, groups = type(module).__name__, module.num_heads
        kv_heads: Any = module.config.num_key_value_heads
        if problem := problem_of_code(type(module), _USED):
            reasons[name] = problem
        elif kv_heads % groups:
            reasons[name] = (
                f"its {name} has index_n_heads={groups}, which do not divide its "
                f"num_key_value_heads={kv_heads} into groups; set one for each, or fewer"
            )
    return list(reasons.values())


def use_block_indexers(pretrained: PreTrainedModel) -> None:
    """Have the block indexers of a model select among the blocks of all ranks in all its forwards on shards.

    Replaces the `forward` of their classes by one that returns a `BlockChoice`. Classes whose code is not known are
    left as they are; repeated calls change nothing.
    """
    for module in block_indexers(pretrained):
        if not problem_of_code(type(module), _USED):
            replace_once(type(module), "forward", _take_over)


def _take_over(original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Take the place of an indexer's `forward`. Return a `BlockChoice` for attention of the ring."""
    if module.config._attn_implementation != ATTN_IMPLEMENTATION:
        return original(module, *args, **kwargs)
    own = partial(original, module)
    return BlockChoice(own, module, dict.fromkeys(inspect.signature(own).parameters) | by_name(own, args, kwargs))
