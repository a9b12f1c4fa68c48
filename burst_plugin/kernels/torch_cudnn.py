"""cuDNN's attention, through PyTorch.

`aten::_scaled_dot_product_cudnn_attention` and its backward (aten/src/ATen/native/cudnn/MHA.cpp). Causal is counted
from the top left corner. cuDNN makes a plan for every new shape of a tile, which takes the host a while, and PyTorch
keeps them all, for every thread (`MHAGraphCache`): where every batch may bring new tiles, "auto" takes another.

On Hopper backward kernels before 9.26 take the padding of a last half block of 128 keys for keys: dq becomes NaN
where the lse is low (NVIDIA/cudnn-frontend#628, pytorch#196678); with a single query dk and dv do so in 9.26, too
(cudnn-frontend#1072), and whether other incomplete blocks of queries do is not known. So the backward pass of tiles
that do not fill such blocks is left to PyTorch's flash-attention there.

It compiles kernels when they are first used, with the CUDA that it finds, which may not know the GPU; and some
releases are wrong on some GPUs (pytorch#193893). So it is first compared with PyTorch's flash-attention.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch
from torch import Tensor

from burst_plugin.kernels.limits import HALVES, Limits
from burst_plugin.kernels.protocol import Case, Grads, How, Queries
from burst_plugin.kernels.shaping import backward_reversed, fit, forward_reversed, round_up
from burst_plugin.kernels.torch_flash import TorchFlashKernel
from burst_plugin.kernels.trial import problem_of
from burst_plugin.types import ANTICAUSAL, CAUSAL

_OLDEST = (
    91501  # before it backward kernels for 192 and 128 (9.13), and for keys that fill no block of 128, are faulty
)
_WHOLE_KEYS = 92600  # the first whose backward kernels for Hopper mask all that is behind the last key
_BLOCK = 128  # of queries or keys that its kernels work on at a time
_ALIGN_BYTES = 16
_LOG = logging.getLogger(__name__)
_seen_dims: set[int] = set()  # of the lse that PyTorch returned


class TorchCudnnKernel:
    """The kernel of cuDNN's attention, through PyTorch, for Hopper and Blackwell: 16-bit types, grouped heads.

    There, on compute capability 9 and 10, it is faster than flash-attention 2. It has no kernels for a single key,
    and not on every GPU for a single query: PyTorch's flash-attention works on such tiles. Its backward pass adds up
    in any order, so it is not deterministic.
    """

    name = "torch_cudnn"
    limits = Limits(
        "cuda",
        HALVES,
        dims=((128, 128), (192, 128)),
        capability=((9, 0), (10, 3)),
        library="cuDNN 9.15.1 or newer",
        keeps_plans=True,
    )
    features = frozenset({"head dims"})

    def refuse(self, case: Case) -> str | None:
        """Return why this kernel cannot do `case`; None if it can."""
        reason = self.limits.refuse(case)
        if reason is not None:
            return reason
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") == "1":
            return "TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 wants another layout of the lse; unset it"
        if _version() < _OLDEST:
            return f"it needs cuDNN {_OLDEST} or newer, not {_version()}"
        if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
            return "it is switched off; torch.backends.cuda.enable_cudnn_sdp(True) switches it on"
        flash = TorchFlashKernel()
        reason = flash.refuse(case)
        return (
            problem_of(self, flash, case) if reason is None else f"it leaves some tiles to torch_flash, and {reason}"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of a tile.

        PyTorch's flash-attention computes tiles of a single query or key.
        """
        if how.band == ANTICAUSAL:
            return forward_reversed(self, q, k, v, how)
        if min(q.shape[1], k.shape[1]) == 1:
            return TorchFlashKernel().forward(q, k, v, how)
        v_dim, dims = v.shape[-1], _dims(k, v)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_heads_first(x, dim) for x, dim in zip((q, k, v), dims, strict=True)),
            *(None, True, 0.0, how.band == CAUSAL),  # attn_bias, compute_log_sumexp, dropout_p, is_causal
            scale=how.scale,
        )
        _seen_dims.add(lse.ndim)
        return out.transpose(1, 2)[..., :v_dim], lse.reshape(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the contributions to dq, dk and dv of a tile.

        PyTorch's flash-attention computes tiles for which cuDNN has no kernel, or may return NaN.
        """
        if how.band == ANTICAUSAL:
            return backward_reversed(self, queries, k, v, how)
        rows, keys, qk_dim, v_dim = queries.q.shape[1], k.shape[1], k.shape[-1], v.shape[-1]
        if min(rows, keys) == 1 or may_be_nan(rows, keys, k.device):
            return TorchFlashKernel().backward(queries, k, v, how)
        dims, dtype = _dims(k, v), k.dtype
        q, k = _heads_first(queries.q, dims[0]), _heads_first(k, dims[0])
        v = _heads_first(v, dims[2])
        # Plans are kept by the strides of q, k and v; those of these two have to follow from the shapes.
        dout, out = (_heads_first(x.to(dtype).contiguous(), dims[2]) for x in (queries.dout, queries.out))
        lse = queries.lse.contiguous()
        if lse.storage_offset() * lse.element_size() % _ALIGN_BYTES:  # the rows of a tile may begin anywhere
            lse = lse.clone()
        state = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(dout, q, k, v, out, lse.unsqueeze(-1) if statistics_have_a_dim() else lse),
            *state,  # philox_seed, philox_offset
            *(None, None, None),  # attn_bias, cum_seq_q, cum_seq_k
            *(rows, keys, 0.0, how.band == CAUSAL),  # max_q, max_k, dropout_p, is_causal
            scale=how.scale,
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in (dq, dk, dv))
        return Grads(dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim])


def _version() -> int:
    return torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]


def may_be_nan(rows: int, keys: int, device: torch.device) -> bool:
    """Return whether gradients of such a tile may be NaN, see the top of this file; log it once."""
    is_affected = is_hopper(device) and (rows % _BLOCK > 0 or (keys % _BLOCK > 0 and _version() < _WHOLE_KEYS))
    if is_affected:
        warn_once()
    return is_affected


@cache
def warn_once() -> None:
    """Log that PyTorch's flash-attention takes tiles from cuDNN, once in a process."""
    _LOG.warning(
        "on this GPU torch_cudnn leaves backward passes of tiles that do not fill blocks of %d rows to torch_flash, "
        "which is slower; lengths that are a multiple of %d times twice the number of ranks fill them",
        *(_BLOCK, _BLOCK),
    )


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a GPU of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _dims(k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return the head dims of q, k and v to pad to."""
    qk_dim, v_dim = round_up(k.shape[-1], 8), round_up(v.shape[-1], 8)
    return (qk_dim, qk_dim, v_dim) if qk_dim <= 128 else (192, 192, 128)


def _heads_first(x: Tensor, dim: int) -> Tensor:
    """Return [B, S, H, D] as [B, H, S, dim], where the stride of a dim of size 1 follows from the dim after it.

    Such a stride says nothing, but plans are kept by it: a rank's own rows and received ones may differ in it alone.
    """
    x = fit(x, dim, _ALIGN_BYTES)
    strides = list(x.stride())
    for at in (2, 1, 0):
        if x.shape[at] == 1:
            strides[at] = x.shape[at + 1] * strides[at + 1]
    return x.as_strided(x.shape, strides).transpose(1, 2)


def statistics_have_a_dim() -> bool:
    """Return whether this PyTorch has the lse as [B, H, Sq, 1]; older ones have [B, H, Sq]."""
    return 4 in _seen_dims if _seen_dims else _described_with_a_dim()


@cache
def _described_with_a_dim() -> bool:
    """Return whether the lse of a meta tensor has that dim, before any lse was returned."""
    x = torch.empty(1, 1, 2, 8, dtype=torch.bfloat16, device="meta")
    return bool(torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].ndim == 4)
