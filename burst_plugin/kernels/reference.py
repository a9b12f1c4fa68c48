"""Attention written out: any device, any float type, any band. Slow, and the one to compare others with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from burst_plugin.kernels.protocol import Case, Queries
from burst_plugin.mask import FULL, Band

__all__ = ["ReferenceKernel"]

_ROWS = 512  # query rows at a time, so that memory does not grow with the square of the sequence


class ReferenceKernel:
    """Softmax and its derivative from their definitions, in float32 (float64 for float64 inputs)."""

    name = "reference"

    def refuse(self, case: Case) -> str | None:
        """Nothing is refused."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`; rows without a key get out 0 and lse -inf."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
        keys, values = _by_query_head(k, q, dtype), _by_query_head(v, q, dtype)
        for rows in _row_slices(q):
            scores = _scores(q[:, rows], keys, band, scale, rows.start)
            lse[:, :, rows] = torch.logsumexp(scores, -1)
            out[:, rows] = _probabilities(scores, lse[:, :, rows]).matmul(values).transpose(1, 2)
        return out, lse

    def backward(
        self, queries: Queries, k: Tensor, v: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`. Source: flash-attention, arXiv 2205.14135, appendix B.2."""
        q = queries.q
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys, values = _by_query_head(k, q, dtype), _by_query_head(v, q, dtype)
        dq = torch.empty_like(q, dtype=dtype)
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _row_slices(q):
            part = Queries(*(x.to(dtype) for x in queries.rows(rows)))
            p = _probabilities(_scores(part.q, keys, band, scale, rows.start), part.lse)
            dout = part.dout.transpose(1, 2)
            delta = (dout * part.out.transpose(1, 2)).sum(-1, keepdim=True)
            ds = p * (dout.matmul(values.transpose(-1, -2)) - delta) * scale
            dq[:, rows] = ds.matmul(keys).transpose(1, 2)
            dk += ds.transpose(-1, -2).matmul(part.q.transpose(1, 2))
            dv += p.transpose(-1, -2).matmul(dout)
        return dq, _by_kv_head(dk, k), _by_kv_head(dv, v)


def _row_slices(q: Tensor) -> Iterator[slice]:
    for start in range(0, q.shape[1], _ROWS):
        yield slice(start, min(start + _ROWS, q.shape[1]))


def _by_query_head(x: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, Hkv, D] as [B, Hq, S, D], every key head repeated for its query heads."""
    return x.to(dtype).transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], dim=1)


def _by_kv_head(grad: Tensor, x: Tensor) -> Tensor:
    """[B, Hq, S, D] summed over the query heads of every key head, as [B, S, Hkv, D] like `x`."""
    batch, _, rows, dim = grad.shape
    return grad.view(batch, x.shape[2], -1, rows, dim).sum(2).transpose(1, 2)


def _scores(q: Tensor, keys: Tensor, band: Band, scale: float, first_row: int) -> Tensor:
    """Scaled scores [B, H, rows, Sk], -inf outside the band."""
    scores = q.to(keys.dtype).transpose(1, 2).matmul(keys.transpose(-1, -2)) * scale
    if band == FULL:
        return scores
    rows = torch.arange(first_row, first_row + q.shape[1], device=q.device).unsqueeze(1)
    ahead = torch.arange(keys.shape[2], device=q.device) - rows
    outside = torch.zeros_like(ahead, dtype=torch.bool)
    if band.lower is not None:
        outside |= ahead < band.lower
    if band.upper is not None:
        outside |= ahead > band.upper
    return scores.masked_fill(outside, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """softmax from scores and lse; 0 where lse is -inf."""
    safe = lse.masked_fill(lse == -torch.inf, torch.inf)
    return torch.exp(scores - safe.unsqueeze(-1))
