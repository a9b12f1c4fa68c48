"""Affine recurrences of numbers, h_t = a_t h_{t-1} + x_t: the RG-LRU, and the states of other layers' chunks."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

_LARGE_TOKENS = 4096  # numbers in a token from which a CPU is as fast on single tokens as on many at once


def computing_type(x: Tensor) -> torch.dtype:
    """Return the type that kernels compute and keep states in: float64 for x in float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def entering_state(initial_state: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `initial_state` in float32, or float64 where `like` is; for None zeros of `shape`.

    They are on the device of `like`.
    """
    dtype = computing_type(like)
    if initial_state is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    return initial_state.to(dtype)


def _along(decay: Tensor, x: Tensor, initial: Tensor, *, backward: bool = False) -> Tensor:
    """Compute the recurrence token after token."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = initial
    tokens = list(zip(decay.unbind(1), x.unbind(1), out.unbind(1), strict=True))
    for a, b, into in reversed(tokens) if backward else tokens:
        state = torch.addcmul(b, a, state, out=into)
    return out


def _in_rows(decay: Tensor, x: Tensor, initial: Tensor) -> Tensor:
    """Compute the recurrence in about sqrt(L) rows at once, each as if from 0; then add what enters each row."""
    length = x.shape[1]
    width = isqrt(length)
    rows = length // width
    row_tokens = rows * width
    a, b = (torch.unflatten(t[:, :row_tokens], 1, (rows, width)).transpose(1, 2) for t in (decay, x))
    nothing = torch.zeros((), dtype=x.dtype, device=x.device).expand(b[:, 0].shape)
    local = _along(a, b, nothing)
    product = torch.cumprod(a, 1)
    ends = _along(product[:, -1], local[:, -1], initial)
    entries = torch.cat([initial.unsqueeze(1), ends[:, :-1]], 1)
    states = local.addcmul_(product, entries.unsqueeze(1)).transpose(1, 2).flatten(1, 2)
    tail = _along(decay[:, row_tokens:], x[:, row_tokens:], ends[:, -1])
    return torch.cat([states, tail], 1)


def affine_states(decay: Tensor, x: Tensor, initial: Tensor, *, backward: bool = False) -> Tensor:
    """Compute all states of h_t = decay_t h_{t-1} + x_t, without a record for gradients.

    `x` is [N, L, ...], `decay` has as many dims, and all but the first two may be 1; `initial` [N, ...] is the state
    before the first token. With `backward` h_t = decay_t h_{t+1} + x_t, and `initial` is the state after the last
    token. Returns [N, L, ...].
    """
    token = x[:, :1].numel()
    if x.shape[1] < 16 or (x.device.type == "cpu" and token >= _LARGE_TOKENS):
        return _along(decay, x, initial, backward=backward)
    if backward:
        return _in_rows(decay.flip(1), x.flip(1), initial).flip(1)
    return _in_rows(decay, x, initial)


def states_before(states: Tensor, initial: Tensor) -> Tensor:
    """Shift states by one token: from the states after each token, [N, L, ...], return the state before each.

    initial: the state before the first token, [N, ...].
    """
    return torch.cat([initial.unsqueeze(1), states[:, :-1]], 1)


def state_gradients(decay: Tensor, d_states: Tensor) -> Tensor:
    """Compute the gradients of all inputs x_t of h_t = decay_t h_{t-1} + x_t from the gradients of all states.

    `decay` and `d_states` are [N, L, ...]; so is the result. It is a recurrence that runs backward.
    """
    after = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], 1)
    nothing = torch.zeros((), dtype=d_states.dtype, device=d_states.device).expand(d_states[:, 0].shape)
    return affine_states(after, d_states, nothing, backward=True)


class _AffineScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, decay: Tensor, x: Tensor, initial: Tensor) -> Tensor:
        states = affine_states(decay, x, initial)
        ctx.save_for_backward(decay, states, initial)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, states, initial = ctx.saved_tensors  # type: ignore[attr-defined]
        d_x = state_gradients(decay, d_states)
        d_decay = (d_x * states_before(states, initial)).sum_to_size(decay.shape)
        return d_decay, d_x, decay[:, 0] * d_x[:, 0]


