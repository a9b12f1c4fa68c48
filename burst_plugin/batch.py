"""A batch of whole sequences cut into one rank's shard: ids, labels, positions, and the mask that goes with them.

    4 tokens a b c d, over 2 ranks in zigzag; labels are shifted before they are cut, and called so from then on:

                     whole              rank 0     rank 1
    input_ids        a b c d            a d        b c
    position_ids     0 1 2 3            0 3        1 2
    shift_labels     b c d -100         b -100     c d

How a batch is read and checked before it is cut is in `sequence.batches`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from burst_plugin.checks import shown
from burst_plugin.context import ContextParallel
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.sequence.batches import IGNORED_LABEL, MASK_KEYS, SEEDS, WholeBatch, read_batch, shifted
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.strategy import AUTO

__all__ = ["IGNORED_LABEL", "SHARD_KEY", "SequenceShard", "as_given", "check_shard", "shard_batch", "shifted"]

SHARD_KEY = "burst"  # the entry of a sharded batch that says what it is a shard of
_UNEVEN = 1.3  # times the mean of the ranks' work, above which a warning is logged
_MARK = "_burst_plugin_shard"  # an attribute of ids that were cut
_DRAW = 1_566_083_941  # seeds of a shard's forwards are so far apart, and far from those of other batches
_LOOKS = 10  # batches to look at until one is uneven; each look takes as long as making a new mask's plan
_looked_at: WeakKeyDictionary[ContextParallel, int] = WeakKeyDictionary()  # by ring: batches looked at so far
_LOG = logging.getLogger(__name__)


class _Forwards:
    """The number of forwards that a shard was used in. No dataclass: FSDP makes copies of these in every forward."""

    def __init__(self) -> None:
        self.made = 0


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """What the local tensors of a sharded batch are part of; passed with them to every attention layer.

    cp: the ranks that hold the sequence between them.
    length: number of tokens of the whole sequence, without padding.
    tokens: the sequence with padding, so that all ranks hold equally many tokens, and the assignment to ranks.
    mask: padding and document bounds in positions of the whole sequence, besides what a layer itself asks for; None
        for neither. Padding that makes the length fit comes last, where causal layers never see it; others add
        `Keys(((0, length),))`.
    valid_tokens: number of labels that are part of the loss, in the whole batch.
    seed: a seed for dropout, the same on all ranks of `cp`; None if it is not known which forward is computed again.
    name: the name of the batch in errors of ranks that are out of step.
    as_given: whether the batch is whole, as it may be on a ring of one rank, and everything in it as it was given:
        labels are not shifted.
    """

    cp: ContextParallel
    length: int
    tokens: Tokens
    mask: Mask | None = None
    valid_tokens: int = 0
    seed: int | None = 0
    as_given: bool = False
    name: str = ""
    _forwards: _Forwards = field(default_factory=_Forwards, repr=False)

    def __str__(self) -> str:
        return self.name

    def of_forward(self) -> SequenceShard:
        """Return the shard that a forward in training is to hand on: from the second one on a copy of another seed.

        Layers that a checkpoint recomputes are given the copy again. A checkpoint around a whole model begins another
        forward, in the backward pass, and does not say which of several that was.
        """
        if torch._C._current_graph_task_id() != -1:
            return self if self._forwards.made <= 1 or self.seed is None else replace(self, seed=None)
        number, self._forwards.made = self._forwards.made, self._forwards.made + 1
        if not number or self.seed is None:
            return self
        return replace(self, seed=(self.seed + number * _DRAW) % SEEDS)

    def unshard(self, local: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor without padding, on every rank; collective, without gradient."""
        return self.cp.unshard(local, dim, self.tokens).narrow(dim, 0, self.length)


@between_graphs
def shard_batch(batch: Mapping[str, Any], cp: ContextParallel, *, pad_token_id: int = 0) -> dict[str, Any]:
    """Return this rank's shard of `batch`, which is the same on all ranks of `cp`; collective.

    Args:
        batch: tensors [B, S, ...] of whole sequences: `input_ids` (or `inputs_embeds`) and, if there are any,
            `labels` (not shifted) or `shift_labels`, `position_ids`, a padding mask `attention_mask` [B, S], and
            document bounds as `cu_seq_lens_q` or as positions that start again, or a `tree`, a `PrefixTree` or one
            for each row, which takes the place of labels and bounds. `position_ids` of mRoPE are [3, B, S], or
            [4, B, S] with the positions in the text first, of which documents are read. Anything else of that shape
            is cut as well, and not shifted, as weights of labels have to be before; numbers, strings and tensors of
            one dimension are passed on.
        pad_token_id: fills up a sequence of which the layout would have ranks hold unequal numbers of tokens.

    Returns:
        The same keys with shards [B, S_local, ...]; `position_ids` in any case; `shift_labels` in place of `labels`,
        which a custom loss might shift once more; the mask and the document bounds in the `SequenceShard` under
        "burst".

    Raises:
        ValueError: on every rank of `cp`, for a batch that cannot be cut, is cut already, or differs between ranks.
    """

    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp is {shown(cp)}, not a ContextParallel; make one of the process group once, and pass it")
    read, number = prepared_together(partial(_read, batch, cp, pad_token_id), partial(_compare, cp))
    whole, tokens = read.tensors, _tokens(cp, read)
    local = {name: _shard(name, x, cp, tokens, pad_token_id) for name, x in whole.items()}
    shard = SequenceShard(
        cp,
        length=whole["position_ids"].shape[-1],
        tokens=tokens,
        mask=read.mask,
        valid_tokens=int((whole["shift_labels"] != IGNORED_LABEL).sum()) if "shift_labels" in whole else 0,
        seed=(read.checksum + number) % SEEDS,
        name=f"batch {read.checksum:08x} of comparison {number}",
    )
    if cp.ranks > 1:
        for name in ("input_ids", "inputs_embeds"):
            if name in local:
                setattr(local[name], _MARK, True)
    passed_on = {k: v for k, v in batch.items() if k not in whole and k not in MASK_KEYS and k != "labels"}
    return {**passed_on, **local, SHARD_KEY: shard}


