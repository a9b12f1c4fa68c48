"""The two passes of attention: what either side of a visit is, at home and on its way (the table in `shapes`).

A pass goes through one direction of the ring; a `Part` is what it does for one part of the heads, of which there is
mostly one. Queries that travel backward send a factor per row in place of out, `softmax.row_factor`; where they
arrive, `softmax.project` makes of it and of dout an `out` that any kernel takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from burst_plugin.compute.accumulators import OwnSums, Place, PlainSums, SoftmaxSums, TileSums, in_parts
from burst_plugin.compute.online_softmax import project
from burst_plugin.compute.rows import take_rows
from burst_plugin.compute.tile_attention import TileWork, VisitPositions
from burst_plugin.kernels import Queries
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Rows, Side

__all__ = ["Part", "PassCargo", "Tensors", "backward_parts", "forward_parts"]

Tensors = tuple[Tensor, ...]


class Part(Protocol):
    """What a pass does in a visit of one part of the heads. Sides are called "q" and "kv"."""

    operands: dict[str, Tensors]  # of this rank, as `compute` reads them

    def outgoing(self, side: Side) -> Tensors:
        """This rank's operands as they travel, in the order of `Shapes.side`."""
        ...

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """Operands that travelled, as `compute` reads them."""
        ...

    def sums(self, side: Side, place: Place, filled: bool) -> TileSums:
        """Sums in tensors, in the order of `Shapes.side`, or in room for them; `filled`: they hold values already."""
        ...

    def compute(self, queries: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> dict[str, Tensors]:
        """The work of one tile: what it adds to the sums of either side, () for nothing."""
        ...


class ForwardPart:
    """out and lse."""

    def __init__(self, work: TileWork, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._work = work
        self.operands: dict[str, Tensors] = {"q": (q,), "kv": (k, v)}

    def outgoing(self, side: Side) -> Tensors:
        """See `Part.outgoing`."""
        return self.operands[side]

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """See `Part.incoming`."""
        return arrived

    def sums(self, side: Side, place: Place, filled: bool) -> TileSums:
        """See `Part.sums`; only queries sum up anything."""
        return SoftmaxSums(place, filled) if side == "q" else PlainSums(place, filled)

    def compute(self, queries: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> dict[str, Tensors]:
        """See `Part.compute`."""
        return {"q": self._work.forward(queries[0], kv, tile, positions), "kv": ()}


class BackwardPart:
    """dq, dk and dv. `factor` [B, H, S] is what travelling queries send in place of out; None if they send that."""

    def __init__(self, work: TileWork, queries: Queries, kv: Tensors, factor: Tensor | None) -> None:
        self._work, self._queries, self._factor = work, queries, factor
        self.operands: dict[str, Tensors] = {"q": tuple(queries), "kv": kv}

    def outgoing(self, side: Side) -> Tensors:
        """See `Part.outgoing`."""
        if side == "kv" or self._factor is None:
            return self.operands[side]
        return self._queries.q, self._queries.dout, self._factor, self._queries.lse

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """See `Part.incoming`."""
        if side == "kv" or self._factor is None:
            return arrived
        q, dout, factor, lse = arrived
        return q, dout, project(dout, factor), lse

    def sums(self, side: Side, place: Place, filled: bool) -> TileSums:
        """See `Part.sums`."""
        return PlainSums(place, filled)

    def compute(self, queries: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> dict[str, Tensors]:
        """See `Part.compute`; `queries` are in the order of `Queries`."""
        dq, dkv = self._work.backward(Queries(*queries), kv, tile, positions)
        return {"q": dq, "kv": dkv}


class PassCargo:
    """What travels in a pass, see `executor.Cargo`; `own` are this rank's sums of side `moving`."""

    def __init__(self, parts: Sequence[Part], moving: Side, own: OwnSums, device: torch.device) -> None:
        self.device = device
        self._parts, self._moving_side, self._own = parts, moving, own

    def operands(self, part: int, rows: Rows | None) -> Tensors:
        """See `executor.Cargo`."""
        whole = self._parts[part].outgoing(self._moving_side)
        return whole if rows is None else tuple(take_rows(x, rows) for x in whole)

    def sums(self, part: int, place: Place, filled: bool) -> TileSums:
        """See `executor.Cargo`."""
        return self._parts[part].sums(self._moving_side, place, filled)

    def own_sums(self, part: int) -> TileSums:
        """See `executor.Cargo`."""
        return self._own.parts[part]


def forward_parts(works: Sequence[TileWork], q: Tensor, k: Tensor, v: Tensor) -> list[Part]:
    """One for each part of the heads."""
    return [ForwardPart(work, *qkv) for work, qkv in zip(works, in_parts((q, k, v), len(works)), strict=True)]


def backward_parts(works: Sequence[TileWork], queries: Queries, kv: Tensors, factor: Tensor | None) -> list[Part]:
    """One for each part of the heads; `factor` [B, H, S] as in `BackwardPart`, of all heads."""
    parts = len(works)
    factors = [None] * parts if factor is None else [one for (one,) in in_parts((factor,), parts)]
    each = zip(works, in_parts(queries, parts), in_parts(kv, parts), factors, strict=True)
    return [BackwardPart(work, Queries(*q_side), kv_side, own) for work, q_side, kv_side, own in each]
