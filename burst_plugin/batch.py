"""A batch of whole sequences cut into one rank's shard: ids, labels, positions, and the mask that goes with them.

    4 tokens a b c d, over 2 ranks in zigzag; labels are shifted before they are cut, and called so from then on:

                     whole              rank 0     rank 1
    input_ids        a b c d            a d        b c
    position_ids     0 1 2 3            0 3        1 2
    shift_labels     b c d -100         b -100     c d

Labels are shifted over the whole sequence, since the neighbour of a shard's last token lives on another rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import and_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from burst_plugin.checks import shown, whole_number
from burst_plugin.comm.consistency import prepared_together
from burst_plugin.context import ContextParallel
from burst_plugin.sequence.layout import Tokens, even_length
from burst_plugin.sequence.masks import Causal, Documents, Mask, PerRow, key_padding
from burst_plugin.strategy import AUTO

__all__ = ["IGNORED_LABEL", "SHARD_KEY", "SequenceShard", "as_given", "check_shard", "shard_batch", "shifted"]

SHARD_KEY = "burst"  # the entry of a sharded batch that says what it is a shard of
IGNORED_LABEL = -100  # label of a token that has no part in the loss
_PACKING = frozenset({"attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
_SEEDS = 2**31 - 1
_UNEVEN = 1.3  # times the mean, from which on it is worth a word
_MARK = "_burst_plugin_shard"  # what ids that were cut have
_LOOKS = 10  # at batches, until one is uneven; each takes as long as making a new mask's plan
_looked_at: WeakKeyDictionary[ContextParallel, int] = WeakKeyDictionary()  # how many so far
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """What the local tensors of a sharded batch are part of; travels with them to every attention layer.

    cp: the ranks that hold the sequence between them.
    length: tokens of the whole sequence, without padding.
    tokens: with what makes all ranks hold equally many, and how they are dealt out.
    mask: padding and document bounds in whole positions, on top of what a layer itself asks for; None: neither. What
        makes the length fit comes last, where causal layers never see it; others add `Keys(((0, length),))`.
    valid_tokens: labels that take part in the loss, in the whole batch.
    seed: the same on all ranks of `cp`, for dropout.
    name: of the batch, as ranks that are out of step are told of it.
    as_given: the batch is whole, as it may be on a ring of one rank, and everything else in it as it came: labels
        are not shifted.
    """

    cp: ContextParallel
    length: int
    tokens: Tokens
    mask: Mask | None = None
    valid_tokens: int = 0
    seed: int = 0
    as_given: bool = False
    name: str = ""

    def __str__(self) -> str:
        return self.name

    def unshard(self, local: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor, padding cut off, on every rank; collective, without gradient."""
        return self.cp.unshard(local, dim, self.tokens).narrow(dim, 0, self.length)


def shard_batch(batch: Mapping[str, Any], cp: ContextParallel, *, pad_token_id: int = 0) -> dict[str, Any]:
    """This rank's shard of `batch`, which is the same on all ranks of `cp`; collective.

    Args:
        batch: tensors [B, S, ...] of whole sequences: `input_ids` (or `inputs_embeds`) and, if there are any,
            `labels` (not shifted) or `shift_labels`, `position_ids`, a padding mask `attention_mask` [B, S], and
            document bounds as `cu_seq_lens_q` or as positions that start again. Anything else of that shape is cut
            as well; numbers, strings and tensors of one dimension are passed on.
        pad_token_id: what fills up a sequence whose length the layout cannot deal out evenly.

    Returns:
        The same keys with shards [B, S_local, ...]; `position_ids` in any case; `shift_labels` in place of `labels`,
        which a loss of one's own might shift once more; the mask and the document bounds in the `SequenceShard` under
        "burst".

    Raises:
        ValueError: on every rank of `cp`, for a batch that cannot be cut, or that differs between ranks.
    """

    def agree(read: _Read | None, problem: str) -> int:
        try:
            shape = None if read is None else list(read.whole["position_ids"].shape)
            return cp.agree({} if read is None else {"batch": f"{shape} with checksum {read.checksum}"}, problem)
        except ValueError as error:
            if problem or "batch=" not in str(error):
                raise
            raise ValueError(
                f"{error}; all ranks of a context-parallel group take the same batch and cut it between them: let "
                "the sampler count data-parallel ranks, not all ranks (Trainer, Accelerate: sp_size of "
                "ParallelismConfig)"
            ) from error

    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp is {shown(cp)}, not a ContextParallel; make one of the process group once, and pass it")
    read, number = prepared_together(partial(_read, batch, cp.ranks, pad_token_id), agree)
    whole, tokens = read.whole, _tokens(cp, read)
    local = {name: _shard(name, x, cp, tokens, pad_token_id) for name, x in whole.items()}
    valid = int((whole["shift_labels"] != IGNORED_LABEL).sum()) if "shift_labels" in whole else 0
    length = whole["position_ids"].shape[1]
    seed, name = (read.checksum + number) % _SEEDS, f"batch {read.checksum:08x} of comparison {number}"
    shard = SequenceShard(cp, length, tokens, read.mask, valid, seed, name=name)
    if cp.ranks > 1:
        for name in ("input_ids", "inputs_embeds"):
            if name in local:
                setattr(local[name], _MARK, True)
    passed_on = {k: v for k, v in batch.items() if k not in whole and k not in _PACKING and k != "labels"}
    return {**passed_on, **local, SHARD_KEY: shard}


