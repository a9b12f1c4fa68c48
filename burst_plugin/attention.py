"""Attention over a sequence that is spread over the ranks of a ring: the one loop, and the autograd function.

In every visit one side, queries or keys and values, is at home and the other has travelled. What a pass reads
and sums up on either side is in `burst_plugin.passes`; which side travels is data.

Sources: RingAttention (arXiv 2310.01889) for travelling keys and values; BurstAttention (2403.09347,
algorithm 2) for travelling queries in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_plugin.context import ContextParallel
from burst_plugin.executor import Packing, Ring
from burst_plugin.kernels import Case, Kernel, Queries, choose_kernel
from burst_plugin.mask import Causal, Mask
from burst_plugin.member import Member, TileTable
from burst_plugin.passes import BackwardPass, ForwardPass, Pass, Tensors
from burst_plugin.strategy import Shapes, choose_traveller

_CAUSAL = Causal()

__all__ = ["Call", "Runner", "burst_attention", "differentiable_attention", "prepare"]


def attend(call: Call, work: Pass) -> Generator[None, None, dict[str, Tensors]]:
    """One pass of one rank: the sums of both its sides. Yields once per step, for ranks that take turns."""
    away = call.travellers[work.direction]
    home = "kv" if away == "q" else "q"
    ring, tiles = call.ring(work, away), call.tiles(away)
    at_home = work.sums(home, call.blank(work.direction, home), False)

    for visit in ring.visits():
        here = {home: work.operands[home], away: work.incoming(away, visit.operands)}
        for tile in tiles[visit.owner]:
            parts = work.visit(here["q"], here["kv"], tile)
            if parts[home]:
                at_home.add(tile.rows(home), parts[home])
            if parts[away]:
                visit.sums.add(tile.rows(away), parts[away])
        yield

    at_home.settle()
    back = yield from ring.homecoming()
    return {home: at_home.tensors, away: back}


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Generator[None, None, Tensors]:
        """This rank's program for out [B, S, Hq, Dv] and lse [B, Hq, S], float32 or wider."""
        sums = yield from attend(self, ForwardPass(self.kernel, self.scale, q, k, v))
        return sums["q"]

    def backward(self, queries: Queries, keys: Tensors) -> Generator[None, None, Tensors]:
        """This rank's program for dq, dk, dv, float32 or wider."""
        sums = yield from attend(self, BackwardPass(self.kernel, self.scale, self.shapes, queries, keys))
        return (*sums["q"], *sums["kv"])

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

    def ring(self, work: Pass, away: str) -> Ring:
        """The ring that carries side `away` in this pass."""
        operands, sums = self._packings[work.direction]
        self.member.count(operands, sums)
        return Ring(
            self.member.plan(sums is not None),
            self.member.transport,
            (operands, work.outgoing(away)),
            (sums, partial(work.sums, away)) if sums else None,
            direction=work.direction,
            trace=self.member.trace,
        )

    @cached_property
    def _packings(self) -> dict[str, tuple[Packing, Packing | None]]:
        """How operands and, if there are any, sums travel, by direction."""
        label = None
        if self.device.type == "cpu":
            text = repr((self.signature(), self.member.topology, self.member.strategy))
            label = torch.frombuffer(bytearray(blake2b(text.encode(), digest_size=16).digest()), dtype=torch.uint8)
        packings = {}
        for direction, away in self.travellers.items():
            operands, sums = self.shapes.side(direction, away)
            packings[direction] = (Packing(operands, label), Packing(sums, label) if sums else None)
        return packings


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
    shapes = Shapes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype)
    scale = 1.0 / math.sqrt(shapes.qk_dim) if scale is None else float(scale)
    key = (shapes, mask, scale, q.device)
    if key not in known:
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


_DIRECTIONS = ("forward", "backward")


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


class Runner(Protocol):
    """Runs the two passes, on whatever ranks there are in this process."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        ...

    def backward(self, queries: Queries, keys: Tensors) -> Tensors:
        """dq, dk, dv."""
        ...


@dataclass(frozen=True)
class _LocalRunner:
    """This process is one rank."""

    call: Call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self._finish(self.call.forward(q, k, v))
        return out, lse

    def backward(self, queries: Queries, keys: Tensors) -> Tensors:
        return self._finish(self.call.backward(queries, keys))

    def _finish(self, program: Generator[None, None, Tensors]) -> Tensors:
        with self.call.member.exclusive(self.call.device):
            while True:
                try:
                    next(program)
                except StopIteration as stop:
                    done: Tensors = stop.value
                    return done


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out and lse, nothing of the ring; any number of calls may await their backward pass."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = runner.forward(q, k, v)
        out = out.to(q.dtype)
        ctx.runner = runner
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = ctx.runner.backward(Queries(q, dout.contiguous(), out, lse), (k, v))
        wanted = zip(ctx.needs_input_grad[1:], grads, (q, k, v), strict=True)
        return (None, *(grad.to(x.dtype) if wants else None for wants, grad, x in wanted))


def differentiable_attention(runner: Runner, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a runner, with gradients for q, k and v; lse has none."""
    out, lse = _Attention.apply(runner, q, k, v)  # type: ignore[no-untyped-call]
    return out, lse


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextParallel,
    *,
    mask: Mask = _CAUSAL,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries on the keys of all ranks of `cp`; all ranks call it together.

    Args:
        q: [B, S_local, Hq, D], float64, float32, bfloat16 or float16.
        k, v: [B, S_local, Hkv, D]; Hq must be a multiple of Hkv.
        cp: the context-parallel group; its layout says which tokens the rows are (`cp.shard`, `cp.positions`).
        mask: `Causal()` (the default) or `Full()`.
        softmax_scale: factor on q.k; 1 / sqrt(D) by default.
        return_lse: also return lse [B, Hq, S_local], float32 (float64 for float64), natural logarithm, without
            gradient.

    Returns:
        out [B, S_local, Hq, D] in the type of q.

    Raises:
        ValueError: on every rank and before data moves, for shapes, types or options that do not fit, here or
            between ranks; says what was got, what was expected, and what to change.
        RingError: a rank was lost; names it and the step at which it was missed.
    """
    problem, call = "", None
    try:
        call = prepare(cp.member, (q, k, v), mask, softmax_scale, cp.calls)
    except ValueError as error:
        problem = str(error)
    cp.agree(call.signature() if call else {}, problem)
    assert call is not None, "agree raises if any rank has a problem"
    out, lse = differentiable_attention(_LocalRunner(call), q, k, v)
    return (out, lse) if return_lse else out
