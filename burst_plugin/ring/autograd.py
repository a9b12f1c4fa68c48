"""Ring attention of one rank as one step of autograd."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from burst_plugin.comm.call_identity import CallId
from burst_plugin.ring.agreement import Agreement
from burst_plugin.ring.attention_pass import (
    Saved,
    backward_program,
    check_lse_grad,
    cut_loose,
    dense,
    forward_program,
)
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.kept_outputs import KeptOutputs
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Inputs, Wanted

T = TypeVar("T")


class RingAttention(torch.autograd.Function):
    """The autograd function of attention on the ring for one rank, with exchanges of heads before and after it.

    It saves the ring's inputs, its out and lse, nothing else; any number of calls may await their backward pass. The
    arguments of `apply` are:

    plan: the plan of the call.
    call: its identity.
    agreement: by which ranks compare the backward pass.
    kept: outputs of an earlier run in a checkpoint, or a place to keep them; None outside of checkpoints.
    tensors: the fields of `Inputs`. The outputs are the fields of `Outputs`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        call: CallId,
        agreement: Agreement,
        kept: KeptOutputs | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Run the forward pass on `tensors`, the fields of `Inputs`, and return the fields of `Outputs`."""
        with plan.rank_state.one_pass("forward", call, plan.device):
            inputs = dense(Inputs(*tensors))  # type: ignore[arg-type]
            outputs, saved = completed(forward_program(plan, call, inputs, kept))
            ctx.save_for_backward(*cut_loose(saved.given), saved.out, saved.lse)
        ctx.plan, ctx.call, ctx.agreement, ctx.shape = plan, call, agreement, outputs.out.shape
        if outputs.max_logits is not None:
            ctx.mark_non_differentiable(outputs.max_logits)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, dmax: None) -> tuple[Tensor | None, ...]:
        """Run the backward pass from the gradients of out and lse, either None if unused; `dmax` is always None.

        Returns a gradient for each argument of `forward`, None where none is needed.
        """
        if torch.compiler.is_compiling():  # compiled autograd
            return between_graphs(_backward)(ctx, dout, dlse)
        return _backward(ctx, dout, dlse)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    check_derivative()
    plan, call, wanted = ctx.plan, ctx.call, ctx.needs_input_grad[4:]
    with _reported(plan):  # errors of hooks that unpack saved tensors, and may compute a forward pass again
        *inputs, out, lse = ctx.saved_tensors
        saved = Saved(Inputs(*inputs), out, lse)
        check_lse_grad(saved.given.q.dtype, dlse)
        if dout is None:  # only lse is used
            dout = saved.given.q.new_zeros(ctx.shape)
        if plan.device.type == "cuda" and plan.warms_up:
            from burst_plugin.ring.warm_up import warm_up_backward

            warm_up_backward(plan, saved, (dout, dlse))
    ctx.agreement.before_backward(call)
    with plan.rank_state.one_pass("backward", call, plan.device):
        grads = completed(backward_program(plan, call, (dout, dlse), saved, Wanted.of(wanted)))
    returned: list[Tensor | None] = [None, None, None, None]
    for grad, is_wanted in zip(grads, wanted, strict=True):
        returned.append(grad if is_wanted else None)
    return tuple(returned)


def completed(program: Generator[None, None, T]) -> T:
    """Run a generator to its end and return its result; for a rank that takes turns with no other in its process."""
    while True:
        try:
            next(program)
        except StopIteration as stop:
            result: T = stop.value
            return result


def check_derivative() -> None:
    """Raise RuntimeError, before ranks meet, for a backward pass that a ring cannot run.

    The graph of a second derivative would lack the ring silently; a batch of gradients, for which autograd calls a
    backward pass under vmap, cannot be sent.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("burst attention has no second derivatives; leave out create_graph=True")
    transform = torch._C._functorch.peek_interpreter_stack()
    is_vmap = transform is not None and transform.key() == torch._C._functorch.TransformType.Vmap
    if is_vmap or torch._C._dispatch_tls_is_dispatch_key_included("VmapMode"):  # of is_grads_batched
        raise RuntimeError(
            "burst attention computes one gradient at a time; leave out is_grads_batched=True, vectorize=True or "
            "vmap, and call torch.autograd.grad for each"
        )


@contextmanager
def _reported(plan: Plan) -> Iterator[None]:
    """Tell the other ranks why they wait if the block, which runs before a pass, fails on this rank.

    Plain RuntimeErrors are autograd's own, of a graph that is gone through twice say, and occur on all ranks.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not RuntimeError:
            plan.rank_state.give_up(error)
        raise
