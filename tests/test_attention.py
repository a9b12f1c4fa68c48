"""All ranks in one process, against float64: every layout x topology x moving side x heads, out, dq, dk and dv."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    PrefixLM,
    Scores,
    SlidingWindow,
    Strategy,
    Topology,
    VirtualRing,
    burst_attention,
    key_padding,
)
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.sequence.layout import LAYOUTS
from burst_plugin.sequence.mask import Region
from tests.support.draws import runnable
from tests.support.reference import Problem, Result, errors, reference

TOPOLOGIES = [(1, 4), (2, 2), (4, 1), (2, 4), (3, 2)]
HEADS = [(8, 8), (8, 2), (8, 1)]
FP32_BOUND = 2e-6


def run(ring: VirtualRing, problem: Problem, mask: Mask) -> Result:
    """Return out, dq, dk, dv; check that every rank sent what its schedule counts."""
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = ring.attention(q, k, v, mask=mask)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    for rank in range(ring.network.ranks):
        assert ring.traffic(rank) == ring.expected_traffic(rank)
    return Result(out.detach(), *grads)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_in_fp32(layout: str, topology: tuple[int, int], backward: str, heads: tuple[int, int]) -> None:
    problem = Problem.draw(2 * 3 * topology[0] * topology[1], heads)
    for mask, parts in ((Causal(), 1), (Full(), min(2, heads[1]))):
        truth = reference(problem, mask)
        for schedule in SCHEDULES:
            strategy = Strategy(layout=layout, backward=backward, schedule=schedule, parts=parts)
            found = errors(run(VirtualRing(Topology(*topology), strategy), problem, mask), truth)
            assert max(found.values()) < FP32_BOUND, found


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("kernel", ["torch_cpu", "reference"])
@pytest.mark.parametrize("forward", ["q", "kv"])
def test_exact_with_every_kernel_and_moving_side_in_fp64(forward: str, kernel: str, backward: str) -> None:
    strategy = Strategy(forward=forward, backward=backward, kernel=kernel)
    for layout, mask in itertools.product(LAYOUTS, (Causal(), Full())):
        problem = Problem.draw(36, (4, 2), dtype=torch.float64)
        ring = VirtualRing(Topology(3, 2), Strategy(**{**strategy.__dict__, "layout": layout}))
        found = errors(run(ring, problem, mask), reference(problem, mask))
        assert max(found.values()) < 1e-14, found


@functools.cache
def bf16_on_one_rank(kernel: str, heads: tuple[int, int]) -> tuple[Problem, Result, dict[str, float]]:
    """Return a problem, the truth, and the errors of a kernel on one rank."""
    problem = Problem.draw(512, heads, dim=32, dtype=torch.bfloat16)
    truth = reference(problem, Causal())
    return problem, truth, errors(run(VirtualRing(Topology(1, 1), Strategy(kernel=kernel)), problem, Causal()), truth)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 4)], ids=["2 ranks", "8 ranks"])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kernel", ["torch_cpu", "reference"])
def test_bf16_is_within_a_fifth_of_the_same_kernel_on_one_rank(
    kernel: str, heads: tuple[int, int], backward: str, ranks: tuple[int, int]
) -> None:
    problem, truth, alone = bf16_on_one_rank(kernel, heads)
    ring = VirtualRing(Topology(*ranks), Strategy(kernel=kernel, backward=backward))
    for name, error in errors(run(ring, problem, Causal()), truth).items():
        assert error <= 1.2 * alone[name], (name, error, alone[name])


BF16_MASKS = [
    Causal(),
    SlidingWindow(60),
    SlidingWindow(30, 20),
    Causal() & Documents((0, 100, 110, 400, 512)),
    PrefixLM(130),
    BidirectionalSpans(((10, 90), (100, 180), (180, 260), (300, 512)), (0, 1, 2, 0)),
    BlockMask.of(torch.rand(16, 16, generator=torch.Generator().manual_seed(3)) > 0.3, 32),
    Causal() & key_padding(torch.arange(512).expand(2, 512) >= torch.tensor([[0], [70]])),
]


@pytest.mark.parametrize("mask", BF16_MASKS, ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("kernel", runnable(torch.float64))
def test_masks_in_bf16_are_within_a_fifth_of_the_same_kernel_on_one_rank(mask: Mask, kernel: str) -> None:
    problem = Problem.draw(512, (4, 2), dim=32, dtype=torch.bfloat16).with_sink()
    truth = reference(problem, mask)

    def error(topology: Topology, layout: str, backward: str) -> dict[str, float]:
        ring = VirtualRing(topology, Strategy(kernel=kernel, backward=backward, layout=layout))
        inputs = [x.clone().requires_grad_() for x in (*problem[:3], problem.sink) if x is not None]
        out, _ = ring.attention(*inputs[:3], mask=mask, sink=inputs[3])
        return errors(Result(out.detach(), *torch.autograd.grad(out, inputs, problem.dout)), truth)

    alone = error(Topology(1, 1), "contiguous", "kv")
    for layout, backward in itertools.product(LAYOUTS, ("q", "kv")):
        for name, found in error(Topology(2, 2), layout, backward).items():
            assert found <= 1.2 * alone[name], (layout, backward, name, found, alone[name])


@pytest.mark.parametrize("backward", ["q", "kv"])
def test_float16_with_large_outputs_does_not_overflow(backward: str) -> None:
    problem = Problem.draw(32, (2, 2), dtype=torch.float16)
    problem = problem._replace(v=problem.v * 1e4, dout=problem.dout * 1e-4)
    found = errors(
        run(VirtualRing(Topology(2, 2), Strategy(backward=backward)), problem, Causal()),
        reference(problem, Causal()),
    )
    assert max(found.values()) < 4e-3, found


@pytest.mark.parametrize("seed", range(5))
def test_the_mood_of_the_network_does_not_change_a_bit(seed: int) -> None:
    problem = Problem.draw(48, (4, 2))
    results = [run(VirtualRing(Topology(3, 2), seed=s), problem, Causal()) for s in (0, seed)]
    assert all(torch.equal(x, y) for x, y in zip(*(result[:4] for result in results), strict=True))


def test_different_head_dims_with_a_kernel_that_has_them() -> None:
    q, k, v = torch.randn(1, 32, 4, 12), torch.randn(1, 32, 2, 12), torch.randn(1, 32, 2, 8)
    one, _ = VirtualRing(Topology(1, 1)).attention(q, k, v)
    four, _ = VirtualRing(Topology(2, 2)).attention(q, k, v)
    assert four.shape == (1, 32, 4, 8)
    torch.testing.assert_close(four, one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_out_and_gradients_have_the_type_of_the_inputs(dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2), dtype=dtype)[:3])
    out, lse = VirtualRing(Topology(1, 2)).attention(q, k, v)
    out.sum().backward()
    assert {x.dtype for x in (out, q.grad, k.grad, v.grad) if x is not None} == {dtype}
    assert lse.dtype is torch.promote_types(dtype, torch.float32)


def test_cross_attention_without_a_mask_may_have_other_lengths() -> None:
    q, kv = torch.randn(1, 16, 2, 8), torch.randn(1, 48, 2, 8)
    one, _ = VirtualRing(Topology(1, 1)).attention(q, kv, kv, mask=Full())
    four, _ = VirtualRing(Topology(2, 2)).attention(q, kv, kv, mask=Full())
    torch.testing.assert_close(four, one)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 8, 4, 8), (1, 8, 3, 8), (1, 8, 3, 8)), "4 query heads are not a multiple of 3 key/value heads"),
        (((1, 8, 2, 8), (1, 8, 4, 8), (1, 8, 4, 8)), "2 query heads are not a multiple of 4"),
        (((8, 4, 8), (8, 4, 8), (8, 4, 8)), r"expected q, k, v of shape \[batch"),
        (((1, 8, 4, 8), (1, 8, 4, 8), (1, 6, 4, 8)), "do not fit together"),
        (((1, 8, 4, 8), (1, 8, 4, 16), (1, 8, 4, 8)), "do not fit together"),
        (((2, 8, 4, 8), (1, 8, 4, 8), (1, 8, 4, 8)), "do not fit together"),
        (((2, 8, 4, 8), (2, 8, 4, 8), (1, 8, 4, 8)), "do not fit together"),
        (((1, 8, 0, 8), (1, 8, 4, 8), (1, 8, 4, 8)), "without batch, heads or head dim"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        burst_attention(q, k, v, ContextParallel())


def test_types_that_differ_are_named() -> None:
    q, k = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"share one floating-point type.*float32.*float64"):
        burst_attention(q, k, k, ContextParallel())
    with pytest.raises(ValueError, match="floating-point"):
        burst_attention(*[torch.zeros(1, 8, 4, 8, dtype=torch.int64)] * 3, ContextParallel())


def test_softmax_scale_is_used() -> None:
    cp = ContextParallel()
    q, k, v = Problem.draw(8, (2, 2))[:3]
    scaled = burst_attention(q, k, v, cp, scores=Scores(scale=2 * 8**-0.5))
    assert torch.equal(scaled, burst_attention(q, k, v, cp, softmax_scale=2 * 8**-0.5))
    torch.testing.assert_close(scaled, VirtualRing(Topology(1, 2)).attention(q, k, v, softmax_scale=2 * 8**-0.5)[0])
    with pytest.raises(ValueError, match=r"got softmax_scale=2.0 and scores with scale=1.0, which mean the same"):
        burst_attention(q, k, v, cp, softmax_scale=2.0, scores=Scores(scale=1.0))
    torch.testing.assert_close(scaled, burst_attention(2 * q, k, v, cp))


@dataclass(frozen=True)
class Nothing(Mask):
    """A mask under which nothing attends to anything."""

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        return ()


@pytest.mark.parametrize(
    ("topology", "forward"), [(Topology(2, 2), "q"), (Topology(2, 2), "kv"), (Topology(1, 1), "q")], ids=str
)
def test_what_attends_to_nothing_is_zero(topology: Topology, forward: str) -> None:
    ring = VirtualRing(topology, Strategy(forward=forward, kernel="reference"))
    q, k, v = Problem.draw(16, (2, 2))[:3]
    out, lse = ring.attention(q, k, v, mask=Nothing())
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu], ids=str)
def test_types_of_8_bits_are_refused(dtype: torch.dtype) -> None:
    x, cp, ring = torch.zeros(1, 4, 2, 8), ContextParallel(), VirtualRing(Topology(1, 2))
    narrow = x.to(dtype)
    message = f"q has type {dtype}, but attention is computed in float64, float32, bfloat16 or float16; cast it with"
    with pytest.raises(ValueError, match=message):
        burst_attention(narrow, narrow, narrow, cp)
    with pytest.raises(ValueError, match=message):
        ring.attention(narrow, narrow, narrow)
    with pytest.raises(ValueError, match=r"sink has type torch\.float8"):
        burst_attention(x, x, x, cp, sink=torch.zeros(2).to(dtype))
    with pytest.raises(ValueError, match=r"bias has type torch\.float8"):
        burst_attention(x, x, x, cp, bias=torch.zeros(1, 1, 4, 4).to(dtype))
