"""DeepSpeed with DeepSeek V4, whose parameters ZeRO 3 gathers where modules of its compressors run."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.support.deepspeed_run import Result, Run, draw, reference, train, worst
from tests.support.ranks import run_ranks

if not hasattr(transformers, "DeepseekV4Config"):
    pytest.skip("this release of transformers has no DeepSeek V4", allow_module_level=True)

from tests.support.compressed_family import config, drawn  # which needs the family

pytestmark = pytest.mark.deepspeed

BATCHES = draw(1, rows=2, length=32)
ALL_CUT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # also the smallest parameters


def _prepared(model: Any) -> Any:
    """The model drawn, its indexers, which are not trained, frozen."""
    for name, parameter in drawn(model).named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    return model


def _trained(rank: int) -> Result:
    run = Run(model=config(), stage=3, lr=0.01, checkpointing=True, prepare=_prepared, config=ALL_CUT)
    return train(run, BATCHES)


@pytest.mark.slow
def test_zero_3_gathers_what_compressors_and_indexers_read() -> None:
    found = run_ranks(_trained, 2, timeout_s=240.0)[0]
    truth = reference(Run(model=config(), lr=0.01, prepare=_prepared), BATCHES)
    assert abs(found.losses[0] - truth.losses[0]) <= 1e-5 * truth.losses[0]
    assert found.grads.keys() == truth.grads.keys()
    error, parameter = worst(_without_streams(found), _without_streams(truth))
    assert error <= 1e-5, (parameter, error)


def _without_streams(result: Result) -> dict[str, Any]:
    return {name: grad for name, grad in result.grads.items() if "_hc." not in name and "hc_head." not in name}
