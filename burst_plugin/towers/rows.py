"""Rows of features on their way: from the rank that encoded them to the one that holds their tokens.

    rank 0 encoded  rows 0 1 2        token of row  0 1 | 2 3 | 4 5
    rank 1 encoded  rows 3 4 5        held by rank   0     1     0        rank 0 gets 0 1 4 5, rank 1 gets 2 3

Every row is held by one rank, so gradients go back the same way, and nothing is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from burst_plugin.comm.call_identity import CallId
from burst_plugin.context import ContextParallel
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.passes import OfOneRank, OfVirtualRing, Passes
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.rank_state import RankState
from burst_plugin.types import Direction
from burst_plugin.virtual import VirtualRing

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RowPlan:
    """One rank's plan for moving rows of features from the ranks that encoded them to their tokens' holders.

    sends: for each rank that gets any, the int64 numbers of the rows that it gets, among the rows encoded here.
    recvs: for each rank that any come from, the int64 places of its rows, among the rows held here.
    rows: how many rows this rank has encoded.
    held: how many rows it holds afterwards.
    """

    rank_state: RankState
    sends: Mapping[int, Tensor]
    recvs: Mapping[int, Tensor]
    rows: int
    held: int


def row_plan(state: RankState, encoded: Sequence[Tensor], held: Sequence[Tensor]) -> RowPlan:
    """Return one rank's plan for moving rows of features from the ranks that encoded them to their holders.

    state: of the rank.
    encoded: for each rank the numbers, among all rows, of the rows that it has encoded, int64 on the CPU, in its
        order.
    held: for each rank the numbers of the rows that it is to hold, likewise.
    """
    rank, total = state.rank, sum(map(len, encoded))
    encoder, holder, place = (torch.full((total,), -1, device="cpu") for _ in range(3))
    for other, (here, there) in enumerate(zip(encoded, held, strict=True)):
        encoder[here], holder[there] = other, other
    place[held[rank]] = torch.arange(len(held[rank]), device="cpu")
    own_rows, wanted = encoded[rank], held[rank]
    sends = {peer: torch.nonzero(holder[own_rows] == peer).flatten() for peer in range(len(held))}
    # Rows of a message are in the sender's order.
    recvs = {peer: place[rows[holder[rows] == rank]] for peer, rows in enumerate(encoded)}
    return RowPlan(
        state,
        {peer: rows for peer, rows in sends.items() if len(rows)},
        {peer: rows for peer, rows in recvs.items() if len(rows)},
        len(own_rows),
        len(wanted),
    )


def to_holders(
    cp: ContextParallel | VirtualRing,
    x: Tensor,
    encoded: Sequence[Tensor],
    held: Sequence[Tensor],
    tag: object = None,
) -> Tensor:
    """Return the rows of features [held rows, D] of this rank's tokens; collective, with gradient.

    Args:
        cp: the ring. With a `VirtualRing` x has the rows of one rank after another, and so has the result.
        x: the rows that this rank has encoded, [encoded rows, D].
        encoded, held: for each rank the numbers of the rows that it has, and that it is to have, in their order;
            int64 on the CPU, the same on every rank. Every row has one holder.
        tag: a name for the call that is the same on every rank.

    Raises:
        ValueError: on every rank, if rows are missing, or ranks have unlike ones.
    """
    passes: Passes = OfOneRank(cp) if isinstance(cp, ContextParallel) else OfVirtualRing(cp)

    def prepare() -> list[RowPlan]:
        numbers = [torch.cat([*each]) for each in (encoded, held)]
        if any(not torch.equal(each.sort()[0], torch.arange(len(each), device="cpu")) for each in numbers) or len(
            numbers[0]
        ) != len(numbers[1]):
            raise ValueError(
                f"features have {len(numbers[0])} rows for {len(numbers[1])} tokens, or some twice; give one row for "
                "each token"
            )
        plans = [row_plan(state, encoded, held) for state in passes.states]
        if x.dim() != 2 or len(x) != sum(plan.rows for plan in plans):
            raise ValueError(f"features are {list(x.shape)}, expected [{sum(plan.rows for plan in plans)}, D]")
        return plans

    def signature(plans: list[RowPlan]) -> Mapping[str, object]:
        trains = torch.is_grad_enabled() and x.requires_grad
        return {
            "call": "features of towers",
            "rows": [len(each) for each in encoded],
            "holders": [len(each) for each in held],
            "width": x.shape[1],
            "dtype": x.dtype,
            "takes part in gradients": trains,
        }

    plans, call = passes.agree(prepare, signature, tag)
    moved: Tensor = _ToHolders.apply(passes, plans, call, x)  # type: ignore[no-untyped-call]
    return moved


def counts_of_all(
    cp: ContextParallel, prepare: Callable[[], tuple[T, Tensor]], sizes: Sequence[int]
) -> tuple[T, list[list[int]]]:
    """Run `prepare` and exchange numbers; return its first result and the numbers of every rank; collective.

    Args:
        cp: the ring.
        prepare: returns anything, and the numbers of this rank, int64 [sizes[rank]], on the device on which they are
            sent; may raise ValueError.
        sizes: how many numbers each rank has, the same on every rank.

    Raises:
        ValueError: on every rank, if `prepare` raises on any.
    """
    passes = OfOneRank(cp)
    (prepared, own_numbers), call = passes.agree(
        prepare, lambda _: {"call": "numbers of features", "sizes": list(sizes)}, None
    )
    device = own_numbers.device
    (state,) = passes.states
    messages = Messages(state, device, "numbers of features", "forward", call)

    def program() -> Generator[None, None, list[list[int]]]:
        ranks = range(len(sizes))
        sends = {p: [own_numbers] for p in ranks if len(own_numbers)}
        specs = {p: [((sizes[p],), own_numbers.dtype)] for p in ranks if sizes[p]}
        received = yield from messages.exchange(sends, specs)
        return [received[p][0].tolist() if p in received else [] for p in ranks]

    (numbers_of_ranks,) = passes.run("forward", call, [program()], device)
    return prepared, numbers_of_ranks


class _ToHolders(torch.autograd.Function):
    """The exchange on the ranks of this process as one step of autograd."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, plans: Sequence[RowPlan], call: CallId, x: Tensor) -> Tensor:
        ctx.passes, ctx.plans, ctx.call = passes, plans, call
        parts = torch.split_with_sizes(x, [plan.rows for plan in plans])
        programs = [
            move_rows(plan.rank_state, call, "forward", part, plan.sends, plan.recvs, plan.held)
            for plan, part in zip(plans, parts, strict=True)
        ]
        return torch.cat(passes.run("forward", call, programs, x.device))

    @staticmethod
    @between_graphs
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = torch.split_with_sizes(grad, [plan.held for plan in ctx.plans])
        programs = [
            move_rows(plan.rank_state, ctx.call, "backward", part, plan.recvs, plan.sends, plan.rows)
            for plan, part in zip(ctx.plans, parts, strict=True)
        ]
        return None, None, None, torch.cat(ctx.passes.run("backward", ctx.call, programs, grad.device))


def move_rows(
    state: RankState,
    call: CallId,
    direction: Direction,
    x: Tensor,
    sends: Mapping[int, Tensor],
    recvs: Mapping[int, Tensor],
    rows: int,
) -> Generator[None, None, Tensor]:
    """Send rows of x to ranks as `sends` says, and return the `rows` rows that come from ranks as `recvs` says."""
    messages = Messages(state, x.device, "features of towers", direction, call)
    leaving = {peer: [x[numbers.to(x.device)]] for peer, numbers in sends.items()}
    specs = {peer: [((len(numbers), x.shape[1]), x.dtype)] for peer, numbers in recvs.items()}
    received = yield from messages.exchange(leaving, specs)
    result = x.new_empty((rows, x.shape[1]))
    for peer, (arrived,) in received.items():
        result[recvs[peer].to(x.device)] = arrived
    return result
