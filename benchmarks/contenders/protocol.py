"""What is compared: a case, and contenders that attend to it, each in its own layout and by its own means."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from burst_plugin import Causal, Documents, Full, Mask
from burst_plugin.compute.shapes import Shapes

__all__ = ["Case", "Contender", "Session", "Slept"]


@dataclass(frozen=True)
class Case:
    """Attention over nodes * ranks_per_node ranks: q [batch, seq, q_heads, head_dim] on each, k and v with kv_heads.

    `seq` is tokens per rank. Of packed `documents`, whose lengths these are, each attends to itself alone, causal.
    """

    nodes: int
    ranks_per_node: int
    seq: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    batch: int = 1
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.documents and not self.causal:
            raise ValueError("packed documents are causal here; peers have no others")

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Where documents begin, and the end of the last one."""
        return (0, *accumulate(self.documents))

    @property
    def mask(self) -> Mask:
        """As the package names it."""
        whole = Causal() if self.causal else Full()
        return whole & Documents(self.cu_seqlens) if self.documents else whole

    @property
    def shapes(self) -> Shapes:
        """As the package names them."""
        dim = self.head_dim
        return Shapes(self.batch, self.seq, self.seq, self.q_heads, self.kv_heads, dim, dim, self.dtype)


@dataclass(frozen=True)
class Slept:
    """What one full visit takes where compute is slept: all query heads, seq queries on seq keys, not masked.

    A kernel call sleeps in proportion to its batch * queries * keys * query heads, without what a causal one leaves
    out: half of a square, all of whose keys the last query sees.
    """

    forward_s: float
    backward_s: float


class Session(Protocol):
    """A contender that is ready to attend, in one rank."""

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's rows, in the contender's layout, of [B, ranks * S, H, D]; contiguous."""
        ...

    def unshard(self, local: Tensor) -> Tensor:
        """The whole sequence out of all ranks' rows, on every rank; collective, without gradient."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of local rows [B, S, H, D] on the whole sequence; collective, and so is its backward pass."""
        ...


class Contender(Protocol):
    """A way of distributing attention. `absent` and `refuse` are asked before there are ranks."""

    @property
    def name(self) -> str:
        """As tables show it."""
        ...

    def absent(self) -> str | None:
        """Why it cannot be had here; None if it can."""
        ...

    def refuse(self, case: Case) -> str | None:
        """Why it cannot do this case; None if it can."""
        ...

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """All its configurations that can do `case`, itself first: for a benchmark that takes the best of them."""
        ...

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        """Ready to attend, in every rank of the default process group; collective. Without `slept` it computes."""
        ...
