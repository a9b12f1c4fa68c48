"""Models that take images, under DeepSpeed: ZeRO 0 to 3, rings with images beside others without; and one rank.

`BURST_SOAK=50 bash tests/run.sh tests/deepspeed/test_media_models.py` draws that many steps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import deepspeed
import pytest
import torch

import burst_plugin.deepspeed as burst
from tests.support.deepspeed_run import Run, configuration, gradients, stop, worst
from tests.support.families import SINCE_5_24
from tests.support.media import Image, batch, tiny_model
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.deepspeed,
    SINCE_5_24,
]
IMAGES = (Image(0, 3, (4, 4)), Image(0, 8, (2, 4)), Image(0, 20, (4, 8)))


VIDEO = (Image(0, 3, (2, 4), frames=2),)


def _of_ring(family: str, ring: int, others: Sequence[Image] = ()) -> dict[str, torch.Tensor]:
    """The batch of one of two rings: the second has text alone, or a video, and as many labels."""
    batches = [batch(family, images) for images in (IMAGES, others)]
    no_labels = (batches[0]["labels"] < 0) | (batches[1]["labels"] < 0)
    return {**batches[ring], "labels": batches[ring]["labels"].masked_fill(no_labels, -100)}


def _engine(family: str, stage: int, cp: int) -> Any:
    burst.install()
    model = tiny_model(family)
    config = configuration(Run(stage=stage, cp=cp), 1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config
    )
    return engine


def _train(rank: int, family: str, stages: tuple[int, ...], others: Sequence[Image]) -> list[Any]:
    found = []
    for stage in stages:
        engine = _engine(family, stage, 2)
        loss = engine(**_of_ring(family, rank // 2, others), use_cache=False).loss
        engine.backward(loss)
        found.append((float(loss.detach()), gradients(engine)))
        engine.step()
        stop(engine)
    return found


@pytest.mark.parametrize(
    ("family", "stages", "others"),
    [("qwen3_vl", (0, 2, 3), ()), ("qwen3_vl", (3,), VIDEO), ("mistral3", (0, 2, 3), ())],
)
def test_steps_equal_those_of_one_rank(family: str, stages: tuple[int, ...], others: Sequence[Image]) -> None:
    model = tiny_model(family)
    losses = []
    for ring in range(2):
        loss = model(**_of_ring(family, ring, others), use_cache=False).loss
        (loss / 2).backward()
        losses.append(float(loss.detach()))
    truths = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    least = 1e-5 * max(float(x.norm()) for x in truths.values())
    truths = {name: x for name, x in truths.items() if float(x.norm()) > least}
    for found in run_ranks(_train, 4, family, stages, others, timeout_s=120.0):
        for stage, (loss, grads) in zip(stages, found, strict=True):
            assert loss == pytest.approx(sum(losses) / 2, rel=1e-5), stage
            assert worst({name: grads[name] for name in truths}, truths)[0] < 1e-5, stage


# With fewer images than ranks of a ring, some have none; each ring draws one of these for each step.
SETS: tuple[tuple[Image, ...], ...] = ((), (), IMAGES[:1], IMAGES, VIDEO, (*VIDEO, Image(0, 20, (4, 8))))


def _steps(rank: int, steps: int) -> int:
    """Steps in which any ranks have no images, or no videos, at random; the number that came to an end."""
    engine, done, draws = _engine("qwen3_vl", 3, 2), 0, random.Random(rank // 2)
    for _ in range(steps):
        loss = engine(**batch("qwen3_vl", draws.choice(SETS)), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        done += bool(torch.isfinite(loss))
    stop(engine)
    return done


def test_ranks_without_images_hang_none() -> None:
    steps = int(os.environ.get("BURST_SOAK", "0")) or 12
    assert run_ranks(_steps, 4, steps, timeout_s=60.0 + steps) == [steps] * 4


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


def _norms_of_towers(rank: int, stages: tuple[int, ...]) -> list[list[float]]:
    """The norm of the tower's gradient in steps of two micro-batches, of which some have no image, by stage."""
    found = []
    for stage in stages:
        burst.install()
        model, run = tiny_model("qwen3_vl"), Run(stage=stage, cp=2, accumulation=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(run, 1))
        norms = []
        for images in (IMAGES, IMAGES, (), IMAGES, (), (), IMAGES, ()):
            engine.backward(engine(**batch("qwen3_vl", images), use_cache=False).loss)
            if engine.is_gradient_accumulation_boundary():
                of_tower = [x for name, x in gradients(engine).items() if "visual" in name]
                norms.append(float(torch.stack([x.norm() for x in of_tower]).norm()))
            engine.step()
        stop(engine)
        found.append(norms)
    return found


def test_steps_without_images_take_no_gradients_of_earlier_steps() -> None:
    for two, three in run_ranks(_norms_of_towers, 2, (2, 3), timeout_s=120.0):
        assert two[2] == three[2] == 0.0
        assert three == pytest.approx(two, rel=1e-5)
