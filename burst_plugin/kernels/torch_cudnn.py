"""cuDNN's attention, through PyTorch.

`aten::_scaled_dot_product_cudnn_attention` and its backward (aten/src/ATen/native/cudnn/MHA.cpp). Causal is counted
from the top left corner. cuDNN makes a plan for every new shape of a tile, which takes the host a while: for masks
whose tiles are new with every batch, ask for another kernel by name.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from burst_plugin.kernels.limits import HALVES, Limits
from burst_plugin.kernels.protocol import Case, Grads, How, Queries
from burst_plugin.kernels.reference import ReferenceKernel
from burst_plugin.kernels.shaping import backward_reversed, fit, forward_reversed, round_up
from burst_plugin.tiles import ANTICAUSAL, CAUSAL

__all__ = ["TorchCudnnKernel"]

_OLDEST = 91100  # the first with head dims 192 and 128 on the GPUs below
_ALIGN_BYTES = 16


class TorchCudnnKernel:
    """16-bit types on compute capability 9 and 10, where it is faster than flash-attention 2; grouped heads.

    It has no kernels for a single key, and not on every GPU for a single query: these tiles are written out. Its
    backward pass adds up in any order, so it is not deterministic.
    """

    name = "torch_cudnn"
    limits = Limits("cuda", HALVES, ((128, 128), (192, 128)), ((9, 0), (10, 3)), "cuDNN 9.11 or newer")
    features = frozenset({"head dims"})

    def refuse(self, case: Case) -> str | None:
        """See `Kernel.refuse`."""
        found = self.limits.refuse(case)
        if found is not None:
            return found
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") == "1":
            return "TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 wants another layout of the lse; unset it"
        version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
        return f"it needs cuDNN {_OLDEST} or newer, not {version}" if version < _OLDEST else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if how.band == ANTICAUSAL:
            return forward_reversed(self, q, k, v, how)
        if min(q.shape[1], k.shape[1]) == 1:
            return ReferenceKernel().forward(q, k, v, how)
        v_dim, dims = v.shape[-1], _dims(k, v)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_heads_first(x, dim) for x, dim in zip((q, k, v), dims, strict=True)),
            *(None, True, 0.0, how.band == CAUSAL),
            scale=how.scale,
        )
        return out.transpose(1, 2)[..., :v_dim], lse.reshape(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """See `Kernel.backward`."""
        if how.band == ANTICAUSAL:
            return backward_reversed(self, queries, k, v, how)
        rows, keys, qk_dim, v_dim = queries.q.shape[1], k.shape[1], k.shape[-1], v.shape[-1]
        if min(rows, keys) == 1:
            return ReferenceKernel().backward(queries, k, v, how)
        dims, dtype = _dims(k, v), k.dtype
        q, k = _heads_first(queries.q, dims[0]), _heads_first(k, dims[0])
        v = _heads_first(v, dims[2])
        # Plans are kept by the strides of q, k and v; those of these two have to follow from the shapes.
        dout, out = (_heads_first(x.to(dtype).contiguous(), dims[2]) for x in (queries.dout, queries.out))
        lse = queries.lse.contiguous()
        state = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(dout, q, k, v, out, lse.unsqueeze(-1) if _statistics_have_a_dim() else lse, *state),
            *(None, None, None, rows, keys, 0.0, how.band == CAUSAL),
            scale=how.scale,
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in (dq, dk, dv))
        return Grads(dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim])


def _dims(k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """The head dims of q, k and v to fill up to."""
    qk_dim, v_dim = round_up(k.shape[-1], 8), round_up(v.shape[-1], 8)
    return (qk_dim, qk_dim, v_dim) if qk_dim <= 128 else (192, 192, 128)


def _heads_first(x: Tensor, dim: int) -> Tensor:
    return fit(x, dim, _ALIGN_BYTES).transpose(1, 2)


@cache
def _statistics_have_a_dim() -> bool:
    """Whether this PyTorch keeps the lse as [B, H, Sq, 1]; older ones have [B, H, Sq]."""
    x = torch.empty(1, 1, 2, 8, dtype=torch.bfloat16, device="meta")
    return bool(torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].ndim == 4)
