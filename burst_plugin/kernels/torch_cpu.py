"""PyTorch's flash-attention kernel for CPUs.

`aten::_scaled_dot_product_flash_attention_for_cpu` (aten/src/ATen/native/transformers/attention.cpp) gives
the lse and takes it back in its backward pass. What it silently gets wrong is refused or avoided here: a last dim
that is not dense is copied; heads that do not divide, which end the process, never arrive (`burst_attention` checks
them). Its one mask is causal from the top left corner: an anticausal tile is a causal one with both sides reversed,
and a narrower v is filled up with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_plugin.kernels.limits import Limits
from burst_plugin.kernels.protocol import Case, Grads, How, Queries
from burst_plugin.kernels.shaping import backward_reversed, fit, forward_reversed
from burst_plugin.tiles import ANTICAUSAL, CAUSAL

__all__ = ["TorchCpuKernel", "flash_backward"]


class TorchCpuKernel:
    """16-bit inputs are computed on and returned in float32: no partial result is rounded before it is summed up, and
    CPUs without instructions for 16-bit types are faster so (backward, 2048 tokens, 8 heads of 64: 3.6 times in
    bfloat16; for others see `torch_cpu_bf16`).
    """

    name = "torch_cpu"
    limits = Limits("cpu", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    features = frozenset({"head dims", "deterministic"})

    def refuse(self, case: Case) -> str | None:
        """See `Kernel.refuse`."""
        return self.limits.refuse(case)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if how.band == ANTICAUSAL:
            return forward_reversed(self, q, k, v, how)
        dtype, dim = torch.promote_types(q.dtype, torch.float32), max(q.shape[-1], v.shape[-1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(x, dtype, dim) for x in (q, k, v)), 0.0, how.band == CAUSAL, scale=how.scale
        )
        return out.transpose(1, 2)[..., : v.shape[-1]], lse

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """See `Kernel.backward`."""
        if how.band == ANTICAUSAL:
            return backward_reversed(self, queries, k, v, how)
        return flash_backward(queries, k, v, how, torch.promote_types(k.dtype, torch.float32))


def flash_backward(queries: Queries, k: Tensor, v: Tensor, how: How, dtype: torch.dtype) -> Grads:
    """The backward pass of a full or causal tile, computed and returned in `dtype`."""
    dims = (k.shape[-1], v.shape[-1])
    q, dout, out, k, v = (_heads_first(x, dtype, max(dims)) for x in (*queries[:3], k, v))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, queries.lse.contiguous(), 0.0, how.band == CAUSAL, scale=how.scale
    )
    return Grads(
        dq.transpose(1, 2)[..., : dims[0]], dk.transpose(1, 2)[..., : dims[0]], dv.transpose(1, 2)[..., : dims[1]]
    )


def _heads_first(x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """[B, S, H, D] as [B, H, S, dim], copied only to change type, fill up the last dim, or make it dense."""
    return fit(x.to(dtype), dim).transpose(1, 2)
