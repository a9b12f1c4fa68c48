"""Rollouts folded into a prefix tree, in models whose layers carry a state: every branch begins with its parent's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import prepare
from burst_plugin.trajectories import fold
from tests.support.hybrids import build, hybrids
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.huggingface

FAMILIES = hybrids()
ROLLOUTS = (
    [7, 7, 3, 4, 9, 11, 12, 5, 6, 8],
    [7, 7, 3, 4, 9, 11, 2, 2],
    [7, 7, 5, 5, 1, 9, 9, 9, 3],
    [8, 4, 4, 4],
)
FOLDED = fold([*map(list, ROLLOUTS)])
TOKENS = FOLDED.ids.shape[1]
Found = tuple[torch.Tensor, torch.Tensor]


def _weights(vocabulary: int) -> torch.Tensor:
    """What logits of each token count in the loss."""
    return torch.randn(TOKENS, vocabulary, generator=torch.Generator().manual_seed(0))


def _gradients(model: Any) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def _on_ring(rank: int, names: Sequence[str], checkpoints: bool) -> dict[str, Found]:
    cp, found = ContextParallel(dist.group.WORLD), {}
    for name in names:
        model = prepare(build(FAMILIES[name]))
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = {"input_ids": FOLDED.ids, "position_ids": FOLDED.position_ids, "tree": FOLDED.tree}
        local = shard_batch(batch, cp)
        tokens = local["burst"].tokens
        logits = model(**local, use_cache=False).logits
        weights = torch.nn.functional.pad(_weights(logits.shape[-1]), (0, 0, 0, tokens.length - TOKENS))
        (logits[0] * cp.shard(weights, 0, tokens)).sum().backward()
        gradients = _gradients(model)
        dist.all_reduce(gradients)
        found[name] = cp.unshard(logits.detach(), 1, tokens)[0, :TOKENS], gradients
    return found


def _on_one_rank(name: str) -> Found:
    """Each rollout by itself; tokens that several have count once."""
    model, logits, loss = build(FAMILIES[name]), dict[int, torch.Tensor](), torch.zeros(())
    for rollout, path in zip(ROLLOUTS, FOLDED.edges.paths, strict=True):
        of_rollout = model(input_ids=torch.tensor([rollout]), use_cache=False).logits[0]
        weights = _weights(of_rollout.shape[-1])
        for place, token in enumerate(path.tolist()):
            if token not in logits:
                logits[token] = of_rollout[place].detach()
                loss = loss + (of_rollout[place] * weights[token]).sum()
    loss.backward()
    return torch.stack([logits[token] for token in range(TOKENS)]), _gradients(model)


@pytest.mark.parametrize(("ranks", "checkpoints"), [(2, True), (4, False)])
def test_folded_rollouts_equal_each_by_itself(ranks: int, checkpoints: bool) -> None:
    found = run_ranks(_on_ring, ranks, tuple(FAMILIES), checkpoints, timeout_s=240.0)[0]
    errors = {}
    for name, both in found.items():
        for kind, x, truth in zip(("logits", "gradients"), both, _on_one_rank(name), strict=True):
            errors[name, kind] = float((x - truth).norm() / truth.norm())

    assert {key: error for key, error in errors.items() if not error < 1e-5} == {}
