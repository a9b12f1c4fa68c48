"""The numbers of attention in pieces: merging partial outputs, and the projection that lets stock kernels do
a backward pass for queries that travel without their output.

Everything here is in the accumulators' type (float32; float64 for float64 inputs). lse is the natural
logarithm of a softmax's denominator, -inf where a query attends to nothing. On GPUs with triton, `merge_`, `add_`,
`row_delta` and `row_factor` are one kernel each (`burst_plugin.compute.triton_softmax`).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
_LEAST_DOUT = {torch.float32: 2.0**-40, torch.float64: 2.0**-70}  # of a row beside the gradient of its lse
_LEAST_ROOT = 2.0**-62  # of a row beside the root of that gradient, by whose square a sum of its size is divided
_LEAST_DLSE = 2.0**-100  # smaller gradients of lse count as none
NUMBERS_AT_ONCE = 2**22  # numbers of a gradient whose rows are worked on together
_LEAST_SAFE_NORM = 1e-15  # of which neither the square nor 1 / square is too small for float32


def merge_(out: Tensor, lse: Tensor, parts: Sequence[Sequence[Tensor]], filled: bool = True) -> None:
    """Merge attention over other keys, parts of (out, lse), into `out` [B, S, H, D] and `lse` [B, H, S], in place.

    `lse' = logaddexp(a, b)`, outputs weighted by `exp(x - lse')`, which for two is the sigmoid of their difference;
    rows where all are -inf stay 0 and -inf. If not `filled`, `out` and `lse` hold nothing yet.
    Source: blockwise softmax, arXiv 2310.01889 section 3; in log form, flash-attention's lse.
    """
    if len(parts) + filled > 1 and (fused := fused_kernels(out, parts[0][0])):
        fused.merge_(out, lse, parts, filled)
        return
    for other_out, other_lse in parts:
        if filled:
            _merge_one(out, lse, other_out, other_lse)
        else:
            out.copy_(other_out)
            lse.copy_(other_lse)
        filled = True


def _merge_one(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    other_lse = other_lse.contiguous()  # exp and log are not vectorised over strided rows
    weight = torch.sigmoid_(other_lse - lse.clamp_min(torch.finfo(lse.dtype).min))  # -inf less -inf would be NaN
    out.lerp_(other_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)


def add_(total: Tensor, parts: Sequence[Tensor], filled: bool = True) -> None:
    """Add `parts`, each shaped like `total` [B, S, H, D], to `total` in place; unless `filled`, overwrite `total`."""
    if len(parts) + filled > 1 and (fused := fused_kernels(total, parts[0])):
        fused.add_(total, parts, filled)
        return
    for part in parts:
        if filled:
            total.add_(part)
        else:
            total.copy_(part)
        filled = True


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Return `delta = rowsum(out * dout)` as [B, H, S], from two [B, S, H, D], in float32 or wider."""
    if fused := fused_kernels(out, dout):
        delta: Tensor = fused.row_delta(out, dout)
        return delta
    dtype = torch.promote_types(out.dtype, torch.float32)
    delta = torch.linalg.vecdot(out.to(dtype), dout.to(dtype))  # CPUs are slow to multiply unlike types
    return delta.transpose(1, 2)


def row_factor(out: Tensor, dout: Tensor) -> Tensor:
    """Return `rowsum(out * dout) / rowsum(dout**2)` as [B, H, S], in float32 or wider: see `project`.

    It is 0 where `dout` is 0, and clamped to the largest finite value, which only rows with negligible gradients
    reach.
    """
    if fused := fused_kernels(out, dout):
        factor: Tensor = fused.row_factor(out, dout)
        return factor
    wide = dout.to(torch.promote_types(dout.dtype, torch.float32))
    norm = _row_norm(wide).transpose(1, 2)
    most = torch.finfo(wide.dtype).max
    return (row_delta(out, wide) / norm).div_(norm).clamp_(-most, most).to(wide.dtype)


def project(dout: Tensor, factor: Tensor) -> Tensor:
    """Return `dout * factor`, [B, S, H, D]: an output that has `rowsum(out * dout) = delta`.

    It has the type of `dout`; on CPUs, where kernels compute in the type of `factor`, it has this type.

    A backward kernel uses the output for nothing but that sum, so it may be handed the projection of the true
    output on `dout`: `dout * delta / rowsum(dout**2)`, which is `dout` times `row_factor`. By Cauchy-Schwarz no row's
    2-norm exceeds the 2-norm of the true output's row. Not for float16, where one element may overflow.
    Source: design of this package.
    """
    factor = factor.transpose(1, 2).unsqueeze(-1)
    if dout.is_cuda:  # which multiplies unlike types in one pass
        return torch.mul(dout, factor, out=torch.empty_like(dout))
    wide = dout.to(factor.dtype)
    return wide * factor if wide is dout else wide.mul_(factor)


