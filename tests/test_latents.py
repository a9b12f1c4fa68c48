"""Latents that travel in place of keys and values: exact on any ring, and few bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Mask,
    PerHeadGroup,
    Scores,
    SlidingWindow,
    Strategy,
    Topology,
    VirtualRing,
    latent_attention,
)
from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.latents import sends_latents
from tests.support.draws import FEW_RANKS, MANY_RANKS, masks
from tests.support.ranks import run_ranks
from tests.support.reference import Problem, attention

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}
HEADS, OWN, VALUE, LATENT = 4, 6, 5, 8


class Whole(NamedTuple):
    """Tensors of a whole sequence, and of the parameters; without a weight queries are in the space of latents."""

    q: Tensor
    latents: Tensor
    shared_keys: Tensor
    weight: Tensor | None
    dout: Tensor
    sink: Tensor | None = None
    selection: Tensor | None = None

    @classmethod
    def draw(cls, length: int, *, absorbed: bool = False, shared: int = 2, dtype: Any = torch.float64) -> Whole:
        """Draw standard normal tensors, batch 2."""
        generator = torch.Generator().manual_seed(length)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        return cls(
            normal(2, length, HEADS, (LATENT if absorbed else OWN) + shared),
            normal(2, length, 1, LATENT),
            normal(2, length, 1, shared),
            None if absorbed else 0.4 * normal(HEADS * (OWN + VALUE), LATENT),
            normal(2, length, HEADS, LATENT if absorbed else VALUE),
        )

    def results(self, ring: VirtualRing, **options: Any) -> list[Tensor]:
        """Return out, lse, and the gradient of each tensor."""
        inputs = [x.clone().requires_grad_() for x in (*self[:4], self.sink) if x is not None]
        given_ = iter(inputs)
        q, c, shared, weight, sink = (None if x is None else next(given_) for x in (*self[:4], self.sink))
        extras = {"sink": sink, "selection": self.selection}
        out, lse = ring.latent_attention(q, c, shared, weight=weight, **options, **extras)
        return [out.detach(), lse, *torch.autograd.grad(out, inputs, self.dout)]

    def truth(self, mask: Mask) -> list[Tensor]:
        """Return out and gradients in float64, from keys and values that are made at once."""
        inputs = [x.double().requires_grad_() for x in (*self[:4], self.sink) if x is not None]
        given_ = iter(inputs)
        q, c, shared, weight, sink = (None if x is None else next(given_) for x in (*self[:4], self.sink))
        if weight is None:
            k, v = torch.cat((c, shared), -1), c
        else:
            up = (c.squeeze(2) @ weight.t()).unflatten(-1, (HEADS, -1))
            k, v = torch.cat((up[..., :OWN], shared.expand(-1, -1, HEADS, -1)), -1), up[..., OWN:]
        out = attention(Problem(q, k, v, self.dout, sink, None, self.selection), mask, Scores())
        grads = torch.autograd.grad(out, inputs, self.dout.double())
        return [out.detach(), *(grad.nan_to_num(0.0) for grad in grads)]


def check(whole: Whole, ring: VirtualRing, mask: Mask, **options: Any) -> None:
    """Compare with one rank, and bytes with those of the schedule."""
    out, _, *grads = whole.results(ring, mask=mask, **options)
    truth = whole.truth(mask)
    for number, (found, exact) in enumerate(zip((out, *grads), truth, strict=True)):
        size = max(float(exact.norm()), 0.5 * exact.numel() ** 0.5)
        error = float((found.double() - exact).norm())
        assert error <= BOUNDS[whole.q.dtype] * size, (number, error, size)
    for rank in range(len(ring.rank_states)):
        assert ring.traffic(rank) == ring.expected_traffic(rank)


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_drawn_calls_are_exact(data: st.DataObject) -> None:
    draw = data.draw
    topology = Topology(*draw(st.sampled_from([*FEW_RANKS, *MANY_RANKS])))
    length = draw(st.integers(1, 48))  # also fewer tokens than ranks
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]))
    shape = {"absorbed": draw(st.booleans()), "shared": draw(st.sampled_from([0, 2]))}
    whole = Whole.draw(length, **shape, dtype=dtype)
    selects = draw(st.booleans())
    if selects:
        listed = Problem(whole.q, whole.latents, whole.latents, whole.dout).with_selection(1, draw(st.integers(1, 9)))
        whole = whole._replace(selection=listed.selection)
    if draw(st.booleans()):
        whole = whole._replace(sink=torch.linspace(-1, 1, HEADS).to(dtype))
    side = st.just("kv") if selects else st.sampled_from(["kv", "q", "auto", "both"])
    strategy = Strategy(
        layout=draw(st.sampled_from(["zigzag", "contiguous"])), forward=draw(side), backward=draw(side)
    )
    mask = draw(masks(length, length))
    check(whole, VirtualRing(topology, strategy, seed=draw(st.integers(0, 9))), mask)


def test_bytes_of_deepseek_v3() -> None:
    expanded = Shapes(1, 4096, 4096, 128, 128, 192, 128, torch.bfloat16)
    latents = expanded._replace(latent=(512, 64))
    forward = hop_bytes(expanded, "forward", "kv") / hop_bytes(latents, "forward", "kv")
    backward = min(hop_bytes(expanded, "backward", side) for side in ("q", "kv")) / hop_bytes(
        latents, "backward", "kv"
    )
    assert forward > 71
    assert backward > 52


def _kept(call: Callable[..., Any], *inputs: Tensor, **options: Any) -> int:
    """Return how many numbers a call keeps for its backward pass."""
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        call(*(x.requires_grad_() for x in inputs), **options)
    return sum(kept)


def test_less_is_kept_for_the_backward_pass() -> None:
    whole, ring = Whole.draw(32), VirtualRing(Topology(1, 2))
    k, v = torch.randn(2, 32, HEADS, OWN + 2).double(), torch.randn(2, 32, HEADS, VALUE).double()
    less = _kept(ring.attention, whole.q, k, v) - _kept(ring.latent_attention, *whole[:3], weight=whole.weight)
    weights = 2 * HEADS * (OWN + VALUE) * LATENT  # of both ranks
    assert less == 2 * 32 * (HEADS * (OWN + 2 + VALUE) - LATENT - 2) - weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight": torch.zeros(HEADS * (OWN + VALUE), LATENT + 1)},
            r"expected a weight \[4 heads \* \(6 \+ value dim\), 8\]",
        ),
        ({"weight": torch.zeros(HEADS * OWN, LATENT)}, "expected a weight"),
        ({"weight": None}, "expected queries of 8 \\+ 2 numbers, since there is no weight"),
        ({"latents": torch.zeros(2, 16, 2, LATENT)}, r"latents and shared_keys \[batch, local tokens, 1, width\]"),
        ({"shared_keys": torch.zeros(2, 15, 1, 2)}, r"latents and shared_keys \[batch, local tokens, 1, width\]"),
        ({"weight": torch.zeros(HEADS * (OWN + VALUE), LATENT).bfloat16()}, "must share one floating-point type"),
    ],
)
def test_tensors_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    whole = Whole.draw(16, dtype=torch.float32)._replace(**changes)
    with pytest.raises(ValueError, match=message):
        VirtualRing(Topology(1, 2)).latent_attention(*whole[:3], weight=whole.weight)


@pytest.mark.parametrize("options", [{"ulysses_degree": 2}, {"parts": 2}, {"mesh_degree": 2}])
def test_heads_that_are_apart_are_refused(options: dict[str, Any]) -> None:
    whole = Whole.draw(16)
    with pytest.raises(ValueError, match="latents belong to all heads, but here"):
        VirtualRing(Topology(1, 4), Strategy(**options)).latent_attention(*whole[:3], weight=whole.weight)
    mask = PerHeadGroup((Causal(), SlidingWindow(3)))
    with pytest.raises(ValueError, match="latents belong to all heads, but the mask has groups of heads"):
        VirtualRing(Topology(1, 2)).latent_attention(*whole[:3], weight=whole.weight, mask=mask)


def _layer(cp: ContextParallel, mask: Mask, q: Tensor, c: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
    return latent_attention(q, c, shared, cp, weight=weight, mask=mask)


def _on_ranks(rank: int) -> dict[str, Any]:
    whole, mask = Whole.draw(40), Documents((0, 7, 40))
    found: dict[str, Any] = {}
    for keep in ("none", "all"):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, keep_attention=keep)
        q, c, shared, dout = (cp.shard(x) for x in (*whole[:3], whole.dout))
        inputs = [x.clone().requires_grad_() for x in (q, c, shared, whole.weight) if x is not None]

        layer = partial(_layer, cp, mask)
        out = checkpoint(layer, *inputs, use_reentrant=False)
        grads = list(torch.autograd.grad(out, inputs, dout))
        dist.all_reduce(grads[-1])
        found[keep] = [*(cp.unshard(x.detach()) for x in (out, *grads[:3])), grads[-1]]
        assert cp.traffic() == cp.expected_traffic()
        found[f"{keep} sent"] = sum(n for link in cp.traffic().values() for n in link.values())
        options: dict[str, Any] = {"latents": "expand"}
        found["expands"] = not sends_latents(ContextParallel(dist.group.WORLD, **options))
        with pytest.raises(ValueError, match="latents='send' is not possible: a reason; use latents='auto'"):
            sends_latents(ContextParallel(dist.group.WORLD, latents="send"), "a reason")
        with pytest.raises(ValueError, match=re.escape("ulysses_degree=4")):
            sends_latents(ContextParallel(dist.group.WORLD, latents="send", ulysses_degree=4))
    return found


def test_real_ranks_and_checkpoints() -> None:
    truth = Whole.draw(40).truth(Documents((0, 7, 40)))
    for found in run_ranks(_on_ranks, 4):
        for keep in ("none", "all"):
            for x, exact in zip(found[keep], truth, strict=True):
                torch.testing.assert_close(x, exact, rtol=1e-11, atol=1e-11)
        assert found["all sent"] < found["none sent"], "what is kept is not sent again"
        assert found["expands"]