def affine_scan(decay: Tensor, x: Tensor, initial: Tensor) -> Tensor:
    """Compute all states h_t = decay_t h_{t-1} + x_t, [N, L, ...], with gradients.

    `x` is [N, L, ...] with L > 0, `initial` [N, ...] the state before the first token; `decay` has as many dims as
    `x`, and all but the first two may be 1. All three have one type. Decays may be 0; their gradients are right there
    too.
    """
    states: Tensor = _AffineScan.apply(decay, x, initial)  # type: ignore[no-untyped-call]
    return states


class _StatesFromZero(torch.autograd.Function):
    """The states before all tokens and after the last, whose gradients need no zeros in the shape of all states."""

    @staticmethod
    def forward(ctx: FunctionCtx, decay: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros_like(x[:, 0])
        before = states_before(affine_states(decay, x, nothing), nothing)
        ctx.save_for_backward(decay, before)
        return before, torch.addcmul(x[:, -1], decay[:, -1], before[:, -1])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_before: Tensor, d_last: Tensor) -> tuple[Tensor, Tensor]:
        decay, before = ctx.saved_tensors  # type: ignore[attr-defined]
        earlier = affine_states(decay[:, 1:], d_before[:, 1:], d_last, backward=True)
        d_x = torch.cat([earlier, d_last.unsqueeze(1)], 1)
        return (d_x * before).sum_to_size(decay.shape), d_x


def states_from_zero(decay: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute h_t = decay_t h_{t-1} + x_t from zero, as `affine_scan` does, with gradients.

    Returns the states before each token, [N, L, ...], and the last one, [N, ...].
    """
    states: tuple[Tensor, Tensor] = _StatesFromZero.apply(decay, x)  # type: ignore[no-untyped-call]
    return states


class _WithEntry(torch.autograd.Function):
    """States, and what is kept of an entering state: before + kept entry."""

    @staticmethod
    def forward(ctx: FunctionCtx, before: Tensor, kept: Tensor, entry: Tensor) -> Tensor:
        ctx.save_for_backward(kept, entry)
        return torch.addcmul(before, kept, entry.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept, entry = ctx.saved_tensors  # type: ignore[attr-defined]
        if grad.device.type != "cpu":
            return grad, (grad * entry.unsqueeze(1)).sum_to_size(kept.shape), (grad * kept).sum(1)
        # State by state, which stays in the processor's cache.
        d_entry, product, d_kept = torch.zeros_like(entry), torch.empty_like(entry), torch.empty_like(kept)
        for gradient, factor, total in zip(grad.unbind(1), kept.unbind(1), d_kept.unbind(1), strict=True):
            d_entry.addcmul_(factor, gradient)
            total.copy_(torch.mul(gradient, entry, out=product).sum_to_size(factor.shape))
        return grad, d_kept, d_entry


def with_entry(before: Tensor, kept: Tensor, entry: Tensor) -> Tensor:
    """Add to states from zero, `before` [N, L, ...], the part `kept` of the state `entry` [N, ...] that enters.

    `kept` has as many dims as `before`, and all but the first two may be 1. Returns [N, L, ...].
    """
    states: Tensor = _WithEntry.apply(before, kept, entry)  # type: ignore[no-untyped-call]
    return states


def linear_unit(x: Tensor, log_decay: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the real-gated linear recurrent unit's h_t = e^{log_decay_t} h_{t-1} + x_t, number by number.

    `x` and `log_decay` [N, L, ...] have one shape; log decays are at most 0, and -inf starts anew. `initial_state`
    [N, ...] enters the first token (None: zeros). Returns all h in the type of `x` and the last one in float32, or in
    float64 for float64. Padding at the end has x = 0 and log_decay = 0.

    Raises ValueError where shapes differ. Source: Griffin, De et al. 2024, arXiv 2402.19427, equation 4.
    """
    if x.shape != log_decay.shape:
        raise ValueError(f"x {tuple(x.shape)} and log_decay {tuple(log_decay.shape)} differ in shape")
    initial = entering_state(initial_state, x, (x.shape[0], *x.shape[2:]))
    if not x.shape[1]:
        return x, initial
    states = affine_scan(log_decay.to(initial.dtype).exp(), x.to(initial.dtype), initial)
    return states.to(x.dtype), states[:, -1]
