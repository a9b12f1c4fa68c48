"""Models with layers that carry a state, under DeepSpeed: ZeRO, LoRA, chunks, checkpoints; one rank is the truth."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from tests.support.deepspeed_run import VOCAB, Result, Run, draw, reference, train, train_unmodified, worst
from tests.support.hybrids import hybrids
from tests.support.inkling import FAMILIES as INKLING
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed
MODELS = {name: config for name, config in hybrids().items() if name in ("qwen3_5", "nemotron_h")}
MODELS |= {name: copy.deepcopy(config) for name, config in INKLING.items() if name == "inkling2"}
if "inkling2" in MODELS:
    MODELS["inkling2"].unpadded_vocab_size = VOCAB  # all labels have a logit
BATCHES = draw(2, rows=2, length=32)


def _lora(model: Any) -> Any:
    linear = ["q_proj", "v_proj", "in_proj", "in_proj_qkv", "up_proj"]  # PEFT refuses the last layer of a Mamba
    return get_peft_model(model, LoraConfig(r=4, target_modules=linear))


RUNS: dict[str, dict[str, Any]] = {
    "ZeRO 1 with accumulation": {"stage": 1, "accumulation": 2},
    "ZeRO 3": {"stage": 3},
    "ZeRO 3, checkpointed": {"stage": 3, "checkpointing": True},
    "kept": {"stage": 1, "checkpointing": True, "block": {"keep_attention": "all", "layout": "auto"}},
    "two rings": {"stage": 2, "cp": 2},
    "chunks": {"stage": 1, "block": {"loss_chunk": 8, "mlp_chunk": 8}},
    "LoRA": {"prepare": _lora},
}


def _train(rank: int, runs: dict[str, Run]) -> dict[str, Result]:
    step = {name: train_unmodified if name == "chunks" else train for name in runs}
    return {name: step[name](run, BATCHES) for name, run in runs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_those_of_one_rank(name: str) -> None:
    left_out = {"nemotron_h": ("chunks",), "inkling2": ("chunks", "LoRA", "kept", "ZeRO 1 with accumulation")}
    runs = {  # no chunks are made of experts
        kind: Run(**{"model": MODELS[name], "cp": 4, **options})
        for kind, options in RUNS.items()
        if kind not in left_out.get(name, ())
    }
    for found in run_ranks(_train, 4, runs, timeout_s=180.0)[:1]:
        for kind, run in runs.items():
            expected = reference(run, BATCHES)
            assert found[kind].losses == pytest.approx(expected.losses, rel=1e-5), kind
            assert worst(found[kind].grads, expected.grads)[0] < 1e-5, kind
