"""PyTorch's flash-attention kernel for CPUs.

`aten::_scaled_dot_product_flash_attention_for_cpu` (aten/src/ATen/native/transformers/attention.cpp) gives
the lse and takes it back in its backward pass. What it silently gets wrong is refused or avoided here: a last dim
that is not dense is copied; heads that do not divide, which end the process, are refused by `burst_attention`. Its
one mask is causal from the top left corner: an anticausal tile is a causal one with both sides reversed,
and a narrower v is filled up with zeros.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from burst_plugin.kernels.limits import Limits
from burst_plugin.kernels.protocol import Case, Grads, How, Queries
from burst_plugin.kernels.shaping import backward_reversed, expand_heads, fit, forward_reversed
from burst_plugin.types import ANTICAUSAL, CAUSAL


class TorchCpuKernel:
    """The kernel of PyTorch's flash-attention for CPUs: full and causal tiles, in float32 or float64.

    16-bit inputs are computed on and returned in float32: no partial result is rounded before it is added up, and
    CPUs without instructions for 16-bit types are faster this way (backward, 2048 tokens, 8 heads of 64: 3.6 times in
    bfloat16; for others see `torch_cpu_bf16`).
    """

    name = "torch_cpu"
    limits = Limits("cpu", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    features = frozenset({"head dims", "deterministic"})

    def refuse(self, case: Case) -> str | None:
        """Return why this kernel cannot do `case`; None if it can."""
        return self.limits.refuse(case)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of a full, causal or anticausal tile."""
        if how.band == ANTICAUSAL:
            return forward_reversed(self, q, k, v, how)
        dtype, v_dim = torch.promote_types(q.dtype, torch.float32), v.shape[-1]
        dim = max(q.shape[-1], v_dim)
        q, k, v = _heads_first(q, dtype, dim), _heads_first(k, dtype, dim), _heads_first(v, dtype, dim)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, how.band == CAUSAL, scale=how.scores.scale
        )
        _restore_lost_rows(out, lse, q, k, how)
        return out.transpose(1, 2)[..., :v_dim], lse

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the contributions to dq, dk and dv of a full, causal or anticausal tile."""
        if how.band == ANTICAUSAL:
            return backward_reversed(self, queries, k, v, how)
        return flash_backward(queries, k, v, how, torch.promote_types(k.dtype, torch.float32))


def _restore_lost_rows(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, how: How) -> None:
    """Write NaN, or lse -inf, to rows of out [B, H, Sq, D] and lse [B, H, Sq] where the largest score is that.

    The kernel skips NaN where it looks for the largest of fewer scores than a vector register holds (16 in float32,
    with AVX-512). It takes a row in which it finds none above -inf for one without keys and gives it out 0 and lse 0.
    """
    suspect = lse == 0  # which few other rows are: those of a single key with a score of 0
    if not suspect.any():
        return
    rows = suspect.flatten(0, 1).any(0).nonzero().flatten()
    keys = expand_heads(k.transpose(1, 2), q.shape[1]).permute(0, 2, 3, 1)
    scores = q[:, :, rows].matmul(keys).mul_(how.scale)
    if how.band == CAUSAL:
        scores.masked_fill_(torch.arange(k.shape[2], device=k.device) > rows.unsqueeze(1), -torch.inf)
    largest = scores.amax(-1)
    lost = suspect[:, :, rows] & ~largest.isfinite()
    lse[:, :, rows] = lse[:, :, rows].where(~lost, largest)
    out[:, :, rows] = out[:, :, rows].masked_fill((lost & largest.isnan()).unsqueeze(-1), torch.nan)


def flash_backward(queries: Queries, k: Tensor, v: Tensor, how: How, dtype: torch.dtype) -> Grads:
    """Return dq, dk and dv of a full or causal tile by PyTorch's operator for CPUs, computed in `dtype`."""
    dims = (k.shape[-1], v.shape[-1])
    q, dout, out, k, v = map(partial(_heads_first, dtype=dtype, dim=max(dims)), (*queries[:3], k, v))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, queries.lse.contiguous(), 0.0, how.band == CAUSAL, scale=how.scores.scale
    )
    return Grads(
        dq.transpose(1, 2)[..., : dims[0]], dk.transpose(1, 2)[..., : dims[0]], dv.transpose(1, 2)[..., : dims[1]]
    )


def _heads_first(x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """Return [B, S, H, D] as [B, H, S, dim], copied only to change type, pad the last dim, or make it dense."""
    x = x.to(dtype)
    if x.shape[-1] < dim or x.stride(-1) != 1:
        x = fit(x, dim)
    return x.transpose(1, 2)
