"""Models with indexers as people run them: compiled, in checkpoints, and with the cache that transformers makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import prepare, register
from burst_plugin.huggingface.indexer_shards import SHARD_ATTRIBUTE
from tests.support.deepspeed_run import draw, worst
from tests.support.ranks import run_ranks
from tests.support.ring_steps import grads_of, shifted, sum_of_losses
from tests.support.sparse_families import build, sparse_families

pytestmark = pytest.mark.huggingface

BATCH = draw(1, rows=2, length=32)[0]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("glm5_next",) if name in sparse_families()]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "no checkpoints": {},
    "checkpoints": {"use_reentrant": False},
    "reentrant checkpoints": {"use_reentrant": True},
}


def _gradients(model: Any, batch: dict[str, Any], labels: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    logits = model(**batch, **options).logits
    sum_of_losses(logits, labels).backward()
    return {name.replace("_orig_mod.", ""): grad for name, grad in grads_of(model).items()}


def _on_ring(rank: int, family: str) -> dict[str, dict[str, torch.Tensor]]:
    register()
    cp, found = ContextParallel(dist.group.WORLD), {}

    def step(name: str, model: Any, **options: Any) -> None:
        local = shard_batch(BATCH, cp)
        found[name] = _gradients(model, local, local.pop("shift_labels"), **options)
        for grad in found[name].values():
            dist.all_reduce(grad)

    for name, checkpoints in CHECKPOINTS.items():
        model = prepare(build(sparse_families()[family])).train()
        if checkpoints:
            model.gradient_checkpointing_enable(checkpoints)
        step(f"compiled, {name}", torch.compile(model, backend="eager"), use_cache=False)
    step("with a cache", prepare(build(sparse_families()[family])).train())
    step("with a cache, in evaluation", prepare(build(sparse_families()[family])).eval())
    return found


@pytest.mark.parametrize("family", ["deepseek_v32", *SLOW])
def test_gradients_equal_those_of_one_rank(family: str) -> None:
    inputs = {name: x for name, x in BATCH.items() if name != "labels"}
    truth = _gradients(build(sparse_families()[family]), inputs, shifted(BATCH["labels"]), use_cache=False)
    for name, grads in run_ranks(_on_ring, 2, family, timeout_s=120.0)[0].items():
        error, parameter = worst(grads, truth)
        assert error <= 1e-5, (name, parameter, error)


def test_a_mask_of_its_own_is_refused_on_a_shard() -> None:
    register()
    model = prepare(build(sparse_families()["deepseek_v32"]))
    indexer = model.model.layers[0].self_attn.indexer
    setattr(indexer, SHARD_ATTRIBUTE, shard_batch(BATCH, ContextParallel())["burst"])
    x = torch.zeros(2, 32, 8)
    with pytest.raises(ValueError, match="got a sharded batch and a mask of its own, a Tensor, with which it would"):
        indexer(x, x, (x, x), torch.zeros(2, 32, 32), None)
