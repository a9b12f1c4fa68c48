"""The shapes of a call, and what follows from them: what each side of a visit reads and sums, and its bytes.

    side   forward operands   forward sums   backward operands                backward sums
    q      q                  out, lse       q, dout, factor per row, lse     dq
    kv     k, v               -              k, v                             dk, dv

In float16 out travels in place of the factor per row. Operands are in the type of the call, sums, lse and the factor
per row in float32 or wider. Whatever travels is one of these rows: operands ahead (gather), sums behind (reduce).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from burst_plugin.types import Direction, Side, Spec


class Shapes(NamedTuple):
    """The local shapes of a call: q [batch, q_len, q_heads, qk_dim], k and v [batch, kv_len, kv_heads, .].

    qk_dim, v_dim: the head dims of q and k, and of v.
    dtype: the type of q, k and v.
    latent: the widths of the two tensors that travel in place of keys and values, latents and the part of keys that
        heads share; None if keys and values travel. See `up_projection`.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype
    latent: tuple[int, int] | None = None

    def of_part(self, parts: int) -> Shapes:
        """Return the shapes of one part of the heads, cut into `parts` equal parts."""
        return self._replace(q_heads=self.q_heads // parts, kv_heads=self.kv_heads // parts)

    @property
    def ulysses_degrees(self) -> list[int]:
        """Return the numbers of ranks that can share these heads in an exchange of heads (DeepSpeed-Ulysses)."""
        degrees = [n for n in range(1, self.q_heads + 1) if self.q_heads % n == 0]
        return [n for n in degrees if self.kv_heads % n == 0 or n % self.kv_heads == 0]

    def of_ulysses_group(self, degree: int) -> Shapes:
        """Return the shapes of one rank's share, where `degree` ranks share the heads; at least one key head."""
        return self._replace(q_heads=self.q_heads // degree, kv_heads=max(1, self.kv_heads // degree))

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the type of accumulated results: float32, or float64 for inputs in float64."""
        return torch.promote_types(self.dtype, torch.float32)

    def side(self, direction: Direction, side: Side) -> tuple[list[Spec], list[Spec]]:
        """Return (operands as they travel, accumulators) of a side, "q" or "kv", in a pass.

        Each is a list of tensors, by shape and type. Queries travel backward with a factor per row in place of their
        output (`online_softmax.project`), except in float16.
        """
        narrow, wide = self.dtype, self.sum_dtype
        q = (self.batch, self.q_len, self.q_heads, self.qk_dim)
        out = dout = (self.batch, self.q_len, self.q_heads, self.v_dim)
        row = (self.batch, self.q_heads, self.q_len)
        k = (self.batch, self.kv_len, self.kv_heads, self.qk_dim)
        v = (self.batch, self.kv_len, self.kv_heads, self.v_dim)
        if self.latent is not None:
            k, v = ((self.batch, self.kv_len, 1, width) for width in self.latent)
        for_delta = (out, narrow) if self.sends_out else (row, wide)
        table: dict[tuple[str, str], tuple[list[Spec], list[Spec]]] = {
            ("forward", "q"): ([(q, narrow)], [(out, wide), (row, wide)]),
            ("forward", "kv"): ([(k, narrow), (v, narrow)], []),
            ("backward", "q"): ([(q, narrow), (dout, narrow), for_delta, (row, wide)], [(q, wide)]),
            ("backward", "kv"): ([(k, narrow), (v, narrow)], [(k, wide), (v, wide)]),
        }
        return table[direction, side]

    @property
    def sends_out(self) -> bool:
        """Return whether travelling queries take out along, not a factor per row (`online_softmax.row_factor`)."""
        return self.dtype is torch.float16


def hop_bytes(shapes: Shapes, direction: Direction, moving: Side) -> int:
    """Return the bytes that a rank sends for one block at one ring step: gathered operands plus reduced results.

    shapes: of the block. moving: the side that goes around. Alignment in messages is not counted.
    """
    return sum(hop_bytes_by_traffic(shapes, direction, moving))


def hop_bytes_by_traffic(shapes: Shapes, direction: Direction, moving: Side) -> tuple[int, int]:
    """Return the bytes that a rank sends for one block at one ring step: (gathered operands, reduced results).

    shapes: of the block. moving: the side that goes around. Alignment in messages is not counted.
    """
    gather, reduce = (
        sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors)
        for tensors in shapes.side(direction, moving)
    )
    return gather, reduce
