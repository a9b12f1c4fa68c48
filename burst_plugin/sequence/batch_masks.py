"""The mask of a batch of whole sequences, read from its padding, document bounds and trees."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from burst_plugin.sequence.masks import Documents, Mask, PerRow, key_padding
from burst_plugin.sequence.prefix_tree import PrefixTree

_LOG = logging.getLogger(__name__)

TypeRuns = tuple[tuple[int, int, int], ...]
"""Runs of tokens of one type in a row, (start, stop, type), from its first token to its last."""


def check_masks(batch: Mapping[str, Any], ids: Tensor) -> None:
    """Raise ValueError for padding and document bounds that cannot be read, and so would be ignored."""
    for name in ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
        if not isinstance(batch.get(name), Tensor | None):
            raise ValueError(
                f"{name} is a {type(batch[name]).__name__}; give padding as a tensor [batch, tokens], and documents "
                "as position_ids that start again"
            )
    tells = any(batch.get(name) is not None for name in ("position_ids", "cu_seq_lens_q", "tree"))
    numbers = batch.get("seq_idx")  # below 0 for tokens of no document
    unlike = isinstance(numbers, Tensor) and (numbers >= 0) & (numbers != numbers.amax(-1, keepdim=True))
    if isinstance(unlike, Tensor) and not tells and bool(unlike.any()):
        raise ValueError(
            "seq_idx alone does not tell a ring where documents begin; give position_ids that start again, or "
            "cu_seq_lens_q, with it"
        )
    padding = batch.get("attention_mask")
    if padding is None:
        return
    if padding.shape != ids.shape[:2]:
        raise ValueError(
            f"attention_mask of shape {list(padding.shape)} is not a padding mask of shape {list(ids.shape[:2])}; "
            "other masks cannot be cut: give document bounds as position_ids that start again"
        )
    if padding.is_floating_point() and bool((padding < 0).any()):
        raise ValueError(
            "attention_mask has values below 0, as one that is added to scores; give 1 for tokens, 0 for padding"
        )
    if padding.dtype is not torch.bool and bool((padding > 1).any()):
        raise ValueError(
            "attention_mask has values above 1, as one that numbers documents; give 1 for tokens, 0 for padding, and "
            "documents as position_ids that start again"
        )


def valid_tokens(batch: Mapping[str, Any], positions: Tensor) -> Tensor:
    """Return which tokens of a batch its `attention_mask` says are no padding, bool [B, S]; all without one.

    positions: a tensor of the shape [B, S].
    """
    valid = batch.get("attention_mask")
    return valid.bool() if isinstance(valid, Tensor) else torch.ones_like(positions, dtype=torch.bool)


def positions_in_text(positions: Tensor) -> Tensor:
    """Return the positions [B, S] that begin again with each document, given a model's position_ids.

    positions: [B, S], which are returned; or mRoPE's [4, B, S], whose first are such positions; or mRoPE's [3, B, S]
        alone, which stand still in an image and say nothing of documents: then each row counts from 0.
    """
    if positions.dim() == 2:
        return positions
    if len(positions) == 4:
        return positions[0]
    return torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape[1:])


def real_tokens(valid: Tensor, padded: int) -> Tensor | None:
    """Return which tokens are no padding once rows are padded to length `padded`, bool [B, padded]; None if all are.

    valid: which tokens are no padding before that, bool [B, S].
    """
    missing = padded - valid.shape[1]
    return None if not missing and bool(valid.all()) else torch.nn.functional.pad(valid, (0, missing), value=False)


def type_runs(types: Tensor) -> tuple[TypeRuns, ...]:
    """Return the runs of tokens of one type, (start, stop, type), of each row of `types` [B, S], whole numbers."""
    rows = []
    for row in types.cpu():
        kinds, lengths = row.unique_consecutive(return_counts=True)
        bounds = [0, *lengths.cumsum(0).tolist()]
        rows.append(tuple(zip(bounds, bounds[1:], kinds.tolist(), strict=False)))
    return tuple(rows)


def batch_mask(
    batch: Mapping[str, Any], positions: Tensor, valid: Tensor, padded: int, trees: Sequence[PrefixTree]
) -> Mask | None:
    """Return the mask of a whole batch: its padding with its documents or prefix trees; None if it has none of these.

    batch: read for `cu_seq_lens_q` and `attention_mask`, either of which may be absent.
    positions, valid: [B, S], the positions of tokens in their documents, and which tokens are real.
    padded: the length that sequences are padded to.
    trees: the prefix tree of each row, or one for all rows; none for batches without trees.

    Raises ValueError where `positions` leave open whether a document begins, or `cu_seq_lens_q` does not fit.
    """
    masks: list[Mask] = []
    if not bool(valid.all()):
        masks.append(key_padding(torch.nn.functional.pad(valid, (0, padded - valid.shape[1]), value=False)))
    if trees:
        own = tuple(tree.padded(padded) for tree in trees)
        return reduce(and_, [*masks, own[0] if len(own) == 1 else PerRow(own)])
    if isinstance(batch.get("cu_seq_lens_q"), Tensor):
        masks.append(_documents(batch["cu_seq_lens_q"].tolist(), positions.shape, padded))
        return reduce(and_, masks)
    packed = batch.get("attention_mask") is None  # only then does transformers take any break for a document
    rows = [Documents((*_starts(*row, packed), padded)) for row in zip(positions, valid, strict=True)]
    if any(len(row.cu_seqlens) > 2 for row in rows):
        starts = [(ok, start) for ok, row in zip(valid, rows, strict=True) for start in row.cu_seqlens[1:-1]]
        if not packed and any(bool(ok[:start].any()) for ok, start in starts):  # and not after padding alone
            _tell_of_documents_beside_a_mask()
        masks.append(rows[0] if len(set(rows)) == 1 else PerRow(tuple(rows)))
    return reduce(and_, masks) if masks else None


@cache
def _tell_of_documents_beside_a_mask() -> None:
    """Log once in this process that documents stay apart, where models by themselves would not look for them."""
    _LOG.warning(
        "position_ids start again beside an attention_mask: documents stay apart here, but without a ring most "
        "models look for documents only where there is no attention_mask; leave attention_mask out to compare losses"
    )


def _documents(bounds: Sequence[int], shape: Sequence[int], padded: int) -> Mask:
    """Return the mask of documents packed into one row of `shape` [1, S]."""
    if shape[0] != 1 or bounds[0] != 0 or bounds[-1] != shape[1]:
        raise ValueError(
            f"cu_seq_lens_q from {bounds[0]} to {bounds[-1]} does not fit a batch of shape {list(shape)}; expected "
            "one packed row, and bounds from 0 to its length"
        )
    return Documents((*bounds[:-1], padded))


def _starts(positions: Tensor, valid: Tensor, packed: bool) -> tuple[int, ...]:
    """Return where documents start in a row of positions [S].

    They start at token 0, and at every real token whose position is not one more than the position of the token
    before it, nor of the last real token: padding in between may count or not. Unless the row is `packed`, positions
    have to start again there: others are shared ones, of images or branches.

    Raises ValueError where it is not clear whether a document starts.
    """
    breaks = (positions[1:] - positions[:-1] != 1) & valid[1:]
    real = valid.nonzero().flatten()
    follows = real[1:][positions[real][1:] - positions[real][:-1] == 1]
    breaks[follows - 1] = False
    unclear = positions[1:] > positions[:-1]
    if not packed and len(real):
        unclear = (positions[1:] != 0) & (positions[1:] != positions[real[0]])
    unclear &= breaks & valid[:-1]
    if bool(unclear.any()):
        at = int(unclear.nonzero()[0]) + 1
        raise ValueError(
            f"position_ids go from {int(positions[at - 1])} to {int(positions[at])} at token {at}: whether that "
            "begins a document is not clear; give documents as positions that start again, or as cu_seq_lens_q"
        )
    return (0, *(breaks.nonzero().flatten() + 1).tolist())
