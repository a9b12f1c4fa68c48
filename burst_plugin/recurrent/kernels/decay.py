"""Linear attention whose state decays by one number per token and head, in chunks; so does lightning attention's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from burst_plugin.recurrent.kernels.linear_unit import affine_scan, computing_type, entering_state, states_before


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Cut [N, L, H, ...] into [N, chunks, H, size, ...], with zeros at the end to fill the last chunk."""
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])
    return torch.unflatten(x, 1, (x.shape[1] // size, size)).transpose(2, 3)


def out_of_chunks(x: Tensor, length: int) -> Tensor:
    """Join chunks [N, chunks, H, size, ...] to [N, length, H, ...], without the zeros that filled the last chunk."""
    return x.transpose(2, 3).flatten(1, 2)[:, :length]


def segment_decays(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the decays between tokens of a chunk, from its start to each token, and from each token to its end.

    Of log decays [..., c], at most 0, these are [..., c, c], whose entry [i, j] is the decay from token j to token i
    and 0 for j > i; [..., c]; and [..., c]; in `dtype`. Sums over stretches of tokens are differences of sums from
    the start. They are formed in float64: in float32 a strong decay early in a chunk would cost the digits of all
    weak ones behind it. No sum is positive, and sums above the diagonal are -inf before they become powers, so that
    no power is infinite and no gradient NaN.
    """
    sums = log_decay.double().cumsum(-1)
    upper = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=sums.device).triu_(1)
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(dtype).masked_fill(upper, -torch.inf).exp()
    return between, sums.to(dtype).exp(), (sums[..., -1:] - sums).to(dtype).exp()


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute linear attention with a decay per token and head, S <- e^log_decay S + k v^T, out = S^T q, in chunks.

    `q` and `k` are [N, L, G, K], `v` [N, L, H, V] with G groups of heads that share queries and keys, `log_decay`
    [N, L, H], at most 0; `initial_state` [N, H, K, V] (None: zeros). L > 0. Returns `out` [N, L, H, V] and the last
    state [N, H, K, V], in float32, or in float64 where `v` is.
    """
    dtype, length = computing_type(v), v.shape[1]
    N, _, H, V = v.shape
    G, K = k.shape[2:]
    shared = (G, H // G)
    q, k = (in_chunks(x.to(dtype), chunk_size) for x in (q, k))
    values = torch.unflatten(in_chunks(v.to(dtype), chunk_size), 2, shared)
    decays = torch.unflatten(in_chunks(log_decay, chunk_size), 2, shared)
    between, entering, leaving = segment_decays(decays, dtype)
    inside = ((q @ k.mT).unsqueeze(3) * between) @ values  # [N, n, G, R, c, V]
    # States hold all heads of a group side by side, [N, n, G, K, R V]: one product for all of them.
    weighted = (values * leaving.unsqueeze(-1)).transpose(3, 4).flatten(4)
    added = torch.unflatten(k.mT @ weighted, 4, (H // G, V))
    initial = torch.unflatten(entering_state(initial_state, v, (N, H, K, V)), 1, shared).transpose(2, 3)
    kept = entering[..., -1].unsqueeze(3).unsqueeze(-1)
    states = affine_scan(kept, added, initial)
    before = states_before(states, initial).flatten(4)
    read = torch.unflatten(q @ before, 4, (H // G, V)).transpose(3, 4) * entering.unsqueeze(-1)
    out = out_of_chunks((inside + read).flatten(2, 3), length)
    return out, states[:, -1].transpose(2, 3).flatten(1, 2)


def before_ends(lengths: Tensor | None, like: Tensor) -> Tensor | None:
    """Return which tokens of `like` [N, L, ...] are not padding, bool [N, L], by the `lengths` [N] of pieces.

    None for None.
    """
    if lengths is None:
        return None
    return torch.arange(like.shape[1], device=like.device) < lengths.to(like.device).unsqueeze(-1)


def decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int = 64,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute lightning attention, S <- e^log_decay S + k v^T and out = S^T q, with one decay per head.

    `q` and `k` are [N, L, H, K], `v` [N, L, H, V], `log_decay` [H], at most 0, `initial_state` [N, H, K, V] (None:
    zeros). `lengths` [N] says where padding begins: the state does not change there. Returns `out` [N, L, H, V] in
    the type of `v` and the last state in float32, or in float64 for float64.

    Raises ValueError where numbers of heads differ. Source: Qin et al. 2024, arXiv 2401.04658.
    """
    heads = [q.shape[2], k.shape[2], v.shape[2], len(log_decay)]
    if len(set(heads)) > 1:
        raise ValueError(f"q, k, v and log_decay have {heads} heads")
    if not v.shape[1]:
        return v, entering_state(initial_state, v, (v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
    decays = log_decay.expand(v.shape[:3])
    inside = before_ends(lengths, v)
    if inside is not None:
        decays = decays * inside.unsqueeze(-1)
        k = k * inside[..., None, None]
    out, final = decayed_attention(q, k, v, decays, initial_state, chunk_size)
    return out.to(v.dtype), final


def decay_attention_read(q: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
    """Compute the part of `decay_attention`'s outputs that comes from an entering state, e^{t log_decay} S^T q_t.

    Tokens count from t = 1. `q` is [N, L, H, K], `log_decay` [H], `state` [N, H, K, V]. Returns [N, L, H, V] in the
    type of the state. Source: Qin et al. 2024, arXiv 2401.04658.
    """
    count = torch.arange(1, q.shape[1] + 1, dtype=state.dtype, device=q.device)
    weighted = q.to(state.dtype) * (count.unsqueeze(-1) * log_decay.to(state.dtype)).exp().unsqueeze(-1)
    return (weighted.transpose(1, 2) @ state).transpose(1, 2)
