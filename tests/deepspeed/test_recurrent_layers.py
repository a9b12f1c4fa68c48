"""DeepSpeed with layers that carry a state along the sequence, of which some read parameters of other modules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.deepspeed_run import Result, Run, draw, reference, train, worst
from tests.support.hybrids import hybrids, randomised
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

FAMILIES = hybrids()
NAMES = [name for name in ("qwen3_next", "bamba", "mamba", "recurrent_gemma", "rwkv", "zaya") if name in FAMILIES]
BATCHES = draw(1, rows=2, length=32)
ALL_CUT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # also the smallest parameters


def _run(name: str) -> Run:
    return Run(model=FAMILIES[name], stage=3, lr=0.01, checkpointing=True, prepare=randomised, config=ALL_CUT)


def _trained(rank: int, names: Sequence[str]) -> dict[str, Result]:
    return {name: train(_run(name), BATCHES) for name in names}


def test_zero_3_gathers_what_layers_read_of_each_other() -> None:
    found = run_ranks(_trained, 2, NAMES, timeout_s=240.0)[0]
    for name, result in found.items():
        truth = reference(Run(model=FAMILIES[name], lr=0.01, prepare=randomised), BATCHES)
        assert abs(result.losses[0] - truth.losses[0]) <= 1e-5 * truth.losses[0], name
        error, parameter = worst(result.grads, truth.grads)
        assert error <= 1e-5, (name, parameter, error)
