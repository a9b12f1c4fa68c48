"""A kernel that computes nothing, to time what the host does beside kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from burst_plugin.kernels import Case, Grads, How, Queries

__all__ = ["StubKernel"]


class StubKernel:
    """A kernel that returns the same tensors, made once per shape, whatever its arguments."""

    name = "stub"
    features = frozenset({"windows"})

    def refuse(self, case: Case) -> str | None:
        """Return None: it takes every case."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return ones for out, [B, Sq, H, D], and zeros for lse, [B, H, Sq]; at least in float32."""
        return _constants(q.shape, k.shape, q.dtype, q.device)[:2]

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return ones for dq, dk and dv, at least in float32."""
        return _constants(queries.q.shape, k.shape, k.dtype, k.device)[2]


@cache
def _constants(
    q: torch.Size, k: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Grads]:
    wide = torch.promote_types(dtype, torch.float32)
    grads = Grads(*(torch.ones(shape, dtype=wide, device=device) for shape in (q, k, k)))
    out, lse = torch.ones(q, dtype=wide, device=device), torch.zeros(q[0], q[2], q[1], dtype=wide, device=device)
    return out, lse, grads
