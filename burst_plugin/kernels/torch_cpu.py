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
from torch.nn.functional import pad

from burst_plugin.kernels.protocol import Case, Grads, How, Queries
from burst_plugin.tiles import ANTICAUSAL, CAUSAL

__all__ = ["TorchCpuKernel"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TorchCpuKernel:
    """16-bit inputs are computed on and returned in float32: no partial result is rounded before it is summed up, and
    CPUs without matrix units for 16-bit types are faster so (backward, 2048 tokens, 8 heads of 64: 3.6 times in
    bfloat16).
    """

    name = "torch_cpu"
    features = frozenset({"head dims", "deterministic"})

    def refuse(self, case: Case) -> str | None:
        """CPU tensors of a float type."""
        if case.device != "cpu":
            return f"it runs on cpu, not on {case.device}"
        if case.dtype not in _FLOATS:
            return f"it takes {', '.join(str(t).removeprefix('torch.') for t in _FLOATS)}, not {case.dtype}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if how.band == ANTICAUSAL:
            out, lse = self.forward(q.flip(1), k.flip(1), v.flip(1), how._replace(band=CAUSAL))
            return out.flip(1), lse.flip(2)
        dtype, dim = torch.promote_types(q.dtype, torch.float32), max(q.shape[-1], v.shape[-1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(x, dtype, dim) for x in (q, k, v)), 0.0, how.band == CAUSAL, scale=how.scale
        )
        return out.transpose(1, 2)[..., : v.shape[-1]], lse

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """See `Kernel.backward`."""
        if how.band == ANTICAUSAL:
            flipped = Queries(queries.q.flip(1), queries.dout.flip(1), queries.out.flip(1), queries.lse.flip(2))
            grads = self.backward(flipped, k.flip(1), v.flip(1), how._replace(band=CAUSAL))
            return Grads(*(grad.flip(1) for grad in grads[:3]))
        dtype = torch.promote_types(k.dtype, torch.float32)
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
    x = x.to(dtype)
    if x.shape[-1] < dim:
        x = pad(x, (0, dim - x.shape[-1]))
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)
