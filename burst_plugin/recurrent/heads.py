"""Exchange heads instead of states: every rank computes whole sequences of its share of the heads.

The traffic of the exchange grows with the number of tokens, so that it pays for few tokens per rank, and where a rank
holds no tokens that follow each other, as in a striped layout.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burst_plugin.comm.call_identity import CallId
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.passes import Passes
from burst_plugin.ring.rank_state import RankState


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """One rank's plan for exchanging its tokens of all heads for whole sequences of its share of the heads.

    rows: for each rank the positions of its tokens in the whole sequence, int64.
    batch: the number of batch rows.
    """

    rank_state: RankState
    rows: Sequence[Tensor]
    batch: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the heads."""
        return len(self.rows)

    def heads_of(self, rank: int, heads: int) -> slice:
        """Return which of `heads` heads `rank` computes, as a slice.

        With fewer heads than ranks, several ranks compute one head.
        """
        return heads_of(rank, self.ranks, heads)

    def to_heads(self, messages: Messages, xs: Sequence[Tensor]) -> Generator[None, None, list[Tensor]]:
        """Exchange this rank's tokens xs [B, S_local, H, ...] for whole sequences of its heads, [B, S, h, ...].

        A generator, which yields while messages are under way, and returns the new tensors when it ends.
        """
        rank = self.rank_state.rank
        parts = {p: [x[:, :, self.heads_of(p, x.shape[2])] for x in xs] for p in range(self.ranks)}
        own = parts.pop(rank)
        specs = {p: [((self.batch, len(self.rows[p]), *x.shape[2:]), x.dtype) for x in own] for p in parts}
        received = yield from messages.exchange(parts, specs)
        received[rank] = own
        length = sum(map(len, self.rows))
        whole = [x.new_empty((self.batch, length, *x.shape[2:])) for x in own]
        for p, tensors in received.items():
            for x, part in zip(whole, tensors, strict=True):
                x[:, self.rows[p]] = part
        return whole

    def to_tokens(
        self, messages: Messages, xs: Sequence[Tensor], heads: Sequence[int]
    ) -> Generator[None, None, list[Tensor]]:
        """Exchange whole sequences xs [B, S, h, ...] of this rank's heads for its tokens of all heads.

        A generator, which yields while messages are under way, and returns tensors [B, S_local, H, ...] when it ends.
        Where several ranks share a head, their tensors are added up.

        heads: the number of all heads H of each of `xs`.
        """
        rank, here = self.rank_state.rank, len(self.rows[self.rank_state.rank])
        parts = {p: [x[:, self.rows[p]] for x in xs] for p in range(self.ranks)}
        own = parts.pop(rank)
        specs = {
            p: [
                ((self.batch, here, _size(self.heads_of(p, count)), *x.shape[3:]), x.dtype)
                for x, count in zip(xs, heads, strict=True)
            ]
            for p in parts
        }
        received = yield from messages.exchange(parts, specs)
        received[rank] = own
        local = [x.new_zeros((self.batch, here, count, *x.shape[3:])) for x, count in zip(xs, heads, strict=True)]
        for p in range(self.ranks):
            for x, part in zip(local, received[p], strict=True):
                x[:, :, self.heads_of(p, x.shape[2])] += part
        return local


def _size(part: slice) -> int:
    return int(part.stop) - int(part.start)


class HeadFunction(torch.autograd.Function):
    """The autograd function that exchanges tokens for heads, or back, on the ranks of this process.

    Arguments of `apply`:

    passes: of the ranks of this process.
    plans: a `HeadPlan` for each of these ranks.
    call: the call that ranks have agreed on.
    heads: None to exchange tokens for heads; for the way back, the number of all heads H of each of `xs`.
    xs: tokens [B, S_local, H, ...], one rank's after another's along dim 1; or heads [B, S, h, ...], one rank's after
        another's along dim 2.

    Returns for each x the other kind of tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        plans: Sequence[HeadPlan],
        call: CallId,
        heads: Sequence[int] | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.passes, ctx.plans, ctx.call, ctx.towards_heads = passes, plans, call, heads is None
        ctx.heads = [x.shape[2] for x in xs] if heads is None else heads
        ctx.save_for_backward(xs[0].new_empty(0))  # as scans do
        return _exchanged(ctx, "forward", xs, towards_heads=heads is None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # a checkpoint computes again here
        return None, None, None, None, *_exchanged(ctx, "backward", grads, towards_heads=not ctx.towards_heads)


def _exchanged(ctx: Any, direction: Any, xs: Sequence[Tensor], *, towards_heads: bool) -> tuple[Tensor, ...]:
    plans: Sequence[HeadPlan] = ctx.plans
    programs = []
    counts = [len(plan.rows[plan.rank_state.rank]) for plan in plans]
    for place, plan in enumerate(plans):
        messages = Messages(plan.rank_state, xs[0].device, "an exchange of heads", direction, ctx.call)
        if towards_heads:
            mine = [torch.split_with_sizes(x, counts, 1)[place] for x in xs]
            programs.append(plan.to_heads(messages, mine))
        else:
            mine = [x.chunk(len(plans), 2)[place] for x in xs]
            programs.append(plan.to_tokens(messages, mine, ctx.heads))
    results = ctx.passes.run(direction, ctx.call, programs, xs[0].device)
    return tuple(torch.cat(parts, 2 if towards_heads else 1) for parts in zip(*results, strict=True))


def gathered(plan: HeadPlan, messages: Messages, x: Tensor) -> Generator[None, None, Tensor]:
    """Gather a tensor x [B, h, ...] of each rank's heads into one of all heads, [B, H, ...]; without gradient.

    A generator, which yields while messages are under way, and returns the gathered tensor when it ends. Ranks have
    equally many heads.
    """
    rank = plan.rank_state.rank
    others = [p for p in range(plan.ranks) if p != rank]
    received = yield from messages.exchange(
        {p: [x] for p in others}, {p: [(tuple(x.shape), x.dtype)] for p in others}
    )
    return torch.cat([x if p == rank else received[p][0] for p in range(plan.ranks)], 1)


def heads_of(part: int, parts: int, heads: int) -> slice:
    """Return which of `heads` heads part number `part` of `parts` has, as a slice.

    With fewer heads than parts, several parts have one head.
    """
    first = part * heads // parts
    return slice(first, max(first + 1, (part + 1) * heads // parts))


def can_share(ranks: int, heads: Sequence[int]) -> bool:
    """Return whether ranks can share the heads of several tensors evenly; several ranks may get the same head.

    `heads` are the tensors' numbers of heads. The largest has to be a multiple of `ranks`, each of the others a
    multiple or a divisor.
    """
    return max(heads) % ranks == 0 and not any(count % ranks and ranks % count for count in heads)


def check_heads(ranks: int, heads: Sequence[int]) -> None:
    """Raise ValueError unless ranks can share tensors with these numbers of heads evenly, see `can_share`."""
    if not can_share(ranks, heads):
        raise ValueError(
            f"{', '.join(map(str, sorted(set(heads))))} heads cannot be shared between {ranks} ranks; use "
            "recurrent='state', with layout='zigzag', 'contiguous' or 'auto'"
        )
