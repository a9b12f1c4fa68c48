"""Which blocks of keys the published methods select, on whole sequences, written out."""

from __future__ import annotations

import torch
from torch import Tensor


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    """Return q [B, S, Hkv, query heads of each, D]."""
    return q.unflatten(2, (k.shape[2], -1))


def moba(q: Tensor, k: Tensor, block: int, top: int) -> Tensor:
    """Return the blocks that MoBA selects (arXiv 2502.13189, section 2.2), bool [B, Hkv, query blocks, key blocks].

    The `top` blocks of highest score between mean queries and mean keys, none of them ahead, their own among them.
    Its queries select one by one; here they do so by blocks.
    """
    queries, keys = _by_group(q, k).mean(3).unflatten(1, (-1, block)).mean(2), k.unflatten(1, (-1, block)).mean(2)
    scores = torch.einsum("bigd,bjgd->bgij", queries, keys)
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(ahead, -torch.inf).masked_fill(torch.eye(len(ahead), dtype=torch.bool), torch.inf)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(-1, scores.topk(top).indices, True) & ~ahead


def nsa(q: Tensor, k: Tensor, block: int, top: int) -> Tensor:
    """Return the blocks that NSA selects (arXiv 2502.11089, section 3.3.2), bool [B, Hkv, query blocks, key blocks].

    Attention to mean keys is added up over the query heads of a group and the queries of a block; the `top` blocks of
    most attention are selected besides the first block and the last two.
    """
    keys = k.unflatten(1, (-1, block)).mean(2)
    logits = torch.einsum("bsghd,bjgd->bghsj", _by_group(q, k), keys) * q.shape[-1] ** -0.5
    number = torch.arange(q.shape[1]) // block
    ahead = torch.arange(keys.shape[1]) > number.unsqueeze(1)
    attention = logits.masked_fill(ahead, -torch.inf).softmax(-1).sum(2).unflatten(2, (-1, block)).sum(3)
    i, j = torch.arange(attention.shape[-2]).unsqueeze(1), torch.arange(attention.shape[-1])
    always = (j == 0) | ((j <= i) & (j > i - 2))
    chosen = torch.zeros_like(attention, dtype=torch.bool)
    return (chosen.scatter(-1, attention.topk(top).indices, True) | always) & (j <= i)
