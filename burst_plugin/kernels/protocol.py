"""The interface of all kernels, and the case that a kernel is chosen for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from burst_plugin.scores import Scores
from burst_plugin.types import NOTHING_IN_FLIGHT, Band, InFlight

FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "windows": "works on a window as one tile; without it, windows are cut into full and causal tiles",
        "varlen": "works on many documents in one batched call; without it, they are looped over",
        "head dims": "v may have another head dim than q and k (MLA)",
        "softcap": "scores are capped by a tanh",
        "alibi": "a slope per head times the distance is added to scores",
        "bias": "a tensor is added to scores, and gets a gradient",
        "selection": "every query has a list of the keys that it attends to",
        "dropout": "probabilities are dropped by position",
        "deterministic": "two runs give the same bits",
    }
)


class Case(NamedTuple):
    """The task of a kernel in an attention call: device, types, heads, dims and features of all its tiles."""

    device: str
    dtype: torch.dtype
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    features: frozenset[str] = frozenset()  # names in `FEATURES`, but "windows" and "varlen"
    new_tiles: bool = False  # whether every batch may bring tiles of new shapes


class Lengths(NamedTuple):
    """Packed sequences of all batch rows: the numbers of queries and of keys of each, at least one.

    `q_ends` and `k_ends` are their bounds, as `cu_seqlens`: int32 [sequences + 1], on the device.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    q_ends: Tensor
    k_ends: Tensor


class Selection(NamedTuple):
    """The keys that the queries of a tile attend to, besides what its band leaves out.

    keys: [B, G, Sq, n], their positions in the sequence, in any order; twice counts once, and others than the tile's
        keys for nothing. G divides Hkv: key heads share a list in groups.
    columns: [Sk], the positions of the tile's keys.
    """

    keys: Tensor
    columns: Tensor

    def of_rows(self, rows: slice) -> Selection:
        """Return the selection of some query rows."""
        return self._replace(keys=self.keys[:, :, rows])

    def local(self) -> Tensor:
        """Return for every selected key its row in the tile, int64 [B, G, Sq, n]; Sk for keys that are elsewhere."""
        ordered, order = self.columns.sort()
        keys = self.keys.to(ordered.dtype)
        found = torch.searchsorted(ordered, keys.contiguous()).clamp_(max=len(ordered) - 1)
        return torch.where(ordered[found] == keys, order[found], len(ordered))


class How(NamedTuple):
    """How the scores of a tile become probabilities.

    bias: of the tile, [1 or B, 1 or Hq, Sq, Sk]; its gradient is wanted if `bias_has_grad`.
    q_positions, k_positions: [Sq] and [Sk], int64; given if `scores` depends on them, or with a bias.
    first_batch_row, first_head: the numbers of the first batch row and query head.
    deterministic: two runs have to give the same bits.
    lengths: for "varlen" kernels: every sequence attends to itself, full, or causal or anticausal in squares; without
        a bias.
    in_flight: messages meanwhile, for kernels that would wait for them; told without positions only.
    selection: the keys of every query, if they are listed.
    """

    band: Band
    scores: Scores
    bias: Tensor | None = None
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    first_batch_row: int = 0
    first_head: int = 0
    deterministic: bool = False
    bias_has_grad: bool = True
    lengths: Lengths | None = None
    in_flight: InFlight = NOTHING_IN_FLIGHT
    selection: Selection | None = None

    @property
    def wants_dbias(self) -> bool:
        """Return whether there is a bias, and its gradient is wanted."""
        return self.bias is not None and self.bias_has_grad

    @property
    def scale(self) -> float:
        """Return the factor on q . k."""
        assert self.scores.scale is not None, "a call resolves it"
        return self.scores.scale


class Queries(NamedTuple):
    """The query side of a backward pass: q, dout, out [B, Sq, Hq, .] and lse [B, Hq, Sq] (float32 or wider).

    `lse` is of the whole row, over all keys of the sequence; of `out` only `rowsum(out * dout)` matters.
    """

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor


class Grads(NamedTuple):
    """A tile's contributions to dq, dk, dv, in their shapes, and to the gradient of its bias if that is wanted."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None


@runtime_checkable
class Kernel(Protocol):
    """Exact attention of q [B, Sq, Hq, Dk] on k [B, Sk, Hkv, Dk], v [B, Sk, Hkv, Dv] within a band.

    Hq is a multiple of Hkv: query head h reads key head `h // (Hq / Hkv)`. Inputs may be strided views whose
    last dim is dense. Bands are full, and causal and anticausal on squares, and, for kernels with "windows", any.
    Every query of a tile has a key. Only kernels with "varlen" get `How.lengths`. Importing a kernel imports no
    library.
    """

    name: str
    features: frozenset[str]

    def refuse(self, case: Case) -> str | None:
        """Return why this kernel cannot do `case`, features aside; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv], in the type of q or wider, and lse [B, Hq, Sq], float32 or wider."""
        ...

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the contributions of this tile, in the inputs' types or wider."""
        ...
