"""The most that one rank of a ring holds at once in a backward pass of attention, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch

from burst_plugin import Full, Strategy, Topology, VirtualRing, virtual
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.compute.shapes import Shapes
from burst_plugin.virtual import VirtualRingAttention
from tests.support.fake_gpu import GPU, fake_gpu
from tests.support.live_bytes import LiveBytes

T = TypeVar("T")
Program = Generator[None, None, T]


class Pass:
    """An autograd function's context, without autograd: its passes are called by themselves."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def apply(self, plans: Any, number: Any, *tensors: Any) -> tuple[Any, ...]:
        self.needs_input_grad = (False, False, *(x is not None for x in tensors))
        return VirtualRingAttention.forward(self, plans, number, *tensors)


def _attend(ring: VirtualRing, shapes: Shapes, tokens: int) -> None:
    """Run a forward pass on as many tokens of all ranks, with latents if the shapes have some."""

    def made(heads: int, dim: int) -> torch.Tensor:
        return torch.empty(1, tokens, heads, dim, dtype=shapes.dtype, device=GPU)

    q = made(shapes.q_heads, shapes.qk_dim)
    if shapes.latent is None:
        ring.attention(q, made(shapes.kv_heads, shapes.qk_dim), made(shapes.kv_heads, shapes.v_dim), mask=Full())
        return
    rank, shared = shapes.latent
    rows = shapes.q_heads * (shapes.qk_dim - shared + shapes.v_dim)
    weight = torch.empty(rows, rank, dtype=shapes.dtype, device=GPU)
    ring.latent_attention(q, made(1, rank), made(1, shared), weight=weight, mask=Full())


def backward_bytes(topology: Topology, shapes: Shapes, **options: Any) -> LiveBytes:
    """Return what the last rank holds that it made itself: out, lse, gradients, buffers; not its q, k, v and dout.

    `shapes` are those of a rank. Every rank has work at every visit.
    """
    last, done, lockstep = topology.ranks - 1, Pass(), virtual.lockstep

    def watched(program: Program[T], rank: int, live: LiveBytes) -> Program[T]:
        while True:
            live.counts = rank == last
            try:
                next(program)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            finally:
                live.counts = False
            yield

    def of_all(programs: Sequence[Program[T]]) -> list[T]:
        return lockstep([watched(program, rank, live) for rank, program in enumerate(programs)])

    with (
        fake_gpu(),
        mock.patch.object(VirtualRingAttention, "apply", done.apply),
        LiveBytes() as live,
        mock.patch.object(virtual, "lockstep", of_all),
    ):
        live.counts = False
        ring = VirtualRing(
            topology, Strategy(kernel="torch_flash", **options), network=CopyNetwork(topology.ranks, GPU)
        )
        _attend(ring, shapes, topology.ranks * shapes.q_len)
        live.reset()
        shape = (1, shapes.q_len, shapes.q_heads, shapes.v_dim)
        douts: list[Any] = []
        for _ in range(topology.ranks):
            douts += [torch.empty(shape, dtype=shapes.dtype, device=GPU), None, None]
        VirtualRingAttention.backward(done, *douts)
    return live
