"""Keys and values that travel as latents, and are made from latents where these arrive (MLA, arXiv 2405.04434).

    travels      c [B, S, 1, C], and the part of keys that heads share [B, S, 1, R], with its rotary embedding
    with weight  k = (W_k c, shared part), v = W_v c, for every query head; weight [Hq * (Dk - R + Dv), C]
    without      k = (c, shared part), v = c, one head: queries are in the space of latents already ("absorbed")

With DeepSeek V3's 128 heads 576 numbers per token travel in place of 40,960. Gradients of keys and values are
projected back before they leave; the weight's gradient is summed where it is made, on every rank for its own queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.compute.accumulators import Tensors
from burst_plugin.compute.passes import BackwardPart, ForwardPart, VisitPositions, fold
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Side


class UpProjection(NamedTuple):
    """The projection that makes keys and values from latents (MLA).

    weight: [heads * (own_dim + v_dim), C]; each head has rows for its keys, then for its values. None: queries are in
        the space of latents already, and values are the latents themselves, of one head.
    heads: the number of heads of keys and values.
    own_dim: the dim of keys without the part that heads share.
    """

    weight: Tensor | None
    heads: int
    own_dim: int

    def of(self, latents: Tensors) -> Tensors:
        """Compute keys [B, S, H, Dk] and values [B, S, H, Dv].

        latents: (c [B, S, 1, C], the part of keys that heads share [B, S, 1, R]).
        """
        c, shared = latents
        if self.weight is None:
            return torch.cat((c, shared), -1), c
        up = (c.squeeze(2) @ self.weight.t()).view(*c.shape[:2], self.heads, self.weight.shape[0] // self.heads)
        k = up.new_empty((*up.shape[:3], self.own_dim + shared.shape[-1]))
        k[..., : self.own_dim] = up[..., : self.own_dim]
        k[..., self.own_dim :] = shared
        return k, up[..., self.own_dim :]

    def gradients(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the part of keys that heads share, and of c projected by `weight`.

        dk, dv: [B, S, H, Dk] and [B, S, H, Dv]. The first gradient is [B, S, 1, R], the second [B, S, H * (own_dim +
            Dv)]; without a weight it is the gradient of c, [B, S, C]. They are in the type of dk or, where heads add
            up, wider.
        """
        own_grad, shared = dk[..., : self.own_dim], dk[..., self.own_dim :]
        if self.weight is None:
            return shared, (own_grad + dv).flatten(2)
        wide = torch.promote_types(dk.dtype, torch.float32)
        return shared.sum(2, keepdim=True, dtype=wide), torch.cat((own_grad, dv), -1).flatten(2)


class LatentForwardPart(ForwardPart):
    """A `Part` that computes out and lse with keys and values made from latents.

    up: the projection that makes them. args: the arguments of `TileAttention`, with (c, shared part) as `kv`.
    """

    def __init__(self, up: UpProjection, *args: Any) -> None:
        super().__init__(*args)
        self._up, self._latents = up, self.kv
        self.kv = up.of(self.kv)

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands of `side` to send: queries, or latents in place of keys and values."""
        return self._latents if side == "kv" else super().outgoing(side)

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """Return received operands as `compute` reads them: latents become keys and values here."""
        return self._up.of(arrived) if side == "kv" else super().incoming(side, arrived)


class LatentBackwardPart(BackwardPart):
    """A `Part` that computes the gradients of queries and of latents.

    `dweight`, if it is wanted, accumulates the gradient of the weight, in float32 or wider. `kv` becomes keys, values
    and c.

    Args:
        up: the projection that makes keys and values.
        wants_dweight: whether the gradient of its weight is wanted.
        args: the arguments of `TileAttention`, with (c, shared part) as `kv`.
    """

    def __init__(self, up: UpProjection, wants_dweight: bool, *args: Any) -> None:
        super().__init__(*args)
        self._up, self._latents = up, self.kv
        self.dweight: Tensor | None = None
        if up.weight is not None and wants_dweight:
            self.dweight = torch.zeros_like(up.weight, dtype=torch.promote_types(up.weight.dtype, torch.float32))
        self.kv = (*up.of(self.kv), self.kv[0])

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands of `side` to send: (q, dout, out or row factor, lse), or (c, shared part)."""
        return self._latents if side == "kv" else super().outgoing(side)

    def incoming(self, side: Side, arrived: Tensors) -> Tensors:
        """Return received operands as `compute` reads them: latents become keys, values and c here."""
        return (*self._up.of(arrived), arrived[0]) if side == "kv" else super().incoming(side, arrived)

    def compute(self, q: Tensors, kv: Tensors, tile: Tile, positions: VisitPositions) -> tuple[Tensors, Tensors]:
        """Return the gradients of a tile, (dq,) and, of latents, (dc, dshared); add to `dweight`, if there is one.

        q: (q, dout, out, lse). kv: (keys, values, c). positions: the positions of their rows, if anything depends on
            them.
        """
        of_queries, (dk, dv) = super().compute(q, kv[:2], tile, positions)
        dshared, dup = self._up.gradients(dk, dv)
        weight = self._up.weight
        if weight is None:
            return of_queries, (dup.unsqueeze(2), dshared)
        if self.dweight is not None:
            c = fold(kv[2], tile.k, tile._replace(pieces=1)).flatten(0, 2)
            self.dweight += dup.flatten(0, 1).t() @ c.to(dup.dtype)
        return of_queries, ((dup @ weight.to(dup.dtype)).unsqueeze(2), dshared)
