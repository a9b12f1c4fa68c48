"""A GPT over a ring against the same GPT on one rank with Megatron's own attention: losses and every gradient."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import burst_plugin.megatron
from burst_plugin import Strategy
from burst_plugin.strategy.presets import PRESETS
from tests.support.megatron_gpt import GptRun, StepResult, check_close, one_step, random_tokens
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

TOKENS = random_tokens(GptRun())


def _step(rank: int, run: GptRun) -> StepResult:
    return one_step(run, TOKENS)


@functools.cache
def one_rank() -> StepResult:
    return run_ranks(_step, 1, GptRun())[0]


def check_parity(run: GptRun) -> None:
    for result in run_ranks(_step, run.tp * run.pp * run.cp, run):
        check_step(result)


def check_step(result: StepResult) -> None:
    """Loss to 1e-5, every parameter's gradient to 1e-4 relative."""
    check_close(result, one_rank())


CP2 = GptRun(cp=2, cp_comm_type="burst")
CP4 = GptRun(cp=4, hierarchical=(2, 2), cp_comm_type="burst")


@pytest.mark.parametrize(
    "run",
    [
        CP2,
        CP4,
        replace(CP4, hierarchical=None),
        replace(CP4, strategy=Strategy(ulysses_degree=2)),
        replace(CP2, strategy=Strategy(ulysses_degree=2)),
    ],
    ids=["cp2", "cp4_2x2", "cp4_flat", "cp4_2x2_ulysses2", "cp2_ulysses2"],
)
def test_context_parallel_equals_one_rank(run: GptRun) -> None:
    check_parity(run)


def _steps(rank: int, presets: tuple[str, ...]) -> dict[str, StepResult]:
    found = {}
    for name in presets:  # in one process each after the other, as no user can
        burst_plugin.megatron.install().registry.strategy = Strategy.preset(name)
        found[name] = _step(rank, CP4)
    return found


@pytest.mark.parametrize("presets", [tuple(PRESETS)[:8], tuple(PRESETS)[8:]], ids="-".join)
def test_every_published_system_equals_one_rank(presets: tuple[str, ...]) -> None:
    for steps in run_ranks(_steps, 4, presets):
        assert tuple(steps) == presets
        for result in steps.values():
            check_step(result)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("run", [CP2, CP4], ids=["cp2", "cp4_2x2"])
def test_recomputation_equals_one_rank(run: GptRun, recompute: str) -> None:
    check_parity(replace(run, recompute=recompute))


@pytest.mark.parametrize(
    "run",
    [
        replace(CP2, tp=2),
        replace(CP2, pp=2),
        replace(CP2, tp=2, sequence_parallel=True),
        replace(CP2, per_token_loss=True),
    ],
    ids=["tp2_cp2", "pp2_cp2", "tp2_cp2_sequence_parallel", "cp2_per_token_loss"],
)
def test_other_parallelism_with_context_parallel_equals_one_rank(run: GptRun) -> None:
    check_parity(run)


def test_two_data_parallel_groups_of_two_equal_one_rank() -> None:
    """4 ranks, CP 2: both data-parallel groups see all tokens here, so that gradients do not change."""
    reference = one_rank()
    for result in run_ranks(_step, 4, CP2):
        assert result.loss == pytest.approx(reference.loss, abs=1e-5)
        for name, grad in result.grads.items():
            torch.testing.assert_close(grad, reference.grads[name], rtol=1e-3, atol=1e-6, msg=name)


def test_softmax_scale_is_megatrons() -> None:
    scaled = {"softmax_scale": 0.5}
    (one,) = run_ranks(_step, 1, GptRun(config=scaled))
    for result in run_ranks(_step, 2, GptRun(cp=2, cp_comm_type="burst", config=scaled)):
        assert result.loss == pytest.approx(one.loss, abs=1e-5)
