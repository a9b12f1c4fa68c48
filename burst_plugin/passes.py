"""The two passes of attention: what either side of a visit is, at home and on its way (the table in `shapes`).

A side that travels backward as q sends a number per row instead of out, `softmax.row_share`. Where it arrives,
`softmax.project` makes of it and of dout an `out` that any kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from burst_plugin.kernels import Queries
from burst_plugin.softmax import project, row_share
from burst_plugin.sums import Place, PlainSums, SoftmaxSums, TileSums, in_parts
from burst_plugin.tile_work import Site, TileWork
from burst_plugin.tiles import Tile

__all__ = ["Pass", "Tensors", "backward_passes", "forward_passes"]

Tensors = tuple[Tensor, ...]


class Pass(Protocol):
    """What a pass does in a visit. Sides are called "q" and "kv"."""

    direction: str
    operands: dict[str, Tensors]  # of this rank, as `compute` reads them

    def outgoing(self, side: str) -> Tensors:
        """This rank's operands as they travel, in the order of `Shapes.side`."""
        ...

    def incoming(self, side: str, arrived: Tensors) -> Tensors:
        """Operands that travelled, as `compute` reads them."""
        ...

    def sums(self, side: str, place: Place, filled: bool) -> TileSums:
        """Something to add to, in tensors in the order of `Shapes.side` or in room for them."""
        ...

    def compute(self, queries: Tensors, keys: Tensors, tile: Tile, site: Site) -> dict[str, Tensors]:
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

    def compute(self, queries: Tensors, keys: Tensors, tile: Tile, site: Site) -> dict[str, Tensors]:
        """See `Pass.compute`."""
        return {"q": self._work.forward(queries[0], keys, tile, site), "kv": ()}


class BackwardPass:
    """dq, dk and dv. `share` gives what queries send instead of out, if they do."""

    direction = "backward"

    def __init__(self, work: TileWork, queries: Queries, keys: Tensors, share: Callable[[], Tensor] | None) -> None:
        self._work, self._share = work, share
        self.operands: dict[str, Tensors] = {
            "q": (queries.q, queries.dout, queries.lse, queries.out),
            "kv": keys,
        }

    def outgoing(self, side: str) -> Tensors:
        """See `Pass.outgoing`."""
        if side == "kv" or self._share is None:
            return self.operands[side]
        return *self.operands["q"][:3], self._share()

    def incoming(self, side: str, arrived: Tensors) -> Tensors:
        """See `Pass.incoming`."""
        if side == "kv" or self._share is None:
            return arrived
        q, dout, lse, share = arrived
        return q, dout, lse, project(dout, share)

    def sums(self, side: str, place: Place, filled: bool) -> TileSums:
        """See `Pass.sums`."""
        return PlainSums(place, filled)

    def compute(self, queries: Tensors, keys: Tensors, tile: Tile, site: Site) -> dict[str, Tensors]:
        """See `Pass.compute`."""
        q, dout, lse, out = queries
        dq, dkv = self._work.backward(Queries(q, dout, out, lse), keys, tile, site)
        return {"q": dq, "kv": dkv}


def forward_passes(works: Sequence[TileWork], q: Tensor, k: Tensor, v: Tensor) -> list[Pass]:
    """One for each part of the heads."""
    return [ForwardPass(work, *qkv) for work, qkv in zip(works, in_parts((q, k, v), len(works)), strict=True)]


def backward_passes(works: Sequence[TileWork], sends_out: bool, queries: Queries, keys: Tensors) -> list[Pass]:
    """One for each part of the heads; `sends_out` says whether out travels, not a number per row (`Shapes`)."""
    parts = len(works)

    @cache
    def shares() -> list[Tensors]:  # of all parts at once, if queries travel
        return in_parts((row_share(queries.out, queries.dout),), parts)

    def share_of(part: int) -> Callable[[], Tensor] | None:
        return None if sends_out else lambda: shares()[part][0]

    heads = in_parts((*queries[:4], *keys), parts)
    each = enumerate(zip(works, heads, strict=True))
    return [BackwardPass(work, Queries(*mine[:4]), mine[4:], share_of(part)) for part, (work, mine) in each]
