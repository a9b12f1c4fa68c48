"""`torch.compile` of a model that contains burst attention: one graph break per attention, and right gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_plugin import ContextParallel, Scores, SlidingWindow, burst_attention
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
