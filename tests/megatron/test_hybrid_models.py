"""Hybrid models of Mamba-2, attention, MLPs and experts over ranks: what GPT models have, against one rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_plugin import Strategy
from burst_plugin.trajectories import fold
from tests.megatron import test_chunked_loss, test_evaluation, test_router_losses, test_trees
from tests.megatron.test_interplay import _train
from tests.megatron.test_megatron_chunked_mlp import _most_rows
from tests.megatron.test_recurrent import DELTA, MAMBA, RUN
from tests.support.largest import LargestLogits
from tests.support.megatron_gpt import GptRun, StepResult, build, check_trained, leave, one_step, random_tokens
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

CHUNK = test_chunked_loss.CHUNK  # of the 128 tokens of a microbatch


def _steps(rank: int, runs: Sequence[GptRun]) -> list[tuple[StepResult, int]]:
    """What each run gives, and the most rows of logits."""
    found = []
    for run in runs:
        with LargestLogits(run.vocab // run.tp, run.hidden) as largest:
            result = one_step(run, random_tokens(run))
        found.append((result, largest.rows))
    return found


@functools.cache
def _of_one_rank() -> StepResult:
    ((result, _),) = run_ranks(_steps, 1, [RUN])[0]
    return result


def test_pipeline_stages() -> None:
    runs = [replace(RUN, pp=2, cp=2), replace(RUN, pp=2, cp=2, recompute="full", strategy=Strategy(layout="striped"))]
    runs[0] = replace(runs[0], strategy=Strategy(layout="contiguous", recurrent="state"))
    for run in runs:
        for ((found, _),) in run_ranks(_steps, 4, [run]):
            check_trained(found, _of_one_rank(), 1e-5, run)


# ------------------------------------------------------------------------------------------------------ checkpoints

TRAINED = replace(RUN, cp=4, hierarchical=(2, 2), distributed_optimizer=True)


@pytest.mark.parametrize("sizes", [{"tp": 1}, {"pp": 2, "cp": 2, "hierarchical": None}], ids=["cp4", "pp2_cp2"])
def test_a_checkpoint_is_continued_at_another_context_parallel_size(tmp_path: Path, sizes: dict[str, Any]) -> None:
    pytest.importorskip("psutil", reason="Megatron's checkpoints want psutil")
    saved = replace(TRAINED, **sizes)
    (expected,) = run_ranks(_train, 1, RUN, 5)
    assert expected[-1] < expected[0] - 0.05
    for first in run_ranks(_train, 4, saved, 3, "", str(tmp_path)):
        assert first == pytest.approx(expected[:3], abs=1e-5)
    for ranks in (1, 2):
        loaded = replace(saved, cp=ranks, hierarchical=None)
        for rest in run_ranks(_train, ranks * saved.pp, loaded, 2, str(tmp_path)):
            assert rest == pytest.approx(expected[3:], abs=1e-5)


# ----------------------------------------------------------------------------------------------------------- chunks


CHUNKED = replace(RUN, vocab=168, ffn=352, strategy=Strategy(loss_chunk=CHUNK, mlp_chunk=10))  # unlike other widths


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_mlps_in_chunks(tied: bool) -> None:
    run = replace(CHUNKED, tied=tied)
    ((truth, rows),) = run_ranks(_steps, 1, [replace(run, strategy=None)])[0]
    assert rows > CHUNK
    runs = [
        replace(run, cp=4),
        replace(run, tp=2, cp=2, sequence_parallel=True),
        replace(run, cp=2, recompute="full"),
    ]
    if not tied:  # stages would draw a weight each
        runs.append(replace(run, pp=2, cp=2))
    found = run_ranks(_steps, 4, runs, timeout_s=120.0)
    for number, each in enumerate(runs):
        for steps in found:
            check_trained(steps[number][0], truth, 1e-5, each)
        assert max(steps[number][1] for steps in found) == CHUNK, each
    assert run_ranks(_most_rows, 2, replace(run, cp=2)) == [10, 10]


# ---------------------------------------------------------------------------------------------------------- routers

EXPERTS = replace(test_router_losses.ONE_RANK, layers=4, pattern="M*EE")
EXPERTS = replace(EXPERTS, config={**EXPERTS.config, **MAMBA})


def test_losses_of_routers_weigh_valid_tokens_alike() -> None:
    (expected,) = run_ranks(test_router_losses._gradients, 1, EXPERTS, test_router_losses.CASES)
    run = replace(EXPERTS, cp=4, strategy=Strategy(layout="contiguous"))
    for found in run_ranks(test_router_losses._gradients, 4, run, test_router_losses.CASES, timeout_s=120.0):
        assert found.keys() == expected.keys()
        for kind, grads in found.items():
            assert test_router_losses._error(grads, expected[kind]) < 1e-5, kind


# ----------------------------------------------------------------------------------------------------------- scores

SCORED = replace(RUN, seq_length=44)


def _logits(rank: int) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_evaluation, "ONE", SCORED)
        return test_evaluation._logits(rank)


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(layout="striped", loss_chunk=8)])
def test_log_likelihoods_of_a_text(strategy: Strategy) -> None:
    (expected,) = run_ranks(_logits, 1)
    for found in run_ranks(test_evaluation._scores, 4, replace(SCORED, cp=2, tp=2, strategy=strategy)):
        assert float((found - expected).abs().max()) < 1e-5


# ----------------------------------------------------------------------------------------------------- prefix trees

FOLDED = replace(RUN, vocab=128, microbatch_size=1)


def test_rollouts_of_a_prefix_tree_are_independent_sequences() -> None:
    runs = [
        replace(FOLDED, cp=4, strategy=Strategy(layout="contiguous", recurrent="state")),
        replace(FOLDED, cp=2, tp=2, sequence_parallel=True, strategy=Strategy(layout="auto")),
        replace(FOLDED, cp=2, pp=2, recompute="full", strategy=Strategy(layout="striped")),
    ]
    for run in runs:
        test_trees._check(FOLDED, run)


def test_rollouts_of_a_prefix_tree_through_gated_delta_nets() -> None:
    one = replace(FOLDED, layers=2, config=DELTA, pattern="")
    test_trees._check(one, replace(one, cp=4, strategy=Strategy(layout="auto", recurrent="state")))


# --------------------------------------------------------------------------------------------------------- refusals


def _refused(rank: int) -> list[str]:
    """Errors of inference, by either name of its context, and of a tree on one rank of each model."""
    from megatron.core.inference.contexts import StaticInferenceContext

    from burst_plugin.megatron.trees import edge_log_probs

    found = []
    tokens = torch.zeros(1, 8, dtype=torch.long, device="cpu")
    model = build(replace(RUN, cp=2)).module.eval()
    calls = model.decoder.layers[0].register_forward_pre_hook(lambda *args: found.append("a layer was called"))
    for name in ("inference_context", "inference_params"):
        with pytest.raises(ValueError, match="is for GPTModel") as error:
            model(tokens, tokens, None, runtime_gather_output=True, **{name: StaticInferenceContext(1, 16)})
        found.append(str(error.value))
    calls.remove()
    leave()
    model = build(replace(RUN, layers=2, config=DELTA, pattern="", cp=2)).module.eval()
    with pytest.raises(ValueError, match="carries a state") as error:
        model(tokens, tokens, None, inference_context=StaticInferenceContext(1, 16), runtime_gather_output=True)
    found.append(str(error.value))
    leave()
    model = build(RUN)
    with pytest.raises(ValueError, match="prefix tree") as error:
        edge_log_probs(model, fold([torch.arange(5), torch.arange(4)]), chunk=8)
    found.append(str(error.value))
    leave()
    return found


def test_what_cannot_be_done_is_refused_before_a_layer_is_called() -> None:
    kind = "inference with context_parallel_size=2 and cp_comm_type='burst' is for GPTModel: layers of "
    for context, params, delta, tree in run_ranks(_refused, 2):
        assert context.startswith(kind)
        assert context.endswith("carry states, which it does not keep; use context_parallel_size=1")
        assert params == context
        assert delta.startswith(
            "GatedDeltaNet of layer 1 carries a state, which inference with context_parallel_size=2"
        )
        assert 'use cp_comm_type="burst", and 2 or more ranks' in tree
