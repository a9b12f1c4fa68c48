"""Tensors made to fit kernels: dense rows, padded head dims, expanded key heads, and reversed sequences."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

from burst_plugin.kernels.protocol import Grads, How, Kernel, Queries
from burst_plugin.types import CAUSAL


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return ceil(number / multiple) * multiple


def fit(x: Tensor, dim: int, align_bytes: int = 1) -> Tensor:
    """Return `x` with its last dim dense and zero-padded to `dim`, and rows at multiples of `align_bytes` bytes.

    `x` is [..., D], D being `dim` at most. It is copied only if it does not have that form.
    """
    if x.shape[-1] < dim:
        x = pad(x, (0, dim - x.shape[-1]))
    if x.stride(-1) != 1:
        x = x.contiguous()
    if align_bytes > 1 and not _is_aligned(x, align_bytes):
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _is_aligned(x: Tensor, align_bytes: int) -> bool:
    starts = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    return not any(start * x.element_size() % align_bytes for start in (x.storage_offset(), *starts))


def expand_heads(x: Tensor, query_heads: int) -> Tensor:
    """Return k or v, [B, S, Hkv, D], as [B, S, Hq, D]: every key head repeated once for each of its query heads."""
    return x if x.shape[2] == query_heads else x.repeat_interleave(query_heads // x.shape[2], dim=2)


def sum_heads(grad: Tensor, kv_heads: int) -> Tensor:
    """Sum a gradient [B, S, Hq, D] over the query heads of each key head, to [B, S, Hkv, D] in float32 or wider.

    Where Hq is Hkv, it is returned in its own type.
    """
    if grad.shape[2] == kv_heads:
        return grad
    batch, rows, _, dim = grad.shape
    groups = grad.reshape(batch, rows, kv_heads, -1, dim)
    return groups.sum(3, dtype=torch.promote_types(grad.dtype, torch.float32))


def forward_reversed(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return out and lse of an anticausal square tile, computed by `kernel` as a causal tile of reversed sequences.

    q, k and v, [B, S, H, D], are reversed along S, and so are the results.
    """
    out, lse = kernel.forward(q.flip(1), k.flip(1), v.flip(1), _reversed(how))
    return out.flip(1), lse.flip(2)


def backward_reversed(kernel: Kernel, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
    """Return the gradients of an anticausal square tile, computed by `kernel` as a causal tile of reversed sequences.

    The tensors of queries, k and v are reversed along the sequence, and so are the results.
    """
    q, dout, out, lse = queries
    flipped = Queries(q.flip(1), dout.flip(1), out.flip(1), lse.flip(2))
    grads = kernel.backward(flipped, k.flip(1), v.flip(1), _reversed(how))
    dbias = None if grads.dbias is None else grads.dbias.flip(2, 3)
    return Grads(grads.dq.flip(1), grads.dk.flip(1), grads.dv.flip(1), dbias)


def _reversed(how: How) -> How:
    return how._replace(
        band=CAUSAL,
        bias=None if how.bias is None else how.bias.flip(2, 3),
        q_positions=None if how.q_positions is None else how.q_positions.flip(0),
        k_positions=None if how.k_positions is None else how.k_positions.flip(0),
    )
