"""Training on several ranks against plain PyTorch on one, with eager attention: every gradient, and SGD steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from burst_plugin.deepspeed.planning import files, space
from burst_plugin.training.model_shape import MODELS
from burst_plugin.training.setting import Setting
from tests.support.deepspeed_run import Batch, Result, Run, draw, gradients, llama, reference, train, worst
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

GRADS, CHANGES = 1e-5, 2e-5  # relative; changes of parameters also carry the rounding of the parameters
STEPS = Run(accumulation=2, steps=2, config={"gradient_clipping": 0.5})
BATCHES = draw(4)


def _several(rank: int, runs: Sequence[Run], batches: Sequence[Batch]) -> list[Result]:
    return [train(run, batches) for run in runs]


def check(runs: Sequence[Run], ranks: int, batches: Sequence[Batch] = BATCHES) -> None:
    """All runs in the same processes, each against one rank."""
    truths = [_reference(run, batches) for run in runs]
    for found in run_ranks(_several, ranks, runs, batches, timeout_s=120.0):
        for run, result, truth in zip(runs, found, truths, strict=True):
            about = f"{run.stage=} {run.cp=} {run.config=}"
            assert result.losses == pytest.approx(truth.losses, rel=1e-6), about
            error, name = worst(result.grads, truth.grads)
            assert error <= GRADS, (about, name)
            error, name = worst(result.changes, truth.changes)
            assert error <= CHANGES, (about, name)


_CACHE: dict[Any, Result] = {}


def _reference(run: Run, batches: Sequence[Batch]) -> Result:
    """Of all runs that differ only in how they are cut up, the one result."""
    key = (str(run.model), run.steps, run.accumulation, run.config.get("gradient_clipping"), run.prepare, id(batches))
    if key not in _CACHE:
        _CACHE[key] = reference(replace(run, checkpointing=False), batches)
    return _CACHE[key]


@pytest.mark.parametrize(("ranks", "cp"), [(2, 2), (4, 4), (4, 2)], ids=["cp2", "cp4", "cp2_dp2"])
def test_every_zero_stage_equals_one_rank(ranks: int, cp: int) -> None:
    """Uneven labels, one rank without any (zigzag gives the first and the last chunk to rank 0), accumulation,
    clipping; recomputation in every other run."""
    assert _labels_of_first_rank(cp) == (0 if cp == 4 else _labels_of_first_rank(cp))
    check([replace(STEPS, stage=stage, cp=cp, checkpointing=stage % 2 == 1) for stage in range(4)], ranks)


def test_heads_exchanged_inside_nodes() -> None:
    check([replace(STEPS, stage=3, cp=4, block={"ulysses_degree": 2, "ranks_per_node": 2})], 4)


def _labels_of_first_rank(cp: int) -> int:
    labels = torch.nn.functional.pad(BATCHES[0]["labels"][:, 1:], (0, 1), value=-100)
    chunks = labels.chunk(2 * cp, 1)
    return int((chunks[0] != -100).sum() + (chunks[-1] != -100).sum())


def _freeze(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def test_frozen_parameters_lora_and_tied_weights() -> None:
    tied = llama(tie_word_embeddings=True)
    kinds = [replace(STEPS, prepare=_freeze), replace(STEPS, prepare=_lora), replace(STEPS, model=tied)]
    check([replace(run, stage=stage) for run in kinds for stage in (2, 3)], 2)


def test_what_zero_composes_with() -> None:
    """hpZ, offload to the CPU, buckets that overflow, gradients without reduce-scatter, predivided gradients."""
    offload = {"device": "cpu"}
    small = {"reduce_bucket_size": 500, "allgather_bucket_size": 500}
    check(
        [
            replace(STEPS, stage=3, config={**STEPS.config, "zero_optimization": {"zero_hpz_partition_size": 2}}),
            replace(STEPS, stage=2, config={**STEPS.config, "zero_optimization": {"offload_optimizer": offload}}),
            replace(
                STEPS,
                stage=3,
                config={
                    **STEPS.config,
                    "zero_optimization": {"offload_optimizer": offload, "offload_param": offload},
                },
            ),
            replace(STEPS, stage=1, config={**STEPS.config, "zero_optimization": small}),
            replace(STEPS, stage=2, config={**STEPS.config, "zero_optimization": {**small, "overlap_comm": True}}),
            replace(STEPS, stage=3, config={**STEPS.config, "zero_optimization": {**small, "reduce_scatter": False}}),
            replace(STEPS, stage=0, config={**STEPS.config, "prescale_gradients": True}),
            replace(STEPS, stage=0, config={**STEPS.config, "gradient_predivide_factor": 2.0}),
        ],
        4,
    )


def test_options_of_the_ring() -> None:
    """Two levels, by force; queries that move; layouts."""
    blocks: list[dict[str, Any]] = [
        {"ranks_per_node": 2, "schedule": "two_level_ring", "backward": "q"},
        {"layout": "striped", "backward": "kv"},
        {"layout": "contiguous", "kernel": "reference"},
        {"layout": "auto"},
    ]
    check([replace(STEPS, stage=3, cp=4, block=block) for block in blocks], 4)


def test_more_ranks_than_key_value_heads() -> None:
    """8 ranks and one key/value head, which Ulysses refuses."""
    model = llama(num_key_value_heads=1)
    check([Run(model=model, cp=8, stage=3, config={"gradient_clipping": 0.0})], 8, ONE)


ONE = draw(1, rows=1, length=64)


def test_lengths_that_do_not_divide() -> None:
    batches = [draw(1, rows=1, length=length)[0] for length in (37, 16, 5, 3)]
    check([replace(STEPS, cp=4, stage=3)], 4, batches)


# ------------------------------------------------------------------------------------------------- low precision


@functools.cache
def _error_on_ranks(ranks: int, precision: str) -> dict[int, float]:
    """By ZeRO stage, the relative error of an SGD step, all parameters as one, against float32 on one rank."""
    scaling = {"initial_scale_power": 12} if precision == "fp16" else {}
    config = {"gradient_clipping": 0.0, precision: {"enabled": True, **scaling}}
    runs = [Run(cp=ranks, stage=stage, config=config) for stage in (1, 2, 3)]
    truth = reference(Run(), BATCHES).changes
    found = run_ranks(_several_low, ranks, runs, BATCHES, timeout_s=120.0)[0]
    return {run.stage: _total(result.changes, truth) for run, result in zip(runs, found, strict=True)}


def _several_low(rank: int, runs: Sequence[Run], batches: Sequence[Batch]) -> list[Result]:
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed thinks that CPUs cannot
    return _several(rank, runs, batches)


def _total(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    error = sum(float((found[name] - truth[name]).square().sum()) for name in truth)
    return (error / sum(float(x.square().sum()) for x in truth.values())) ** 0.5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_as_exact_as_on_one_rank(precision: str) -> None:
    """fp16 with loss scaling."""
    one = _error_on_ranks(1, precision)
    for stage, error in _error_on_ranks(2, precision).items():
        assert 1e-5 < error <= 1.2 * one[stage] < 0.05, (stage, error, one[stage])


def test_gradients_summed_up_in_float32_as_in_the_recipe() -> None:
    """bf16 with `grad_accum_dtype`, for which DeepSpeed has an optimizer of its own."""
    config = {"gradient_clipping": 0.0, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    run = Run(stage=1, accumulation=2, config=config)
    truth = reference(replace(run, config={}), BATCHES).changes
    errors = []
    for ranks in (1, 2):
        found = run_ranks(_several, ranks, [replace(run, cp=ranks)], BATCHES, timeout_s=120.0)[0][0]
        errors.append(_total(found.changes, truth))
    assert 1e-5 < errors[1] <= 1.2 * errors[0] < 0.05, errors


def _left(rank: int, runs: Sequence[Run], batches: Sequence[Batch]) -> list[tuple[Result, list[str]]]:
    """The results of runs, and the parameters that still have a gradient of their own after a backward pass."""
    found = []
    for run in runs:
        left: set[str] = set()

        def grads(engine: Any, left: set[str] = left) -> dict[str, torch.Tensor]:
            left |= {name for name, parameter in engine.module.named_parameters() if parameter.grad is not None}
            return gradients(engine)

        with mock.patch("tests.support.deepspeed_run.gradients", grads):
            found.append((train(run, batches), sorted(left)))
    return found


def test_a_plan_keeps_no_gradients_in_16_bits_beside_the_sums() -> None:
    """ZeRO 1 as `burst plan` writes it; gradients are what they are where DeepSpeed adds them up at the end."""
    setting = Setting(tokens=32, code=space(False).code, context=2, inner=2, batch=2)
    written = json.loads(files(MODELS["llama3_8b"], setting)["ds_config.json"])
    assert written["zero_optimization"]["stage"] == 1
    precision = {name: written[name] for name in ("bf16", "data_types")}
    late = {**precision, "bf16": {"enabled": True}}
    whole = Run(stage=1, accumulation=2, steps=2, checkpointing=True)
    chunks = replace(whole, model=llama(tie_word_embeddings=True), block={"loss_chunk": 8, "mlp_chunk": 8})
    runs = [replace(run, config=config) for run in (whole, chunks) for config in (precision, late)]
    truths = [reference(replace(run, checkpointing=False), BATCHES).grads for run in (whole, chunks)]
    for found in run_ranks(_left, 2, runs, BATCHES, timeout_s=120.0):
        for truth, ((planned, left), (usual, usually_left)) in zip(truths, (found[:2], found[2:]), strict=True):
            assert worst(planned.grads, truth)[0] < 0.05
            assert not left
            assert usually_left
            for name, grad in planned.grads.items():
                assert torch.equal(grad, usual.grads[name]), name
                assert torch.equal(planned.changes[name], usual.changes[name]), name
