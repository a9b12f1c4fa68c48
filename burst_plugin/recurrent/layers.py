"""Layers that carry a state along the sequence, over the ranks of a ring: what users call, a function for each kind.

    place = recurrent.Placement(cp, mask=Documents((0, 700, 8192)))
    x = recurrent.with_tokens_before(conv, x, 3, place)
    out = recurrent.gated_delta_rule(q, k, v, g, beta, place)

Every piece of the sequence (`pieces`) is computed by a kernel as it is on one rank, with the state that enters it, in
one of the ways of `recurrent.ways`. States are float32, float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_plugin.recurrent.affine import ELEMENTWISE, MATRIX
from burst_plugin.recurrent.by_heads import by_heads
from burst_plugin.recurrent.delta_pairs import pair_by_kernel, pair_by_rule
from burst_plugin.recurrent.held_pieces import Group
from burst_plugin.recurrent.kernels import convolution
from burst_plugin.recurrent.kernels import decay as decays
from burst_plugin.recurrent.kernels import mlstm as lstm
from burst_plugin.recurrent.kernels import rwkv as wkv
from burst_plugin.recurrent.kernels import selective_scan as selective
from burst_plugin.recurrent.kernels import state_space as spaces
from burst_plugin.recurrent.kernels.delta_rule import delta_rule
from burst_plugin.recurrent.kernels.linear_unit import linear_unit
from burst_plugin.recurrent.placement import Placement
from burst_plugin.recurrent.segments import in_segments, looking_back
from burst_plugin.recurrent.staged import Pair
from burst_plugin.recurrent.ways import (
    Exponential,
    InStages,
    Kernel,
    OnePass,
    OutputsOf,
    State,
    TwoPasses,
    in_parts,
    state_type,
    with_exponents,
)
from burst_plugin.ring.graph_breaks import between_graphs

_PARTS = 2  # of the heads, so that states of one travel while others are computed
_NOTHING_LEFT = -1e4  # a logarithm of decays whose power is 0 in every type, and no infinity


@between_graphs
def with_tokens_before(
    function: Callable[[Any], Tensor], x: Tensor | Sequence[Tensor], width: int, place: Placement
) -> Tensor:
    """Compute a function that looks back at most `width` tokens, such as a convolution; collective.

    Args:
        function: takes x as one sequence [1, T, ...], where each piece of the shard follows the `width` tokens before
            it, or zeros before a document; returns [1, T, ...]. Causal. Its results for the tokens in front are left
            out.
        x: [B, S_local, ...], or several such tensors; then the function takes a list of them.
        width: 0 or more; for a convolution 1 less than the width of its kernel.
        place: see `Placement`.

    Returns:
        [B, S_local, ...].

    Raises:
        ValueError: on every rank, if shapes do not fit on any of them.
    """
    xs = [x] if isinstance(x, Tensor) else list(x)

    def check() -> dict[str, object]:
        if width < 0:
            raise ValueError(f"width={width} is not valid; give the number of tokens to look back at, 0 or more")
        return {"width": width, "sizes": [list(y.shape[2:]) for y in xs], "dtype": [y.dtype for y in xs]}

    call = place.call("with_tokens_before", {f"x{n or ''}": y for n, y in enumerate(xs)}, check)
    rows = [call.held.flat(y) for y in xs]
    extended, keep = call.with_tokens_before(rows, width)
    inputs = [y.unsqueeze(0) for y in extended]
    longest = call.held.most_with_halos(width)
    out = looking_back(lambda ys: function(ys[0] if isinstance(x, Tensor) else ys), inputs, width, longest)
    return call.held.unflat(out[0][keep])


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    place: Placement,
    activation: str | None = None,
) -> Tensor:
    """Convolve each channel along the sequence with the tokens before it; collective.

    Args:
        x: [B, S_local, C].
        weight: [C, W], whose last column is the token's own; the same on all ranks, as bias is.
        bias: [C].
        place: see `Placement`.
        activation: None or "silu".

    Returns:
        [B, S_local, C], of x's type.

    Raises:
        ValueError: on every rank, for x or a weight that does not fit; for another activation.
    """

    if weight.dim() != 2:
        instead = "; pass weight[:, 0] of nn.Conv1d's [C, 1, W]" if weight.dim() == 3 else ""
        raise ValueError(f"weight of shape {list(weight.shape)} is not valid: it has to be [C, W]{instead}")

    def convolve(x: Tensor) -> Tensor:
        return convolution.causal_convolution(x, weight, bias, activation)

    return with_tokens_before(convolve, x, weight.shape[-1] - 1, place)


@between_graphs
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    place: Placement,
    *,
    kernel: Kernel | None = None,
    pair: Callable[..., Pair] | None = None,
    return_final_state: bool = False,
) -> Any:
    """Compute a gated delta rule: S <- diag(e^g) S, then S <- S + beta k (v - S^T k)^T; out = S^T q. Collective.

    Args:
        q, k: [B, S_local, Hk, K], normalised and scaled as the model does it.
        v: [B, S_local, H, V]; H is a multiple of Hk.
        g: logarithms of decays, [B, S_local, H] (gated delta net) or [B, S_local, H, K] (Kimi delta attention),
            0 or less.
        beta: [B, S_local, H].
        place: see `Placement`.
        kernel: `kernel(q, k, v, g, beta, initial_state)` in place of the one here: takes pieces [N, L, ...], padded
            with zeros, and the states that enter them [N, H, K, V]; returns outputs and the states that leave them.
        pair: `pair(q, k, v, g, beta)` computes with less work what `kernel` would: it returns the transitions and
            biases of pieces, and a function from entering states to the outputs of `kernel`; see `recurrent.staged`.
        return_final_state: also return the states after the last tokens of rows, [B, H, K, V], on every rank, without
            gradient.

    Returns:
        out [B, S_local, H, V], of v's type. States are float32, float64 for float64.

    Raises:
        ValueError: on every rank, for shapes that do not fit.

    Sources: Gated Delta Networks (arXiv 2412.06464), Kimi Linear (2510.26692).
    """
    tensors = {"v": v, "q": q, "k": k, "g": g, "beta": beta}
    if place.exchanges_heads(tensors, k.shape[-1] * v.shape[-1], k.shape[-1] ** 2):
        return by_heads(partial(gated_delta_rule, kernel=kernel), tensors, {}, place, return_final_state)

    def check() -> dict[str, object]:
        if v.dim() != 4 or q.shape != k.shape or q.dim() != 4 or v.shape[2] % q.shape[2]:
            raise ValueError(_unlike("gated_delta_rule", tensors, "H of v is a multiple of the heads of q and k"))
        heads, dim = v.shape[2], k.shape[3]
        if g.shape[2:] not in ((heads,), (heads, dim)) or beta.shape[2:] != (heads,):
            raise ValueError(_unlike("gated_delta_rule", tensors, "g is [..., H] or [..., H, K], beta [..., H]"))
        return {"heads": heads, "qk_dim": dim, "v_dim": v.shape[3], "dtype": v.dtype, "decays": list(g.shape[3:])}

    call = place.call("gated_delta_rule", tensors, check)
    rule: Kernel = in_segments(kernel) if kernel else delta_rule
    pairs: Any = pair or (partial(pair_by_kernel, kernel) if kernel else pair_by_rule)

    def of_heads(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> TwoPasses:
        heads, dim = v.shape[2], k.shape[3]
        return TwoPasses(rule, pairs, State(MATRIX, (heads, dim, dim), (heads, dim, v.shape[3]), v))

    return in_parts(call, _PARTS, of_heads, (q, k, v, g, beta), return_final_state)


@between_graphs
def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    place: Placement,
    *,
    kernel: Kernel | None = None,
    return_final_state: bool = False,
) -> Any:
    """Compute a state space with scalar decays, as Mamba-2 has it: S <- e^(dt A) S + dt x B^T; out = S C. Collective.

    Args:
        x: [B, S_local, H, P].
        dt: steps, [B, S_local, H], 0 or more: after bias, softplus and limits.
        A: [H], 0 or less; the same on all ranks. Its gradient is a part of the whole: sum it over ranks.
        B, C: [B, S_local, G, N]; H is a multiple of G.
        place: see `Placement`.
        kernel: `kernel(x, dt, A, B, C, initial_state)` in place of the one here, of pieces [N, L, ...] padded with
            zeros; returns outputs and the states that leave them.
        return_final_state: also return the states after the last tokens of rows, [B, H, P, N], on every rank, without
            gradient.

    Returns:
        out [B, S_local, H, P], of x's type.

    Raises:
        ValueError: on every rank, for shapes that do not fit.

    Source: Transformers are SSMs (arXiv 2405.21060).
    """
    tensors = {"x": x, "dt": dt, "B": B, "C": C}
    if place.exchanges_heads(tensors, x.shape[-1] * B.shape[-1]):
        return by_heads(partial(state_space, kernel=kernel), tensors, {"A": A}, place, return_final_state)

    def check() -> dict[str, object]:
        if x.dim() != 4 or B.dim() != 4 or B.shape != C.shape or x.shape[2] % B.shape[2]:
            raise ValueError(_unlike("state_space", tensors, "B and C are [..., G, N], H of x a multiple of G"))
        heads = x.shape[2]
        if dt.shape[2:] != (heads,) or A.shape != (heads,):
            raise ValueError(_unlike("state_space", {**tensors, "A": A}, "dt is [..., H], A [H]"))
        return {"sizes": [list(each.shape[2:]) for each in tensors.values()], "dtype": x.dtype}

    call = place.call("state_space", tensors, check, (A,))
    run, dtype = in_segments(kernel) if kernel else spaces.state_space, state_type(x)
    A = A.to(dtype)  # whose gradients are added up before they are rounded

    def of_heads(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor) -> OnePass | InStages:
        def of_pieces(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, initial: Any) -> tuple[Tensor, Tensor]:
            return run(x, dt, A, B, C, initial)

        def decay(inputs: Sequence[Tensor], group: Group) -> Tensor:
            return torch.exp((inputs[1].to(dtype) * A).sum(1))[:, :, None, None]

        def read(inputs: Sequence[Tensor], entries: Tensor) -> Tensor:
            return spaces.state_space_read(inputs[1], A, inputs[3], entries)

        def begin(inputs: Sequence[Tensor], _: Group) -> tuple[Tensor, Tensor, Callable[[], OutputsOf]]:
            x, dt, B, C = inputs
            chunks = spaces.state_space_chunks(x, dt, A, B, C)
            return chunks.transition, chunks.bias.mT, partial(chunks.inside_then_outputs, x.dtype, True)

        state = State(ELEMENTWISE, (x.shape[2], 1, 1), (*x.shape[2:], B.shape[3]), x)
        return InStages(of_pieces, begin, state) if kernel is None else OnePass(of_pieces, decay, read, state)

    return in_parts(call, _PARTS, of_heads, (x, dt, B, C), return_final_state, A)


@between_graphs
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, place: Placement, *, return_final_state: bool = False
) -> Any:
    """Compute a selective scan, as Mamba has it: S <- e^(dt A) S + dt x B; out = S C, by channel. Collective.

    Args:
        x: [B, S_local, D].
        dt: [B, S_local, D], 0 or more: after bias and softplus.
        A: [D, N], 0 or less; the same on all ranks. Its gradient is a part of the whole: sum it over ranks.
        B, C: [B, S_local, N].
        place: see `Placement`.
        return_final_state: also return the states after the last tokens of rows, [B, D, N], on every rank, without
            gradient.

    Returns:
        out [B, S_local, D], of x's type.

    Raises:
        ValueError: on every rank, for shapes that do not fit.

    Source: Mamba (arXiv 2312.00752).
    """
    tensors = {"x": x, "dt": dt, "B": B, "C": C}

    def check() -> dict[str, object]:
        if x.dim() != 3 or dt.shape != x.shape or B.shape != C.shape or A.shape != (x.shape[2], *B.shape[2:]):
            raise ValueError(_unlike("selective_scan", {**tensors, "A": A}, "A is [D, N], B and C [..., N]"))
        return {"sizes": list(A.shape), "dtype": x.dtype}

    call = place.call("selective_scan", tensors, check, (A,))
    dtype = state_type(x)
    A = A.to(dtype)  # whose gradients are added up before they are rounded

    def of_pieces(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return selective.selective_scan(x, dt, A, B, C, initial)

    def decay(inputs: Sequence[Tensor], group: Group) -> Tensor:
        return torch.exp(inputs[1].to(dtype).sum(1).unsqueeze(-1) * A)

    def read(inputs: Sequence[Tensor], entries: Tensor) -> Tensor:
        return selective.selective_scan_read(inputs[1], A, inputs[3], entries)

    way = OnePass(of_pieces, decay, read, State(ELEMENTWISE, tuple(A.shape), tuple(A.shape), x))
    return in_parts(call, 1, lambda *_: way, (x, dt, B, C), return_final_state)


@between_graphs
def decay_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, place: Placement, *, return_final_state: bool = False
) -> Any:
    """Compute linear attention with a fixed decay for each head: S <- e^log_decay S + k v^T; out = S^T q. Collective.

    Args:
        q, k: [B, S_local, H, K].
        v: [B, S_local, H, V].
        log_decay: [H], 0 or less; the same on all ranks.
        place: see `Placement`.
        return_final_state: also return the states after the last tokens of rows, [B, H, K, V], on every rank, without
            gradient.

    Returns:
        out [B, S_local, H, V], of v's type.

    Raises:
        ValueError: on every rank, for shapes that do not fit.

    Sources: Lightning Attention (arXiv 2401.04658), MiniMax-01 (2501.08313).
    """
    tensors = {"v": v, "q": q, "k": k}
    if place.exchanges_heads(tensors, v.shape[-1] * k.shape[-1]):
        return by_heads(decay_attention, tensors, {"log_decay": log_decay}, place, return_final_state)

    def check() -> dict[str, object]:
        if v.dim() != 4 or q.shape != k.shape or q.shape[:3] != v.shape[:3] or log_decay.shape != (v.shape[2],):
            raise ValueError(
                _unlike("decay_attention", {**tensors, "log_decay": log_decay}, "all have as many heads H")
            )
        return {"sizes": [list(each.shape[2:]) for each in tensors.values()], "dtype": v.dtype}

    call = place.call("decay_attention", tensors, check, (log_decay,))
    log_decay = log_decay.to(state_type(v)).clamp(min=_NOTHING_LEFT)

    def of_heads(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> InStages:
        def of_pieces(q: Tensor, k: Tensor, v: Tensor, initial: Any, lengths: Tensor) -> tuple[Tensor, Tensor]:
            return decays.decay_attention(q, k, v, log_decay, initial, lengths=lengths)

        def begin(inputs: Sequence[Tensor], group: Group) -> tuple[Tensor, Tensor, Callable[[], OutputsOf]]:
            q, k, v = inputs
            chunks = decays.decay_chunks(q, k, v, log_decay, group.counts)
            return chunks.transition, chunks.bias, partial(chunks.inside_then_outputs, v.dtype, False)

        heads = v.shape[2]
        state = State(ELEMENTWISE, (heads, 1, 1), (heads, k.shape[3], v.shape[3]), v, takes_lengths=True)
        return InStages(of_pieces, begin, state)

    return in_parts(call, _PARTS, of_heads, (q, k, v), return_final_state, log_decay)


@between_graphs
def affine_scan(x: Tensor, log_decay: Tensor, place: Placement, *, return_final_state: bool = False) -> Any:
    """Compute h <- e^log_decay h + x, number by number, and return h after every token; collective.

    For custom recurrences, and for gated linear units (RG-LRU): their steps before and after the scan need no
    other ranks.

    Args:
        x: [B, S_local, ...].
        log_decay: of x's shape, 0 or less; -inf forgets all earlier tokens.
        place: see `Placement`.
        return_final_state: also return h after the last tokens of rows, [B, ...], on every rank, without gradient.

    Returns:
        h, of x's shape and type.

    Raises:
        ValueError: on every rank, for shapes that do not fit.

    Source: Griffin (arXiv 2402.19427).
    """
    tensors = {"x": x, "log_decay": log_decay}

    def check() -> dict[str, object]:
        if x.shape != log_decay.shape:
            raise ValueError(_unlike("affine_scan", tensors, "both have one shape"))
        return {"sizes": list(x.shape[2:]), "dtype": x.dtype}

    call = place.call("affine_scan", tensors, check)
    dtype = state_type(x)

    def decay(inputs: Sequence[Tensor], group: Group) -> Tensor:
        return torch.exp(inputs[1].to(dtype).sum(1))

    def read(inputs: Sequence[Tensor], entries: Tensor) -> Tensor:
        return torch.exp(inputs[1].to(dtype).cumsum(1)) * entries.unsqueeze(1)

    way = OnePass(linear_unit, decay, read, State(ELEMENTWISE, tuple(x.shape[2:]), tuple(x.shape[2:]), x))
    return in_parts(call, 1, lambda *_: way, (x, log_decay), return_final_state)


@between_graphs
def rwkv(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, place: Placement, *, return_final_state: bool = False
) -> Any:
    """Compute the weighted mean of values of RWKV-4 (WKV), with weights e^k that decay; collective.

    Args:
        k, v: [B, S_local, E].
        log_decay: [E], 0 or less; the same on all ranks.
        bonus: [E], added to the k of the token itself.
        place: see `Placement`.
        return_final_state: also return the states after the last tokens of rows, (num, den, max), each [B, E], on
            every rank, without gradient: num and den are times e^max.

    Returns:
        out [B, S_local, E], of v's type.

    Raises:
        ValueError: on every rank, for shapes that do not fit.

    Source: RWKV (arXiv 2305.13048).
    """
    tensors = {"v": v, "k": k}

    def check() -> dict[str, object]:
        if v.dim() != 3 or k.shape != v.shape or log_decay.shape != v.shape[2:] or bonus.shape != v.shape[2:]:
            raise ValueError(
                _unlike("rwkv", {**tensors, "log_decay": log_decay, "bonus": bonus}, "all have one last size E")
            )
        return {"sizes": list(v.shape[2:]), "dtype": v.dtype}

    call = place.call("rwkv", tensors, check, (log_decay, bonus))
    # All gradients of parameters are added up before they are rounded.
    logs, bonus = log_decay.to(state_type(v)).clamp(min=_NOTHING_LEFT), bonus.to(state_type(v))

    def of_pieces(inputs: Sequence[Tensor], initial: Any, lengths: Tensor) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        k, v = inputs
        out, (num, den, most) = wkv.rwkv(k, v, logs, bonus, initial, lengths=lengths)
        return out, (num, den), most

    def decay(inputs: Sequence[Tensor], group: Group) -> Tensor:
        return group.counts.unsqueeze(-1) * logs

    size = (v.shape[2],)
    return with_exponents(call, (k, v), of_pieces, decay, Exponential((size, size), size, v), return_final_state)


@between_graphs
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    igate: Tensor,
    fgate: Tensor,
    place: Placement,
    *,
    return_final_state: bool = False,
) -> Any:
    """Compute a matrix LSTM, as xLSTM has it, with exponential input gates; collective.

    Args:
        q, k: [B, S_local, H, K], not scaled.
        v: [B, S_local, H, V].
        igate, fgate: gates before exp and sigmoid, [B, S_local, H].
        place: see `Placement`.
        return_final_state: also return the states after the last tokens of rows on every rank, without gradient:
            C [B, H, K, V] and n [B, H, K], both times e^m, and m [B, H].

    Returns:
        out [B, S_local, H, V], of v's type.

    Raises:
        ValueError: on every rank, for shapes that do not fit.

    Source: xLSTM (arXiv 2405.04517).
    """
    tensors = {"v": v, "q": q, "k": k, "igate": igate, "fgate": fgate}

    def check() -> dict[str, object]:
        if v.dim() != 4 or q.shape != k.shape or q.shape[:3] != v.shape[:3] or igate.shape != fgate.shape:
            raise ValueError(_unlike("mlstm", tensors, "all have as many heads H"))
        if igate.shape != v.shape[:3]:
            raise ValueError(_unlike("mlstm", tensors, "gates are [..., H]"))
        return {"sizes": [list(each.shape[2:]) for each in tensors.values()], "dtype": v.dtype}

    call = place.call("mlstm", tensors, check)
    dtype = state_type(v)

    def of_pieces(inputs: Sequence[Tensor], initial: Any, lengths: Tensor) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        q, k, v, igate, fgate = inputs
        is_padding = torch.arange(v.shape[1], device=v.device) >= lengths.unsqueeze(-1)
        igate = igate.masked_fill(is_padding.unsqueeze(-1), -torch.inf)
        fgate = fgate.masked_fill(is_padding.unsqueeze(-1), torch.inf)
        out, (matrix, norm, most) = lstm.mlstm(q, k, v, igate, fgate, initial)
        return out, (matrix, norm), most

    def decay(inputs: Sequence[Tensor], group: Group) -> Tensor:
        gates = torch.nn.functional.logsigmoid(inputs[4].to(dtype))
        return group.without_padding(gates).sum(1)

    state = Exponential(((*k.shape[2:], v.shape[3]), tuple(k.shape[2:])), (v.shape[2],), v)
    return with_exponents(call, (q, k, v, igate, fgate), of_pieces, decay, state, return_final_state)


def _unlike(name: str, tensors: Mapping[str, Tensor], expected: str) -> str:
    shapes = ", ".join(f"{other} {list(x.shape)}" for other, x in tensors.items())
    return f"{name}: {shapes} do not fit: {expected}"
