"""The maps of states, S -> A S + B, of pieces of a gated delta rule: in stages, or by any kernel with states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_plugin.recurrent.kernels.delta_rule import DeltaChunks, delta_chunks
from burst_plugin.recurrent.segments import in_segments
from burst_plugin.recurrent.staged import Pair, Stages, pair_by_stages
from burst_plugin.recurrent.ways import Kernel, state_type


class _DeltaStages(Stages):
    """The stages of the delta rule in PyTorch, on the tensors of `DeltaChunks`.

    tokens, dtype: see `DeltaChunks`.
    """

    def __init__(self, tokens: int, dtype: torch.dtype) -> None:
        self._tokens, self._dtype = tokens, dtype

    def _of(self, xs: Sequence[Tensor]) -> DeltaChunks:
        values, reads, keys, kept, weights, queries = xs
        return DeltaChunks(values, reads, keys, kept, weights, queries, self._tokens, self._dtype)

    def pair(self, *xs: Tensor) -> tuple[Tensor, Tensor, tuple[()]]:
        """Return the maps of states of pieces, and tensors for the other stages."""
        return *self._of(xs).pair(), ()

    def outputs(self, entries: Tensor, *xs: Tensor) -> Tensor:
        """Return the outputs of pieces, given the states that enter them."""
        return self._of(xs).outputs(entries)[0]

    def entry_gradients(self, grad: Tensor, *xs: Tensor) -> Tensor:
        """Return the gradients of the states that enter pieces, from the outputs alone."""
        return self._of(xs).entry_gradients(grad)

    def gradients(self, entries: Tensor, grad: Tensor, leaving: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the tensors that `pair` took."""
        return tuple(self._of(xs).gradients(entries, grad, leaving))


def pair_by_rule(*tensors: Tensor) -> Pair:
    """Return A and B of pieces of the delta rule, and the function from entering states to outputs."""
    chunks = delta_chunks(*tensors)
    return pair_by_stages(_DeltaStages(chunks.tokens, chunks.dtype), chunks.tensors)


def pair_by_kernel(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, None]:
    """Return A and B of pieces by a kernel of the delta rule, which treats each column of a state by itself.

    Columns of the values, from zero, end as B; further columns without values, from the identity, end as A.
    """
    count, heads, dim, width = k.shape[0], v.shape[2], k.shape[3], v.shape[3]
    wide = torch.cat([v, v.new_zeros((*v.shape[:3], dim))], -1)
    state = torch.zeros((count, heads, dim, width + dim), dtype=state_type(v), device=v.device)
    state[..., width:] = torch.eye(dim, dtype=state.dtype, device=v.device)

    def without_outputs(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        out, final = kernel(*arguments)
        return out.new_empty((*out.shape[:2], 0)), final  # which segments would join

    _, final = in_segments(without_outputs)(q, k, wide, g, beta, state)
    return final[..., width:], final[..., :width], None
