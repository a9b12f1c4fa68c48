"""Mamba's selective scan: a state of its own for each channel, held for one stretch of tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from burst_plugin.recurrent.kernels.linear_unit import affine_states, computing_type, entering_state, states_before

_Gradients = tuple[None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _decays_and_states(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Compute decays and states of some tokens, [N, l, D, M] each."""
    decay = (dt.unsqueeze(-1) * A).exp_()
    return decay, affine_states(decay, (dt * x).unsqueeze(-1) * B.unsqueeze(2), initial)


class _SelectiveScan(torch.autograd.Function):
    """Keeps the states between stretches of `size` tokens; the backward pass computes those within them again."""

    @staticmethod
    def forward(ctx: FunctionCtx, size: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, state = tensors
        entering, outputs = [], []
        for x_, dt_, B_, C_ in zip(*(t.split(size, 1) for t in (x, dt, B, C)), strict=True):  # type: ignore[no-untyped-call]
            entering.append(state)
            _, states = _decays_and_states(x_, dt_, A, B_, state)
            outputs.append((states @ C_.unsqueeze(-1)).squeeze(-1))
            state = states[:, -1].clone()  # a view would keep all
        ctx.save_for_backward(x, dt, A, B, C, torch.stack(entering))
        ctx.size = size  # type: ignore[attr-defined]
        return torch.cat(outputs, 1), state

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_out: Tensor, d_final: Tensor) -> _Gradients:
        x, dt, A, B, C, entering = ctx.saved_tensors  # type: ignore[attr-defined]
        tokens = [t.split(ctx.size, 1) for t in (x, dt, B, C, d_out)]  # type: ignore[attr-defined]
        d_tokens, d_A, d_state = [], torch.zeros_like(A), d_final
        for *stretch, state in reversed(list(zip(*tokens, entering, strict=True))):
            d_stretch, d_A_, d_state = _stretch_gradients(stretch, A, state, d_state)
            d_tokens.append(d_stretch)
            d_A += d_A_
        d_x, d_dt, d_B, d_C = (torch.cat(parts, 1) for parts in zip(*reversed(d_tokens), strict=True))
        return None, d_x, d_dt, d_A, d_B, d_C, d_state


def _stretch_gradients(
    stretch: list[Tensor], A: Tensor, initial: Tensor, d_final: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Compute gradients of a stretch's x, dt, B and C, of A, and of the state that enters the stretch."""
    x, dt, B, C, d_out = stretch
    decay, states = _decays_and_states(x, dt, A, B, initial)
    d_C = (d_out.unsqueeze(2) @ states).squeeze(2)
    after = torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], 1)
    d_states = affine_states(after, d_out.unsqueeze(-1) * C.unsqueeze(2), d_final, backward=True)
    d_initial = decay[:, 0] * d_states[:, 0]
    d_input = (d_states @ B.unsqueeze(-1)).squeeze(-1)  # of dt x
    d_B = ((dt * x).unsqueeze(2) @ d_states).squeeze(2)
    d_power = states_before(states, initial).mul_(decay).mul_(d_states)  # of dt A
    d_dt = d_input * x + (d_power * A).sum(-1)
    d_A = d_power.mul_(dt.unsqueeze(-1)).sum((0, 1))
    return (d_input * dt, d_dt, d_B, d_C), d_A, d_initial


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int = 32,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba's S <- e^{dt A} S + dt x B^T and out = S C, with a decay per channel and number of its state.

    `x` and `dt` are [N, L, D] (`dt` after bias and softplus, so at least 0), `A` [D, M] negative, `B` and `C`
    [N, L, M]; `initial_state` is [N, D, M] (None: zeros). Padding at the end has dt = 0. Returns `out` [N, L, D] in
    the type of `x` and the last state in float32, or in float64 for float64. States of `chunk_size` tokens are held
    at a time, in the backward pass too, and one per `chunk_size` tokens in between.

    Raises ValueError where shapes do not fit. Source: Gu and Dao 2023, arXiv 2312.00752.
    """
    if x.shape != dt.shape or A.shape != (x.shape[2], B.shape[2]):
        raise ValueError(f"x {tuple(x.shape)}, dt {tuple(dt.shape)} and A {tuple(A.shape)} do not fit")
    initial = entering_state(initial_state, x, (x.shape[0], *A.shape))
    if not x.shape[1]:
        return x, initial
    tensors = (t.to(computing_type(x)) for t in (x, dt, A, B, C))
    out, final = _SelectiveScan.apply(chunk_size, *tensors, initial)  # type: ignore[no-untyped-call]
    return out.to(x.dtype), final


def selective_scan_read(dt: Tensor, A: Tensor, C: Tensor, state: Tensor) -> Tensor:
    """Compute the part of `selective_scan`'s outputs that comes from an entering state [N, D, M].

    It is what the outputs would be with x = 0. `dt` is [N, L, D], `A` [D, M], `C` [N, L, M]. Returns [N, L, D] in the
    type of the state.
    """
    dt = dt.to(state.dtype)
    return selective_scan(torch.zeros_like(dt), dt, A, torch.zeros_like(C), C, state)[0]
