"""Both passes of a call without its messages, so that nothing is planned or compiled in the middle of a real pass.

The first tile of a kind may take a library seconds, with Triton, CuTe or a plan of cuDNN's, while other ranks wait
for messages of this rank. cuDNN keeps plans by thread (`MHAGraphCache` in MHA.cpp): so passes run in each thread that
calls them: the forward pass also in autograd's, where layers are computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from burst_plugin.comm.buffers import BufferPool
from burst_plugin.comm.call_identity import CallId, Progress
from burst_plugin.comm.copies import NullTransport
from burst_plugin.ring.attention_pass import Saved, backward_program, cut_loose, dense, forward_program
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.plan import PassPlan, Plan
from burst_plugin.ring.request import Inputs, has_gradients
from burst_plugin.types import Direction

_CALL = CallId(0, "warm-up")


def warm_up(plan: Plan, inputs: Inputs) -> None:
    """Run the passes of a call without its messages in the threads that will run them, unless they are known there.

    There is a backward pass if any tensor needs a gradient. Passes use these tensors, whose values do not matter, and
    the buffers of the ring. No other rank takes part, and a failure leaves the ring as it was. A pass is known in a
    thread if one of its kind has run there.
    """
    warm_up_forward(plan, inputs)
    if has_gradients(inputs):
        _in_autograds_thread(plan.device, partial(_both, plan, inputs))


def warm_up_forward(plan: Plan, inputs: Inputs) -> None:
    """Run the forward pass without its messages in this thread, unless a pass of this kind has run here before."""
    if _is_new(plan, plan.forward):
        with _unnoticed(plan, plan.forward):
            _forward(plan, inputs)


def warm_up_backward(plan: Plan, saved: Saved, upstream: tuple[Tensor, Tensor | None]) -> None:
    """Run the backward pass without its messages in this thread, unless a pass of this kind has run here before.

    It uses the call's own tensors, `saved`, and the gradients of out and lse, `upstream`, and takes no more memory.
    """
    if _is_new(plan, plan.backward):
        with _unnoticed(plan, plan.backward):
            lockstep([backward_program(_alone(plan, "backward"), _CALL, upstream, saved)])


def _both(plan: Plan, inputs: Inputs) -> None:
    if _is_new(plan, plan.backward):
        with _unnoticed(plan, plan.forward):
            out, saved = _forward(plan, inputs)
        warm_up_backward(plan, saved, (out, None))


def _forward(plan: Plan, inputs: Inputs) -> tuple[Tensor, Saved]:
    ((outputs, saved),) = lockstep([forward_program(_alone(plan, "forward"), _CALL, dense(inputs))])
    return outputs.out, saved._replace(given=cut_loose(saved.given))


def _is_new(plan: Plan, which: PassPlan) -> bool:
    return (which, get_ident()) not in plan.rank_state.warmed_up


@contextmanager
def _unnoticed(plan: Plan, which: PassPlan) -> Iterator[None]:
    """Run a pass without its messages inside the block, and note that this thread need not do so again."""
    state = plan.rank_state
    with state.warming_up(plan.device), torch.no_grad(), torch.autocast(plan.device.type, enabled=False):
        try:
            yield
        except BaseException:  # buffers leased by then are lost
            state.transport.pool, state.ulysses_transport.pool = BufferPool(), BufferPool()
            raise
    state.warmed_up.add((which, get_ident()))


def _alone(plan: Plan, direction: Direction) -> Plan:
    """Return a copy of the plan on a ring whose messages go nowhere and are not recorded."""
    state, label = plan.rank_state, plan.label(direction, _CALL)
    ring, ulysses = (NullTransport(pool, label, copies=False) for pool in state.pools)
    alone = replace(
        state,
        transport=ring,
        ulysses_transport=ulysses,
        is_process=False,
        at_end=None,
        profile=None,
        expected_bytes=Counter(),
        progress=Progress(),
    )
    return replace(plan, rank_state=alone)


class _InBackward(torch.autograd.Function):
    """A number whose backward pass does some work."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.work()
        return None, None


def _in_autograds_thread(device: torch.device, work: Callable[[], None]) -> None:
    """Do some work where backward passes run: for GPUs that is a thread of autograd's."""
    with torch.enable_grad():
        number = torch.zeros((), device=device, requires_grad=True)
        _InBackward.apply(number, work).backward()  # type: ignore[no-untyped-call]
