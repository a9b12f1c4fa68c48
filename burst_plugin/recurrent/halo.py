"""Halos: the tokens before each piece, which convolutions and token shifts look back at.

Slots of a halo that would reach back beyond the beginning of a document hold zeros.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burst_plugin.activations.kept_attention import KeptTensors
from burst_plugin.comm.call_identity import CallId
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.passes import Passes
from burst_plugin.recurrent.pieces import START, Pieces
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.rank_state import RankState


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """One rank's plan for fetching halos, the `width` tokens before each of its pieces, from their holders.

    Its tokens are the rows of tensors [T, ...]. Its halos are the rows ("slots") of tensors [pieces * width, ...]:
    slots `n * width` up to `(n + 1) * width` are of its piece n, in the order of the sequence.

    sends: for each rank, this one included, the int64 numbers of the rows that it needs of this rank.
    recvs: for each rank, this one included, the int64 numbers of the slots that its rows go to. Other slots are
        zeros.
    pieces: how many pieces this rank has.
    what: a description of the exchange for error messages, equal on all ranks.
    """

    rank_state: RankState
    sends: Mapping[int, Tensor]
    recvs: Mapping[int, Tensor]
    pieces: int
    width: int
    what: str


def halo_plan(state: RankState, pieces: Pieces, width: int, what: str, device: torch.device) -> HaloPlan:
    """Return one rank's plan for getting the `width` tokens before each of its pieces from other ranks.

    state: of the rank.
    pieces: all pieces of the batch, on all ranks.
    what: a description of the exchange for error messages, equal on all ranks.
    device: of the plan's tensors.
    """
    rank = state.rank
    sends: dict[int, list[int]] = {}
    recvs: dict[int, list[int]] = {}
    first = pieces.first_of_rank[rank]
    for number, piece in enumerate(pieces.every):
        slot, before = width, piece.before
        while slot and before != START:
            source = pieces.every[before]
            count = min(slot, source.length)
            if source.rank == rank:
                end = source.offset + source.length
                sends.setdefault(piece.rank, []).extend(range(end - count, end))
            if piece.rank == rank:
                at = (number - first) * width + slot
                recvs.setdefault(source.rank, []).extend(range(at - count, at))
            slot, before = slot - count, source.before
    leaving, arriving = (
        {peer: torch.tensor(rows, device=device) for peer, rows in each.items()} for each in (sends, recvs)
    )
    return HaloPlan(state, leaving, arriving, len(pieces.of_rank(rank)), width, what)


class HaloFunction(torch.autograd.Function):
    """The autograd function that fetches halos, the tokens before each piece, on the ranks of this process.

    Gradients of halos are added to the gradients of the tokens, on the ranks that hold them. Arguments of `apply`:

    passes: of the ranks of this process.
    plans: a `HaloPlan` for each of these ranks.
    counts: the number of token rows of each of these ranks.
    call: the call that ranks have agreed on.
    kept: where a checkpoint keeps the halos, so that its second run fetches none; None to keep none.
    xs: tensors [T, ...], with the tokens of one rank after another's.

    Returns for each x its halos, [pieces * width, ...], one rank's after another's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        plans: Sequence[HaloPlan],
        counts: Sequence[int],
        call: CallId,
        kept: KeptTensors | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        halos = None if kept is None else kept.found
        if halos is None:
            of_ranks = zip(*(torch.split_with_sizes(x, list(counts)) for x in xs), strict=True)
            programs = [_forward(plan, call, mine) for plan, mine in zip(plans, of_ranks, strict=True)]
            halos = passes.run("forward", call, programs, xs[0].device)
            if kept is not None:
                kept.found = halos
        ctx.save_for_backward(xs[0].new_empty(0))  # as scans do: checkpoints compute again at the same place
        ctx.passes, ctx.plans, ctx.counts, ctx.call = passes, plans, counts, call
        return tuple(torch.cat(parts) for parts in zip(*halos, strict=True))

    @staticmethod
    @between_graphs
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, plans = ctx.saved_tensors, ctx.plans
        slots = [plan.pieces * plan.width for plan in plans]
        of_ranks = zip(*(torch.split_with_sizes(grad, slots) for grad in grads), strict=True)
        programs = [
            _backward(plan, ctx.call, mine, count)
            for plan, mine, count in zip(plans, of_ranks, ctx.counts, strict=True)
        ]
        results = ctx.passes.run("backward", ctx.call, programs, grads[0].device)
        return None, None, None, None, None, *(torch.cat(parts) for parts in zip(*results, strict=True))


def _forward(plan: HaloPlan, call: CallId, xs: Sequence[Tensor]) -> Generator[None, None, list[Tensor]]:
    """Return the halos of one rank's tokens `xs`, each [T, ...]."""
    messages = Messages(plan.rank_state, xs[0].device, plan.what, "forward", call)
    sends = {peer: [x[rows] for x in xs] for peer, rows in plan.sends.items()}
    specs = {peer: [((len(slots), *x.shape[1:]), x.dtype) for x in xs] for peer, slots in plan.recvs.items()}
    received = yield from messages.exchange(sends, specs)
    halos = [x.new_zeros((plan.pieces * plan.width, *x.shape[1:])) for x in xs]
    for peer, tensors in received.items():
        for halo, rows in zip(halos, tensors, strict=True):
            halo[plan.recvs[peer]] = rows
    return halos


def _backward(
    plan: HaloPlan, call: CallId, grads: Sequence[Tensor], count: int
) -> Generator[None, None, list[Tensor]]:
    """Return the gradients of one rank's `count` tokens, from the gradients of its own and others' halos."""
    messages = Messages(plan.rank_state, grads[0].device, plan.what, "backward", call)
    sends = {peer: [grad[slots] for grad in grads] for peer, slots in plan.recvs.items()}
    specs = {
        peer: [((len(rows), *grad.shape[1:]), grad.dtype) for grad in grads] for peer, rows in plan.sends.items()
    }
    received = yield from messages.exchange(sends, specs)
    results = [grad.new_zeros((count, *grad.shape[1:])) for grad in grads]
    for peer, tensors in sorted(received.items()):
        for result, rows in zip(results, tensors, strict=True):
            result.index_add_(0, plan.sends[peer], rows)
    return results
