"""Models that take images, under DeepSpeed: ZeRO 0 to 3, rings with images beside others without; and one rank."""

from __future__ import annotations

import random
from typing import Any

import deepspeed
import pytest
import torch
import transformers

import burst_plugin.deepspeed as burst
from tests.support.deepspeed_run import Run, configuration, gradients, stop, worst
from tests.support.media import Image, batch, tiny_model
from tests.support.ranks import run_ranks

NEWER = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(not NEWER, reason="other releases have other default configurations"),
]
IMAGES = (Image(0, 3, (4, 4)), Image(0, 8, (2, 4)), Image(0, 20, (4, 8)))


def _of_ring(family: str, ring: int) -> dict[str, torch.Tensor]:
    """The batch of one of two rings: the second has text alone, and as many labels."""
    with_images = batch(family, IMAGES)
    if ring == 0:
        return with_images
    text = batch(family, ())
    kept = {name: text[name] for name in ("input_ids", "labels")}
    return {**kept, "labels": kept["labels"].masked_fill(with_images["labels"] < 0, -100)}


def _engine(family: str, stage: int, cp: int) -> Any:
    burst.install()
    model = tiny_model(family)
    config = configuration(Run(stage=stage, cp=cp), 1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config
    )
    return engine


def _train(rank: int, family: str, stages: tuple[int, ...]) -> list[Any]:
    found = []
    for stage in stages:
        engine = _engine(family, stage, 2)
        loss = engine(**_of_ring(family, rank // 2), use_cache=False).loss
        engine.backward(loss)
        found.append((float(loss.detach()), gradients(engine)))
        engine.step()
        stop(engine)
    return found


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3"])
def test_steps_equal_those_of_one_rank(family: str) -> None:
    model = tiny_model(family)
    losses = []
    for ring in range(2):
        loss = model(**_of_ring(family, ring), use_cache=False).loss
        (loss / 2).backward()
        losses.append(float(loss.detach()))
    truths = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    least = 1e-5 * max(float(x.norm()) for x in truths.values())
    truths = {name: x for name, x in truths.items() if float(x.norm()) > least}
    stages = (0, 2, 3)
    for found in run_ranks(_train, 4, family, stages, timeout_s=120.0):
        for stage, (loss, grads) in zip(stages, found, strict=True):
            assert loss == pytest.approx(sum(losses) / 2, rel=1e-5), stage
            assert worst({name: grads[name] for name in truths}, truths)[0] < 1e-5, stage


def _steps(rank: int, steps: int) -> int:
    """Steps in which rings have images or none, at random; the number of forwards that came to an end."""
    engine, done, draws = _engine("qwen3_vl", 3, 2), 0, random.Random(rank // 2)
    for _ in range(steps):
        ring = draws.randrange(2)
        engine.backward(engine(**_of_ring("qwen3_vl", ring), use_cache=False).loss)
        engine.step()
        done += 1
    stop(engine)
    return done


def test_rings_without_images_hang_none() -> None:
    assert run_ranks(_steps, 4, 12, timeout_s=120.0) == [12] * 4


def _evaluates_alone(rank: int) -> float:
    """One ring evaluates a batch of text, then all train."""
    engine = _engine("mistral3", 2, 2)
    if rank < 2:
        with torch.no_grad():
            local = burst.shard_batch({"input_ids": _of_ring("mistral3", 1)["input_ids"]})
            engine(**local, use_cache=False)
    loss = engine(**_of_ring("mistral3", rank // 2), use_cache=False).loss
    engine.backward(loss)
    engine.step()
    stop(engine)
    return float(loss.detach())


def test_one_ring_may_evaluate_alone() -> None:
    assert len(set(run_ranks(_evaluates_alone, 4))) == 1
