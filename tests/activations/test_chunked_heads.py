"""Heads in chunks: the same outputs and gradients, and as many passes of the ring, as with all heads at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin import ContextParallel, Strategy, burst_attention
from burst_plugin.activations.chunked_heads import Linear, chunked_heads
from burst_plugin.activations.recomputed_chunks import linear
from tests.support.ranks import run_ranks

TOKENS, HEADS, KV_HEADS, DIM, HIDDEN = 32, 8, 4, 4, 24
Wrapped = Callable[..., Tensor]
CHECKPOINTS: dict[str, Wrapped] = {
    "none": lambda function, *args: function(*args),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "nested": lambda function, *args: checkpoint(
        lambda *inner: checkpoint(function, *inner, use_reentrant=False), *args, use_reentrant=False
    ),
}


class Layer:
    """Attention of a normalized input: projections to queries, keys and values, then to an output, in float64."""

    def __init__(self, strategy: Strategy, chunks: int, dtype: torch.dtype = torch.float64) -> None:
        self.cp, self.chunks, self.passes = ContextParallel(dist.group.WORLD, strategy=strategy), chunks, 0
        drawn = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=drawn).bfloat16().to(dtype)

        sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        self.weights = [torch.nn.Parameter(draw(size, HIDDEN) / 4) for size in sizes]
        self.bias = torch.nn.Parameter(draw(HEADS * DIM))
        self.gain, self.output = torch.nn.Parameter(draw(DIM)), torch.nn.Parameter(draw(HIDDEN, HEADS * DIM) / 4)
        self.x = self.cp.shard(draw(2, TOKENS, HIDDEN)).requires_grad_()

    def attend(self, number: int, x: Tensor, linear: Linear) -> Tensor:
        of_q, of_k, of_v = (weight.chunk(self.chunks)[number] for weight in self.weights)
        bias = self.bias.chunk(self.chunks)[number]
        projected = linear(x, of_q, bias), x @ of_k.t(), linear(x, of_v, None)  # and one in a way of its own
        q, k, v = (each.view(*x.shape[:2], -1, DIM) for each in projected)
        q, k = q * self.gain, k * self.gain
        return burst_attention(q, k, v, self.cp).flatten(2)

    def __call__(self, x: Tensor) -> Tensor:
        heads = chunked_heads(self.attend, x, [*self.weights, self.bias, self.gain], chunks=self.chunks)
        return x + heads @ self.output.t()

    def gradients(self, wrapped: Wrapped, times: int = 1) -> list[Tensor]:
        """Return the output of two layers with the same weights, and the gradients of a number that depends on it."""
        out = wrapped(self, wrapped(self, self.x))
        wanted = [self.x, *self.weights, self.bias, self.gain, self.output]
        loss = out.square().sum()
        for _ in range(times):
            for each in wanted:
                each.grad = None
            loss.backward(retain_graph=times > 1)
        return [out.detach(), *(each.grad for each in wanted)]

    def sent(self) -> int:
        """Return the bytes that this rank has sent since the last call, which are those of its schedules."""
        sent = self.cp.traffic()
        assert sent == self.cp.expected_traffic()
        self.cp.reset_traffic()
        return sum(nbytes for kinds in sent.values() for nbytes in kinds.values())


def _same(rank: int, degree: int) -> dict[str, float]:
    """Return the largest relative differences between heads in chunks and all at once, by case."""
    found = {}
    for keep in ("none", 0.5, "all"):
        strategy = Strategy(ulysses_degree=degree, keep_attention=keep)
        expected = Layer(Strategy(ulysses_degree=degree), 1).gradients(CHECKPOINTS["none"])
        for name, wrapped in CHECKPOINTS.items():
            for chunks, times in ((2, 1), (4, 1), (4, 2)):
                if times > 1 and name in ("reentrant", "nested"):
                    continue  # a graph that is kept has other tests
                actual = Layer(strategy, chunks).gradients(wrapped, times)
                worst = max(float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))
                found[f"{keep} {name} {chunks} chunks, {times} times"] = worst
    return found


@pytest.mark.parametrize("degree", [1, 2])
def test_gradients_are_those_of_all_heads_at_once(degree: int) -> None:
    for found in run_ranks(_same, 2 * degree, degree):
        assert {case: worst for case, worst in found.items() if worst > 1e-12} == {}
        assert len(found) == 3 * (2 * 3 + 2 * 2)


def _passes(rank: int) -> dict[str, float]:
    """Return by case how many times the bytes of one forward pass of the ring a step sends, besides one backward."""
    plain = Layer(Strategy(), 4)
    plain.gradients(CHECKPOINTS["none"])
    both = plain.sent()
    with torch.no_grad():
        plain(plain(plain.x))
    forward = plain.sent()
    found = {}
    for keep, (name, wrapped) in product(("none", "all"), CHECKPOINTS.items()):
        layer = Layer(Strategy(keep_attention=keep), 4)
        layer.gradients(wrapped)
        found[f"{keep} {name}"] = 1 + (layer.sent() - both) / forward
    return found


def test_the_ring_runs_forward_as_often_as_with_all_heads_at_once() -> None:
    once = {"none none": 1, "all none": 1, "all reentrant": 1, "all non-reentrant": 1, "all nested": 1}
    twice = {"none reentrant": 2, "none non-reentrant": 2, "none nested": 2}
    for found in run_ranks(_passes, 4):
        assert found == once | twice


def _low_precision(rank: int) -> list[float]:
    """Return the errors of the input's gradient in bfloat16, for several numbers of chunks."""
    exact = Layer(Strategy(), 1).gradients(CHECKPOINTS["none"])[1]
    found = [Layer(Strategy(), chunks, torch.bfloat16).gradients(CHECKPOINTS["none"])[1] for chunks in (1, 2, 4)]
    return [float((each.double() - exact).norm() / exact.norm()) for each in found]


