"""A batch of whole sequences, read and checked: what is cut along the sequence, its mask, and a checksum.

Labels are shifted over the whole sequence, since the target of a shard's last token may be on another rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.checks import shown, whole_number
from burst_plugin.sequence.layout import even_length
from burst_plugin.sequence.masks import Documents, Mask, PerRow, key_padding
from burst_plugin.sequence.prefix_tree import PrefixTree

__all__ = ["IGNORED_LABEL", "MASK_KEYS", "SEEDS", "WholeBatch", "read_batch", "shifted"]

IGNORED_LABEL = -100  # label of a token that is not part of the loss
# Entries of a batch that say which tokens attend to which; a shard has a mask in their place.
MASK_KEYS = frozenset(
    {"attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "tree"}
)
SEEDS = 2**31 - 1  # checksums, and seeds made of them, are below this


def shifted(labels: Tensor) -> Tensor:
    """Return each token's target, [B, S]: the label of the token after it, `IGNORED_LABEL` for the last one."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


class WholeBatch(NamedTuple):
    """A batch of whole sequences as it was read.

    tensors: [B, S, ...] by name, to be cut along the sequence; position_ids of mRoPE are [3, B, S] or [4, B, S].
    padded: the length S with padding, of which every rank holds equally many tokens.
    mask: padding and document bounds; None if there are neither.
    checksum: what ranks compare to know that they cut the same batch.
    """

    tensors: dict[str, Tensor]
    padded: int
    mask: Mask | None
    checksum: int


def read_batch(batch: Mapping[str, Any], ranks: int, pad_token_id: int) -> WholeBatch:
    """Return what a batch holds. Raise ValueError for what cannot be cut over `ranks` ranks, or cannot be read."""
    whole_number("pad_token_id={}", pad_token_id, "use the id of the token that fills up sequences, or leave it out")
    tensors = _tensors_to_cut(batch)
    padded = even_length(tensors["position_ids"].shape[-1], ranks)
    trees = _trees(batch, tensors)
    mask = _mask(batch, _positions_in_text(tensors["position_ids"]), padded, trees)
    compared = [*tensors.values(), batch.get("attention_mask"), batch.get("cu_seq_lens_q")]
    return WholeBatch(tensors, padded, mask, _checksum_of([x for x in compared if isinstance(x, Tensor)]))


