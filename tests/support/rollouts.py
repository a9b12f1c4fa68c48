"""A small transformer in float64, and rollouts for it: what it gives for each alone, and for all of them folded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from burst_plugin import Causal, Mask, Scores
from burst_plugin.activations import Head
from tests.support.reference import Problem, attention

HEADS, DIM, VOCAB = (4, 2), 4, 11

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]  # q, k, v, the sink, and the number of the layer


class TinyModel(nn.Module):
    """Two layers with rotary positions, grouped heads and sinks; `forward` gives hidden states before the head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width, (q_heads, kv_heads) = HEADS[0] * DIM, HEADS
        self.embedding = nn.Embedding(VOCAB, width)
        self.qkv = nn.ModuleList(nn.Linear(width, (q_heads + 2 * kv_heads) * DIM) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        self.sinks = nn.Parameter(torch.randn(2, q_heads))
        self.double()

    def forward(self, ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(ids)
        for layer, (qkv, mix) in enumerate(zip(self.qkv, self.mix, strict=True)):
            heads = qkv(self.norm(x)).unflatten(-1, (-1, DIM))
            q, k, v = heads.split([HEADS[0], HEADS[1], HEADS[1]], 2)
            out = attend(_rotated(q, position_ids), _rotated(k, position_ids), v, self.sinks[layer], layer)
            x = x + torch.tanh(mix(out.flatten(2)))
        return self.norm(x)


def _rotated(x: Tensor, position_ids: Tensor) -> Tensor:
    """Return [B, S, H, D] with rotary positions."""
    angles = position_ids[..., None, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def draw_rollouts(seed: int, most: int = 8) -> list[Tensor]:
    """Return up to `most` rollouts, many of which continue a beginning of another one, or are one."""
    draw = random.Random(seed)
    rollouts: list[list[int]] = []
    for _ in range(draw.randint(1, most)):
        other = draw.choice(rollouts) if rollouts and draw.random() < 0.85 else []
        beginning = other[: draw.randint(0, len(other))]
        more = draw.randint(0 if beginning else 1, 7)
        rollouts.append([*beginning, *(draw.randrange(VOCAB) for _ in range(more))])
    return [torch.tensor(each) for each in rollouts]


class Given(NamedTuple):
    """What a model gives for rollouts: a loss, log-probabilities and entropies [T - 1] of each, gradients by name."""

    loss: Tensor
    log_probs: Sequence[Tensor]
    entropies: Sequence[Tensor]
    grads: dict[str, Tensor]

    def error(self, truth: Given) -> float:
        """Return the largest error against `truth`, relative to the largest number of each tensor, or to 1."""
        pairs = [(self.loss, truth.loss), *zip(self.log_probs, truth.log_probs, strict=True)]
        pairs += [*zip(self.entropies, truth.entropies, strict=True)]
        pairs += [(self.grads[name], grad) for name, grad in truth.grads.items()]
        assert self.grads.keys() == truth.grads.keys()
        assert all(one.shape == other.shape for one, other in pairs)
        pairs = [(a.detach(), b.detach()) for a, b in pairs]
        return max(float((a - b).abs().max()) / max(1.0, float(b.abs().max())) for a, b in pairs if a.numel())


def grpo_loss(log_probs: Sequence[Tensor], entropies: Sequence[Tensor]) -> Tensor:
    """Return a loss in which every rollout has an advantage of its own, and ratios are clipped in places."""
    loss = torch.zeros(())
    for number, (log_prob, entropy) in enumerate(zip(log_probs, entropies, strict=True)):
        advantage = (-1) ** number * (1 + number) / 3
        ratio = (log_prob + 2.4 + 0.1 * number).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = loss - surrogate.sum() / max(1, len(log_prob)) - 0.03 * entropy.sum()
    return loss


def alone(model: TinyModel, rollouts: Sequence[Tensor], masks: Sequence[Mask], scores: Scores) -> Given:
    """Return what the model gives for each rollout as a sequence of its own, from definitions, on whole logits.

    `masks` are those of the layers. Dropout is that of the first batch row.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, layer: int) -> Tensor:
        return attention(Problem(q, k, v, q, sink), Causal() & masks[layer], scores)

    log_probs, entropies = [], []
    for ids in rollouts:
        hidden = model(ids[None], torch.arange(len(ids))[None], attend)
        of_all = model.head(hidden[0, :-1]).log_softmax(-1)
        log_probs.append(of_all.gather(1, ids[1:, None])[:, 0])
        entropies.append(-(of_all.exp() * of_all).sum(-1))
    loss = grpo_loss(log_probs, entropies)
    return Given(loss.detach(), log_probs, entropies, gradients(model, loss))


def gradients(model: TinyModel, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters by name; 0 where a loss has none."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    if not loss.requires_grad:
        return {name: torch.zeros_like(x) for name, x in zip(names, parameters, strict=True)}
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    filled = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(parameters, found, strict=True))
    return dict(zip(names, filled, strict=True))


def head_of(model: TinyModel) -> Head:
    """Return the model's head, five rows at a time."""
    return Head(model.head, chunk=5)
