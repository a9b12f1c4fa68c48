"""Linear attention whose state decays by one number per token and head, in chunks; so does lightning attention's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from burst_plugin.recurrent.kernels.linear_unit import (
    computing_type,
    entering_state,
    states_before,
    states_from_zero,
    with_entry,
)


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Cut [N, L, H, ...] into [N, chunks, H, size, ...], with zeros at the end to fill the last chunk."""
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])
    return torch.unflatten(x, 1, (x.shape[1] // size, size)).transpose(2, 3)


def out_of_chunks(x: Tensor, length: int) -> Tensor:
    """Join chunks [N, chunks, H, size, ...] to [N, length, H, ...], without the zeros that filled the last chunk."""
    return x.transpose(2, 3).flatten(1, 2)[:, :length]


def decays_between(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the decays between tokens of a chunk, from sums of log decays from its start, [..., c] in float64.

    These are [..., c, c] in `dtype`, whose entry [i, j] is the decay from token j to token i, and 0 for j > i. Sums
    over stretches of tokens are differences of sums from the start. They are formed in float64: in float32 a strong
    decay early in a chunk would cost the digits of all weak ones behind it. No sum is positive, and sums above the
    diagonal are -inf before they become powers, so that no power is infinite and no gradient NaN.
    """
    upper = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=sums.device).triu_(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(dtype).masked_fill(upper, -torch.inf).exp()


def segment_decays(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the decays between tokens of a chunk, from its start to each token, and from each token to its end.

    Of log decays [..., c], at most 0, these are [..., c, c], see `decays_between`; [..., c]; and [..., c]; all in
    `dtype`.
    """
    sums = log_decay.double().cumsum(-1)
    return decays_between(sums, dtype), sums.to(dtype).exp(), (sums[..., -1:] - sums).to(dtype).exp()


class DecayChunks:
    """Linear attention with a decay per token and head, S <- e^log_decay S + k v^T, out = S^T q, in stages by chunks.

    Args:
        q, k: [N, L, G, K], of G groups of heads that share queries and keys; L > 0.
        v: [N, L, H, V].
        log_decay: [N, L, H], at most 0.
        chunk_size: the number of tokens in a chunk.

    Attributes:
        transition: what all tokens multiply the state by that enters the first one, [N, H, 1, 1].
        bias: the last state if that state is zero, [N, H, K, V].

    Results are in float32, or in float64 for `v` in float64.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, chunk_size: int) -> None:
        dtype, self._length = computing_type(v), v.shape[1]
        groups, repeats = k.shape[2], v.shape[2] // k.shape[2]
        self._shared = groups, repeats
        self._q, self._k = (in_chunks(x.to(dtype), chunk_size) for x in (q, k))
        self._values = torch.unflatten(in_chunks(v.to(dtype), chunk_size), 2, self._shared)
        self._sums = torch.unflatten(in_chunks(log_decay, chunk_size), 2, self._shared).double().cumsum(-1)
        ends = self._sums[..., -1:]
        # States hold all heads of a group side by side, [N, n, G, K, R V]: one product for all of them.
        weighted = self._values * (ends - self._sums).to(dtype).exp().unsqueeze(-1)
        added = torch.unflatten(self._k.mT @ weighted.transpose(3, 4).flatten(4), 4, (repeats, v.shape[3]))
        self._before, last = states_from_zero(ends.to(dtype).exp().unsqueeze(3), added)
        self.bias = last.transpose(2, 3).flatten(1, 2)
        totals = ends.squeeze(-1).cumsum(1)
        self._kept = states_before(totals, torch.zeros_like(totals[:, 0])).to(dtype).exp()
        self.transition = totals[:, -1].to(dtype).exp().flatten(1)[:, :, None, None]

    def inside(self) -> Tensor:
        """Return the outputs that tokens read from their chunks alone, [N, chunks, G, R, chunk size, V]."""
        between = decays_between(self._sums, self._values.dtype)
        return ((self._q @ self._k.mT).unsqueeze(3) * between) @ self._values

    def outputs(self, inside: Tensor, entry: Tensor | None) -> Tensor:
        """Return the outputs [N, L, H, V], given the state that enters the first token.

        inside: what `inside` returned. entry: [N, H, K, V]; None for zeros.
        """
        before = self._before
        if entry is not None:
            entry = torch.unflatten(entry, 1, self._shared).transpose(2, 3)
            before = with_entry(before, self._kept[:, :, :, None, :, None], entry)
        read = torch.unflatten(self._q @ before.flatten(4), 4, before.shape[4:]).transpose(3, 4)
        entering = self._sums.to(read.dtype).exp().unsqueeze(-1)
        return out_of_chunks((inside + read * entering).flatten(2, 3), self._length)

    def inside_then_outputs(self, dtype: torch.dtype, transposed: bool) -> Callable[[Tensor | None], Tensor]:
        """Compute outputs inside chunks; return the function from entering states to all outputs, in `dtype`.

        transposed: whether it takes states [N, H, V, K].
        """
        inside = self.inside()

        def outputs(entry: Tensor | None) -> Tensor:
            return self.outputs(inside, entry.mT if transposed and entry is not None else entry).to(dtype)

        return outputs


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute linear attention with a decay per token and head, for tensors as in `DecayChunks`.

    `initial_state` is [N, H, K, V] (None: zeros). Returns `out` [N, L, H, V] and the last state [N, H, K, V], in
    float32, or in float64 where `v` is.
    """
    chunks = DecayChunks(q, k, v, log_decay, chunk_size)
    initial = None if initial_state is None else initial_state.to(chunks.bias.dtype)
    out = chunks.outputs(chunks.inside(), initial)
    return out, chunks.bias if initial is None else chunks.bias + chunks.transition * initial


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
    out, final = decayed_attention(q, *_without_padding(k, v, log_decay, lengths), initial_state, chunk_size)
    return out.to(v.dtype), final


def decay_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, lengths: Tensor | None, *, chunk_size: int = 64
) -> DecayChunks:
    """Return the stages of `decay_attention`, for L > 0."""
    return DecayChunks(q, *_without_padding(k, v, log_decay, lengths), chunk_size)


def _without_padding(
    k: Tensor, v: Tensor, log_decay: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and log decays [N, L, H] with which padding leaves states as they are."""
    decays = log_decay.expand(v.shape[:3])
    inside = before_ends(lengths, v)
    if inside is None:
        return k, v, decays
    return k * inside[..., None, None], v, decays * inside.unsqueeze(-1)
