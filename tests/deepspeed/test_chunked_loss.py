"""Losses in chunks in DeepSpeed: every ZeRO stage equals one rank with whole logits, also with LoRA on the head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

import burst_plugin.deepspeed as burst
from tests.support.deepspeed_run import (
    VOCAB,
    Result,
    Run,
    configuration,
    draw,
    gradients,
    llama,
    reference,
    start,
    stop,
    train,
    train_unmodified,
    worst,
)
from tests.support.largest import LargestLogits
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

BATCHES = draw(2)
CHUNK = 5  # tokens; a rank has 32 of a batch
RUN = Run(accumulation=2, block={"loss_chunk": CHUNK}, config={"gradient_clipping": 0.0})


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def _freeze_head(model: Any) -> None:
    model.lm_head.requires_grad_(False)


def _trained(rank: int, runs: Sequence[Run]) -> list[tuple[Result, int, Counter[str]]]:
    """What a run gave; the most rows of logits; how often ZeRO-3 fetched the head, by class."""
    found = []
    for run in runs:
        fetched: Counter[str] = Counter()
        fetch = PartitionedParameterCoordinator.fetch_sub_module

        def counted(self: Any, module: Any, forward: bool, fetch: Any = fetch, fetched: Any = fetched) -> Any:
            if getattr(module, "out_features", 0) == VOCAB:
                fetched[type(module).__name__] += 1
            return fetch(self, module, forward)

        with (
            mock.patch.object(PartitionedParameterCoordinator, "fetch_sub_module", counted),
            LargestLogits(VOCAB, 32) as largest,
        ):
            result = train_unmodified(run, BATCHES)
        found.append((result, largest.rows, fetched))
    return found


def check(runs: Sequence[Run], ranks: int = 2) -> list[tuple[Result, int, Counter[str]]]:
    """Compare runs with one rank without DeepSpeed, whose losses are those of two micro-batches."""
    found = run_ranks(_trained, ranks, runs, timeout_s=180.0)
    for run, (result, rows, _) in zip(runs, found[0], strict=True):
        truth = _mean_of_steps(run)
        about = f"{run.stage=} {run.prepare=}"
        assert sum(result.losses) / 2 == pytest.approx(truth.losses[0], rel=1e-6), about
        error, name = worst(result.grads, truth.grads)
        assert error <= 2e-6, (about, name, error)
        assert rows <= CHUNK, about
    return found[0]


def _mean_of_steps(run: Run) -> Result:
    """The mean over micro-batches of each one's mean over its labels, which is what DeepSpeed gives a script."""
    each = [reference(replace(run, accumulation=1), [batch]) for batch in BATCHES]
    grads = {name: (each[0].grads[name] + each[1].grads[name]) / 2 for name in each[0].grads}
    return Result([(each[0].losses[0] + each[1].losses[0]) / 2], grads, {})


def test_every_zero_stage_equals_one_rank() -> None:
    runs = [replace(RUN, stage=stage, checkpointing=stage % 2 == 1) for stage in range(4)]
    stage_3 = check(runs)[3]
    assert stage_3[2]["Linear"] == 4, "once per pass and micro-batch, however many chunks"


def test_heads_with_lora_tied_and_frozen() -> None:
    kinds = [
        replace(RUN, prepare=_lora),
        replace(RUN, model=llama(tie_word_embeddings=True)),
        replace(RUN, prepare=_freeze_head),
    ]
    found = check([replace(run, stage=stage) for run in kinds for stage in (1, 3)])
    assert found[1][2] == {"Linear": 4}, "LoRA's head is one: its parts are not fetched by themselves"


def test_two_rings() -> None:
    found = check([replace(RUN, stage=stage) for stage in (0, 3)], 4)
    assert [fetched["Linear"] for _, _, fetched in found] == [0, 4]


def _low(rank: int, runs: Sequence[Run]) -> list[dict[str, torch.Tensor]]:
    return [train_unmodified(run, BATCHES).grads for run in runs]


