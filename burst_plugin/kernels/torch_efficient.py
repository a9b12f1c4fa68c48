"""PyTorch's memory-efficient attention for NVIDIA GPUs, from xFormers: float32, old GPUs, and biases.

`aten::_efficient_attention_forward` and `_backward` (aten/src/ATen/native/transformers/cuda/attention.cu and
attention_backward.cu). Causal is counted from the top left corner. It has no grouped heads: keys are expanded, and
their gradients summed in float32. Its lse has rows in multiples of 32, infinite at the end, and is 0 for a query
with a bias of -inf only (mem_eff_attention/kernel_forward.h), also where it becomes that in base 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from burst_plugin.kernels.limits import HALVES, Limits
from burst_plugin.kernels.protocol import Case, Grads, How, Queries
from burst_plugin.kernels.shaping import backward_reversed, expand_heads, fit, forward_reversed, round_up, sum_heads
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, Band

_ALIGN_BYTES = 16
_LSE_ROWS = 32
_BIAS_COLUMNS = 16
_NO_MASK, _CAUSAL_FROM_TOP_LEFT = 0, 1  # sdp::CustomMaskType
_LOWEST_BIAS = -1e38  # that stays finite if it is multiplied by log2(e)
LARGEST_BIAS = 2**32 - 1  # of one head: kernel_forward.h counts them in uint32 (pytorch#187227)
LARGEST_OFFSET = 2**31 - 1  # of a key, as its forward pass counts numbers in int32 (pytorch#186075)


class TorchEfficientKernel:
    """The kernel of PyTorch's memory-efficient attention: float32 and 16-bit types, any head dims, and biases.

    The head dims of q and k and of v may differ. A causal tile with a bias has its mask in the bias: blocks that a
    mask leaves out would be missing from the bias' gradient. The bias is rounded to the type of q.
    """

    name = "torch_efficient"
    limits = Limits("cuda", (torch.float32, *HALVES), capability=((7, 0), (12, 1)))
    features = frozenset({"head dims", "bias", "deterministic"})

    def refuse(self, case: Case) -> str | None:
        """Return why this kernel cannot do `case`; None if it can."""
        reason = self.limits.refuse(case)
        if reason is None and case.dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
            return "it takes bfloat16 from compute capability 8.0 on"
        return reason

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of a tile."""
        if how.band == ANTICAUSAL:
            return forward_reversed(self, q, k, v, how)
        if parts := _slices(q, k, how):
            outputs = [self.forward(q[:, rows], k, v, part) for rows, part in parts]
            return torch.cat([out for out, _ in outputs], 1), torch.cat([lse for _, lse in outputs], 2)
        v_dim, rows, bias = v.shape[-1], q.shape[1], _masked_bias(q, how)
        q, k, v = (_whole(x, q.shape[2]) for x in (q, k, v))
        outputs = [
            torch.ops.aten._efficient_attention_forward(
                *(some_q, some_k, some_v, some_bias),
                *(None, None, None, None),  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
                *(0.0, _mask(how), True),  # dropout_p, custom_mask_type, compute_log_sumexp
                scale=how.scale,
            )
            for some_q, some_k, some_v, some_bias in _addressable(q, k, v, _whole_bias(bias, q, k))
        ]
        out, lse = (
            parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            for parts, dim in (([found[0] for found in outputs], 2), ([found[1] for found in outputs], 1))
        )
        lse = lse[:, :, :rows]
        if bias is not None:
            lse = lse.masked_fill((bias == -torch.inf).all(3), -torch.inf)
        return out[..., :v_dim], lse

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the contributions to dq, dk and dv of a tile, and to the gradient of its bias if that is wanted."""
        if how.band == ANTICAUSAL:
            return backward_reversed(self, queries, k, v, how)
        (qk_dim, v_dim), kv_heads, dtype = (k.shape[-1], v.shape[-1]), k.shape[2], k.dtype
        q, k, v = (_whole(x, queries.q.shape[2]) for x in (queries.q, k, v))
        dout, out = (fit(x.to(dtype), v.shape[-1]).contiguous() for x in (queries.dout, queries.out))
        rows = q.shape[1]
        lse = queries.lse.masked_fill(queries.lse == -torch.inf, torch.inf)  # -inf less -inf would be NaN
        lse = pad(lse, (0, -rows % _LSE_ROWS), value=torch.inf).contiguous()
        bias = _whole_bias(_masked_bias(q, how), q, k)
        state = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        dq, dk, dv, dbias = torch.ops.aten._efficient_attention_backward(
            *(dout, q, k, v, bias, out),
            *(None, None, rows, k.shape[1]),  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            *(lse, 0.0, *state),  # logsumexp, dropout_p, philox_seed, philox_offset
            *(_mask(how), how.wants_dbias),  # custom_mask_type, bias_requires_grad
            scale=how.scale,
            num_splits_key=1 if how.deterministic else None,
        )
        dk, dv = sum_heads(dk, kv_heads), sum_heads(dv, kv_heads)
        return Grads(
            dq[..., :qk_dim],
            dk[..., :qk_dim],
            dv[..., :v_dim],
            _like(dbias, how.bias) if how.bias is not None and how.wants_dbias else None,
        )


def _whole(x: Tensor, query_heads: int) -> Tensor:
    """Return keys or values of every query head, with rows in whole vectors of 16 bytes."""
    dim = round_up(x.shape[-1], _ALIGN_BYTES // x.element_size())
    return fit(expand_heads(x, query_heads), dim, _ALIGN_BYTES)


def _addressable(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Return q, k, v and bias in parts of as many heads as the forward pass can address: mostly one."""
    if k.shape[1] * max(k.stride(1), v.stride(1)) <= LARGEST_OFFSET:
        return [(q, k, v, bias)]
    some = max(1, LARGEST_OFFSET // (k.shape[1] * max(k.shape[3], v.shape[3])))
    heads = [slice(first, first + some) for first in range(0, k.shape[2], some)]
    return [
        (
            q[:, :, part],
            k[:, :, part].contiguous(),
            v[:, :, part].contiguous(),
            None if bias is None else bias[:, part],
        )
        for part in heads
    ]


def _mask(how: How) -> int:
    return _CAUSAL_FROM_TOP_LEFT if how.band == CAUSAL and how.bias is None else _NO_MASK


def _slices(q: Tensor, k: Tensor, how: How) -> list[tuple[slice, How]]:
    """Return slices of query rows where a bias is too large for one call, with the mask in the bias; else none."""
    columns = round_up(k.shape[1], _BIAS_COLUMNS)
    if how.bias is None or q.shape[1] * columns <= LARGEST_BIAS:
        return []
    some = max(1, LARGEST_BIAS // columns)
    parts = [slice(first, first + some) for first in range(0, q.shape[1], some)]
    biases = (_of_rows(how.bias[:, :, rows], rows.start, how.band, q.dtype) for rows in parts)
    return [(rows, how._replace(band=FULL, bias=bias)) for rows, bias in zip(parts, biases, strict=True)]


def _masked_bias(q: Tensor, how: How) -> Tensor | None:
    """Return the bias, [1 or B, 1 or Hq, Sq, Sk], with the mask in it."""
    return None if how.bias is None else _of_rows(how.bias, 0, how.band, q.dtype)


def _of_rows(bias: Tensor, first: int, band: Band, dtype: torch.dtype) -> Tensor:
    """Return the bias of rows from `first` on, in `dtype`: -inf where the causal mask is, and where it was.

    The lowest finite numbers, by which transformers masks, stay finite.
    """
    masked = bias == -torch.inf
    if band == CAUSAL:
        masked |= torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).triu(1 + first)
    finite = bias.to(dtype).clamp_min(max(_LOWEST_BIAS, torch.finfo(dtype).min))
    return finite.masked_fill_(masked, -torch.inf)


def _whole_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the bias for every batch row and head, [B, Hq, Sq, Sk], with rows in whole vectors."""
    if bias is None:
        return None
    columns = bias.shape[3]
    bias = pad(bias, (0, -columns % _BIAS_COLUMNS)).contiguous()
    return bias[..., :columns].expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def _like(dbias: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of the bias in float32 or wider, summed over batch rows or heads that share it."""
    same = [dim for dim in (0, 1) if bias.shape[dim] == 1 and dbias.shape[dim] > 1]
    wide = torch.promote_types(dbias.dtype, torch.float32)
    return dbias.sum(same, keepdim=True, dtype=wide) if same else dbias.to(wide)
