"""Models with multi-head latent attention under ZeRO, which gathers the weights of what latents are expanded with."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.support.deepspeed_run import Result, Run, draw, reference, train, worst
from tests.support.families import mla_families
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        not hasattr(transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"),
        reason="layers of this release of transformers make keys and values without a method for it",
    ),
]

ASKED: dict[str, Any] = {"block": {"latents": "send"}, "config": {"gradient_clipping": 0.5}}
CONFIG = mla_families()["youtu"]
CONFIG.initializer_range = 0.2  # at the usual 0.02 scores are next to equal, and what is left of gradients of queries
# is rounding: 1.2e-5 on a processor with AVX-512, less on others; at 0.1 the same of norms on some
RUNS = [
    Run(CONFIG, stage, cp=2, steps=2, checkpointing=checkpointing, **ASKED)
    for stage, checkpointing in ((0, False), (2, True), (3, False), (3, True))
]
BATCHES = draw(2, rows=2)


def _train(rank: int) -> list[Result]:
    return [train(run, BATCHES) for run in RUNS]


def test_steps_equal_those_of_one_rank() -> None:
    results = run_ranks(_train, 4, timeout_s=60.0)[0]
    for run, found in zip(RUNS, results, strict=True):
        truth = reference(run, BATCHES)
        assert found.losses == pytest.approx(truth.losses, rel=1e-5)
        for one, other in ((found.grads, truth.grads), (found.changes, truth.changes)):
            error, parameter = worst(one, other)
            assert error <= 1e-5, (run.stage, run.checkpointing, parameter, error)