def test_bfloat16_is_as_exact_as_with_whole_logits() -> None:
    """The head's gradient, against float32 on one rank."""
    low = replace(RUN, config={**RUN.config, "bf16": {"enabled": True}})
    runs = [replace(low, stage=stage, block=block) for stage in (1, 3) for block in ({"loss_chunk": 2}, {})]
    truth = _mean_of_steps(RUN).grads["lm_head.weight"]
    found = run_ranks(_low, 2, runs, timeout_s=120.0)[0]
    errors = [float((grads["lm_head.weight"] - truth).norm() / truth.norm()) for grads in found]
    for chunked, whole in zip(errors[::2], errors[1::2], strict=True):
        assert 1e-4 < chunked <= 1.2 * whole


def _read(rank: int, stages: Sequence[int]) -> list[tuple[float, float, bool]]:
    """Return the model's own loss, the loss that a script makes of its logits, and whether gradients are equal."""
    burst.install()
    found = []
    for stage in stages:
        grads = []
        for reads in (False, True):
            engine = start(replace(RUN, stage=stage), 2)
            for batch in BATCHES:  # over which DeepSpeed takes the mean, by hooks on what the model returns
                local = burst.shard_batch(batch)
                output = engine(**{name: x for name, x in local.items() if name != "labels"}, use_cache=False)
                own = loss = output.loss
                if reads:
                    loss = burst.token_mean_loss(output.logits, local["shift_labels"])
                engine.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    grads.append(gradients(engine))
                engine.step()
            stop(engine)
        found.append((float(own), float(loss), worst(grads[1], grads[0])[0] <= 2e-6))
    return found


def test_logits_may_be_read_all_the_same() -> None:
    for own, loss, is_equal in run_ranks(_read, 2, (0, 1, 2, 3), timeout_s=120.0)[0]:
        assert loss == pytest.approx(own, rel=1e-6)
        assert is_equal


def _of_logits(rank: int, runs: Sequence[Run]) -> list[Result]:
    """Train on losses made of logits, by `engine.backward` and then by `loss.backward`."""

    def backward(engine: Any, loss: torch.Tensor, **options: Any) -> None:
        (loss * engine.gradient_accumulation_steps()).backward()

    found = [train(run, BATCHES) for run in runs]
    with mock.patch.object(deepspeed.DeepSpeedEngine, "backward", backward):
        return found + [train(run, BATCHES) for run in runs]


def test_a_loss_of_logits_begins_a_backward_pass_of_deepspeed() -> None:
    """DeepSpeed reduces buckets that are full in the backward pass, and has to know which micro-batch is the last."""
    small = {"reduce_bucket_size": 500}
    runs = [
        replace(RUN, stage=stage, config={**RUN.config, "zero_optimization": {**small, **options}}, lr=1.0)
        for stage, options in ((2, {"offload_optimizer": {"device": "cpu"}}), (1, {"overlap_comm": True}), (2, {}))
    ]
    truth = reference(replace(RUN, lr=1.0), BATCHES)
    for result in run_ranks(_of_logits, 2, runs, timeout_s=180.0)[0]:
        assert worst(result.grads, truth.grads)[0] <= 2e-6
        assert worst(result.changes, truth.changes)[0] <= 1e-5


def _refused(rank: int) -> list[str]:
    """A model of one's own."""
    burst.install()
    messages = []
    model = torch.nn.Linear(4, 4)
    config = configuration(RUN, 2)
    with pytest.raises(ValueError, match="for models of transformers") as error:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    messages.append(str(error.value))
    return messages


def test_what_has_no_chunks_is_refused() -> None:
    for messages in run_ranks(_refused, 2, timeout_s=120.0):
        assert "loss_chunk=5 is for models of transformers, and Linear is not one" in messages[0]


def _evaluated(rank: int, runs: Sequence[Run]) -> list[tuple[float, float]]:
    """The loss of a compiled engine, and that of an evaluation."""
    found = []
    for run in runs:
        engine = start(run, 2)
        engine.compile(backend="eager")
        loss = engine(**BATCHES[0]).loss
        engine.backward(loss)
        engine.step()
        found.append((float(loss.detach()), float(burst.eval_batch(BATCHES[0], engine))))
        stop(engine)
    return found


@pytest.mark.slow
def test_compiled_and_evaluated() -> None:
    run = replace(RUN, accumulation=1, stage=1)
    chunked, whole = run_ranks(_evaluated, 2, [run, replace(run, block={})], timeout_s=120.0)[0]
    assert chunked == pytest.approx(whole, rel=1e-5)
