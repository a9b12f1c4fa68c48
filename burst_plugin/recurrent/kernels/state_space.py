"""Mamba-2's state space layer (a decay per token and head), in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_plugin.recurrent.kernels.decay import DecayChunks, decayed_attention
from burst_plugin.recurrent.kernels.linear_unit import computing_type, entering_state


def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2's S <- e^{dt A} S + dt x B^T and out = S C (no D term).

    `x` is [N, L, H, P], `dt` [N, L, H] after bias, softplus and limits, so at least 0, `A` [H] negative, `B` and `C`
    [N, L, G, M] for G groups of heads. `initial_state` is [N, H, P, M] (None: zeros). Padding at the end has dt = 0.
    Returns `out` [N, L, H, P] in the type of `x` and the last state in float32, or in float64 for float64.

    Raises ValueError where groups do not divide heads. Source: Dao and Gu 2024, arXiv 2405.21060.
    """
    heads, groups = x.shape[2], B.shape[2]
    if heads % groups:
        raise ValueError(f"{groups} groups do not divide {heads} heads")
    if not x.shape[1]:
        return x, entering_state(initial_state, x, (x.shape[0], heads, x.shape[3], B.shape[3]))
    initial = None if initial_state is None else initial_state.mT
    out, final = decayed_attention(*_as_attention(x, dt, A, B, C), initial, chunk_size)
    return out.to(x.dtype), final.mT


def state_space_chunks(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, chunk_size: int = 64
) -> DecayChunks:
    """Return the stages of `state_space`, for L > 0; their states are [N, H, M, P]."""
    return DecayChunks(*_as_attention(x, dt, A, B, C), chunk_size)


def _as_attention(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and log decays."""
    dtype = computing_type(x)
    dt = dt.to(dtype)
    return C, B, x.to(dtype) * dt.unsqueeze(-1), dt * A.to(dtype)


def state_space_read(dt: Tensor, A: Tensor, C: Tensor, state: Tensor) -> Tensor:
    """Compute the part of `state_space`'s outputs that comes from an entering state [N, H, P, M].

    It is what the outputs would be with x = 0. `dt` is [N, L, H], `A` [H], `C` [N, L, G, M] for G groups of heads.
    Returns [N, L, H, P] in the type of the state.
    """
    N, L, H = dt.shape
    groups, dtype = C.shape[2], state.dtype
    kept = (dt.to(dtype) * A.to(dtype)).cumsum(1).exp()
    flat = torch.unflatten(state, 1, (groups, H // groups)).flatten(2, 3)  # [N, G, R P, M]
    read = C.to(dtype).transpose(1, 2) @ flat.mT
    return torch.reshape(read.transpose(1, 2), (N, L, H, state.shape[2])) * kept.unsqueeze(-1)
