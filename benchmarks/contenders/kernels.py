"""The kernel under every contender: PyTorch's for CPUs, as this package calls it, or one that only takes its time.

Calls of GPU packages in other libraries reach the very kernel object that `burst` uses, the fastest one for this
processor. So whatever differs between contenders is their own.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.contenders.protocol import Case, Slept
from burst_plugin.kernels import Case as KernelCase
from burst_plugin.kernels import Grads, How, Kernel, Lengths, Queries, choose_kernel
from burst_plugin.kernels.varlen import backward_looped, forward_looped
from burst_plugin.scores import Scores
from burst_plugin.types import CAUSAL, FULL
from tests.support.emulated_gpu import SleepingKernel, zeros


def sleeping(case: Case, slept: Slept, grads: torch.dtype | None = None) -> SleepingKernel:
    """Return a kernel that takes the time of its share of a full visit."""
    return SleepingKernel(case.batch * case.seq**2 * case.q_heads, slept.forward_s, slept.backward_s, grads)


def kernel_for(case: Case, slept: Slept | None) -> Kernel:
    """Return the kernel of this case, with results as flash_attn gives them."""
    if slept is not None:
        return sleeping(case, slept, case.dtype)
    dims = (case.head_dim, case.head_dim)
    return choose_kernel("auto", KernelCase("cpu", case.dtype, case.q_heads, case.kv_heads, *dims))


def typed(kernel: Kernel, found: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a result of `kernel` in `dtype`; where compute is slept it costs nothing, as on GPUs."""
    if isinstance(kernel, SleepingKernel):
        return zeros(tuple(found.shape), dtype).detach()  # a tensor of its own for autograd, of the same memory
    return found.to(dtype)


def write(kernel: Kernel, found: Tensor, buffer: Tensor) -> None:
    """Write a result of `kernel` to `buffer`; where compute is slept this costs as much as clearing it."""
    buffer.zero_() if isinstance(kernel, SleepingKernel) else buffer.copy_(found)


def tile(scale: float | None, causal: bool, head_dim: int, ends: tuple[Tensor, Tensor] | None = None) -> How:
    """Return a tile of full or causal attention; of sequences with these query and key `ends`, int32 [number + 1]."""
    how = How(CAUSAL if causal else FULL, Scores(scale=head_dim**-0.5 if scale is None else scale))
    if ends is None:
        return how
    q, k = (tuple(each.diff().tolist()) for each in ends)
    return how._replace(lengths=Lengths(q, k, *ends))


def forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return out [B, T, Hq, D] and lse [B, Hq, T] of q [B, T, Hq, D], k and v [B, U, Hkv, D]; B is 1 for sequences.

    In flash_attn a causal sequence may have keys before its first query: the last query sees the last key. A kernel
    that works on one sequence after another has causal squares only, so it gets as many queries as there are keys.
    """
    if how.lengths is None or "varlen" in kernel.features:
        return kernel.forward(q, k, v, how)
    rows, how = _in_squares(how, how.lengths)
    out, lse = forward_looped(kernel, _padded(q, rows, 1), k, v, how)
    return out[:, rows], lse[:, :, rows]


def backward(kernel: Kernel, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
    """Return the gradients, in the shapes of q, k and v; see `forward`."""
    if how.lengths is None or "varlen" in kernel.features:
        return kernel.backward(queries, k, v, how)
    rows, how = _in_squares(how, how.lengths)
    q, dout, out = (_padded(x, rows, 1) for x in queries[:3])
    grads = backward_looped(kernel, Queries(q, dout, out, _padded(queries.lse, rows, 2)), k, v, how)
    return grads._replace(dq=grads.dq[:, rows])


def _in_squares(how: How, lengths: Lengths) -> tuple[Tensor, How]:
    """Return the rows of the real queries, int64 [T], and `how` for as many queries as keys, if it is causal."""
    if how.band != CAUSAL:
        return torch.arange(sum(lengths.q)), how
    ends = zip(accumulate(lengths.k), lengths.q, strict=True)
    rows = torch.cat([torch.arange(stop - count, stop) for stop, count in ends])
    return rows, how._replace(lengths=lengths._replace(q=lengths.k, q_ends=lengths.k_ends))


def _padded(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Return zeros with `x` at `rows` of `dim`."""
    shape = list(x.shape)
    shape[dim] = int(rows[-1]) + 1
    return x.new_zeros(shape).index_copy(dim, rows, x)
