"""Tokens that other ranks hold, with their gradients: whole sequences, and sequences shifted by some places.

Shifted by -1, token p takes the value of token p + 1. With 8 tokens in stripes over 2 ranks every value travels:

    rank 0 holds 0 2 4 6, gets 1 3 5 7        rank 1 holds 1 3 5 7, gets 2 4 6 and a zero

In zigzag only values at the ends of chunks travel. Gradients travel the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.sequence.layout import Layout, Run, Tokens, positions
from burst_plugin.sequence.mask import Both
from burst_plugin.sequence.masks import Documents, Keys, Mask, document_starts

# Types that gloo sends and index_copy_ knows; others travel as bytes.
_SENT = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.complex64, torch.complex128),
    }
)


class HeldTokens(NamedTuple):
    """The distribution of a sequence over the ranks of a group, for tensors with tokens along dimension `dim`.

    layout, tokens: which tokens each rank holds, and in which order.
    lengths: how many tokens each rank holds, by rank.
    rank: this rank's number in the group.
    group: the process group; None for a single rank.
    """

    dim: int
    layout: Layout
    tokens: Tokens
    lengths: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole sequence, in order, from every rank's `local` [..., lengths[rank], ...]; collective."""
        if self.group is None:
            return self.layout.unshard([local], self.dim, self.tokens)
        dim, held, most = self.dim, self.lengths[self.rank], max(self.lengths)
        padded = local.contiguous()
        if held < most:
            padded = local.new_zeros((*local.shape[:dim], most, *local.shape[dim + 1 :]))
            padded.narrow(dim, 0, held).copy_(local)
        shards = [torch.empty_like(padded) for _ in self.lengths]
        dist.all_gather([as_sent(shard) for shard in shards], as_sent(padded), group=self.group)
        found = [shard.narrow(dim, 0, length) for shard, length in zip(shards, self.lengths, strict=True)]
        return self.layout.unshard(found, dim, self.tokens)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return the tokens that `rank` holds of the tensor `whole` of a whole sequence."""
        return self.layout.shard(whole, self.dim, (rank, len(self.lengths)), self.tokens)

    def summed_part(self, whole: Tensor) -> Tensor:
        """Add up the ranks' tensors `whole`, in rank order; return this rank's tokens of the sum; collective."""
        if self.group is None:
            return self.part(whole, self.rank)
        parts = [self.part(whole, rank).movedim(self.dim, 0) for rank in range(len(self.lengths))]
        leaving, held = torch.cat(parts), self.lengths[self.rank]
        arrived = leaving.new_empty((held * len(self.lengths), *leaving.shape[1:]))
        dist.all_to_all_single(arrived, leaving, [held] * len(self.lengths), list(self.lengths), group=self.group)
        wide = torch.promote_types(whole.dtype, torch.float32)
        summed = arrived.view(len(self.lengths), held, *arrived.shape[1:]).sum(0, dtype=wide)
        return summed.to(whole.dtype).movedim(0, self.dim)


class WholeSequence(torch.autograd.Function):
    """An autograd function that gathers the whole sequence from all ranks' tokens.

    Its gradient is this rank's part of the whole gradient, summed over ranks if there is a `meet`, which is called
    before ranks send theirs and raises ValueError where they are not in one backward pass.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, held: HeldTokens, meet: Callable[[], None] | None) -> Tensor:
        ctx.held, ctx.meet = held, meet
        return held.whole(local)

    @staticmethod
    @between_graphs
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        held, meet = ctx.held, ctx.meet
        if meet is None:
            return held.part(grad, held.rank), None, None
        if torch.is_grad_enabled():  # the graph would lack the other ranks
            raise RuntimeError("unshard(loss='own') has no second derivatives; leave out create_graph=True")
        meet()
        return held.summed_part(grad), None, None


class Rows(NamedTuple):
    """Rows of a rank's tensor that it sends to the other ranks, or receives from them, in one exchange.

    rows: int64 [N], on the host: the numbers of the rows, grouped by the other rank, in rank order.
    counts: for each rank of the group, how many of these rows are exchanged with it.
    """

    rows: Tensor  # int64, on the host
    counts: list[int]


class Shift(NamedTuple):
    """One rank's part in a shift of a sequence: the rows that leave it, and the rows that arrive from other ranks.

    Both include rows that stay on this rank. `group` is None for a single rank.
    """

    leaving: Rows
    arriving: Rows
    group: dist.ProcessGroup | None

    def move(self, local: Tensor, *, back: bool = False) -> Tensor:
        """Send the rows of `local` [S_local, ...] that leave; return a tensor like it with what arrived; collective.

        Rows at which nothing arrives are 0. With `back` rows go the opposite way, as gradients do.
        """
        sent, put = (self.arriving, self.leaving) if back else (self.leaving, self.arriving)
        moved = torch.zeros_like(local, memory_format=torch.contiguous_format)
        source = as_sent(local).index_select(0, sent.rows.to(local.device))
        arrived = source.new_empty((len(put.rows), *source.shape[1:]))
        if self.group is None:
            arrived.copy_(source)
        else:
            dist.all_to_all_single(arrived, source, put.counts, sent.counts, group=self.group)
        as_sent(moved).index_copy_(0, put.rows.to(local.device), arrived)
        return moved


