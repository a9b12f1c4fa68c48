"""Exchange heads instead of states: every rank computes whole sequences of its share of the heads.

The traffic of the exchange grows with the number of tokens, so that it pays for few tokens per rank, and where a rank
holds no tokens that follow each other, as in a striped layout.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_plugin.comm.call_identity import CallId
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.passes import Passes, Results
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.rank_state import RankState
from burst_plugin.types import Direction

MANY_TOKENS = 1024


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
        parts = {p: [x[:, :, self.heads_of(p, x.shape[2])] for x in xs] for p in range(self.ranks)}
        own_parts = parts[self.rank_state.rank]
        specs = {p: [((self.batch, len(self.rows[p]), *x.shape[2:]), x.dtype) for x in own_parts] for p in parts}
        received = yield from messages.exchange(parts, specs)
        length = sum(map(len, self.rows))
        sequences = [x.new_empty((self.batch, length, *x.shape[2:])) for x in own_parts]
        for p, tensors in received.items():
            for x, part in zip(sequences, tensors, strict=True):
                x[:, self.rows[p]] = part
        return sequences

    def to_tokens(
        self, messages: Messages, xs: Sequence[Tensor], heads: Sequence[int]
    ) -> Generator[None, None, list[Tensor]]:
        """Exchange whole sequences xs [B, S, h, ...] of this rank's heads for its tokens of all heads.

        A generator, which yields while messages are under way, and returns tensors [B, S_local, H, ...] when it ends.
        Where several ranks share a head, their tensors are added up.

        heads: the number of all heads H of each of `xs`.
        """
        here = len(self.rows[self.rank_state.rank])
        parts = {p: [x[:, self.rows[p]] for x in xs] for p in range(self.ranks)}
        specs = {
            p: [
                ((self.batch, here, _size(self.heads_of(p, count)), *x.shape[3:]), x.dtype)
                for x, count in zip(xs, heads, strict=True)
            ]
            for p in parts
        }
        received = yield from messages.exchange(parts, specs)
        local = [x.new_zeros((self.batch, here, count, *x.shape[3:])) for x, count in zip(xs, heads, strict=True)]
        for p in range(self.ranks):
            for x, part in zip(local, received[p], strict=True):
                x[:, :, self.heads_of(p, x.shape[2])] += part
        return local


def _size(part: slice) -> int:
    return int(part.stop) - int(part.start)


class ExchangeOfHeads:
    """An exchange of tokens for heads, or back, on the ranks of this process.

    Autograd sees two steps, `begin` and `end`. Computing between them hides the messages, in the backward pass as
    well: the gradient of `end` begins a pass, and the gradient of `begin` ends it.

    Args:
        passes: run programs on the ranks of this process.
        plans: a `HeadPlan` for each of these ranks.
        call: the call that ranks have agreed on.
        heads: None to exchange tokens for heads; for the way back, the number of all heads H of each tensor.
        is_hidden: whether the caller computes between `begin` and `end`, so that passes run on a stream or in a
            thread of their own.
    """

    def __init__(
        self,
        passes: Passes,
        plans: Sequence[HeadPlan],
        call: CallId,
        heads: Sequence[int] | None,
        *,
        is_hidden: bool,
    ) -> None:
        self.plans, self.heads, self.towards_heads = plans, heads, heads is None
        self._start, self._call = partial(passes.start, call=call, beside=is_hidden), call
        self._results: Results | None = None
        self._dim = 2  # of the tensors on their way, along which one rank's come after another's

    def begin(self, xs: Sequence[Tensor]) -> Tensor:
        """Begin to exchange xs, and return an empty tensor for `end`, by which autograd knows where the end begins.

        xs: tokens [B, S_local, H, ...], one rank's after another's along dim 1; or heads [B, S, h, ...], one rank's
            after another's along dim 2.
        """
        if self.heads is None:
            self.heads = [x.shape[2] for x in xs]
        begun: Tensor = _ExchangeBegun.apply(self, *xs)  # type: ignore[no-untyped-call]
        return begun

    def end(self, begun: Tensor) -> tuple[Tensor, ...]:
        """Wait for the exchange; return heads for tokens, or tokens for heads. `begun`: the result of `begin`."""
        found: tuple[Tensor, ...] = _ExchangeEnded.apply(self, begun)  # type: ignore[no-untyped-call]
        return found

    def start(self, direction: Direction, xs: Sequence[Tensor]) -> None:
        """Start a pass over xs, the tensors or their gradients; `finish` waits for it."""
        assert self.heads is not None
        towards_heads = self.towards_heads == (direction == "forward")
        counts = [len(plan.rows[plan.rank_state.rank]) for plan in self.plans]
        programs = []
        for place, plan in enumerate(self.plans):
            messages = Messages(plan.rank_state, xs[0].device, "an exchange of heads", direction, self._call)
            if towards_heads:
                programs.append(plan.to_heads(messages, [torch.split_with_sizes(x, counts, 1)[place] for x in xs]))
            else:
                own_heads = [x.chunk(len(self.plans), 2)[place] for x in xs]
                programs.append(plan.to_tokens(messages, own_heads, self.heads))
        self._dim = 2 if towards_heads else 1
        self._results = self._start(direction, programs=programs, inputs=xs)

    def finish(self) -> tuple[Tensor, ...]:
        """Wait for the pass in flight, and return its tensors."""
        assert self._results is not None
        results, self._results = self._results(), None
        if len(results) == 1:
            return tuple(results[0])
        return tuple(torch.cat(parts, self._dim) for parts in zip(*results, strict=True))

    def abandon(self) -> None:
        """Wait, after an error, for a pass in flight, and drop its tensors."""
        results, self._results = self._results, None
        if results is not None:
            with suppress(Exception):
                results()


class _ExchangeBegun(torch.autograd.Function):
    """The beginning of an exchange; returns an empty tensor that its end is a function of."""

    @staticmethod
    def forward(ctx: Any, exchange: ExchangeOfHeads, *xs: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.start("forward", xs)
        return xs[0].new_empty(0)

    @staticmethod
    @between_graphs
    def backward(ctx: Any, unused: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.finish()


class _ExchangeEnded(torch.autograd.Function):
    """The end of an exchange; returns the tensors that have been received."""

    @staticmethod
    def forward(ctx: Any, exchange: ExchangeOfHeads, begun: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.save_for_backward(begun.new_empty(0))  # so that a checkpoint computes again before the backward pass
        return exchange.finish()

    @staticmethod
    @between_graphs
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        ctx.exchange.start("backward", grads)
        return None, grads[0].new_empty(0)


def gathered(plan: HeadPlan, messages: Messages, x: Tensor) -> Generator[None, None, Tensor]:
    """Gather a tensor x [B, h, ...] of each rank's heads into one of all heads, [B, H, ...]; without gradient.

    A generator, which yields while messages are under way, and returns the gathered tensor when it ends. Ranks have
    equally many heads.
    """
    ranks, spec = range(plan.ranks), (tuple(x.shape), x.dtype)
    received = yield from messages.exchange({p: [x] for p in ranks}, {p: [spec] for p in ranks})
    return torch.cat([received[p][0] for p in ranks], 1)


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


def can_hide(tokens: float) -> bool:
    """Return whether computing a part of the heads for a rank's tokens can hide the messages of another part.

    tokens: of a rank, on average over ranks.
    """
    return tokens >= MANY_TOKENS


def parts_of_heads(ranks: int, heads: Sequence[int], tokens: float) -> int:
    """Return into how many parts an exchange cuts heads, so that some travel while others are computed: 2, or 1.

    heads: of several tensors, the numbers of heads. tokens: of a rank, on average over ranks.
    """
    return 2 if can_hide(tokens) and not any(count % (2 * ranks) for count in heads) else 1


def check_heads(ranks: int, heads: Sequence[int]) -> None:
    """Raise ValueError unless ranks can share tensors with these numbers of heads evenly, see `can_share`."""
    if not can_share(ranks, heads):
        raise ValueError(
            f"{', '.join(map(str, sorted(set(heads))))} heads cannot be shared between {ranks} ranks; use "
            "recurrent='state', with layout='zigzag', 'contiguous' or 'auto'"
        )
