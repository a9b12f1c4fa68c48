"""What every kernel offers, and the case by which it says whether it can."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_plugin.mask import Band

__all__ = ["Case", "Kernel", "Queries"]


class Case(NamedTuple):
    """What a kernel is asked to do, for all tiles of a call."""

    device: str
    dtype: torch.dtype
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    bands: frozenset[Band]


class Queries(NamedTuple):
    """The query side of a backward pass: q, dout, out [B, Sq, Hq, .] and lse [B, Hq, Sq] (float32 or wider).

    `lse` is of the whole row, over all keys of the sequence; of `out` only `rowsum(out * dout)` matters.
    """

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor

    def rows(self, rows: slice) -> Queries:
        """The same for some query rows; views."""
        return Queries(self.q[:, rows], self.dout[:, rows], self.out[:, rows], self.lse[:, :, rows])


class Kernel(Protocol):
    """Exact attention of q [B, Sq, Hq, Dk] on k [B, Sk, Hkv, Dk], v [B, Sk, Hkv, Dv] within a band.

    Hq is a multiple of Hkv: query head h reads key head `h // (Hq / Hkv)`. Inputs may be strided views whose
    last dim is dense.
    """

    name: str

    def refuse(self, case: Case) -> str | None:
        """Why this kernel cannot do `case`; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        """out [B, Sq, Hq, Dv], in the type of q or wider, and lse [B, Hq, Sq], float32 or wider."""
        ...

    def backward(
        self, queries: Queries, k: Tensor, v: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) that this tile contributes, shaped as q, k, v, in their type or wider."""
        ...