def test_in_bfloat16_errors_are_those_of_all_heads_at_once() -> None:
    (whole, *chunked), *_ = run_ranks(_low_precision, 2)
    assert max(chunked) <= 1.2 * whole, (whole, chunked)


def test_a_weight_that_is_listed_twice_gets_its_gradient_once() -> None:
    """As in `[*a.parameters(), *b.parameters()]` of projections with tied weights."""
    cp, weight = ContextParallel(None), torch.nn.Parameter(torch.eye(8, dtype=torch.float64))

    def attend(number: int, x: Tensor, linear: Linear) -> Tensor:
        q, v = (linear(x, weight, None).unflatten(-1, (2, 4)) for _ in range(2))
        return burst_attention(q, q, v, cp).flatten(2)

    def grads(listed: list[Tensor]) -> tuple[Tensor, ...]:
        x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(1, 6, 8).requires_grad_()
        out = chunked_heads(attend, x, listed, chunks=2) if listed else torch.cat([attend(0, x, linear)] * 2, -1)
        return torch.autograd.grad(out.square().sum(), (weight, x))

    torch.testing.assert_close(grads([weight, weight]), grads([]))


def test_weights_that_are_not_listed_or_have_changed_are_refused() -> None:
    """As under FSDP, where a module's weights may be views of one tensor; and as autograd does for what it saves."""
    x, flat = torch.ones(1, 4, 4, requires_grad=True), torch.nn.Parameter(torch.ones(2 * 16))
    listed, other = (each.view(4, 4) for each in flat.split(16))

    def attend(number: int, x: Tensor, linear: Linear) -> Tensor:
        return linear(x, listed.chunk(2)[number], None) + x @ other.chunk(2)[number].t()

    out = chunked_heads(attend, x, [listed], chunks=2)
    with pytest.raises(ValueError, match=r"attention on a few heads at a time uses a trained tensor \[32\] that"):
        out.sum().backward()
    out = chunked_heads(attend, x, [listed, other], chunks=2)
    with torch.no_grad():
        flat.mul_(2)
    with pytest.raises(RuntimeError, match=r"a tensor \[4, 4\] of what runs in chunks, .* was modified in place"):
        out.sum().backward()
