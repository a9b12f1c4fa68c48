"""The interface of all kernels, and the case that a kernel is chosen for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from burst_plugin.scores import Scores
from burst_plugin.types import Band

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
    """The task that a kernel is chosen for: device, type, heads, head dims and features of an attention call.

    device: "cuda", "cpu" or another type of device.
    dtype: the type of q, k and v.
    query_heads, kv_heads: the numbers of heads of q, and of k and v.
    qk_dim, v_dim: the head dims of q and k, and of v.
    features: the names in `FEATURES` that the call needs, except "windows" and "varlen".
    new_tiles: whether every batch may bring tiles of new shapes.
    """

    device: str
    dtype: torch.dtype
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    features: frozenset[str] = frozenset()  # names in `FEATURES`, but "windows" and "varlen"
    new_tiles: bool = False  # whether every batch may bring tiles of new shapes


class Lengths(NamedTuple):
    """The lengths of packed sequences, over all batch rows: how many queries and keys each has, at least one.

    q, k: the numbers of queries and of keys of each sequence.
    q_ends, k_ends: their bounds, as `cu_seqlens`: int32 [sequences + 1], on the device.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    q_ends: Tensor
    k_ends: Tensor


class Selection(NamedTuple):
    """The keys that each query of a tile has selected; it attends to the selected keys in the tile and its band.

    keys: [B, G, Sq, n], their positions in the sequence, in any order. A key listed twice counts once, and keys
        outside of the tile do not count. G divides Hkv: the key heads of a group share a list.
    columns: [Sk], the positions of the tile's keys.
    """

    keys: Tensor
    columns: Tensor

    def of_rows(self, rows: slice) -> Selection:
        """Return the selection of the query rows `rows` of the tile."""
        return self._replace(keys=self.keys[:, :, rows])

    def local(self) -> Tensor:
        """Return the row in the tile of every selected key, int64 [B, G, Sq, n]; Sk for keys outside of the tile."""
        ordered, order = self.columns.sort()
        keys = self.keys.to(ordered.dtype)
        found = torch.searchsorted(ordered, keys.contiguous()).clamp_(max=len(ordered) - 1)
        return torch.where(ordered[found] == keys, order[found], len(ordered))


class How(NamedTuple):
    """The options of one tile: which keys its queries attend to, and how scores become probabilities.

    band: query row i attends to key row j where `lower <= j - i <= upper`, both counted from the first row of the
        tile.
    scores: scale, softcap, slopes and dropout.
    bias: the tile's bias, [1 or B, 1 or Hq, Sq, Sk]; None without one.
    bias_has_grad: whether the gradient of the bias is wanted.
    q_positions, k_positions: [Sq] and [Sk], int64, positions in the sequence; given if `scores` depends on them, or
        with a bias.
    first_batch_row, first_head: the numbers of the tile's first batch row and query head, by which dropout is drawn.
    deterministic: whether two runs have to give the same bits.
    lengths: for kernels with "varlen", packed sequences in place of one tile: every sequence attends to itself, in a
        band that is full, or causal or anticausal in squares, without a bias.
    selection: the keys that each query has selected; None if it attends to all keys in the band.
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
    selection: Selection | None = None

    @property
    def wants_dbias(self) -> bool:
        """Return whether the tile has a bias and the gradient of it is wanted."""
        return self.bias is not None and self.bias_has_grad

    @property
    def scale(self) -> float:
        """Return the factor on q . k, which a call has filled in."""
        assert self.scores.scale is not None, "a call resolves it"
        return self.scores.scale


class Queries(NamedTuple):
    """The query side of a backward pass: q, dout and out [B, Sq, Hq, .], and lse [B, Hq, Sq] (float32 or wider).

    `lse` is of the whole row, over all keys of the sequence; of `out` only `rowsum(out * dout)` matters.
    """

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor


class Grads(NamedTuple):
    """The contributions of one tile to the gradients of q, k, v, in their shapes, and of its bias.

    `dbias` is None unless the tile has a bias whose gradient is wanted.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None


@runtime_checkable
class Kernel(Protocol):
    """The interface of kernels, which compute exact attention of the queries of a tile to its keys within a band.

    q is [B, Sq, Hq, Dk], k [B, Sk, Hkv, Dk] and v [B, Sk, Hkv, Dv]. Hq is a multiple of Hkv: query head h reads key
    head `h // (Hq / Hkv)`. Inputs may be strided views whose last dim is dense. Bands are full, and causal and
    anticausal on squares, and, for kernels with "windows", any. Every query of a tile has a key. Only kernels with
    "varlen" get `How.lengths`. Importing a kernel imports no library.

    name: the kernel's name in the option `kernel`.
    features: names in `FEATURES`, of what the kernel can do.
    """

    name: str
    features: frozenset[str]

    def refuse(self, case: Case) -> str | None:
        """Return why this kernel cannot do `case`; None if it can. Features that it lacks are checked elsewhere."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv], in the type of q or wider, and lse [B, Hq, Sq], float32 or wider, of a tile."""
        ...

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return a tile's contributions to dq, dk, dv and the bias' gradient, in the inputs' types or wider."""
        ...