def _tensors_to_cut(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of a batch that are to be cut, with positions, and with labels shifted."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch has to be a dict of tensors by name, got a {type(batch).__name__}")
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(ids, Tensor) or ids.dim() < 2 or 0 in ids.shape:
        got = f"shape {list(ids.shape)}" if isinstance(ids, Tensor) else ", ".join(map(str, batch)) or "nothing"
        raise ValueError(f"a batch needs input_ids of shape [batch, tokens], got {got}")
    tensors: dict[str, Tensor] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or name in MASK_KEYS:
            continue
        if name == "position_ids":
            _check_positions(value, ids)
        elif value.shape[:2] != ids.shape[:2]:
            raise ValueError(
                f"{name} of shape {list(value.shape)} cannot be cut along the sequence: the first two dims of a "
                f"batch's tensors have to be {list(ids.shape[:2])}, those of the input; take it out of the batch"
            )
        tensors[name] = value
    for name in ("position_ids", "labels", "shift_labels"):
        if batch.get(name) is not None and name not in tensors:
            raise ValueError(
                f"{name} cannot be cut along the sequence: got {_kind(batch[name])}, expected a tensor of shape "
                f"{list(ids.shape[:2])}, one for each token; give others another name"
            )
    _check_masks(batch, ids)
    if "position_ids" not in tensors:
        tensors["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[:2])
    labels = tensors.pop("labels", None)
    if labels is not None:
        if labels.shape != ids.shape[:2]:
            raise ValueError(
                f"labels of shape {list(labels.shape)} are not one for each token, {list(ids.shape[:2])}; give "
                "others than those of the next token another name"
            )
        tensors.setdefault("shift_labels", shifted(labels))
    return tensors


def _check_positions(positions: Tensor, ids: Tensor) -> None:
    """Raise ValueError for positions of which a token has none, or more than mRoPE has."""
    shape, rows = list(positions.shape), list(ids.shape[:2])
    if shape == rows or (len(shape) == 3 and shape[0] in (3, 4) and shape[1:] == rows):
        return
    raise ValueError(
        f"position_ids of shape {shape} are not one for each token: give {rows}, expanded to all rows, or those of "
        f"mRoPE, {[3, *rows]}, or {[4, *rows]} with the positions in the text first"
    )


def _positions_in_text(positions: Tensor) -> Tensor:
    """Return the positions [B, S] that begin again with a document.

    Of mRoPE's four, as transformers has them, they are the first; its three alone, which stand still in an image, say
    nothing of documents.
    """
    if positions.dim() == 2:
        return positions
    if len(positions) == 4:
        return positions[0]
    return torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape[1:])


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _check_masks(batch: Mapping[str, Any], ids: Tensor) -> None:
    """Raise ValueError for padding and document bounds that cannot be read, and so would be ignored."""
    for name in ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
        if not isinstance(batch.get(name), Tensor | None):
            raise ValueError(
                f"{name} is a {type(batch[name]).__name__}; give padding as a tensor [batch, tokens], and documents "
                "as position_ids that start again"
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


def _trees(batch: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[PrefixTree, ...]:
    """Return the prefix trees of a batch, one, or one for each row, and put their positions into `tensors`.

    From logical positions a tree can be told, so that ranks need not compare more than these.

    Raises ValueError for what is no tree of this batch, or does not go with one.
    """
    given = batch.get("tree")
    if given is None:
        return ()
    positions = tensors["position_ids"]
    if positions.dim() == 3:
        raise ValueError(
            f"position_ids of shape {list(positions.shape)}, of mRoPE, are given with a tree, whose positions count "
            "along each path; leave the tree out"
        )
    shape = positions.shape
    trees = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(tree, PrefixTree) for tree in trees) or len(trees) not in (1, shape[0]):
        raise ValueError(f"tree={shown(given)} is not valid; give a PrefixTree, or a list, one for each batch row")
    for tree in trees:
        tree.beside_trees(shape[1], shape[1])  # raises ValueError if it is of another length
    for name in ("labels", "cu_seq_lens_q"):
        if batch.get(name) is not None:
            why = "a token has several next ones: use edges" if name == "labels" else "roots are documents"
            raise ValueError(f"{name} is given with a tree, in which {why}; leave it out")
    logical = torch.stack([tree.logical(torch.arange(shape[1], device="cpu")) for tree in trees]).expand(shape)
    if batch.get("position_ids") is not None and not torch.equal(positions.cpu().long(), logical):
        raise ValueError("position_ids are not those of the tree, which count along each path; leave them out")
    tensors["position_ids"] = logical.to(positions.device)
    return trees


def _mask(batch: Mapping[str, Any], positions: Tensor, padded: int, trees: Sequence[PrefixTree]) -> Mask | None:
    """Return the mask of a whole batch: padding, document bounds or trees; None for none of these."""
    masks: list[Mask] = []
    valid = batch.get("attention_mask")
    valid = valid.bool() if isinstance(valid, Tensor) else torch.ones_like(positions, dtype=torch.bool)
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
        masks.append(rows[0] if len(set(rows)) == 1 else PerRow(tuple(rows)))
    return reduce(and_, masks) if masks else None


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

    They start at token 0, and at every real token whose position is not one more than that of the token before it,
    nor than that of the last real one: padding in between may count or not. Unless the row is `packed`, positions
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


def _checksum_of(tensors: Sequence[Tensor]) -> int:
    """Return a number that two different batches are unlikely to share; the order of tensors counts."""
    checksum = 0
    for x in tensors:
        flat = x.detach().float().contiguous().view(torch.int32) if x.is_floating_point() else x.detach()
        flat = flat.flatten().to(torch.int64)
        weights = torch.arange(1, flat.numel() + 1, device=flat.device) % 65521 + 1
        checksum = (31 * checksum + int((flat * weights).sum() % SEEDS)) % SEEDS
    return checksum
