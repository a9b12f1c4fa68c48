"""RWKV-4's WKV: an average of values whose weights e^k decay, kept with the largest power so far taken out."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_plugin.recurrent.kernels.linear_unit import affine_scan, computing_type, states_before

State = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def _running_tops(k: Tensor, log_decay: Tensor, top: Tensor) -> Tensor:
    """Compute top_t = max(top_{t-1} + log_decay, k_t) [N, L, E], over 1, 2, 4, ... tokens at once."""
    tops = torch.cat([torch.maximum(top + log_decay, k[:, 0]).unsqueeze(1), k[:, 1:]], 1)
    step = 1
    while step < k.shape[1]:
        later = torch.maximum(tops[:, step:], tops[:, :-step] + step * log_decay)
        tops = torch.cat([tops[:, :step], later], 1)
        step *= 2
    return tops


def _last_top(k: Tensor, log_decay: Tensor, top: Tensor, lengths: Tensor) -> Tensor:
    """Compute the last top with gradients, which go to the largest term."""
    behind = lengths.unsqueeze(-1) - 1 - torch.arange(k.shape[1], device=k.device)  # tokens after each
    faded = k + behind.clamp(min=0).unsqueeze(-1) * log_decay
    faded = faded.masked_fill((behind < 0).unsqueeze(-1), -torch.inf)
    return torch.maximum(faded.amax(1), top + lengths.unsqueeze(-1) * log_decay)


def rwkv(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    initial_state: State | None = None,
    *,
    lengths: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Compute WKV: out_t = (sum_{j<t} e^{(t-1-j) log_decay + k_j} v_j + e^{bonus + k_t} v_t) / (the same without v).

    `k` and `v` are [N, L, E], `log_decay`, at most 0, and `bonus` [E]. The state is (num, den, top), [N, E] each, for
    sums num e^top and den e^top; None is (0, 0, -1e38). `lengths` [N] says where padding begins: the state does not
    change there. Returns `out` [N, L, E] in the type of `v` and the last state in float32, or in float64 for float64.

    Raises ValueError where shapes differ. Source: Peng et al. 2023, arXiv 2305.13048, appendix D.
    """
    if k.shape != v.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in shape")
    dtype, (N, L, E) = computing_type(v), k.shape
    if initial_state is None:
        nothing = torch.zeros(N, E, dtype=dtype, device=v.device)
        initial_state = (nothing, nothing, torch.full_like(nothing, -1e38))
    num, den, top = (t.to(dtype) for t in initial_state)
    if not L:
        return v, (num, den, top)
    k, values, log_decay, bonus = (t.to(dtype) for t in (k, v, log_decay, bonus))
    # Tops inside are constants: the sums they are taken out of do not depend on them. They come and go in float64,
    # since their differences, which are powers of weak decays, would lose digits.
    tops = _running_tops(k.double(), log_decay.double(), top.double())
    before = states_before(tops, top)
    added = (k - tops).to(dtype).exp()
    sums = torch.stack([added * values, added], 2)
    decay = (before + log_decay - tops).to(dtype).exp().unsqueeze(2)
    initial = torch.stack([num, den], 1)
    sums = affine_scan(decay, sums, initial)
    num_before, den_before = states_before(sums, initial).unbind(2)
    own_power = bonus.double() + k
    high = torch.maximum(before, own_power).detach()
    old, new = ((power - high).to(dtype).exp() for power in (before, own_power))
    out = (old * num_before + new * values) / (old * den_before + new)
    return out.to(v.dtype), _final(k, log_decay, (num, den, top), (sums, tops), lengths)


def _final(
    k: Tensor, log_decay: Tensor, initial: State, states: tuple[Tensor, Tensor], lengths: Tensor | None
) -> State:
    """Take the state after each piece's last token, of sums [N, L, 2, E] and tops."""
    sums, tops = states
    if lengths is None:
        lengths = torch.full(k.shape[:1], k.shape[1], device=k.device)
    lengths = lengths.to(k.device)
    rows, last = torch.arange(len(k), device=k.device), lengths.sub(1).clamp(min=0)
    top = _last_top(k.double(), log_decay.double(), initial[2].double(), lengths).to(k.dtype)
    some = (lengths > 0).unsqueeze(-1)
    scaled = sums[rows, last] * torch.where(some, tops[rows, last] - top, 0.0).to(k.dtype).exp().unsqueeze(1)
    num, den = (torch.where(some, new, old) for new, old in zip(scaled.unbind(1), initial[:2], strict=True))
    return num, den, top
