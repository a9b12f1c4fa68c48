"""Megatron's losses in chunks against whole logits on one rank: tensor-parallel, tied, several heads, hybrids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer import multi_token_prediction

from burst_plugin import Strategy
from tests.megatron.test_model_parity import MTP, check_equal, first_token_masked
from tests.support.largest import LargestLogits
from tests.support.megatron_gpt import GptRun, StepResult, build, leave, one_step, random_tokens
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

CHUNK = 7  # of 64 tokens in two rows
TWO_LAYERS = GptRun(layers=2, vocab=160)


def in_chunks(run: GptRun, **changes: Any) -> GptRun:
    return replace(run, cp_comm_type="burst", strategy=Strategy(loss_chunk=CHUNK), **changes)


def _steps(rank: int, runs: Sequence[GptRun], step: Any = None) -> list[tuple[StepResult, int]]:
    """What each run gives, and the most rows of logits, or of a rank's share of them."""
    found = []
    for run in runs:
        with LargestLogits(run.vocab // run.tp, run.hidden) as largest:
            result = one_step(run, random_tokens(run), step)
        found.append((result, largest.rows))
    return found


def check(base: GptRun, runs: Sequence[GptRun], ranks: int = 4, step: Any = None) -> None:
    ((reference, rows),) = run_ranks(_steps, 1, [base], step)[0]
    assert rows > CHUNK
    found = run_ranks(_steps, ranks, runs, step, timeout_s=120.0)
    for number, run in enumerate(runs):
        check_equal([steps[number][0] for steps in found], reference)
        assert max(steps[number][1] for steps in found) == CHUNK, run


def test_tensor_context_and_pipeline_parallel_equal_one_rank() -> None:
    cut = in_chunks(TWO_LAYERS, tp=2, cp=2)
    runs = [cut, replace(cut, sequence_parallel=True), in_chunks(TWO_LAYERS, cp=2, pp=2), in_chunks(TWO_LAYERS, cp=4)]
    check(TWO_LAYERS, runs)


def test_a_head_that_is_the_embedding_equals_one_rank() -> None:
    tied = replace(TWO_LAYERS, tied=True)
    check(
        tied, [in_chunks(tied, tp=2, cp=2, sequence_parallel=True), in_chunks(tied, cp=2, distributed_optimizer=True)]
    )


def test_multi_token_prediction_equals_one_rank() -> None:
    run = replace(MTP, vocab=TWO_LAYERS.vocab, config={"mtp_num_layers": 2})
    check(run, [in_chunks(run, cp=4), in_chunks(run, tp=2, cp=2)], step=first_token_masked)


def _counts(rank: int, run: GptRun) -> list[torch.Tensor]:
    """How many tokens were predicted rightly, and how many at all, by prediction layer."""
    one_step(run, random_tokens(run))
    tracker = multi_token_prediction.MTPLossLoggingHelper.tracker
    return [tracker["correct_values"], tracker["total_values"]]


@pytest.mark.skipif(
    not hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts"), reason="Megatron counts since core 0.19"
)
@pytest.mark.parametrize("parallel", [{"cp": 2}, {"tp": 2}])
def test_predictions_that_are_right_are_counted_as_with_whole_logits(parallel: dict[str, Any]) -> None:
    run = replace(MTP, vocab=8, config={"mtp_num_layers": 2}, cp_comm_type="burst", **parallel)
    whole, chunked = (run_ranks(_counts, 2, each) for each in (run, in_chunks(run)))
    assert int(whole[0][0].sum()) > 0
    for of_whole, of_chunks in zip(whole, chunked, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(of_whole, of_chunks, strict=True))


def _low(rank: int, runs: Sequence[GptRun]) -> list[torch.Tensor]:
    """The gradient of the output layer."""
    return [one_step(run, random_tokens(run)).grads["output_layer.weight"] for run in runs]


def test_bfloat16_is_as_exact_as_with_whole_logits() -> None:
    low = replace(TWO_LAYERS, cp=2, cp_comm_type="burst", config={"bf16": True, "params_dtype": torch.bfloat16})
    low = replace(low, config={**low.config, "pipeline_dtype": torch.bfloat16})
    truth = run_ranks(_low, 1, [TWO_LAYERS])[0][0]
    chunked, whole = (
        float((run_ranks(_low, 2, [run])[0][0] - truth).norm() / truth.norm()) for run in (in_chunks(low), low)
    )
    assert 1e-4 < chunked <= 1.2 * whole


# --------------------------------------------------------------------------------------------------------- refusals


class _Another(torch.nn.Module):
    """An output layer of another kind, such as one with LoRA."""


def _refused(rank: int, directory: str) -> tuple[list[str], list[int]]:
    """Errors of models that are built, and of a forward; and the shape of logits without labels."""
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import gpt_model

    from tests.support.megatron_gpt import cut_batch, transformer_config

    run = in_chunks(TWO_LAYERS, cp=2)
    messages = []
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    for changes in (fused, {"config_logger_dir": directory}):
        with pytest.raises(ValueError, match="burst-loss-chunk") as error:
            build(replace(run, config=changes))
        messages.append(str(error.value))
        leave()
    with (
        mock.patch.object(gpt_model.tensor_parallel, "ColumnParallelLinear", _another_layer),
        pytest.raises(ValueError, match="burst-loss-chunk") as error,
    ):
        build(run)
    messages.append(str(error.value))
    leave()
    later = type("LinearCrossEntropyModule", (gpt_model.tensor_parallel.ColumnParallelLinear,), {})
    later.__module__ = "megatron.core.transformer.linear_cross_entropy"  # of newer releases
    with mock.patch.object(gpt_model.tensor_parallel, "ColumnParallelLinear", later):
        wrapped = build(run)
    with pytest.raises(ValueError, match="burst-loss-chunk") as error:
        BertModel(
            transformer_config(run), 0, None, run.vocab, 8, position_embedding_type="rope", add_binary_head=False
        )
    messages.append(str(error.value))
    model, layer = wrapped.module, wrapped.module.output_layer
    tokens = random_tokens(run)[0][:, :-1]
    batch = cut_batch({"tokens": tokens, "labels": tokens, "position_ids": torch.arange(64).expand(2, -1)})
    given = batch["tokens"], batch["position_ids"], None
    shape = [*model(*given).shape]
    with pytest.raises(ValueError, match="burst-loss-chunk") as error:
        model(*given, labels=batch["labels"], runtime_gather_output=True)
    messages.append(str(error.value))
    assert model.output_layer is layer
    assert "compute_language_model_loss" not in model.__dict__
    leave()
    return messages, shape


def _another_layer(*args: Any, **kwargs: Any) -> Any:
    layer = _Another()
    layer.weight = None
    return layer


def test_what_cannot_be_cut_is_refused_when_the_model_is_built(tmp_path: Path) -> None:
    directory = str(tmp_path)
    expected = [
        "--burst-loss-chunk 7 cannot cut the loss of GPTModel:\n  cross_entropy_loss_fusion=True: it computes",
        f"config_logger_dir={directory!r}: it saves whole logits",
        "its output layer is a _Another",
        "--burst-loss-chunk 7 is not supported with BertModel",
        "GPTModel: it asks its output layer for runtime_gather_output; drop it",
    ]
    for messages, shape in run_ranks(_refused, 2, directory):
        assert shape == [2, 32, TWO_LAYERS.vocab]
        for message, part in zip(messages, expected, strict=True):
            assert part in message
