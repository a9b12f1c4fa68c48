"""One attention call of one rank: its arguments checked, and every choice made."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b

import torch
from torch import Tensor

from burst_plugin.executor import Packing, Ring
from burst_plugin.kernels import Case, Kernel, choose_kernel
from burst_plugin.mask import Mask
from burst_plugin.member import Member, TileTable
from burst_plugin.passes import Pass, Tensors
from burst_plugin.strategy import Shapes, choose_traveller

__all__ = ["Call", "prepare"]

_DIRECTIONS = ("forward", "backward")
_KNOWN_CALLS = 64  # kinds of calls to remember; lengths may vary without end


@dataclass(frozen=True)
class Call:
    """One attention call of one rank, all choices made."""

    member: Member
    shapes: Shapes
    mask: Mask
    kernel: Kernel
    scale: float
    travellers: dict[str, str]  # by direction
    device: torch.device

    def signature(self) -> dict[str, object]:
        """What has to be the same on every rank."""
        return {
            **self.shapes._asdict(),
            **{f"{direction} traveller": side for direction, side in self.travellers.items()},
            "kernel in use": self.kernel.name,
            "mask": self.mask,
            "softmax_scale": self.scale,
        }

    def tiles(self, away: str) -> TileTable:
        """The tiles of this rank's visits when side `away` travels."""
        return self.member.tiles(self.mask, self.shapes, away == "q")

    def blank(self, direction: str, side: str) -> Tensors:
        """Uninitialised tensors for the sums of a side that stays at home."""
        _, sums = self.shapes.side(direction, side)
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in sums)

    def ring(self, work: Pass, away: str, number: int) -> Ring:
        """The ring that carries side `away` in this pass."""
        operands, sums = self._packings[work.direction]
        self.member.count(operands, sums)
        return Ring(
            self.member.plan(sums is not None),
            self.member.transport,
            (operands, work.outgoing(away)),
            (sums, partial(work.sums, away)) if sums else None,
            direction=work.direction,
            label=self._label(work.direction, number),
            trace=self.member.trace,
        )

    @cached_property
    def _packings(self) -> dict[str, tuple[Packing, Packing | None]]:
        """How operands and, if there are any, sums travel, by direction."""
        packings, labelled = {}, self.device.type == "cpu"
        for direction, away in self.travellers.items():
            operands, sums = self.shapes.side(direction, away)
            packings[direction] = (Packing(operands, labelled), Packing(sums, labelled) if sums else None)
        return packings

    @cached_property
    def _digest(self) -> bytes:
        text = repr((self.signature(), self.member.topology, self.member.strategy))
        return blake2b(text.encode(), digest_size=8).digest()

    def _label(self, direction: str, number: int) -> Tensor | None:
        """What every message of a pass carries on CPUs: of which kind of call it is, which one, and which pass."""
        if self.device.type != "cpu":
            return None
        which = 2 * number + _DIRECTIONS.index(direction)
        return torch.frombuffer(bytearray(self._digest + which.to_bytes(8, "little")), dtype=torch.uint8)


def prepare(
    member: Member,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Mask,
    scale: float | None,
    known: dict[Hashable, Call],
) -> Call:
    """Check one rank's local q, k, v and make every choice; once for calls that are alike, kept in `known`.

    Raises ValueError, before any communication.
    """
    q, k, v = tensors
    _check_tensors(q, k, v)
    if not hasattr(mask, "reach"):
        raise ValueError(f"mask={mask!r} is not a mask; use burst_plugin.Causal() or burst_plugin.Full()")
    shapes = Shapes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype)
    scale = 1.0 / math.sqrt(shapes.qk_dim) if scale is None else float(scale)
    key = (shapes, mask, scale, q.device)
    if key not in known:
        if len(known) >= _KNOWN_CALLS:
            known.clear()
        known[key] = _choose(member, shapes, mask, scale, q.device)
    call = known[key]
    member.choices = {**call.travellers, "kernel": call.kernel.name}
    return call


def _choose(member: Member, shapes: Shapes, mask: Mask, scale: float, device: torch.device) -> Call:
    """The call that these arguments make."""
    ranks = member.topology.ranks
    member.layout.check(ranks, shapes.q_len * ranks)
    member.layout.check(ranks, shapes.kv_len * ranks)
    if shapes.q_len != shapes.kv_len and mask.reach() != (None, None):
        raise ValueError(
            f"mask={mask} with {shapes.q_len} query and {shapes.kv_len} key tokens per rank has no meaning yet; "
            "use mask=Full() for cross attention, or equal lengths"
        )
    travellers = {direction: choose_traveller(member.strategy, direction, shapes) for direction in _DIRECTIONS}
    bands = frozenset(
        tile.band
        for away in set(travellers.values())
        for tiles in member.tiles(mask, shapes, away == "q").values()
        for tile in tiles
    )
    case = Case(device.type, shapes.dtype, shapes.q_heads, shapes.kv_heads, shapes.qk_dim, shapes.v_dim, bands)
    kernel = choose_kernel(member.strategy.kernel, case)
    return Call(member, shapes, mask, kernel, scale, travellers, device)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"expected q, k, v of shape [batch, local tokens, heads, head dim], got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q, k, v do not fit together: {shapes}; batches must be equal, k and v must have the same tokens and "
            "heads, q and k the same head dim"
        )
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"empty tensors cannot attend: {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads; repeat key/value heads or "
            "change the number of query heads"
        )
    kinds = {(str(x.dtype), str(x.device)) for x in (q, k, v)}
    if len(kinds) > 1 or not q.is_floating_point():
        raise ValueError(f"q, k, v must share one floating-point type and one device, got {sorted(kinds)}")
