"""The gated delta rule in chunks: one decay per head (gated DeltaNet), or per channel (Kimi delta attention)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from burst_plugin.recurrent.kernels.decay import in_chunks, out_of_chunks, segment_decays
from burst_plugin.recurrent.kernels.linear_unit import computing_type, entering_state


class _Chunks(NamedTuple):
    """Tensors [N, n, G, R, c, ...] of n chunks of c tokens, for G key heads with R heads of values each."""

    products: list[Tensor]  # of rows with keys [c, c], weighted by the decay between them, 0 above the diagonal
    entering: Tensor  # what a token keeps of what enters the chunk [c, K or 1]
    leaving: Tensor  # what the chunk's end keeps of a token [c, K or 1]


def _by_heads(rows: list[Tensor], k: Tensor, g: Tensor) -> _Chunks:
    """Weigh products of `rows` and keys by one decay per head; `g` is [..., c, 1]."""
    between, entering, leaving = segment_decays(g.squeeze(-1), k.dtype)
    return _Chunks([(row @ k.mT) * between for row in rows], entering.unsqueeze(-1), leaving.unsqueeze(-1))


def _by_channels(rows: list[Tensor], k: Tensor, g: Tensor) -> _Chunks:
    """Weigh products of `rows` and keys by one decay per channel; `g` is [..., c, K], c a power of 2.

    Blocks of 1, 2, 4, ... tokens are joined two by two. For a token i of the first block and a token j of the second
    the key of i, decayed to the end of the first block, meets the row of j, decayed from the start of the second
    block: two decays that end at one point in time, neither above 1.
    """
    shape, size, blocks = g.shape[:-2], 1, g.shape[-2]
    entering = g.exp().unsqueeze(-2)  # [..., blocks, tokens of a block, K]
    leaving = torch.ones((), dtype=g.dtype, device=g.device).expand(entering.shape)
    k = k.expand(*shape, *k.shape[-2:])
    stacked = torch.stack([row.expand(k.shape) for row in rows], -2)  # [..., c, rows, K]
    products = (stacked * k.unsqueeze(-2)).sum(-1)[..., None, :, None]  # [..., blocks, tokens, rows, tokens]
    while blocks > 1:
        blocks //= 2
        enter_first, enter_second = torch.unflatten(entering, -3, (blocks, 2)).unbind(-3)
        leave_first, leave_second = torch.unflatten(leaving, -3, (blocks, 2)).unbind(-3)
        second_rows = torch.unflatten(stacked, -3, (blocks, 2, size)).select(-4, 1) * enter_second.unsqueeze(-2)
        first_keys = torch.unflatten(k, -2, (blocks, 2, size)).select(-3, 0) * leave_first
        across = torch.unflatten(second_rows.flatten(-3, -2) @ first_keys.mT, -2, (size, len(rows)))
        first, second = torch.unflatten(products, -4, (blocks, 2)).unbind(-4)
        products = torch.cat([F.pad(first, (0, size)), torch.cat([across, second], -1)], -3)
        leaving = torch.cat([leave_first * enter_second[..., -1:, :], leave_second], -2)
        entering = torch.cat([enter_first, enter_second * enter_first[..., -1:, :]], -2)
        size *= 2
    return _Chunks(list(products.squeeze(-4).unbind(-2)), entering.squeeze(-3), leaving.squeeze(-3))


class DeltaChunks(NamedTuple):
    """Pieces of the gated delta rule in chunks of c tokens, prepared as far as they need no states (the WY form).

    Tensors are [N, n, G, R, ...]: N pieces, n chunks, G key heads, R heads of values for each. Their last two dims:
    values [c, V], reads and keys [c, K], kept [K or 1, 1], weights [c, c], queries [c, K]. Of a state S [K, V] that
    enters a chunk, deltas = values - reads S, the outputs are weights deltas + queries S, and the state that leaves
    is kept S + keys^T deltas.

    tokens, dtype: the length L of the pieces, and the type of their values.
    """

    values: Tensor  # [c, V]
    reads: Tensor  # [c, K]
    keys: Tensor  # under which deltas are added, as the chunk's end keeps them [c, K]
    kept: Tensor  # of S at the chunk's end [K or 1, 1]
    weights: Tensor  # what outputs take from deltas [c, c]
    queries: Tensor  # and from what enters [c, K]
    tokens: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the six tensors, in order."""
        return self.values, self.reads, self.keys, self.kept, self.weights, self.queries

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return the map from the initial to the last state of each piece, last = A initial + B.

        A is [N, H, K, K] and B [N, H, K, V], float32, or float64 for float64.
        """
        identity = torch.eye(self.keys.shape[-1], dtype=self.keys.dtype, device=self.keys.device)
        moved = self.keys.mT @ torch.cat([self.reads, self.values], -1)
        A, B = moved.tensor_split([self.reads.shape[-1]], -1)
        A, B = _joined(identity * self.kept - A, B)
        return A.flatten(1, 2), B.flatten(1, 2)

    def outputs(self, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs of pieces for the states that enter them, and the states that leave them.

        `initial_state` is [N, H, K, V] (None: zeros). Outputs are [N, L, H, V] in the type of values, last states
        [N, H, K, V] in float32, or in float64 for float64.
        """
        shape = self.values.shape[0], self.values.shape[2] * self.values.shape[3]
        sizes = self.reads.shape[-1], self.values.shape[-1]
        state = entering_state(initial_state, self.values, (*shape, *sizes))
        state = torch.unflatten(state, 1, tuple(self.values.shape[2:4]))
        states, deltas = [], []
        parts = self.values, self.reads, self.keys, self.kept
        for value, read, key, kept in zip(*(x.unbind(1) for x in parts), strict=True):
            states.append(state)
            deltas.append(value - read @ state)
            state = kept * state + key.mT @ deltas[-1]
        out = self.weights @ torch.stack(deltas, 1) + self.queries @ torch.stack(states, 1)
        return out_of_chunks(out.flatten(2, 3), self.tokens).to(self.dtype), state.flatten(1, 2)

    def entry_gradients(self, grad: Tensor) -> Tensor:
        """Return the gradients of entering states, [N, H, K, V], given the gradients of outputs, [N, L, H, V]."""
        return self._back(self._chunked(grad), None)[0].flatten(1, 2)

    def gradients(self, initial_state: Tensor, grad: Tensor, leaving: Tensor) -> list[Tensor]:
        """Return the gradients of the six tensors.

        initial_state: the states that enter pieces, [N, H, K, V]. grad, leaving: the gradients of the outputs,
        [N, L, H, V], and of the states that leave pieces, [N, H, K, V].
        """
        grad, by_head = self._chunked(grad), tuple(self.values.shape[2:4])
        state, states, deltas = torch.unflatten(initial_state, 1, by_head), [], []
        parts = self.values, self.reads, self.keys, self.kept
        for value, read, key, kept in zip(*(x.unbind(1) for x in parts), strict=True):
            states.append(state)
            deltas.append(value - read @ state)
            state = kept * state + key.mT @ deltas[-1]
        before, delta = torch.stack(states, 1), torch.stack(deltas, 1)
        _, of_deltas, after = self._back(grad, torch.unflatten(leaving, 1, by_head))
        full_gradients = (
            of_deltas,
            -of_deltas @ before.mT,
            delta @ after.mT,
            (before * after).sum(-1, keepdim=True),
            grad @ delta.mT,
            grad @ before.mT,
        )
        return [gradient.sum_to_size(x.shape) for gradient, x in zip(full_gradients, self.tensors, strict=True)]

    def _chunked(self, grad: Tensor) -> Tensor:
        """Cut gradients of outputs [N, L, H, V] into chunks, [N, n, G, R, c, V]."""
        chunks = in_chunks(grad.to(self.values.dtype), self.values.shape[-2])
        return torch.unflatten(chunks, 2, tuple(self.values.shape[2:4]))

    def _back(self, grad: Tensor, leaving: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Go back through the chunks; return gradients of entering states, of deltas, and of states after chunks."""
        of_deltas, of_states = self.weights.mT @ grad, self.queries.mT @ grad
        state = torch.zeros_like(of_states[:, 0]) if leaving is None else leaving
        deltas, after = [], []
        parts = of_deltas, of_states, self.reads, self.keys, self.kept
        for delta, from_out, read, key, kept in [*zip(*(x.unbind(1) for x in parts), strict=True)][::-1]:
            after.append(state)
            deltas.append(delta + key @ state)
            state = from_out + kept * state - read.mT @ deltas[-1]
        return state, torch.stack(deltas[::-1], 1), torch.stack(after[::-1], 1)


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, chunk_size: int = 64) -> DeltaChunks:
    """Prepare the gated delta rule on N pieces of L tokens, at least 1, as far as it needs no states.

    `q` and `k` are [N, L, Hk, K], `v` [N, L, H, V] with Hk dividing H, `beta` [N, L, H]; `g` is the logarithm of
    decays, [N, L, H], or [N, L, H, K] for one per channel. `chunk_size` is the number of tokens in a chunk, a power
    of 2. `delta_rule` says what is computed.

    Raises ValueError where heads do not divide, `g` does not fit, or `chunk_size` is not a power of 2.
    """
    _check(k, v, g, chunk_size)
    dtype, shared = computing_type(v), (k.shape[2], v.shape[2] // k.shape[2])
    tokens, out_dtype, by_channel = v.shape[1], v.dtype, g.dim() == 4
    g = g.to(dtype) if by_channel else g.unsqueeze(-1)  # in float64 anyway, by heads
    k, q = (in_chunks(x.to(dtype), chunk_size).unsqueeze(3) for x in (k, q))
    v, beta = (torch.unflatten(in_chunks(x.to(dtype), chunk_size), 2, shared) for x in (v, beta.unsqueeze(-1)))
    g = torch.unflatten(in_chunks(g, chunk_size), 2, shared)
    chunks = (_by_channels if by_channel else _by_heads)([k, q], k, g)
    below, weights = chunks.products[0] * beta, chunks.products[1]
    right = torch.cat([v * beta, chunks.entering * beta * k], -1)
    solved = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
    kept = chunks.entering[..., -1, :].unsqueeze(-1)
    width = v.shape[-1]
    return DeltaChunks(
        solved[..., :width],
        solved[..., width:],
        chunks.leaving * k,
        kept,
        weights,
        chunks.entering * q,
        tokens,
        out_dtype,
    )


def _check(k: Tensor, v: Tensor, g: Tensor, chunk_size: int) -> None:
    if v.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} heads of keys do not divide {v.shape[2]} heads of values")
    if g.dim() == 4 and g.shape[2:] != (v.shape[2], k.shape[3]):
        raise ValueError(f"log decays {tuple(g.shape)} are not for {v.shape[2]} heads of {k.shape[3]} channels")
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is {chunk_size}, not a power of 2")


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule: S <- diag(e^g) S, S <- S + beta k (v - S^T k)^T, out = S^T q.

    `q` and `k` are [N, L, Hk, K], scaled and normalised by the caller, `v` [N, L, H, V] with Hk dividing H (each key
    head serves neighbouring heads of values), `beta` [N, L, H]. `g`, at most 0, is [N, L, H], or [N, L, H, K] for a
    decay per channel. `initial_state` is [N, H, K, V] (None: zeros). Padding at the end has k = g = beta = 0. Returns
    `out` [N, L, H, V] in the type of `v` and the last state in float32, or in float64 for float64.

    Raises ValueError where heads do not divide, `g` does not fit, or `chunk_size` is not a power of 2. Sources: Yang
    et al. 2024, arXiv 2412.06464; Kimi Team 2025, arXiv 2510.26692.
    """
    _check(k, v, g, chunk_size)
    if not v.shape[1]:
        return v, entering_state(initial_state, v, (v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
    return delta_chunks(q, k, v, g, beta, chunk_size=chunk_size).outputs(initial_state)


def _joined(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Join the transitions of chunks [N, n, ...] two by two until there is one."""
    while A.shape[1] > 1:
        pairs = A.shape[1] // 2
        first, second = A[:, : 2 * pairs : 2], A[:, 1::2]
        joined = second @ first, second @ B[:, : 2 * pairs : 2] + B[:, 1::2]
        A, B = (torch.cat([new, old[:, 2 * pairs :]], 1) for new, old in zip(joined, (A, B), strict=True))
    return A[:, 0], B[:, 0]
