"""The loss of a step of Trainer on a ring, and its gradients, against Trainer on one rank without the plugin."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

import burst_plugin.deepspeed as burst
from burst_plugin.deepspeed.trainer import check_mean
from tests.support.deepspeed_run import Run, draw, llama, worst
from tests.support.families import experts
from tests.support.ranks import run_ranks
from tests.support.trainer_run import (
    Rows,
    Setup,
    Supervised,
    SupervisedInChunks,
    arguments,
    load,
    save_model,
    weights,
)

pytestmark = pytest.mark.huggingface


class AddsTerm(Trainer):
    """A trainer that adds a mean over all tokens of a micro-batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """See `Trainer`."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 0.1 * outputs.logits.logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


class AddsWeights(Trainer):
    """A trainer that adds a term of weights, which ZeRO 3 has in parts outside of the model."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + 0.1 * sum(p.square().sum() for p in model.parameters())


class CountsTokens(Trainer):
    """A trainer that adds a sum over labelled tokens, divided by the number of labels of the step."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """See `Trainer`."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        targets = inputs.get("shift_labels")
        if targets is None:
            targets = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        loss = loss + 0.1 * outputs.logits.logsumexp(-1).square()[targets != -100].sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


EXPERTS = experts(num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=0.5)


@dataclass(frozen=True)
class Case:
    """A step of Trainer; labels: the number of labels in the row of each micro-batch, from its second token on."""

    labels: tuple[int, ...]
    trainer: type[Any] = Trainer
    stage: int = 1
    averages_tokens: bool = True
    has_experts: bool = False

    def setup(self, directory: str) -> Setup:
        """Return what Trainer is given; gradients are not clipped, which would hide a wrong scale."""
        rows = len(self.labels)
        model = EXPERTS if self.has_experts else llama(num_hidden_layers=1)
        run = Run(stage=self.stage, accumulation=rows, lr=0.1, model=model)
        options = {"max_grad_norm": 1e9, "average_tokens_across_devices": self.averages_tokens}
        options["per_device_eval_batch_size"] = 1  # so that some have no labels
        directory += "/experts" if self.has_experts else "/dense"
        return Setup(run, directory, rows, length=16, max_steps=1, options=options, trainer=self.trainer)


FEW, MANY = (1, 0, 0, 2), (3, 15, 8, 0)
CASES = [
    Case((1,)),
    Case((0, 1), stage=3),
    Case((0, 1, 0, 0)),
    Case(FEW, stage=3),
    Case(FEW, averages_tokens=False),
    Case(MANY),
    Case(FEW, AddsTerm),
    Case(MANY[:2], AddsTerm, 3),
    Case(MANY, AddsWeights),
    Case(FEW, CountsTokens, 3),
    Case(MANY, CountsTokens),
    Case(MANY, has_experts=True),
    Case(MANY[:2], has_experts=True),
    Case(MANY[:2], Supervised, has_experts=True),
    Case(MANY[:2], SupervisedInChunks, has_experts=True),
    Case(FEW, stage=3, has_experts=True),
    Case(MANY, Supervised, has_experts=True),
    Case(FEW, SupervisedInChunks, 3, has_experts=True),
]
NO_LABELS = Case((0, 0))  # of which plain Trainer's mean is not a number


@dataclass(frozen=True)
class Outcome:
    """The loss that Trainer logged and that of its evaluation, and changes of weights."""

    loss: float
    eval_loss: float
    changes: dict[str, torch.Tensor]


def _train(rank: int, cases: list[Case], directory: str, deepspeed: bool) -> list[Outcome]:
    """Run Trainer once for each case."""
    if deepspeed:
        burst.install()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return [_outcome(case, directory, deepspeed) for case in cases]


def _outcome(case: Case, directory: str, deepspeed: bool) -> Outcome:
    setup = case.setup(directory)
    ids = draw(1, rows=setup.rows, length=setup.length)[0]["input_ids"]
    hidden = torch.arange(setup.length) > torch.tensor(case.labels)[:, None]
    hidden[:, 0] = True
    data = Rows({"input_ids": ids, "labels": ids.masked_fill(hidden, -100)})
    args = arguments(setup, deepspeed=deepspeed)  # before the model, which ZeRO 3 cuts up while it is read
    model = load(setup)
    before = weights(model)
    trainer = case.trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    after = weights(trainer.model)
    evaluates = case.trainer is AddsTerm or case.has_experts
    evaluated = trainer.evaluate()["eval_loss"] if evaluates else math.nan
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return Outcome(loss, evaluated, {name: after[name] - before[name] for name in after})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Outcome, ...]]:
    """What two ranks come to in each case, and one rank without the plugin where that is a number."""
    directory = str(tmp_path_factory.mktemp("model"))
    for case in {case.has_experts: case for case in CASES}.values():
        save_model(case.setup(directory))
    ranks = run_ranks(_train, 2, [*CASES, NO_LABELS], directory, True, timeout_s=150.0)
    [truth] = run_ranks(_train, 1, CASES, directory, False, timeout_s=60.0)
    return dict(zip([*CASES, NO_LABELS], zip(*ranks, [*truth, None], strict=True), strict=True))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_on_a_ring_equals_one_on_one_rank(case: Case, outcomes: dict[Case, tuple[Outcome, ...]]) -> None:
    *ranks, truth = outcomes[case]
    for outcome in ranks:
        assert outcome.loss == pytest.approx(truth.loss, rel=1e-5)
        assert outcome.eval_loss == pytest.approx(truth.eval_loss, rel=1e-5, nan_ok=True)
        error, name = worst(outcome.changes, truth.changes)
        assert error <= 2e-5, name


@pytest.mark.timeout(240)
def test_a_step_without_labels_changes_nothing(outcomes: dict[Case, tuple[Outcome, ...]]) -> None:
    for outcome in outcomes[NO_LABELS][:2]:
        assert outcome.loss == 0.0
        assert not any(change.any() for change in outcome.changes.values())


def test_a_mean_of_each_ring_is_refused_and_one_ring_has_no_other() -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(average_tokens_across_devices=False))
    ring = SimpleNamespace(ranks=2)
    check_mean(SimpleNamespace(cp=ring, ranks=2, loss="token_mean"), trainer, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"average_tokens_across_devices=False .* is not supported on 2 rings"):
        check_mean(SimpleNamespace(cp=ring, ranks=4, loss="token_mean"), trainer, None)  # type: ignore[arg-type]
