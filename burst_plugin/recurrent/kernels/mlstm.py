"""xLSTM's mLSTM in chunks: linear attention with exponential input gates, whose largest power is taken out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from burst_plugin.recurrent.kernels.decay import in_chunks, out_of_chunks
from burst_plugin.recurrent.kernels.linear_unit import affine_scan, computing_type, states_before

State = tuple[Tensor, Tensor, Tensor]
_CHUNK_SIZE = 64
_HIGHEST_POWERS = {torch.float32: 80.0, torch.float64: 700.0}


def _gates(igate: Tensor, fgate: Tensor) -> tuple[Tensor, Tensor]:
    """Return log input gates, in the type given, and sums of log forget gates in float64, [N, n, H, c]."""
    igate = F.pad(igate, (0, 0, 0, -igate.shape[1] % _CHUNK_SIZE), value=-torch.inf)
    return in_chunks(igate, _CHUNK_SIZE), in_chunks(F.logsigmoid(fgate.double()), _CHUNK_SIZE).cumsum(-1)


def _tops(added: Tensor, totals: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Compute states' largest powers before and after each chunk [N, n, H], from powers `added` [N, n, H, c]."""
    tops = [top]
    for new, kept in zip(added.amax(-1).unbind(1), totals.unbind(1), strict=True):
        tops.append(torch.maximum(tops[-1] + kept, new))
    return torch.stack(tops[:-1], 1), torch.stack(tops[1:], 1)


def _entering(initial_state: State | None, k: Tensor, v: Tensor) -> State:
    dtype, (N, _, H, K) = computing_type(v), k.shape
    if initial_state is not None:
        C, n, m = (t.to(dtype) for t in initial_state)
        return C, n, m
    shapes = (N, H, K, v.shape[3]), (N, H, K), (N, H)
    C, n, m = (torch.zeros(shape, dtype=dtype, device=v.device) for shape in shapes)
    return C, n, m


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    igate: Tensor,
    fgate: Tensor,
    initial_state: State | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, State]:
    """Compute mLSTM: C <- f C + i k v^T, n <- f n + i k, out = C^T q / (max(|n q|, e^-m) + eps).

    `q` and `k` are [N, L, H, K], `v` [N, L, H, V], `igate` and `fgate` [N, L, H] before i = e^igate and f =
    sigmoid(fgate); q is divided by sqrt(K) here. The state is C [N, H, K, V] and n [N, H, K], both kept divided
    by e^m, and m [N, H], the largest power so far; None is zeros. Padding at the end has igate = -inf and fgate =
    inf. Returns `out` [N, L, H, V] in the type of `v` and the last state in float32, or in float64 for float64.

    Raises ValueError where shapes do not fit. Source: Beck et al. 2024, arXiv 2405.04517; 2025, arXiv 2503.13427.
    """
    if q.shape != k.shape or igate.shape != v.shape[:3] or fgate.shape != v.shape[:3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and gates {tuple(igate.shape)} do not fit")
    dtype, length = computing_type(v), v.shape[1]
    C, n, top = _entering(initial_state, k, v)
    if not length:
        return v, (C, n, top)
    gates, sums = _gates(igate.to(dtype), fgate)
    q, k, values = (in_chunks(x.to(dtype), _CHUNK_SIZE) for x in (q.to(dtype) * q.shape[3] ** -0.5, k, v))
    values = F.pad(values, (0, 1), value=1.0)  # n is one more column of C
    added, totals = (sums[..., -1:] - sums).to(dtype) + gates, sums[..., -1].to(dtype)
    entering_power = (top - top.detach()).exp()  # 1, with the gradient of the power
    C, n, top = C * entering_power[..., None, None], n * entering_power[..., None], top.detach()
    before, after = _tops(added.detach(), totals.detach(), top)  # any powers would do, but for eps
    states = affine_scan(
        (totals + before - after).exp()[..., None, None],
        (k * (added - after.unsqueeze(-1)).exp().unsqueeze(-1)).mT @ values,
        torch.cat([C, n.unsqueeze(-1)], -1),
    )
    entering = states_before(states, torch.cat([C, n.unsqueeze(-1)], -1))
    out = _outputs((q, k, values), (gates, sums), (entering, before), eps)
    final = states[:, -1]
    return out_of_chunks(out, length).to(v.dtype), (final[..., :-1], final[..., -1], after[:, -1])


def _outputs(
    tokens: tuple[Tensor, Tensor, Tensor], gates: tuple[Tensor, Tensor], entering: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """Compute outputs [N, n, H, c, V] of queries, keys and values, gates and their sums, states and their powers."""
    q, k, values = tokens
    igate, sums = gates
    states, before = entering
    size = sums.shape[-1]
    upper = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    powers = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(q.dtype) + igate.unsqueeze(-2)
    powers = powers.masked_fill(upper, -torch.inf)
    read = sums.to(q.dtype) + before.unsqueeze(-1)
    top = torch.maximum(read, powers.amax(-1)).detach()
    weights = (q @ k.mT) * (powers - top.unsqueeze(-1)).exp()
    both = weights @ values + (q * (read - top).exp().unsqueeze(-1)) @ states
    least = (-top).clamp(max=_HIGHEST_POWERS[q.dtype]).exp()  # where this has an effect, outputs are nothing but 0
    return both[..., :-1] / (torch.maximum(both[..., -1].abs(), least) + eps).unsqueeze(-1)