def _read(batch: Mapping[str, Any], cp: ContextParallel, pad_token_id: int) -> WholeBatch:
    """Return what a batch holds; raise ValueError for one that is cut already, or that cannot be read."""
    if isinstance(batch, Mapping) and _is_cut(batch):
        raise ValueError(
            "the batch is cut already, by shard_batch or by a data loader that calls it, as sp_size of "
            "ParallelismConfig makes one: pass it to the model as it is"
        )
    return read_batch(batch, cp.ranks, pad_token_id)


def _is_cut(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch carries its shard, or ids that were cut."""
    ids_are_cut = any(hasattr(batch.get(name), _MARK) for name in ("input_ids", "inputs_embeds"))
    return isinstance(batch.get(SHARD_KEY), SequenceShard) or ids_are_cut


def as_given(batch: Mapping[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """Return the whole batch of a ring of one rank as it was given, and its `SequenceShard` for attention.

    A model on one rank gets the padding, the document bounds and the positions of the batch, and shifts its labels:
    its own layers may need them, and what it returns is that of every token of the batch.
    """
    shard: SequenceShard = shard_batch(batch, cp)[SHARD_KEY]
    return {**batch, SHARD_KEY: replace(shard, as_given=True)}


def check_shard(batch: Mapping[str, Any]) -> None:
    """Raise ValueError for parts of a shard that do not fit together, before they are passed to a model.

    Ids that were cut, without the entry that says so, would be taken for a whole sequence; labels of a shard, under
    the name of those that models shift, would be shifted twice. A tree that was not cut would be ignored.
    """
    if SHARD_KEY not in batch and any(hasattr(batch.get(name), _MARK) for name in ("input_ids", "inputs_embeds")):
        raise ValueError(
            f"got the ids of a shard without its entry {SHARD_KEY!r}, as if they were a whole sequence; pass all "
            "that shard_batch returned: model(**batch)"
        )
    if SHARD_KEY not in batch and batch.get("tree") is not None:
        raise ValueError(
            "got a tree with a whole batch, which a model computes as one text; pass what shard_batch(batch, cp) "
            "returns, or leave the tree out"
        )
    labels, shard = batch.get("labels"), batch.get(SHARD_KEY)
    if shard is None or getattr(shard, "as_given", False):
        return
    if isinstance(labels, Tensor) and labels.dim() == 2 and batch.get("shift_labels") is None:
        raise ValueError(
            "got labels with a shard, which models would shift, but labels of a shard are shifted already; pass them "
            "as shift_labels"
        )


def _compare(cp: ContextParallel, read: WholeBatch | None, problem: str) -> int:
    """Return the number of the comparison in which all ranks turned out to have the same batch; collective."""
    compared = {}
    if read is not None:
        compared["batch"] = f"{list(read.tensors['position_ids'].shape)} with checksum {read.checksum}"
    try:
        return cp.agree(compared, problem)
    except ValueError as error:
        if problem or "batch=" not in str(error):
            raise
        raise ValueError(
            f"{error}; all ranks of a context-parallel group take the same batch and cut it between them: let "
            "the sampler count data-parallel ranks, not all ranks (Trainer, Accelerate: sp_size of "
            "ParallelismConfig)"
        ) from error


def _tokens(cp: ContextParallel, read: WholeBatch) -> Tokens:
    """Return how tokens are assigned: by the group's layout or, if that is "auto", as suits causal layers."""
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
                'documents, trees or padding give one rank %.1f times the attention work of the mean; layout="auto" '
                "balances every batch",
                uneven,
            )
    return tokens


def _shard(name: str, x: Tensor, cp: ContextParallel, tokens: Tokens, pad_token_id: int) -> Tensor:
    """Return this rank's shard of one tensor of a batch, padded to the length of `tokens`."""
    dim = x.dim() - 1 if name == "position_ids" else 1  # positions of mRoPE are [3, B, S]
    missing = tokens.length - x.shape[dim]
    if missing:
        if name == "position_ids":  # repeats the last one: a table of learned positions may end there
            tail = x[..., -1:].expand(*x.shape[:-1], missing)
        else:
            fill = {"shift_labels": IGNORED_LABEL, "input_ids": pad_token_id}.get(name, 0)
            tail = x.new_full((x.shape[0], missing, *x.shape[2:]), fill)
        x = torch.cat([x, tail], dim)
    return cp.shard(x, dim, tokens)
