"""Megatron's losses in chunks against whole logits on one rank: tensor-parallel, tied, several heads, hybrids."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from burst_plugin import Strategy
from burst_plugin.activations.deferred_logits import DeferredLogits
from burst_plugin.megatron.memory.output_layer import LanguageModelLoss, output_layer_problems
from burst_plugin.megatron.registry import Registry
from tests.megatron.test_model_parity import MTP, check_equal, first_token_masked
from tests.support.largest import LargestLogits
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    batches,
    build,
    cut_batch,
    forward_backward,
    forward_step,
    leave,
    one_step,
    random_tokens,
)
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


class _OneRank:
    def size(self) -> int:
        return 1


def test_logits_of_a_type_of_their_own_are_not_rounded_to_that_of_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with --output-logit-dtype fp32 on Megatron's main, whose product needs Transformer Engine."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return x.to(dtype) @ weight.to(dtype).t()

    monkeypatch.setattr(layers, "_linear_forward", product, raising=False)
    generator = torch.manual_seed(0)
    hidden = (4 * torch.randn(9, 2, 16, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(40, (2, 9), generator=generator)
    layer = SimpleNamespace(
        output_dtype=torch.float32, skip_bias_add=False, bias=None, sequence_parallel=False, tp_group=_OneRank()
    )
    losses = LanguageModelLoss(layer, CHUNK)(labels, DeferredLogits(hidden, "", weight))
    losses.sum().backward()

    logits = product(hidden.detach(), weight.detach(), None, torch.float32).requires_grad_()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.view(9, 2).t(), rtol=1e-6, atol=1e-6)
    assert logits.grad is not None
    grad = logits.grad.bfloat16().flatten(0, 1)  # Megatron casts it to the type of hidden states
    for found, truth in (
        (hidden.grad, grad @ weight.detach()),
        (weight.grad, grad.t() @ hidden.detach().flatten(0, 1)),
    ):
        assert found is not None
        assert float((found.flatten() - truth.flatten()).norm() / truth.norm()) < 2**-8  # bfloat16's


# --------------------------------------------------------------------------------------------------------- refusals


class _Another(torch.nn.Module):
    """An output layer of another kind, such as one with LoRA."""


def _refused(rank: int, directory: str) -> tuple[list[str], list[int]]:
    """Errors of models that are built, and of a forward; and the shape of logits without labels."""
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import gpt_model

    from tests.support.megatron_gpt import transformer_config

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
    wrapped.module.output_layer.gtp_remat_size = 2  # as in core 0.19 with weights in shards
    messages += output_layer_problems(wrapped.module)
    del wrapped.module.output_layer.gtp_remat_size
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
        "one of them alone: drop tensor_parallel_num_weight_shards",
        "--burst-loss-chunk 7 is not supported with BertModel",
        "GPTModel: it asks its output layer for runtime_gather_output; drop it",
    ]
    for messages, shape in run_ranks(_refused, 2, directory):
        assert shape == [2, 32, TWO_LAYERS.vocab]
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def _own_loss(self: Any, labels: Any, logits: Any) -> Any:
    return logits.float().logsumexp(-1).square().transpose(0, 1)


def _changed(rank: int) -> list[str]:
    """Errors of a model that was changed after it was built, by turns, and '' once it is as it was."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    run = in_chunks(TWO_LAYERS, cp=2)
    wrapped = build(run)
    model, tokens = wrapped.module, random_tokens(run, microbatches=1)
    kind, layer = type(model), model.output_layer
    subclass = type("Mine", (kind,), {"compute_language_model_loss": _own_loss})

    def error(change: Callable[[], Any]) -> str:
        change()
        try:
            forward_backward(wrapped, run, tokens)
            return ""
        except ValueError as refused:
            return str(refused)

    own = MethodType(_own_loss, model)
    found = [error(lambda: setattr(model, "compute_language_model_loss", own))]
    assert vars(model).pop("compute_language_model_loss") is own
    found.append(error(lambda: setattr(model, "__class__", subclass)))
    model.__class__ = kind
    with mock.patch.object(LanguageModule, "compute_language_model_loss", _own_loss):
        found.append(error(lambda: None))
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
        handles = []
        found.append(error(lambda h=handles, add=register: h.append(add(_half))))
        handles[0].remove()
    found.append(error(lambda: setattr(layer, "forward", torch.nn.Identity().forward)))
    del layer.forward
    found.append(error(lambda: setattr(model, "output_layer", _another_layer())))
    model.output_layer = layer
    found.append(error(lambda: None))
    leave()
    return found


