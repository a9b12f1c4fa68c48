"""PyTorch's flash-attention kernel for CPUs.

`aten::_scaled_dot_product_flash_attention_for_cpu` (aten/src/ATen/native/transformers/attention.cpp) gives
the lse and takes it back in its backward pass. What it silently gets wrong is refused or avoided here:
its causal mask starts at the top left corner, so other bands are refused; a last dim that is not dense is
copied; heads that do not divide, which end the process, never arrive (`burst_attention` checks them).
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_plugin.kernels.protocol import Case, Queries
from burst_plugin.mask import CAUSAL, FULL, Band

__all__ = ["TorchCpuKernel"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TorchCpuKernel:
    """Forward passes of 16-bit inputs are computed and returned in float32: at the kernel's own speed, and
    without rounding each partial output before it is merged. Backward passes run in the input's type, but
    float16's in float32, since CPUs multiply float16 matrices very slowly.
    """

    name = "torch_cpu"

    def refuse(self, case: Case) -> str | None:
        """CPU tensors, one head dim, full and causal bands."""
        if case.device != "cpu":
            return f"it runs on cpu, not on {case.device}"
        if case.dtype not in _FLOATS:
            return f"it takes {', '.join(str(t).removeprefix('torch.') for t in _FLOATS)}, not {case.dtype}"
        if case.qk_dim != case.v_dim:
            return f"it needs one head dim, not {case.qk_dim} for q, k and {case.v_dim} for v"
        if not case.bands <= {FULL, CAUSAL}:
            return "it has full and causal tiles only"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(x.to(dtype)) for x in (q, k, v)), 0.0, band == CAUSAL, scale=scale
        )
        return out.transpose(1, 2), lse

    def backward(
        self, queries: Queries, k: Tensor, v: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        dtype = torch.float32 if k.dtype is torch.float16 else k.dtype
        q, dout, out = (_heads_first(x.to(dtype)) for x in queries[:3])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout,
            q,
            _heads_first(k.to(dtype)),
            _heads_first(v.to(dtype)),
            out,
            queries.lse.contiguous(),
            0.0,
            band == CAUSAL,
            scale=scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _heads_first(x: Tensor) -> Tensor:
    """[B, S, H, D] as [B, H, S, D], copied only if the last dim is not dense."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)