class ShiftedRows(torch.autograd.Function):
    """An autograd function that moves rows of a tensor between ranks by a `Shift`, and gradients the opposite way."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shift: Shift, meet: Callable[[], None] | None) -> Tensor:
        ctx.shift, ctx.meet = shift, meet
        return shift.move(local)

    @staticmethod
    @between_graphs
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.meet is not None:
            ctx.meet()
        return ctx.shift.move(grad, back=True), None, None


def as_sent(x: Tensor) -> Tensor:
    """Return a tensor [N, ...] as it is sent: itself, or its bytes, [N, n], a view of them if it is contiguous."""
    return x if x.dtype in _SENT else x.reshape(len(x), x.shape[1:].numel()).contiguous().view(torch.uint8)


def shifted(
    local: Tensor,
    by: int,
    dim: int,
    shards: Sequence[Sequence[Run]],
    place: tuple[int, dist.ProcessGroup | None],
    meet: Callable[[], None] | None = None,
) -> Tensor:
    """Return this rank's tokens of a sequence that is shifted by `by` places along `dim`; collective, also backward.

    Args:
        local: this rank's tokens along `dim`, of any dtype.
        by: how many places, in the direction of `torch.roll`; zeros come in where that would let values in again.
        dim: a dimension of `local`.
        shards: the runs of every rank.
        place: (this rank's number, the group of all ranks or None if it is alone).
        meet: called before gradients move; raises ValueError where ranks are not in one backward pass. None to call
            nothing.
    """
    rank, group = place
    shift = Shift(*exchanged_rows(tuple(map(tuple, shards)), rank, by), group)
    rows: Tensor = ShiftedRows.apply(local.movedim(dim, 0), shift, meet)  # type: ignore[no-untyped-call]
    return rows.movedim(0, dim)


@lru_cache(maxsize=16)  # all shifts of some microbatches that a pipeline has in flight
def exchanged_rows(shards: tuple[tuple[Run, ...], ...], rank: int, by: int) -> tuple[Rows, Rows]:
    """Return (the rows that `rank` sends, the rows that it receives) for a shift by `by` places.

    `shards` are the runs of every rank.
    """
    held = [positions(runs) for runs in shards]
    ranks, length = len(shards), sum(map(len, held))
    edge = abs(by)
    holder = torch.full((length + 2 * edge,), ranks, device="cpu")  # no rank holds what is beyond the ends
    for other, rows in enumerate(held):
        holder[rows + edge] = other
    order = held[rank].argsort()  # both sides name rows in the order of the sequence
    own = held[rank][order] + edge
    return _by_rank(order, holder[own + by], ranks), _by_rank(order, holder[own - by], ranks)


def _by_rank(rows: Tensor, partners: Tensor, ranks: int) -> Rows:
    """Return local rows sorted by the rank that they are exchanged with, without rows that stay unused."""
    by_rank = partners.argsort(stable=True)
    counts = torch.bincount(partners, minlength=ranks + 1)[:ranks].tolist()
    return Rows(rows[by_rank][: sum(counts)], counts)


def crosses_documents(runs: Sequence[Run], length: int, by: int, mask: Mask, device: torch.device) -> Tensor:
    """Return where a shift by `by` places would bring a value of another document, of padding, or none at all.

    Args:
        runs: the runs of this rank.
        length: of the whole sequence.
        by: how many places, in the direction of `torch.roll`.
        mask: whose documents and padding count.
        device: of the result.

    Returns:
        bool [1 or B, S_local] for this rank's tokens, with a row for each batch row of `mask`. It is True where the
        token itself is padding, too.

    Raises:
        ValueError: for a mask with a prefix tree, or of another length.
    """
    if mask.trees:
        raise ValueError(
            "a shift is not defined with a prefix tree, where several tokens follow one; leave the mask out, or use "
            "burst_plugin.trajectories"
        )
    held = positions(runs, device)
    source = held - by
    inside = (source >= 0) & (source < length)
    by_row = []
    for row in range(mask.rows or 1):
        mask.of_row(row).regions(length, length)  # raises ValueError if they do not fit
        starts = torch.tensor(sorted({0} | document_starts(mask.of_row(row))), device=device)
        same = torch.searchsorted(starts, source, right=True) == torch.searchsorted(starts, held, right=True)
        both_real = are_real(mask.of_row(row), source) & are_real(mask.of_row(row), held)
        by_row.append(~(inside & same & both_real))
    return torch.stack(by_row)


def are_real(mask: Mask, places: Tensor) -> Tensor:
    """Return which of the tokens at `places` of the whole sequence are no padding, as a bool tensor like `places`.

    `mask` is the mask of one batch row.
    """
    if isinstance(mask, Both):
        return are_real(mask.one, places) & are_real(mask.other, places)
    real = torch.ones_like(places, dtype=torch.bool)
    if isinstance(mask, Keys):
        real = torch.zeros_like(real)
        for start, stop in mask.spans:
            real |= (places >= start) & (places < stop)
    elif isinstance(mask, Documents) and mask.lengths is not None:
        bounds = torch.tensor(mask.cu_seqlens, device=places.device)
        document = (torch.searchsorted(bounds, places, right=True) - 1).clamp(0, len(mask.lengths) - 1)
        lengths = torch.tensor(mask.lengths, device=places.device)
        real = places - bounds[document] < lengths[document]
    return real
