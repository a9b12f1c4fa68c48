"""Ring attention as one step of autograd, for all ranks of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from burst_plugin.comm.call_identity import CallId
from burst_plugin.ring.attention_pass import Saved, backward_program, forward_program
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.memo import Memo
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Inputs, Outputs, cut_loose, dense
from burst_plugin.types import Direction

T = TypeVar("T")

__all__ = ["RingAttention", "by_rank"]


class RingAttention(torch.autograd.Function):
    """The ring, and heads exchanged before and after it, for all ranks of this process: five inputs each.

    Saves what the ring was given, its out and lse, nothing else of it; any number of calls may await their backward
    pass. `memo`, of one rank, has what need not be computed again, or takes it up.
    """

    @staticmethod
    def forward(
        ctx: Any, plans: Sequence[Plan], which: CallId, memo: Memo | None, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        with _one_pass(plans, "forward", which):
            inputs = [dense(Inputs(*each)) for each in by_rank(tensors, len(plans))]  # type: ignore[arg-type]
            each = zip(plans, inputs, strict=True)
            results = lockstep([forward_program(plan, which, mine, memo) for plan, mine in each])
            kept = [(*cut_loose(saved.given), saved.out, saved.lse) for _, saved in results]
        ctx.plans, ctx.which = plans, which
        ctx.save_for_backward(*(x for of_rank in kept for x in of_rank))
        ctx.mark_non_differentiable(*(x for outputs, _ in results for x in outputs[1:] if x is not None))
        return tuple(x for outputs, _ in results for x in outputs)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: that graph would lack something without a word
            raise RuntimeError("burst attention has no second derivatives; leave out create_graph=True")
        plans, mine = ctx.plans, douts[:: len(Outputs._fields)]
        with _told_to_others(plans):  # of hooks that bring them back, which may compute a forward pass again
            tensors = ctx.saved_tensors
            saved = [Saved(Inputs(*each[:-2]), *each[-2:]) for each in by_rank(tensors, len(plans))]
            for plan, dout, kept in zip(plans, mine, saved, strict=True):
                if plan.is_rehearsed:
                    from burst_plugin.ring.rehearsal import rehearse_backward

                    rehearse_backward(plan, kept, dout)
        wants_dbias = [Inputs(*each).bias for each in by_rank(ctx.needs_input_grad[3:], len(plans))]
        each = zip(plans, mine, saved, wants_dbias, strict=True)
        programs = [backward_program(plan, ctx.which, *of_rank) for plan, *of_rank in each]  # type: ignore[arg-type]
        for plan in plans:
            plan.rank_state.compare_backward(ctx.which)
        with _one_pass(plans, "backward", ctx.which):
            grads = [grad for of_rank in lockstep(programs) for grad in of_rank]
        wanted = zip(ctx.needs_input_grad[3:], grads, strict=True)
        return None, None, None, *(grad if wants else None for wants, grad in wanted)


def by_rank(flat: Sequence[T], ranks: int) -> list[tuple[T, ...]]:
    """Return the items of each rank, the same number for each."""
    each = len(flat) // ranks
    return [tuple(flat[each * rank : each * (rank + 1)]) for rank in range(ranks)]


@contextmanager
def _told_to_others(plans: Sequence[Plan]) -> Iterator[None]:
    """Tell the other ranks why they wait, if what is inside the block, before a pass, fails on this one.

    Plain RuntimeErrors are autograd's own, of a graph that is gone through twice say, and the same on all ranks.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not RuntimeError:
            for plan in plans:
                plan.rank_state.give_up(error)
        raise


@contextmanager
def _one_pass(plans: Sequence[Plan], direction: Direction, which: CallId) -> Iterator[None]:
    """Run the block as one pass of all ranks of this process: no other pass meanwhile, and no autocast."""
    with ExitStack() as stack:
        for plan in plans:
            stack.enter_context(plan.rank_state.exclusive(plan.device))
            plan.rank_state.begin_pass(direction, which)
        device = plans[0].device.type
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            yield
        finally:
            for plan in plans:
                plan.rank_state.progress.end_pass(direction)
