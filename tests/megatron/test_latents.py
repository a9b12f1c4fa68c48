"""Megatron's multi-head latent attention sends latents: few bytes, and gradients of one rank."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burst_plugin import Strategy
from burst_plugin.megatron import install
from burst_plugin.megatron.layers import mla
from tests.megatron.test_model_parity import DEEPSEEK, check_equal
from tests.support.core_attentions import WrittenOut
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    build,
    forward_backward,
    full_grads,
    leave,
    packed_forward_step,
    random_tokens,
)
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.megatron

DENSE = replace(DEEPSEEK, config={name: value for name, value in DEEPSEEK.config.items() if "moe" not in name})
CP2 = replace(DENSE, cp=2)
# By name: the run, and whether latents are sent.
RUNS: dict[str, tuple[GptRun, bool]] = {
    "plain": (CP2, True),
    "tensor parallel": (replace(CP2, tp=2), True),
    "sequence parallel": (replace(CP2, tp=2, sequence_parallel=True), True),
    "core attention recomputed": (replace(CP2, recompute="selective"), True),
    "layers recomputed": (replace(CP2, recompute="full", tp=2, sequence_parallel=True), True),
    "expanded": (replace(CP2, strategy=Strategy(latents="expand")), False),
    "up-projection recomputed": (
        replace(CP2, recompute="selective", config={**CP2.config, "recompute_modules": ["mla_up_proj"]}),
        False,
    ),
}
PACKED = replace(CP2, seq_length=48, microbatch_size=1, per_token_loss=True)


def _step(rank: int, run: GptRun, step: Any = None) -> tuple[StepResult, int]:
    """Run a step; return its results and the bytes that this rank sent."""
    model = build(run)
    try:
        loss = forward_backward(model, run, random_tokens(run), *([] if step is None else [step]))
        contexts = install(run.strategy).contexts()
        sent = sum(n for cp in contexts for link in cp.traffic().values() for n in link.values())
        assert all(cp.traffic() == cp.expected_traffic() for cp in contexts)
        return StepResult(loss, full_grads(model, run)), sent
    finally:
        leave()


def test_each_way_of_training_equals_the_definition() -> None:
    references = {}  # by tensor-parallel ranks, which Megatron does not add all gradients up of in layers without TE
    for tp, parallel in ((1, {}), (2, {}), (2, {"sequence_parallel": True})):
        run = replace(DENSE, core=WrittenOut, tp=tp, **parallel)
        references[tp, bool(parallel)] = run_ranks(_step, tp, run)
    bytes_by_name = {}
    for name, (run, _) in RUNS.items():
        results, truths = run_ranks(_step, run.tp * run.cp, run), references[run.tp, run.sequence_parallel]
        for rank, (found, sent) in enumerate(results):
            check_equal([found], truths[rank % run.tp][0], bound=1e-5)
            bytes_by_name[name] = sent
    for name, (run, sends) in RUNS.items():
        forwards = 3 if run.recompute != "none" and sends else 2  # of which one is a pass backward
        whole = bytes_by_name["expanded"] * forwards / 2 / run.tp
        assert (bytes_by_name[name] < 0.5 * whole) == sends, (name, bytes_by_name)


def test_packed_documents_equal_the_definition() -> None:
    def run(ranks: int, of: GptRun) -> list[tuple[StepResult, int]]:
        return run_ranks(_packed, ranks, of)

    reference = run(1, replace(PACKED, cp=1, core=WrittenOut))[0][0]
    check_equal([result for result, _ in run(2, PACKED)], reference, bound=1e-5)


def _packed(rank: int, run: GptRun) -> tuple[StepResult, int]:
    return _step(rank, run, partial(packed_forward_step, starts=(0, 16, 40, 48), real=(0, 13, 37, 40)))


def test_what_keeps_latents_from_travelling_is_named() -> None:
    run = replace(RUNS["up-projection recomputed"][0], strategy=Strategy(latents="send"))
    message = "latents='send' is not possible: recompute_modules has mla_up_proj"
    with pytest.raises(RankError, match=re.escape(message)):
        run_ranks(_step, 2, run)


def _layer(kind: str = "ColumnParallelLinear", **changes: Any) -> Any:
    projection = type(kind, (), {"normalization": "RMSNorm", "bias": None})()
    config = SimpleNamespace(fp8=None, fp4=None)
    usual = {"linear_kv_up_proj": projection, "config": config, "num_attention_heads_per_partition": 2}
    return SimpleNamespace(**{**usual, **changes})


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (_layer("TELayerNormColumnParallelLinear"), ""),
        (_layer("TEColumnParallelLinear"), ""),
        (
            _layer("LoRALinear"),
            "is a LoRALinear, which is not known to be linear",
        ),
        (_layer("TEColumnParallelLinear", num_attention_heads_per_partition=1), "a rank has one head"),
        (_layer("TEColumnParallelLinear", config=SimpleNamespace(fp8="hybrid")), "is quantised"),
        (
            _layer("TEColumnParallelLinear", config=SimpleNamespace(fp8=None, gtp_weight_remat_size=2)),
            "holds a shard of its weight (tensor_parallel_num_weight_shards)",
        ),
        (_layer("TEColumnParallelLinear", recompute_up_proj=True), "recompute_modules has mla_up_proj"),
    ],
)
def test_projections_that_are_known(layer: Any, problem: str) -> None:
    found = mla.problem_of_latents(layer)
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_in_the_projection_is_computed(monkeypatch: pytest.MonkeyPatch, zero_centered: bool) -> None:
    monkeypatch.setattr(mla, "copy_to_tensor_model_parallel_region", lambda x, group: x)
    layer = _layer("TELayerNormColumnParallelLinear", tp_group=None)
    layer.config.sequence_parallel = False
    scale = torch.linspace(0.5, 2.0, 6)
    layer.linear_kv_up_proj.layer_norm_weight = scale - 1 if zero_centered else scale
    layer.linear_kv_up_proj.zero_centered_gamma, layer.linear_kv_up_proj.eps = zero_centered, 1e-5
    x = torch.randn(3, 2, 6)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    torch.testing.assert_close(mla.gather_latents(layer, x), expected)