def with_lse_grad(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, dout), [B, S, H, D], that make any backward kernel add the gradient `dlse` [B, H, S] of lse.

    lse grows by a key's probability p with its score: `dscore = p * (dout . v - rowsum(out * dout) + dlse)`. So `out`
    becomes the multiple of `dout` for which `rowsum(out * dout)` is less by `dlse`. A row of `dout` that is too small
    for such a multiple is replaced by small numbers that change no digit of the gradient. Rows without `dlse` stay as
    they are. Not for float16, which has no room for such an `out`. Source: design of this package.

    Tokens are worked on a few at a time, so that hardly any memory is taken besides the results.
    """
    size = max(1, NUMBERS_AT_ONCE // max(1, dout[:, :1].numel()))
    made: list[Tensor] = []
    for start in range(0, max(1, dout.shape[1]), size):
        rows = slice(start, start + size)
        part = _rows_with_lse_grad(out[:, rows], dout[:, rows], lse[..., rows], dlse[..., rows])
        made = made or [x.new_empty(dout.shape) for x in part]
        for whole, x in zip(made, part, strict=True):
            whole[:, rows] = x
    return made[0], made[1]


def _rows_with_lse_grad(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, dout) of some tokens; see `with_lse_grad`."""
    wide = dout.to(torch.promote_types(dout.dtype, torch.float32))
    dlse = dlse.to(wide.dtype).masked_fill((lse == -torch.inf) | (dlse.abs() < _LEAST_DLSE), 0.0)  # no key, no score
    size, share = dlse.abs(), _LEAST_DOUT[wide.dtype]
    least = torch.maximum(size * share, size.sqrt() * _LEAST_ROOT).transpose(1, 2)  # whose multiple is still finite
    is_small = torch.linalg.vector_norm(wide, dim=-1, dtype=torch.float64) < least
    spread = (least / wide.shape[-1] ** 0.5).unsqueeze(-1)
    dout = torch.where(is_small.unsqueeze(-1), spread, wide).to(dout.dtype)
    delta = row_delta(out, dout) - dlse
    wide = dout.to(wide.dtype)
    norm = _row_norm(wide).transpose(1, 2)
    projected = project(dout, (delta / norm).div_(norm).to(wide.dtype))
    return torch.where(dlse.transpose(1, 2).unsqueeze(-1) == 0, out.to(projected.dtype), projected), dout


def _row_norm(x: Tensor) -> Tensor:
    """Return 2-norms of the rows of x [B, S, H, D] as [B, S, H], in float32 or wider; no square under- or overflows.

    1 for rows of zeros.
    """
    norm: Tensor
    if x.is_cpu and x.dtype != torch.float64:  # a quarter of the time of float64; checking the range costs nothing
        norm = torch.linalg.vector_norm(x, dim=-1)
        if not norm.numel():
            return norm
        least, most = norm.aminmax()
        if least.item() > _LEAST_SAFE_NORM and most.item() < 1 / _LEAST_SAFE_NORM:
            return norm
    if x.dtype == torch.float64:
        largest = x.abs().amax(-1)
        largest.masked_fill_(largest == 0, 1.0)
        norm = torch.linalg.vector_norm(x / largest.unsqueeze(-1), dim=-1).mul_(largest)
    else:
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return norm.masked_fill_(norm == 0, 1.0)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention that may also choose `sink` [H], a logit per head with value 0.

    out: [B, S, H, D] and lse: [B, H, S], of attention without the sink. Both are new tensors.

    Source: "attention is off by one" (sink = 0); gpt-oss, with a learnt logit (arXiv 2508.10925, section 2.2).
    """
    both = torch.logaddexp(lse, sink.to(lse.dtype).view(1, -1, 1))
    share = torch.exp(lse - both.masked_fill(both == -torch.inf, torch.inf))
    return out * share.transpose(1, 2).unsqueeze(-1), both


def sink_grad(sink: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient [H] of the sink: every query gives `-probability of the sink * rowsum(out * dout)`.

    sink: [H], logits. out, dout: [B, S, H, D], and lse: [B, H, S], of attention with the sink.
    """
    share = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(share * row_delta(out, dout)).sum((0, 2))


def fused_kernels(*tensors: Tensor) -> Any:
    """Return the module `burst_plugin.compute.triton_softmax` if its kernels can work on these tensors, else None.

    They can on a GPU for which triton compiles, and not in float64.
    """
    first = tensors[0]
    if not first.is_cuda or not all(tensor.is_cuda and tensor.dtype != torch.float64 for tensor in tensors):
        return None
    return _fused_on(first.device)


@cache
def _fused_on(device: torch.device) -> Any:
    try:
        fused = importlib.import_module("burst_plugin.compute.triton_softmax")
        fused.try_out(device)
    except torch.OutOfMemoryError:  # which says nothing about the kernels, and is not remembered
        raise
    except Exception as error:  # no triton, no compiler, a GPU that it does not know
        _LOG.warning("outputs are merged by several kernels instead of one on %s: %s", device, error)
        return None
    return fused
