"""Sequences of unlike lengths, as flash_attn's functions take them, on whatever kernel is under all contenders.

In flash_attn a causal sequence may have keys before its first query: the last query sees the last key. A kernel that
works on one sequence after another has causal squares only, so it gets as many queries as there are keys.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.contenders.kernels import tile
from burst_plugin.kernels import Grads, How, Kernel, Lengths, Queries
from burst_plugin.kernels.varlen import backward_looped, forward_looped
from burst_plugin.types import CAUSAL

__all__ = ["backward", "forward", "how_of"]


def how_of(scale: float | None, causal: bool, head_dim: int, q_ends: Tensor, k_ends: Tensor) -> How:
    """Of sequences that begin and end there, int32 [number + 1]."""
    q, k = (tuple(ends.diff().tolist()) for ends in (q_ends, k_ends))
    return tile(scale, causal, head_dim)._replace(lengths=Lengths(q, k, q_ends, k_ends))


def forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """out [1, T, Hq, D] and lse [1, Hq, T] of q [1, T, Hq, D], k and v [1, U, Hkv, D]."""
    if "varlen" in kernel.features:
        return kernel.forward(q, k, v, how)
    rows, how = _in_squares(how)
    out, lse = forward_looped(kernel, _among(q, rows, 1), k, v, how)
    return out[:, rows], lse[:, :, rows]


def backward(kernel: Kernel, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
    """The gradients, in the shapes of q, k and v."""
    if "varlen" in kernel.features:
        return kernel.backward(queries, k, v, how)
    rows, how = _in_squares(how)
    q, dout, out = (_among(x, rows, 1) for x in queries[:3])
    grads = backward_looped(kernel, Queries(q, dout, out, _among(queries.lse, rows, 2)), k, v, how)
    return grads._replace(dq=grads.dq[:, rows])


def _in_squares(how: How) -> tuple[Tensor, How]:
    """`how` for as many queries as keys, if it is causal, and where the real ones are among them, int64 [T]."""
    lengths = how.lengths
    assert lengths is not None, "there are sequences"
    if how.band == CAUSAL:
        ends = zip(accumulate(lengths.k), lengths.q, strict=True)
        rows = torch.cat([torch.arange(stop - count, stop) for stop, count in ends])
        return rows, how._replace(lengths=lengths._replace(q=lengths.k, q_ends=lengths.k_ends))
    return torch.arange(sum(lengths.q)), how


def _among(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """`x` at `rows` of `dim`, with zeros between and before."""
    shape = list(x.shape)
    shape[dim] = int(rows[-1]) + 1
    return x.new_zeros(shape).index_copy(dim, rows, x)