def _half(module: Any, args: Any, output: Any = None) -> None:
    """A hook that only looks on would get no logits either."""


def test_a_model_that_was_changed_since_is_refused() -> None:
    of_layer = ["(forward hook tests.", "(forward_pre hook tests.", "(a forward of its own)", "layer is a _Another"]
    expected = ["its loss is _own_loss of tests."] * 3 + of_layer
    for found in run_ranks(_changed, 2):
        assert found.pop() == "", "once more as it was built"
        for message, part in zip(found, expected, strict=True):
            assert part in message
            assert "--burst-loss-chunk 7" in message
            assert "loss_chunk=0" in message


def _with_own_loss(rank: int) -> str:
    from megatron.core.models.gpt import GPTModel

    with (
        mock.patch.object(GPTModel, "compute_language_model_loss", _own_loss),
        pytest.raises(ValueError, match="burst-loss-chunk") as error,
    ):
        build(in_chunks(TWO_LAYERS, pp=2))
    leave()
    return str(error.value)


def test_a_loss_of_its_own_is_refused_on_every_pipeline_stage() -> None:
    for message in run_ranks(_with_own_loss, 2):
        assert "cannot cut the loss of GPTModel:\n  its loss is _own_loss" in message


def _not_in_chunks(rank: int, kind: str) -> list[str]:
    """Return what a model warns of whose loss is to be computed in chunks by choice of `memory="auto"`."""
    run = replace(TWO_LAYERS, cp=2, cp_comm_type="burst")
    chosen = Strategy(loss_chunk=CHUNK, keep_attention="all")
    with mock.patch.object(Registry, "asked", return_value=chosen), warnings.catch_warnings(record=True) as said:
        model, tokens = build(run).module, random_tokens(run)[0][:, :-1]
        batch = cut_batch({"tokens": tokens, "labels": tokens, "position_ids": torch.arange(64).expand(2, -1)})
        inputs = batch["tokens"], batch["position_ids"], None
        warnings.simplefilter("always")
        if kind == "usual":
            model(*inputs, labels=batch["labels"])
            with torch.no_grad():
                model(*inputs)  # scores
        if kind == "without labels":
            model(*inputs)
            model(*inputs)
        if kind == "hook":
            model.output_layer.register_forward_hook(_half)
            model(*inputs, labels=batch["labels"])
    leave()
    return [str(each.message) for each in said if "logits" in str(each.message)]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("usual", None), ("without labels", "it is called without labels"), ("hook", "its output layer has what would")],
)
def test_whole_logits_where_chunks_were_chosen_warn_once(kind: str, reason: str | None) -> None:
    said, others = run_ranks(_not_in_chunks, 2, kind)
    assert others == []
    assert len(said) == (reason is not None)
    assert all(f"the model has those of all its tokens: {reason}" in each for each in said)


def _gathered(rank: int) -> int:
    """How many parameters were computed with while they were still being gathered."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    run = in_chunks(TWO_LAYERS, cp=2)
    model = build(run).module
    options = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(**options, bucket_size=1), model
    )  # a parameter per bucket
    groups = wrapped.bucket_groups
    with torch.no_grad():
        forward_step(batches(random_tokens(run)), wrapped)
    leave()
    assert all(each.param_gather_dispatched for each in groups)
    return sum(each.param_gather_handle is not None for each in groups)


def test_the_output_layers_weight_is_waited_for_where_parameters_are_gathered_meanwhile() -> None:
    assert run_ranks(_gathered, 2) == [0, 0]
