"""Sequences that multi-token prediction rolls by one token, while they are cut over ranks in any layout.

Token p takes the value of token p + 1. With 8 tokens in stripes over 2 ranks, every row travels to the other rank:

    rank 0 holds 0 2 4 6, gets 1 3 5 7        rank 1 holds 1 3 5 7, gets 2 4 6 and a zero

In zigzag only rows at the ends of chunks travel. Gradients travel the way back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.megatron.batches.packed import layout_of
from burst_plugin.sequence.layout import Tokens, positions


class _Rows(NamedTuple):
    """This rank's local rows that are exchanged with every rank, in rank order: `counts` of each."""

    rows: Tensor  # int64, on the host
    counts: list[int]


def roll_left(local: Tensor, dim: int, tokens: Tokens, group: dist.ProcessGroup, ends: Tensor | None) -> Tensor:
    """Return this rank's tokens of a sequence that is rolled by one token along `dim`; collective, also backward.

    Args:
        local: this rank's tokens along `dim`, of any dtype.
        tokens: which tokens of the sequence ranks of `group` hold.
        ends: where packed documents end, int [documents]; None for one sequence.

    Returns:
        A tensor like `local`, 0 at the last token of the sequence or of a document.
    """
    rank, ranks = group.rank(), group.size()
    rows = local.movedim(dim, 0)
    rolled: Tensor = _Rolled.apply(rows, *_exchanged(tokens, rank, ranks), group)  # type: ignore[no-untyped-call]
    if ends is not None:
        held = positions(layout_of(tokens).runs(rank, ranks, tokens), ends.device)
        is_last = torch.isin(held + 1, ends)
        rolled = rolled.masked_fill(is_last.view(-1, *[1] * (rolled.dim() - 1)), 0)
    return rolled.movedim(0, dim)


class _Rolled(torch.autograd.Function):
    """Rows that other ranks hold. The backward pass sends gradients where rows came from."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, taken: _Rows, put: _Rows, group: dist.ProcessGroup) -> Tensor:
        ctx.exchange = taken, put, group
        return _exchange(local, taken, put, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        taken, put, group = ctx.exchange
        return _exchange(grad, put, taken, group), None, None, None


def _exchange(local: Tensor, taken: _Rows, put: _Rows, group: dist.ProcessGroup) -> Tensor:
    """Send rows that are `taken` here to other ranks, and return a tensor with what arrives in rows `put`, else 0."""
    sent = local.index_select(0, taken.rows.to(local.device))
    received = sent.new_empty((len(put.rows), *sent.shape[1:]))
    target, source = (x.view(torch.uint8) if x.dtype is torch.bool else x for x in (received, sent))
    dist.all_to_all_single(target, source, put.counts, taken.counts, group=group)
    result = torch.zeros_like(local, memory_format=torch.contiguous_format)
    return result.index_copy_(0, put.rows.to(local.device), received)


@lru_cache(maxsize=16)  # all rolls of some microbatches that a pipeline has in flight
def _exchanged(tokens: Tokens, rank: int, ranks: int) -> tuple[_Rows, _Rows]:
    """Return the rows that a rank sends, which hold the token after one of the receiver's, and those that it gets."""
    held = [positions(layout_of(tokens).runs(other, ranks, tokens)) for other in range(ranks)]
    holder = torch.full((tokens.length + 2,), ranks)  # of tokens -1 to length; no rank holds these two
    for other, rows in enumerate(held):
        holder[rows + 1] = other
    order = held[rank].argsort()  # both sides name rows in the order of the sequence
    own = held[rank][order] + 1
    return _by_rank(order, holder[own - 1], ranks), _by_rank(order, holder[own + 1], ranks)


def _by_rank(rows: Tensor, other: Tensor, ranks: int) -> _Rows:
    """Return local rows sorted by the rank that holds their neighbour, without those that have none."""
    by_rank = other.argsort(stable=True)
    counts = torch.bincount(other, minlength=ranks + 1)[:ranks].tolist()
    return _Rows(rows[by_rank][: sum(counts)], counts)
