"""Attention over a sequence that is spread over the ranks of a ring: the one loop, and the autograd function.

In every visit one side, queries or keys and values, is at home and the other has travelled. What a pass reads
and sums up on either side is in `burst_plugin.passes`; which side travels is data.

Sources: RingAttention (arXiv 2310.01889) for travelling keys and values; BurstAttention (2403.09347,
algorithm 2) for travelling queries in the backward pass.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_plugin.call import Call, prepare
from burst_plugin.context import ContextParallel
from burst_plugin.executor import lockstep
from burst_plugin.kernels import Queries
from burst_plugin.mask import Causal, Mask
from burst_plugin.passes import BackwardPass, ForwardPass, Pass, Tensors

_CAUSAL = Causal()

__all__ = [
    "Runner",
    "attend",
    "backward_program",
    "burst_attention",
    "differentiable_attention",
    "forward_program",
]


def attend(call: Call, work: Pass, number: int) -> Generator[None, None, dict[str, Tensors]]:
    """One pass of one rank: the sums of both its sides. Yields once per step, for ranks that take turns.

    `number` is that of the call, the same on every rank.
    """
    away = call.travellers[work.direction]
    home = "kv" if away == "q" else "q"
    ring, tiles = call.ring(work, away, number), call.tiles(away)
    at_home = work.sums(home, call.blank(work.direction, home), False)

    for visit in ring.visits():
        here = {home: work.operands[home], away: work.incoming(away, visit.operands)}
        for tile in tiles[visit.owner]:
            parts = work.visit(here["q"], here["kv"], tile)
            if parts[home]:
                at_home.add(tile.rows(home), parts[home])
            if parts[away]:
                visit.sums.add(tile.rows(away), parts[away])
        yield

    at_home.settle()
    back = yield from ring.homecoming()
    return {home: at_home.tensors, away: back}


def forward_program(call: Call, number: int, q: Tensor, k: Tensor, v: Tensor) -> Generator[None, None, Tensors]:
    """A rank's program for out [B, S, Hq, Dv] and lse [B, Hq, S], float32 or wider."""
    sums = yield from attend(call, ForwardPass(call.kernel, call.scale, q, k, v), number)
    return sums["q"]


def backward_program(call: Call, number: int, queries: Queries, keys: Tensors) -> Generator[None, None, Tensors]:
    """A rank's program for dq, dk, dv, float32 or wider."""
    sums = yield from attend(call, BackwardPass(call.kernel, call.scale, call.shapes, queries, keys), number)
    return (*sums["q"], *sums["kv"])


class Runner(Protocol):
    """Runs the two passes, on whatever ranks there are in this process."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        ...

    def backward(self, queries: Queries, keys: Tensors) -> Tensors:
        """dq, dk, dv."""
        ...


@dataclass(frozen=True)
class _LocalRunner:
    """This process is one rank."""

    call: Call
    number: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self._finish(forward_program(self.call, self.number, q, k, v))
        return out, lse

    def backward(self, queries: Queries, keys: Tensors) -> Tensors:
        return self._finish(backward_program(self.call, self.number, queries, keys))

    def _finish(self, program: Generator[None, None, Tensors]) -> Tensors:
        with self.call.member.exclusive(self.call.device):
            return lockstep([program])[0]


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out and lse, nothing of the ring; any number of calls may await their backward pass."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):  # softmax and sums are never lower than float32
            out, lse = runner.forward(q, k, v)
        out = out.to(q.dtype)
        ctx.runner = runner
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = ctx.runner.backward(Queries(q, dout.contiguous(), out, lse), (k, v))
        wanted = zip(ctx.needs_input_grad[1:], grads, (q, k, v), strict=True)
        return (None, *(grad.to(x.dtype) if wants else None for wants, grad, x in wanted))


def differentiable_attention(runner: Runner, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a runner, with gradients for q, k and v; lse has none."""
    out, lse = _Attention.apply(runner, q, k, v)  # type: ignore[no-untyped-call]
    return out, lse


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextParallel,
    *,
    mask: Mask = _CAUSAL,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries on the keys of all ranks of `cp`; all ranks call it together.

    Args:
        q: [B, S_local, Hq, D], float64, float32, bfloat16 or float16.
        k, v: [B, S_local, Hkv, D]; Hq must be a multiple of Hkv.
        cp: the context-parallel group; its layout says which tokens the rows are (`cp.shard`, `cp.positions`).
        mask: `Causal()` (the default) or `Full()`.
        softmax_scale: factor on q.k; 1 / sqrt(D) by default.
        return_lse: also return lse [B, Hq, S_local], float32 (float64 for float64), natural logarithm, without
            gradient.

    Returns:
        out [B, S_local, Hq, D] in the type of q.

    Raises:
        ValueError: on every rank and before data moves, for shapes, types or options that do not fit, here or
            between ranks; says what was got, what was expected, and what to change.
        RingError: a rank was lost; names it and the step at which it was missed.
    """
    problem, call, cause = "", None, None
    try:
        call = prepare(cp.member, (q, k, v), mask, softmax_scale, cp.calls)
        problem = cp.device_problem(q.device)
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        problem, cause = (str(error) if isinstance(error, ValueError) else repr(error)), error
    try:
        number = cp.agree(call.signature() if call else {}, problem)
    except ValueError as error:
        raise error from cause
    assert call is not None, "agree raises if any rank has a problem"
    out, lse = differentiable_attention(_LocalRunner(call, number), q, k, v)
    return (out, lse) if return_lse else out
