"""Both passes of a call without its messages, so that nothing is planned or compiled in the middle of a real one.

The first tile of a kind may take a library seconds, with Triton, CuTe or a plan of cuDNN's, while other ranks wait
for what this one is to send. cuDNN's plans are those of a thread (`MHAGraphCache` in MHA.cpp): so the forward pass
runs in this one, and both passes in autograd's, where layers are also computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_plugin.comm.buffers import BufferPool
from burst_plugin.comm.call_identity import CallId, Progress
from burst_plugin.comm.null_transport import NullTransport
from burst_plugin.ring.attention_pass import Saved, backward_program, forward_program
from burst_plugin.ring.autograd import cut_loose, dense
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.pass_plan import PassPlan
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Inputs, has_gradients
from burst_plugin.types import Direction

__all__ = ["rehearse"]

_CALL = CallId(0, "warm-up")


def rehearse(plan: Plan, inputs: Inputs, known: set[PassPlan]) -> None:
    """Run the passes of a call that are not among `known`, and add them; the backward pass only with gradients.

    With these tensors, in the buffers of the ring; their values do not matter, nor do results. No other rank takes
    part, and a failure leaves the ring as it was.
    """
    missing = {plan.forward, plan.backward} if has_gradients(inputs) else {plan.forward}
    missing -= known
    if not missing:
        return
    state = plan.rank_state
    with state.undisturbed(plan.device), torch.autocast(plan.device.type, enabled=False):
        try:
            if plan.forward in missing:
                with torch.no_grad():
                    _forward(plan, inputs)
            if plan.backward in missing:
                _in_autograds_thread(plan.device, partial(_both, plan, inputs))
        except BaseException:  # what was leased then is lost
            state.transport.pool, state.ulysses_transport.pool = BufferPool(), BufferPool()
            raise
    known |= missing


def _forward(plan: Plan, inputs: Inputs) -> tuple[Tensor, Saved]:
    given = dense(inputs)
    ((outputs, saved),) = lockstep([forward_program(_alone(plan, "forward"), _CALL, given)])
    return outputs.out, saved._replace(given=cut_loose(saved.given))


def _both(plan: Plan, inputs: Inputs) -> None:
    out, saved = _forward(plan, inputs)
    lockstep([backward_program(_alone(plan, "backward"), _CALL, out, saved)])


def _alone(plan: Plan, direction: Direction) -> Plan:
    """Return the same plan on a ring whose messages go nowhere, and of which nothing is noted."""
    state, label = plan.rank_state, plan.label(direction, _CALL)
    ring, ulysses = (NullTransport(pool, label, copies=False) for pool in state.pools)
    alone = replace(
        state,
        transport=ring,
        ulysses_transport=ulysses,
        consistency=None,
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