def as_given(batch: Mapping[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """The whole batch of a ring of one rank as it came, and beside it what it is to attention.

    A model on one rank gets the padding, the document bounds and the positions that came with the batch, and shifts
    its labels: its own layers may need them, and what it returns is that of every token of the batch.
    """
    shard: SequenceShard = shard_batch(batch, cp)[SHARD_KEY]
    return {**batch, SHARD_KEY: replace(shard, as_given=True)}


def check_shard(batch: Mapping[str, Any]) -> None:
    """Raise ValueError for parts of a shard that do not fit together, as a model is about to get them.

    Ids that were cut, without the entry that says so, would be taken for a whole sequence; labels of a shard, under
    the name of those that models shift, would be shifted twice.
    """
    if SHARD_KEY not in batch and any(hasattr(batch.get(name), _MARK) for name in ("input_ids", "inputs_embeds")):
        raise ValueError(
            f"got the ids of a shard without its entry {SHARD_KEY!r}, as if they were a whole sequence; pass all "
            "that shard_batch returned: model(**batch)"
        )
    labels, shard = batch.get("labels"), batch.get(SHARD_KEY)
    if shard is None or getattr(shard, "as_given", False):
        return
    if isinstance(labels, Tensor) and labels.dim() == 2 and batch.get("shift_labels") is None:
        raise ValueError(
            "got labels with a shard, which models would shift, but labels of a shard are shifted already; pass them "
            "as shift_labels"
        )


def shifted(labels: Tensor) -> Tensor:
    """Each token's target: the label of the token after it; `IGNORED_LABEL` for the last one. labels: [B, S]."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


class _Read(NamedTuple):
    """A whole batch: tensors [B, S, ...] that are to be cut, the length with padding, and what ranks compare."""

    whole: dict[str, Tensor]
    padded: int
    mask: Mask | None
    checksum: int


def _read(batch: Mapping[str, Any], ranks: int, pad_token_id: int) -> _Read:
    whole_number("pad_token_id={}", pad_token_id, "use the id of the token that fills up sequences, or leave it out")
    whole = _whole(batch)
    padded = even_length(whole["position_ids"].shape[1], ranks)
    mask = _mask(batch, whole["position_ids"], padded)
    compared = [*whole.values(), batch.get("attention_mask"), batch.get("cu_seq_lens_q")]
    return _Read(whole, padded, mask, _checksum_of([x for x in compared if isinstance(x, Tensor)]))


def _whole(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors [B, S, ...] of a batch that are to be cut, with positions and with labels shifted."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch has to be a dict of tensors by name, got a {type(batch).__name__}")
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(ids, Tensor) or ids.dim() < 2 or 0 in ids.shape:
        got = f"shape {list(ids.shape)}" if isinstance(ids, Tensor) else ", ".join(map(str, batch)) or "nothing"
        raise ValueError(f"a batch needs input_ids of shape [batch, tokens], got {got}")
    whole: dict[str, Tensor] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or name in _PACKING:
            continue
        if value.shape[:2] != ids.shape[:2]:
            raise ValueError(
                f"{name} of shape {list(value.shape)} cannot be cut along the sequence: the first two dims of a "
                f"batch's tensors have to be {list(ids.shape[:2])}, those of the input; take it out of the batch"
            )
        whole[name] = value
    for name in ("position_ids", "labels", "shift_labels"):
        if batch.get(name) is not None and name not in whole:
            raise ValueError(
                f"{name} cannot be cut along the sequence: got {_kind(batch[name])}, expected a tensor of shape "
                f"{list(ids.shape[:2])}, one for each token; give others another name"
            )
    _check_masks(batch, ids)
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[:2])
    labels = whole.pop("labels", None)
    if labels is not None:
        if labels.shape != ids.shape[:2]:
            raise ValueError(
                f"labels of shape {list(labels.shape)} are not one for each token, {list(ids.shape[:2])}; give "
                "others than those of the next token another name"
            )
        whole.setdefault("shift_labels", shifted(labels))
    return whole


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _check_masks(batch: Mapping[str, Any], ids: Tensor) -> None:
    """Raise ValueError for padding and document bounds that cannot be read, and would be dropped."""
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


def _tokens(cp: ContextParallel, read: _Read) -> Tokens:
    """How a batch is dealt out: by the layout of the group, or where that is "auto" as suits causal layers."""
    mask = Causal() if read.mask is None else Causal() & read.mask
    if cp.strategy.layout == AUTO:
        return cp.tokens(read.padded, mask, alike=True)
    tokens = Tokens(read.padded)
    looks = _looked_at.get(cp, 0)
    if cp.rank == 0 and read.mask is not None and looks < _LOOKS:
        uneven = cp.imbalance(mask, tokens)
        _looked_at[cp] = looks + 1 if uneven <= _UNEVEN else _LOOKS
        if uneven > _UNEVEN:
            _LOG.warning(
                'documents or padding give one rank %.1f times the attention work of the mean; layout="auto" deals '
                "every batch out as suits it",
                uneven,
            )
    return tokens


def _shard(name: str, x: Tensor, cp: ContextParallel, tokens: Tokens, pad_token_id: int) -> Tensor:
    missing = tokens.length - x.shape[1]
    if missing:
        if name == "position_ids":  # the last one: a table of learned positions may end there
            tail = x[:, -1:].expand(-1, missing)
        else:
            fill = {"shift_labels": IGNORED_LABEL, "input_ids": pad_token_id}.get(name, 0)
            tail = x.new_full((x.shape[0], missing, *x.shape[2:]), fill)
        x = torch.cat([x, tail], 1)
    return cp.shard(x, tokens=tokens)


def _mask(batch: Mapping[str, Any], positions: Tensor, padded: int) -> Mask | None:
    """Padding and document bounds of the whole batch, None for neither."""
    masks: list[Mask] = []
    valid = batch.get("attention_mask")
    valid = valid.bool() if isinstance(valid, Tensor) else torch.ones_like(positions, dtype=torch.bool)
    if not bool(valid.all()):
        masks.append(key_padding(torch.nn.functional.pad(valid, (0, padded - valid.shape[1]), value=False)))
    if isinstance(batch.get("cu_seq_lens_q"), Tensor):
        masks.append(_documents(batch["cu_seq_lens_q"].tolist(), positions.shape, padded))
        return reduce(and_, masks)
    packed = batch.get("attention_mask") is None  # only then does transformers take any break for a document
    rows = [Documents((*_starts(*row, packed), padded)) for row in zip(positions, valid, strict=True)]
    if any(len(row.cu_seqlens) > 2 for row in rows):
        masks.append(rows[0] if len(set(rows)) == 1 else PerRow(tuple(rows)))
    return reduce(and_, masks) if masks else None


def _documents(bounds: Sequence[int], shape: Sequence[int], padded: int) -> Mask:
    """Bounds of documents packed into one row of `shape` [1, S]."""
    if shape[0] != 1 or bounds[0] != 0 or bounds[-1] != shape[1]:
        raise ValueError(
            f"cu_seq_lens_q from {bounds[0]} to {bounds[-1]} does not fit a batch of shape {list(shape)}; expected "
            "one packed row, and bounds from 0 to its length"
        )
    return Documents((*bounds[:-1], padded))


def _starts(positions: Tensor, valid: Tensor, packed: bool) -> tuple[int, ...]:
    """Where documents start in a row of positions [S].

    At token 0, and at every real token whose position is not one more than that of the token before it, nor than that
    of the last real one: padding in between may count or not. Unless the row is `packed`, positions have to start
    again there: others are shared ones, of images or branches.
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
    """A number that two different batches hardly share; order counts."""
    checksum = 0
    for x in tensors:
        flat = x.detach().float().contiguous().view(torch.int32) if x.is_floating_point() else x.detach()
        flat = flat.flatten().to(torch.int64)
        weights = torch.arange(1, flat.numel() + 1, device=flat.device) % 65521 + 1
        checksum = (31 * checksum + int((flat * weights).sum() % _SEEDS)) % _SEEDS
    return checksum
