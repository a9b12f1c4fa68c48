"""Layers that carry a state along the sequence, as they are defined: in float64, token after token.

Sequences are [B, S, ...] and made of documents, [bounds[i], bounds[i + 1]) each; states and convolutions start anew
at each. `bounds` None is one document. `initial_state` enters the first document. All return outputs and the last
document's last state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Bounds = Sequence[int] | None


def _documents(
    token: Callable[[Any, int], tuple[Tensor, Any]], start: Any, length: int, bounds: Bounds, initial: Any
) -> tuple[Tensor, Any]:
    """Run `token`, which takes a state and an index to an output and the next state, along all documents."""
    outputs, state = [], start
    bounds = [0, length] if bounds is None else bounds
    for first, end in pairwise(bounds):
        state = initial if first == 0 and initial is not None else start
        for t in range(first, end):
            out, state = token(state, t)
            outputs.append(out)
    return torch.stack(outputs, 1), state


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    bounds: Bounds = None,
) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    g = g if g.dim() == 4 else g.unsqueeze(-1)

    def token(S: Tensor, t: int) -> tuple[Tensor, Tensor]:
        S = g[:, t].exp().unsqueeze(-1) * S
        delta = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], delta)
        return torch.einsum("bhkv,bhk->bhv", S, q[:, t]), S

    start = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return _documents(token, start, v.shape[1], bounds, initial_state)


def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
    *,
    bounds: Bounds = None,
) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    B, C = (t.repeat_interleave(x.shape[2] // B.shape[2], 2) for t in (B, C))

    def token(S: Tensor, t: int) -> tuple[Tensor, Tensor]:
        S = (dt[:, t] * A).exp()[..., None, None] * S
        S = S + torch.einsum("bh,bhp,bhm->bhpm", dt[:, t], x[:, t], B[:, t])
        return torch.einsum("bhpm,bhm->bhp", S, C[:, t]), S

    start = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    return _documents(token, start, x.shape[1], bounds, initial_state)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
    *,
    bounds: Bounds = None,
) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))

    def token(S: Tensor, t: int) -> tuple[Tensor, Tensor]:
        S = (dt[:, t].unsqueeze(-1) * A).exp() * S + torch.einsum("bd,bm->bdm", dt[:, t] * x[:, t], B[:, t])
        return torch.einsum("bdm,bm->bd", S, C[:, t]), S

    return _documents(token, x.new_zeros(x.shape[0], *A.shape), x.shape[1], bounds, initial_state)


def decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    *,
    bounds: Bounds = None,
) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay = (t.double() for t in (q, k, v, log_decay))

    def token(S: Tensor, t: int) -> tuple[Tensor, Tensor]:
        S = log_decay.exp()[:, None, None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        return torch.einsum("bhkv,bhk->bhv", S, q[:, t]), S

    start = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return _documents(token, start, v.shape[1], bounds, initial_state)


def linear_unit(
    x: Tensor, log_decay: Tensor, initial_state: Tensor | None = None, *, bounds: Bounds = None
) -> tuple[Tensor, Tensor]:
    x, log_decay = x.double(), log_decay.double()

    def token(h: Tensor, t: int) -> tuple[Tensor, Tensor]:
        h = log_decay[:, t].exp() * h + x[:, t]
        return h, h

    return _documents(token, torch.zeros_like(x[:, 0]), x.shape[1], bounds, initial_state)


def rwkv(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    bounds: Bounds = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    k, v, log_decay, bonus = (t.double() for t in (k, v, log_decay, bonus))

    def token(state: tuple[Tensor, Tensor, Tensor], t: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        num, den, top = state
        high = torch.maximum(top, bonus + k[:, t])
        old, new = (top - high).exp(), (bonus + k[:, t] - high).exp()
        out = (old * num + new * v[:, t]) / (old * den + new)
        high = torch.maximum(top + log_decay, k[:, t])
        old, new = (top + log_decay - high).exp(), (k[:, t] - high).exp()
        return out, (old * num + new * v[:, t], old * den + new, high)

    zero = torch.zeros_like(k[:, 0])
    return _documents(token, (zero, zero, zero - 1e38), k.shape[1], bounds, initial_state)


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    igate: Tensor,
    fgate: Tensor,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    bounds: Bounds = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    q, k, v, igate, fgate = (t.double() for t in (q, k, v, igate, fgate))
    q = q * q.shape[-1] ** -0.5

    def token(state: tuple[Tensor, Tensor, Tensor], t: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        C, n, m = state
        kept = F.logsigmoid(fgate[:, t]) + m
        m = torch.maximum(kept, igate[:, t]).detach()  # any would do, but for eps
        old, new = (kept - m).exp(), (igate[:, t] - m).exp()
        C = old[..., None, None] * C + new[..., None, None] * torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        n = old.unsqueeze(-1) * n + new.unsqueeze(-1) * k[:, t]
        read = torch.einsum("bhkv,bhk->bhv", C, q[:, t])
        below = torch.maximum((n * q[:, t]).sum(-1).abs(), (-m).exp()) + 1e-6
        return read / below.unsqueeze(-1), (C, n, m)

    B, _, H, K = k.shape
    start = (v.new_zeros(B, H, K, v.shape[3]), v.new_zeros(B, H, K), v.new_zeros(B, H))
    return _documents(token, start, k.shape[1], bounds, initial_state)


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *, bounds: Bounds = None
) -> Tensor:
    x, weight = x.double(), weight.double()

    def token(last: list[Tensor], t: int) -> tuple[Tensor, list[Tensor]]:
        last = [*last[1:], x[:, t]]
        out = sum(weight[:, i] * before for i, before in enumerate(last))
        out = out if bias is None else out + bias.double()
        return out * torch.sigmoid(out) if activation in ("silu", "swish") else out, last

    return _documents(token, [torch.zeros_like(x[:, 0])] * weight.shape[1], x.shape[1], bounds, None)[0]


Draw = Callable[..., Tensor]


def _extremes(r: Draw, values: Tensor, low: float, high: float) -> Tensor:
    """Put `low` in place of one value in ten, and `high` in place of one in five."""
    where = r(*values.shape)
    return torch.where(where < 0.1, low, torch.where(where > 0.8, high, values))


def _some(values: Tensor, low: float, high: float) -> Tensor:
    """Put `low` and `high` in place of the first and last."""
    values[0], values[-1] = low, high
    return values


def _draw_delta_rule(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    G, H, K, V = (sizes[name] for name in ("groups", "heads", "keys", "values"))
    q, k = (F.normalize(n(*at, G, K), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": n(*at, H, V),
        "g": _extremes(r, -r(*at, H), -80, 0),
        "beta": _extremes(r, r(*at, H), 0, 1),
    }


def _draw_delta_rule_by_channel(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    drawn = _draw_delta_rule(n, r, at, sizes)
    return drawn | {"g": _extremes(r, -r(*at, sizes["heads"], sizes["keys"]), -80, 0)}


def _draw_state_space(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    G, H, M, P = (sizes[name] for name in ("groups", "heads", "keys", "values"))
    dt, A = _extremes(r, r(*at, H), 0, 1), _some(-2 * r(H), -80, -1e-3)
    return {"x": n(*at, H, P), "dt": dt, "A": A, "B": n(*at, G, M), "C": n(*at, G, M)}


def _draw_selective_scan(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    D, M = sizes["heads"], sizes["keys"]
    A = _extremes(r, -2 * r(D, M), -80, -1e-3)
    return {"x": n(*at, D), "dt": _extremes(r, r(*at, D), 0, 1), "A": A, "B": n(*at, M), "C": n(*at, M)}


def _draw_decay_attention(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    H, K, V = (sizes[name] for name in ("heads", "keys", "values"))
    return {"q": n(*at, H, K), "k": n(*at, H, K), "v": n(*at, H, V), "log_decay": _some(-r(H), -80, 0)}


def _draw_linear_unit(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    E = sizes["values"]
    return {"x": n(*at, E), "log_decay": _extremes(r, _extremes(r, -r(*at, E), -80, 0), -torch.inf, -1e-3)}


def _draw_rwkv(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    E = sizes["values"]
    return {"k": 3 * n(*at, E), "v": n(*at, E), "log_decay": _some(-r(E), -80, 0), "bonus": n(E)}


def _draw_mlstm(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    H, K, V = (sizes[name] for name in ("heads", "keys", "values"))
    # Input gates all differ: gradients of a maximum are nobody's where several are the largest.
    igate, fgate = 0.5 * n(*at, H) + _extremes(r, n(*at, H), -80, 0), _extremes(r, 2 * n(*at, H), -80, 80)
    return {"q": n(*at, H, K), "k": n(*at, H, K), "v": n(*at, H, V), "igate": igate, "fgate": fgate}


def _draw_causal_convolution(n: Draw, r: Draw, at: tuple[int, int], sizes: dict[str, int]) -> dict[str, Tensor]:
    C = sizes["values"]
    return {"x": n(*at, C), "weight": n(C, sizes["groups"] + 2), "bias": n(C)}


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "delta_rule": delta_rule,
    "delta_rule_by_channel": delta_rule,
    "state_space": state_space,
    "selective_scan": selective_scan,
    "decay_attention": decay_attention,
    "linear_unit": linear_unit,
    "rwkv": rwkv,
    "mlstm": mlstm,
    "causal_convolution": causal_convolution,
}
_DRAWS = {
    "delta_rule": _draw_delta_rule,
    "delta_rule_by_channel": _draw_delta_rule_by_channel,
    "state_space": _draw_state_space,
    "selective_scan": _draw_selective_scan,
    "decay_attention": _draw_decay_attention,
    "linear_unit": _draw_linear_unit,
    "rwkv": _draw_rwkv,
    "mlstm": _draw_mlstm,
    "causal_convolution": _draw_causal_convolution,
}


def draw(kind: str, generator: torch.Generator, batch: int, tokens: int, **sizes: int) -> dict[str, Tensor]:
    """Draw a layer's tensors by name, gates of all strengths among them: float64, yet all are float32 numbers.

    `sizes` are groups (2; of heads, which share queries and keys), heads (4; channels of the selective scan), keys
    (8; a channel's states there) and values (6; channels of layers that have no heads).
    """
    sizes = {"groups": 2, "heads": 4, "keys": 8, "values": 6} | sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    drawn = _DRAWS[kind](normal, uniform, (batch, tokens), sizes)
    return {name: x.float().double() for name, x in drawn.items()}


def draw_state(kind: str, generator: torch.Generator, batch: int, **sizes: int) -> Any:
    """Draw a state as it is after three tokens: a tensor, or a tuple of them for RWKV and mLSTM."""
    _, state = DEFINITIONS[kind](**draw(kind, generator, batch, 3, **sizes))
    return tuple(x.float().double() for x in state) if isinstance(state, tuple) else state.float().double()
