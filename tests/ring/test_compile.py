"""`torch.compile` of a model that contains burst attention: one graph break per attention, and right gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_plugin import (
    ContextParallel,
    Scores,
    SlidingWindow,
    Topology,
    VirtualRing,
    burst_attention,
    recurrent,
    shard_batch,
)
from burst_plugin.inference import KVCache
from burst_plugin.towers.rows import to_holders
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Projections, attention with a mask made on the way, and something after it."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cp, self.qkv, self.out = cp, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, window: int) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).unbind(2)
        attended = burst_attention(
            q, k, v, self.cp, mask=SlidingWindow(window), softmax_scale=0.3, scores=Scores(softcap=2.0)
        )
        return torch.sin(self.out(attended.flatten(2)))


class Counter:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def _grads(model: nn.Module, compiled: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = compiled(compiled(x, 5), 3)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _compiled_like_eager(rank: int) -> tuple[int, float]:
    """(graphs, largest difference) of two attentions under the compiler."""
    cp = ContextParallel(dist.group.WORLD if dist.is_initialized() else None)
    model, counter = Block(cp), Counter()
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    expected = _grads(model, model, x)
    compiled = torch.compile(model, backend=counter)
    differences = [
        float((got - want).abs().max())
        for _ in range(3)
        for got, want in zip(_grads(model, compiled, x), expected, strict=True)
    ]
    return counter.graphs, max(differences)


def test_one_break_per_attention_and_the_same_gradients() -> None:
    for graphs, difference in run_ranks(_compiled_like_eager, 2):
        assert graphs == 3, "one before the attention, again for the other window, and one after it; for all steps"
        assert difference < 1e-6


def _turns(cp: ContextParallel, counter: Counter | None) -> list[Tensor]:
    """A prompt and a token in a cache, unsharded keys and a cut batch, compiled or not."""
    generator = torch.Generator().manual_seed(cp.rank)
    weight, whole = torch.randn(8, 8, generator=generator), torch.randn(1, 9, 2, 8)
    cache, batch = KVCache(cp, 1), {"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}

    def step(x: Tensor, count: int) -> Tensor:
        turn = cache.begin([count])
        own = torch.sin(turn.take(x) @ weight)
        out = cache.attend(0, own, own, own, scores=Scores(softcap=2.0)) * 2
        return cache.gather(out, last=True).cos()

    def looked_at(x: Tensor) -> Tensor:
        ids = shard_batch(batch, cp)["input_ids"]
        return cp.unshard(torch.sin(x @ weight)).cos() * ids.sum()

    if counter is not None:
        step, looked_at = torch.compile(step, backend=counter), torch.compile(looked_at, backend=counter)
    with torch.no_grad():
        return [step(whole, 9), step(whole[:, :1], 1), looked_at(whole[:, :8])]


def _virtual(counter: Counter | None) -> list[Tensor]:
    """Three layers of all ranks in one process, compiled or not, with their gradients."""
    ring, x = VirtualRing(Topology(1, 2)), torch.randn(1, 8, 2, 8, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()

    def layers(x: Tensor) -> Tensor:
        x = torch.sin(ring.attention(x * 2, x, x, mask=SlidingWindow(5))[0])
        x = torch.cos(ring.attention(x * 2, x, x, sink=torch.zeros(2))[0])
        own, shared = x[:, :, :1, :6].contiguous(), x[:, :, :1, 6:].contiguous()
        return torch.sin(ring.latent_attention(x * 2, own, shared)[0])

    out = (layers if counter is None else torch.compile(layers, backend=counter))(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


def test_caches_and_rings_are_breaks_too_and_nothing_of_them_is_traced() -> None:
    def on_rank(rank: int) -> tuple[int, float, int, float]:
        cp, graphs, errors = ContextParallel(dist.group.WORLD), [], []
        for run in (partial(_turns, cp), _virtual):
            torch.manual_seed(0)
            expected, counter = run(None), Counter()
            torch.manual_seed(0)
            got = run(counter)
            graphs.append(counter.graphs)
            errors.append(max(float((one - other).abs().max()) for one, other in zip(got, expected, strict=True)))
        cp.close()
        return graphs[0], errors[0], graphs[1], errors[1]

    for turns, error, layers, difference in run_ranks(on_rank, 2, timeout_s=240.0):
        assert turns <= 8, "three around a cache's calls, for both shapes; two around unshard"
        assert layers == 4, "before, between and after three attentions"
        assert max(error, difference) < 1e-6


def _difference(x: Tensor, loss: Callable[[], Tensor]) -> float:
    """The largest difference between the gradients of x with and without a compiled backward pass."""
    expected = torch.autograd.grad(loss(), x)[0]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        x.grad = None
        loss().backward()
    assert x.grad is not None
    return float((x.grad - expected).abs().max())


def _backward_compiled_too(rank: int) -> list[float]:
    """The largest difference of gradients whose backward pass is compiled, through each collective operation."""
    cp = ContextParallel(dist.group.WORLD)
    model = Block(cp)
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    losses: list[Any] = [
        lambda: model(x, 5).square().sum(),
        lambda: cp.unshard(model.out(x), loss="own").sin().square().sum(),
        lambda: cp.unshard(model.out(x), loss="same").sin().square().sum(),
        lambda: cp.shift(model.out(x), -1).sin().square().sum(),
    ]
    differences = [_difference(x, loss) for loss in losses]
    cp.close()
    return differences


def test_backward_passes_are_not_traced_either() -> None:
    for differences in run_ranks(_backward_compiled_too, 2, timeout_s=240.0):
        assert max(differences) < 1e-6


def _convolution(place: recurrent.Placement, x: Tensor) -> Tensor:
    return recurrent.causal_convolution(x, torch.ones(8, 3), place=place)


def _scan(place: recurrent.Placement, x: Tensor) -> Tensor:
    return recurrent.affine_scan(x, -x.abs(), place)  # type: ignore[no-any-return]


def _exchange_of_heads(place: recurrent.Placement, x: Tensor) -> Tensor:
    x = x.unflatten(2, (2, 4))
    return place.call("an exchange of heads", {"x": x}, dict).exchange_heads(None, [x]).wait()[0]


def _layer_compiled_too(rank: int, layer: Callable[[recurrent.Placement, Tensor], Tensor]) -> float:
    """The largest difference of gradients whose backward pass is compiled, through a layer with messages."""
    cp = ContextParallel(dist.group.WORLD)
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    difference = _difference(x, lambda: layer(recurrent.Placement(cp), x * 2).sin().sum())
    cp.close()
    return difference


@pytest.mark.parametrize("layer", [_convolution, _scan, _exchange_of_heads])
def test_backward_passes_of_layers_with_messages_are_not_traced_either(
    layer: Callable[[recurrent.Placement, Tensor], Tensor],
) -> None:
    assert max(run_ranks(_layer_compiled_too, 2, layer, timeout_s=240.0)) < 1e-6


def _rows_compiled_too(rank: int) -> float:
    cp = ContextParallel(dist.group.WORLD)
    encoded, held = [torch.arange(3), torch.arange(3, 6)], [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3])]
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    difference = _difference(x, lambda: to_holders(cp, x * 2, encoded, held).sin().sum())
    cp.close()
    return difference


def test_backward_passes_of_rows_on_their_way_are_not_traced_either() -> None:
    assert max(run_ranks(_rows_compiled_too, 2, timeout_s=240.0)) < 1e-6
