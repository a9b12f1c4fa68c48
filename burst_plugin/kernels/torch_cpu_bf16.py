"""PyTorch's flash-attention kernel for CPUs, with a backward pass that multiplies bfloat16.

On processors with instructions for that, it takes 0.6 times as long as in float32 (AMD EPYC with avx512_bf16). The
forward pass does not get faster (0.86 to 1.16 times) and stays in float32.

PyTorch's backward kernel adds up a gradient in the type of its inputs, block by block and head by head. In bfloat16
the error of dk and dv grows: 0.5 % at 2048 tokens, 1.2 % at 16384. Here it is given squares of 1024 rows at most,
and as many key heads as query heads, and their results are added up in float32: 0.5 % at any length, for no more time
(squares of 512 rows take 1.4 times as long). Squares of an odd number of keys are computed in float32: in
bfloat16 a NaN of one query gets into dq of the query before it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from burst_plugin.kernels.limits import Limits
from burst_plugin.kernels.protocol import Case, Grads, How, Queries
from burst_plugin.kernels.shaping import backward_reversed, expand_heads, sum_heads
from burst_plugin.kernels.torch_cpu import TorchCpuKernel, flash_backward
from burst_plugin.types import ANTICAUSAL, FULL, Band

ROWS = 1024  # queries and keys of a square


class TorchCpuBf16Kernel(TorchCpuKernel):
    """The kernel of PyTorch's flash-attention for CPUs, with a backward pass that multiplies bfloat16.

    It rounds probabilities and their gradients to bfloat16 before products, as kernels for GPUs do.
    """

    name = "torch_cpu_bf16"
    limits = Limits("cpu", (torch.bfloat16,), library="a processor with `avx512_bf16`")

    def refuse(self, case: Case) -> str | None:
        """Return why this kernel cannot do `case`; None if it can."""
        has: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.13 and newer
        lacking = None if has.get("avx512_bf16") else "PyTorch knows of no avx512_bf16 in this processor"
        return self.limits.refuse(case) or lacking

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the contributions to dq, dk and dv of a tile, added up in float32 over squares of 1024 rows."""
        if how.band == ANTICAUSAL:
            return backward_reversed(self, queries, k, v, how)
        query_heads, kv_heads = queries.q.shape[2], k.shape[2]
        total = Grads(*(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (queries.q, k, v)))
        for rows, k_rows, band in _squares(queries.q.shape[1], k.shape[1], how.band):
            q, dout, out = (x[:, rows] for x in queries[:3])
            some_k, some_v = (expand_heads(x[:, k_rows], query_heads) for x in (k, v))
            some = Queries(q, dout, out, queries.lse[:, :, rows])
            dtype = torch.float32 if some_k.shape[1] % 2 else k.dtype
            grads = flash_backward(some, some_k, some_v, how._replace(band=band), dtype)
            total.dq[:, rows].add_(grads.dq)
            total.dk[:, k_rows].add_(sum_heads(grads.dk, kv_heads))
            total.dv[:, k_rows].add_(sum_heads(grads.dv, kv_heads))
        return total


def _squares(queries: int, keys: int, band: Band) -> Iterator[tuple[slice, slice, Band]]:
    """Yield query rows, key rows and band of the squares of a full or causal tile."""
    for first_q, first_k in product(range(0, queries, ROWS), range(0, keys, ROWS)):
        if band == FULL or first_k <= first_q:
            rows, k_rows = slice(first_q, first_q + ROWS), slice(first_k, first_k + ROWS)
            yield rows, k_rows, band if first_k == first_q else FULL
