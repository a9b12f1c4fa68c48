"""Parts of Llama 4 that other models do not have: attention in chunks, and temperatures that grow along a row.

    chunks of 3, of a row that is padded on the left by 2:   . . a b c | d e f | g
    documents a b c d and e f, packed:                       a b c | d | e f

Chunks of a row are documents of equal length, counted from the first real token or from the start of a document.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from burst_plugin.batch import SequenceShard
from burst_plugin.sequence.masks import Documents, Mask, PerRow, document_starts


def chunk_mask(shard: SequenceShard, size: int) -> Mask:
    """Return the mask that lets tokens attend only to tokens of their own chunk of `size` tokens.

    It is in positions of the whole sequence. Chunks are counted from the first real token of a row, and from the
    start of each document of `shard`. Raises ValueError for a shard of a prefix tree.
    """
    if shard.mask is not None and shard.mask.trees:
        raise ValueError(
            "attention in chunks is not supported with a tree, which has several tokens at one position; leave the "
            "tree out"
        )
    return _chunks(shard.mask, shard.tokens.length, size)


@lru_cache(maxsize=64)
def _chunks(mask: Mask | None, length: int, size: int) -> Mask:
    """Return the mask of chunks in a batch with the padding and the documents of `mask`."""
    rows = 1 if mask is None or mask.rows is None else mask.rows
    masks = []
    for row in range(rows):
        bounds = [*sorted({0} if mask is None else document_starts(mask.of_row(row)) | {0}), length]
        starts = [at for start, end in pairwise(bounds) for at in range(start, end, size)]
        masks.append(Documents((*starts, length)))
    return masks[0] if len(set(masks)) == 1 else PerRow(tuple(masks))


def with_temperature(module: torch.nn.Module, query: Tensor, shard: SequenceShard) -> Tensor:
    """Return queries [B, heads, S, D], scaled by the attention temperatures of their positions in the whole row.

    module: an attention layer, which has scaled `query` already, by the temperatures of positions counted in this
        rank's part of the row. Layers without temperatures get their queries back unchanged.
    """
    if not getattr(module, "attn_temperature_tuning", None) or module.use_rope:
        return query
    local_places = torch.arange(query.shape[2], device=query.device)
    places = shard.cp.positions(shard.tokens, query.device)
    ratio = _temperature(module, places) / _temperature(module, local_places)
    return (query * ratio[:, None]).to(query.dtype)


def _temperature(module: torch.nn.Module, places: Tensor) -> Tensor:
    """Return the factors of queries at these places in a row."""
    every, scale = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]
    factor: Tensor = torch.log1p(torch.floor((places.double() + 1.0) / every)) * scale + 1.0
    return factor
