"""The two passes of attention, as what each side of a visit reads and what is summed up there.

    side   forward reads  forward sums   backward reads            backward sums
    q      q              out, lse       q, dout, lse, out         dq
    kv     k, v           -              k, v                      dk, dv

A side that travels backward as q sends a number per row instead of out, `softmax.row_share`. Where it arrives,
`softmax.project` makes of it and of dout an `out` that any kernel takes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from burst_plugin.kernels import Queries
from burst_plugin.softmax import project, row_share
from burst_plugin.strategy import Shapes
from burst_plugin.sums import Place, PlainSums, SoftmaxSums, TileSums
from burst_plugin.tile_work import Site, TileWork
from burst_plugin.tiles import Tile

__all__ = ["BackwardPass", "ForwardPass", "Pass", "Tensors"]

Tensors = tuple[Tensor, ...]


class Pass(Protocol):
    """What a pass does in a visit. Sides are called "q" and "kv"."""

    direction: str
    operands: dict[str, Tensors]  # of this rank, as `visit` reads them

    def outgoing(self, side: str) -> Tensors:
        """This rank's operands as they travel, in the order of `Shapes.side`."""
        ...

    def incoming(self, side: str, arrived: Tensors) -> Tensors:
        """Operands that travelled, as `visit` reads them."""
        ...

    def sums(self, side: str, place: Place, filled: bool) -> TileSums:
        """Something to add to, in tensors in the order of `Shapes.side` or in room for them."""
        ...

    def visit(self, queries: Tensors, keys: Tensors, tile: Tile, site: Site) -> dict[str, Tensors]:
        """The work of one tile: what it adds to the sums of either side, () for nothing."""
        ...


class ForwardPass:
    """out and lse."""

    direction = "forward"

    def __init__(self, work: TileWork, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._work = work
        self.operands: dict[str, Tensors] = {"q": (q,), "kv": (k, v)}

    def outgoing(self, side: str) -> Tensors:
        """See `Pass.outgoing`."""
        return self.operands[side]

    def incoming(self, side: str, arrived: Tensors) -> Tensors:
        """See `Pass.incoming`."""
        return arrived

    def sums(self, side: str, place: Place, filled: bool) -> TileSums:
        """See `Pass.sums`; only queries sum up anything."""
        return SoftmaxSums(place, filled) if side == "q" else PlainSums(place, filled)

    def visit(self, queries: Tensors, keys: Tensors, tile: Tile, site: Site) -> dict[str, Tensors]:
        """See `Pass.visit`."""
        return {"q": self._work.forward(queries[0], keys, tile, site), "kv": ()}


class BackwardPass:
    """dq, dk and dv."""

    direction = "backward"

    def __init__(self, work: TileWork, shapes: Shapes, queries: Queries, keys: Tensors) -> None:
        self._work = work
        self._projects = not shapes.sends_out
        self.operands: dict[str, Tensors] = {
            "q": (queries.q, queries.dout, queries.lse, queries.out),
            "kv": keys,
        }

    def outgoing(self, side: str) -> Tensors:
        """See `Pass.outgoing`."""
        if side == "kv" or not self._projects:
            return self.operands[side]
        q, dout, lse, out = self.operands["q"]
        return q, dout, lse, row_share(out, dout)

    def incoming(self, side: str, arrived: Tensors) -> Tensors:
        """See `Pass.incoming`."""
        if side == "kv" or not self._projects:
            return arrived
        q, dout, lse, share = arrived
        return q, dout, lse, project(dout, share)

    def sums(self, side: str, place: Place, filled: bool) -> TileSums:
        """See `Pass.sums`."""
        return PlainSums(place, filled)

    def visit(self, queries: Tensors, keys: Tensors, tile: Tile, site: Site) -> dict[str, Tensors]:
        """See `Pass.visit`."""
        q, dout, lse, out = queries
        dq, dkv = self._work.backward(Queries(q, dout, out, lse), keys, tile, site)
        return {"q": dq, "kv": dkv}
