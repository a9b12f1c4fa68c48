"""Ranks of a DeepSpeed engine that are out of step are told so by themselves, before a wrong number."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.deepspeed_run import Run, draw, start, stop
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

FAULTS = ("step", "call", "doubled call", "backward")
STEPS, AT_FAULT = 4, 3


def _noted(outs: dict[str, Tensor], original: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    """`burst_attention`, called as often as `times` says in the first layer; outputs are noted by layer and batch."""

    def attention(q: Tensor, *args: Any, tag: tuple[object, ...], **kwargs: Any) -> Any:
        out = torch.zeros_like(q)
        for _ in range(times[0] if tag[0] == "layer 0" else 1):
            out = original(q, *args, tag=tag, **kwargs)
            outs[f"{tag[0]}, {str(tag[1]).split(' of ')[0]}"] = out.detach()
        return out

    return attention


def _out_of_step(rank: int, stage: int) -> list[tuple[str, float, bool]]:
    """Of every fault in every step: what is said, after how many seconds, and whether all outputs were right."""
    from burst_plugin.huggingface import attention

    truth: dict[str, Tensor] = {}
    found, batches = [], draw(STEPS)
    for fault, at in [("", 0), *((fault, at) for fault in FAULTS for at in range(STEPS - 1))]:
        outs: dict[str, Tensor] = {}
        times = [1]
        engine, said, began = start(Run(cp=4, stage=stage, lr=0.0), 2), "nothing", time.monotonic()
        with mock.patch.object(attention, "burst_attention", _noted(outs, attention.burst_attention, times)):
            try:
                for step, batch in enumerate(batches):
                    here = fault if (rank, step) == (AT_FAULT, at) else ""
                    if here == "step":
                        continue
                    times[0] = {"call": 0, "doubled call": 2}.get(here, 1)
                    loss = engine(**batch, use_cache=False).loss
                    if here != "backward":
                        engine.backward(loss)
                    engine.step()
            except ValueError as error:
                said = str(error)
        truth = truth or outs
        right = all(torch.equal(out, truth[key]) for key, out in outs.items())
        found.append((said, time.monotonic() - began, right))
        dist.barrier()
        stop(engine)
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_that_is_out_of_step_is_named_with_both_places_before_a_wrong_number(stage: int) -> None:
    for first, *of_rank in run_ranks(_out_of_step, 4, stage, timeout_s=60.0):
        assert first[0] == "nothing"
        for number, (said, seconds, right) in enumerate(of_rank):
            fault, step = FAULTS[number // 3], number % 3
            if fault == "step":
                assert "rank 3: batch=[2, 32] with checksum " in said, said
                assert "rank 0, 1, 2: batch=[2, 32] with checksum " in said, said
            else:
                assert said.startswith("ranks are at different places: rank 3: before "), (fault, said)
                there, elsewhere = said.split("; rank 0, 1, 2: ")
                places = {
                    "call": ("layer 1, batch ", "layer 0, batch "),
                    "doubled call": ("layer 0, batch ", "layer 1, batch "),
                    "backward": ("before engine.step() of step ", "before the backward pass of "),
                }[fault]
                assert f"step {step}, microbatch {step}" in there, (fault, said)
                assert places[0] in there, (fault, said)
                assert places[1] in elsewhere, (fault, said)
            assert seconds < 8.0
            assert right, "a wrong number left attention"


def _engines_in_another_order(rank: int) -> list[str]:
    """Rank 3 trains its second engine before its first in one step."""
    said = []
    batch = draw(1)[0]
    for at in range(3):
        engines = [start(Run(cp=4), 2) for _ in range(2)]
        try:
            for step in range(STEPS):
                for engine in reversed(engines) if (rank, step) == (AT_FAULT, at) else engines:
                    engine.backward(engine(**batch, use_cache=False).loss)
                    engine.step()
        except ValueError as error:
            said.append(str(error))
        dist.barrier()
        for engine in engines:
            stop(engine)
    return said


def test_engines_in_another_order_are_told_apart() -> None:
    for said in run_ranks(_engines_in_another_order, 4, timeout_s=60.0):
        assert len(said) == 3, said
        for text in said:
            assert "ranks are at different places: rank 3: before comparison " in text, text
            assert " of the ring " in text
