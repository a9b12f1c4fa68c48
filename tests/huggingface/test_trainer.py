"""Hugging Face Trainer over DeepSpeed and rings, against Trainer on one rank without either."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

import burst_plugin.deepspeed as burst
from burst_plugin.deepspeed.adapter import Adapter
from burst_plugin.deepspeed.trainer import install_trainer
from burst_plugin.huggingface import RingCache
from tests.support.deepspeed_run import Run, draw, llama, worst
from tests.support.families import families
from tests.support.ranks import RankError, run_ranks
from tests.support.trainer_run import (
    Outcome,
    Rows,
    Setup,
    Supervised,
    SupervisedInChunks,
    arguments,
    load,
    save_model,
    train,
)

pytestmark = pytest.mark.huggingface


def _train(rank: int, setups: list[Setup], deepspeed: bool) -> Outcome:
    """One after the other; the last one's outcome."""
    for number, setup in enumerate(setups):
        outcome = train(setup, deepspeed=deepspeed, resume=number > 0)
    return outcome


def check(found: list[Outcome], truth: Outcome) -> None:
    """Losses, SGD steps, evaluation and words of all ranks."""
    for outcome in found:
        assert outcome.evaluated_on_ring
        assert outcome.losses == pytest.approx(truth.losses, rel=1e-5)
        error, name = worst(outcome.changes, truth.changes)
        assert error <= 2e-5, name
        assert outcome.eval_loss == pytest.approx(truth.eval_loss, rel=1e-5)
        torch.testing.assert_close(outcome.logits, truth.logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(outcome.generated, truth.generated)


def _reference(setup: Setup, ranks: int) -> Outcome:
    """On one rank every step takes the micro-batches of all data-parallel ranks."""
    accumulation = setup.run.accumulation * ranks // setup.run.cp
    one = replace(setup, run=replace(setup.run, accumulation=accumulation))
    return run_ranks(_train, 1, [one], False)[0]


@pytest.mark.parametrize(
    ("ranks", "run"),
    [
        (2, Run(cp=2, stage=2, accumulation=2, checkpointing=True)),
        (4, Run(cp=2, stage=3, accumulation=4)),
        (4, Run(cp=4, stage=3, accumulation=2, model=families()["gemma2"])),
        (2, Run(cp=2, stage=3, accumulation=2, model=families()["gemma2"], block={"loss_chunk": 5})),
    ],
    ids=["cp2_zero2", "cp2_dp2_zero3", "cp4_zero3_gemma2", "loss_in_chunks"],
)
def test_training_evaluation_and_generation_equal_one_rank(tmp_path: Path, ranks: int, run: Run) -> None:
    """Uneven labels, accumulation, clipping; with ZeRO 3 the model is read under zero.Init."""
    setup = save_model(Setup(run, str(tmp_path), rows=64))
    check(run_ranks(_train, ranks, [setup], True, timeout_s=120.0), _reference(setup, ranks))


def _generating(args: TrainingArguments, **given: Any) -> Seq2SeqTrainer:
    args.predict_with_generate, args.generation_config = True, None
    args.generation_max_length, args.generation_num_beams = 38, None
    return Seq2SeqTrainer(args=args, **given)


def _train_and_count(rank: int, setup: Setup) -> tuple[Outcome, int]:
    """What a run comes to, and how often layers attended to a cache on the ring."""
    calls, attend = [], RingCache.attend
    RingCache.attend = lambda *args: calls.append(1) or attend(*args)  # type: ignore[assignment]
    return _train(rank, [setup], True), len(calls)


def test_words_are_generated_on_the_ring_to_evaluate(tmp_path: Path) -> None:
    run = Run(cp=2, stage=2, model=families()["qwen3"])
    setup = save_model(Setup(run, str(tmp_path), held_out=4, trainer=_generating, max_steps=1))  # drops no rows
    found = run_ranks(_train_and_count, 2, setup, timeout_s=120.0)
    check([outcome for outcome, _ in found], _reference(setup, 2))
    assert [calls for _, calls in found] == [2 * 6 * 2] * 2  # batches, tokens after 32, layers


def test_accelerate_need_not_be_told_how_many_rings_there_are(tmp_path: Path) -> None:
    """It takes one, for which it works out the size of a batch."""
    setup = Setup(Run(cp=2, stage=2, accumulation=4), str(tmp_path), max_steps=2, rows=64, counts_rings=False)
    check(run_ranks(_train, 4, [save_model(setup)], True, timeout_s=120.0), _reference(setup, 4))


def _with_an_earlier_trainer(rank: int, setup: Setup) -> tuple[list[str], str]:
    """Whose loss with `sp_size` is a method; what `install` reports, and what happens then."""
    import transformers.trainer

    del transformers.trainer.deepspeed_sp_compute_loss
    report = install_trainer(Adapter())  # whatever else an earlier test has installed in the process that forked
    with pytest.raises(ValueError, match="needs transformers") as refused:
        train(setup, deepspeed=True)
    return report, str(refused.value)


def test_an_earlier_trainer_is_left_alone_and_refused(tmp_path: Path) -> None:
    setup = save_model(Setup(Run(cp=2, stage=2), str(tmp_path)))
    for report, refusal in run_ranks(_with_an_earlier_trainer, 2, setup):
        assert any("Trainer is not patched; rings need 5.8 or newer" in line for line in report)
        assert '"burst_attention" with sp_size needs transformers 5.8 or newer' in refusal


def test_resuming_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """2 steps and a checkpoint, then from there to step 4, against 4 steps in one go."""
    run = Run(cp=2, stage=2, accumulation=2)
    whole = save_model(Setup(run, str(tmp_path), max_steps=4))
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    halves = [replace(whole, max_steps=2, options=options), replace(whole, options=options)]
    check(run_ranks(_train, 2, halves, True, timeout_s=120.0), _reference(whole, 2))


def test_sft_trainer_equals_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    setup = save_model(Setup(Run(cp=2, stage=3, accumulation=2), str(tmp_path), trainer=Supervised))
    check(run_ranks(_train, 2, [setup], True, timeout_s=120.0), _reference(setup, 2))


def test_trl_has_its_own_loss_in_chunks_and_one_of_the_two_is_refused(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    if tuple(map(int, trl.__version__.split(".")[:2])) < (1, 15):
        pytest.skip("TRL computes its loss of whole logits before 1.15")
    run = Run(cp=2, stage=2, accumulation=2, block={"loss_chunk": 5})
    setup = save_model(Setup(run, str(tmp_path), trainer=Supervised))
    with pytest.raises(RankError, match=r"loss_chunk=5 is not supported with .* fused losses of Liger and TRL"):
        run_ranks(_train, 2, [setup], True, timeout_s=120.0)


class WithoutLogits(Trainer):
    """A trainer whose loss does not come with logits, as that of `SupervisedInChunks`."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """See `Trainer`."""
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        outputs["logits"] = None
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("trainer", [WithoutLogits, SupervisedInChunks])
def test_a_loss_without_logits_is_evaluated(trainer: Any, tmp_path: Path) -> None:
    """ZeRO 3 would cut up the output weight, which TRL's loss in chunks reads by itself."""
    if trainer is SupervisedInChunks:
        trl = pytest.importorskip("trl", reason="trl is not installed")
        if tuple(map(int, trl.__version__.split(".")[:2])) >= (1, 15):
            pytest.skip("TRL has no such loss since 1.15")
    run = Run(cp=2, stage=2, accumulation=2)
    setup = save_model(Setup(run, str(tmp_path), trainer=trainer, has_logits=False))
    check(run_ranks(_train, 2, [setup], True, timeout_s=120.0), _reference(setup, 2))


class WithHiddenStates(Trainer):
    """A trainer whose model returns hidden states when it predicts, which are left out where that is asked for."""

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`."""
        self.model.config.output_hidden_states = True
        if self.is_deepspeed_enabled:
            with pytest.raises(ValueError, match="logits alone, but the model returns hidden_states as well"):
                super().predict(test_dataset)
        return super().predict(test_dataset, ignore_keys=["past_key_values", "hidden_states"])


def test_predictions_of_more_than_logits_are_refused_by_name(tmp_path: Path) -> None:
    setup = save_model(Setup(Run(cp=2), str(tmp_path), trainer=WithHiddenStates, max_steps=1))
    check(run_ranks(_train, 2, [setup], True, timeout_s=120.0), _reference(setup, 2))


class AddsUp(Trainer):
    """A trainer that makes something of the loss that there is."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`."""
        found = super().compute_loss(model, inputs, *args, **kwargs)
        return (found[0] + 0.5, found[1]) if isinstance(found, tuple) else found + 0.5


class Scales(Trainer):
    """A trainer whose loss is divided by the number of micro-batches already."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.loss_is_scaled_for_ga = True


class Accepts(Trainer):
    """A trainer that takes the loss of its model for divided, which it does not by itself with rings."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.model_accepts_loss_kwargs = True


class ShiftsLabels(Trainer):
    """A trainer with a loss of its own, of labels that it shifts."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`."""
        labels = inputs.pop("labels")
        raise AssertionError(labels)


class CallsTheModel(Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`."""
        labels = inputs.pop("shift_labels")
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("trainer", [Scales, Accepts])
def test_a_loss_that_trainer_does_not_divide(tmp_path: Path, trainer: type[Trainer]) -> None:
    unclipped = {"max_grad_norm": 1e9}  # which would hide a wrong scale
    run = Run(cp=2, stage=2, accumulation=2, lr=0.1)
    setup = save_model(Setup(run, str(tmp_path), trainer=trainer, options=unclipped))
    found, truth = run_ranks(_train, 2, [setup], True, timeout_s=120.0), _reference(setup, 2)
    for outcome in found:
        error, name = worst(outcome.changes, truth.changes)
        assert error <= 2e-5, name


def test_a_loss_of_ones_own_starts_from_that_of_the_ring(tmp_path: Path) -> None:
    setup = save_model(Setup(Run(cp=2, stage=2, model=llama(num_hidden_layers=1)), str(tmp_path), trainer=AddsUp))
    check(run_ranks(_train, 2, [setup], True, timeout_s=120.0), _reference(setup, 2))
    with pytest.raises(RuntimeError, match=r"CallsTheModel.compute_loss calls the model itself, but labels are"):
        run_ranks(_train, 2, [replace(setup, trainer=CallsTheModel)], True, timeout_s=120.0)
    with pytest.raises(RuntimeError, match=r"KeyError: 'labels'"):
        run_ranks(_train, 2, [replace(setup, trainer=ShiftsLabels)], True, timeout_s=120.0)


def _warned(rank: int, setup: Setup, accumulations: list[int]) -> list[str]:
    """What is said of accumulation while a trainer is made, for each of these numbers of batches in a step."""
    burst.install()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    said = []
    for accumulation in accumulations:
        args = arguments(replace(setup, run=replace(setup.run, accumulation=accumulation)), deepspeed=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Trainer(model=load(setup), args=args, train_dataset=Rows(draw(1)[0]))
        texts = [str(warning.message) for warning in caught]
        said += [text for text in texts if text.startswith("gradient_accumulation_steps=")]
    return said


def test_rings_whose_steps_have_other_rows_than_one_rank_are_told_of(tmp_path: Path) -> None:
    setup = save_model(Setup(Run(cp=2, model=llama(num_hidden_layers=1)), str(tmp_path)))
    first, *others = run_ranks(_warned, 4, setup, [3, 4], timeout_s=120.0)
    assert ["with 2 rings a step has other rows than on one rank" in text for text in first] == [True]
    assert others == [[]] * 3


def _loop_after_training(rank: int, setup: Setup) -> tuple[float, float]:
    """The loss of a batch on the ring, by a call of the model, and that of this rank alone."""
    burst.install()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    batch = draw(1, rows=setup.rows, length=setup.length)[0]
    trainer = Trainer(model=load(setup), args=arguments(setup, deepspeed=True), train_dataset=Rows(batch))
    trainer.train()
    on_ring = trainer.model.train()(**batch).loss.item()
    with torch.no_grad():
        return on_ring, trainer.model.eval()(**batch).loss.item()


def test_a_loop_of_ones_own_goes_on_where_trainer_has_ended(tmp_path: Path) -> None:
    setup = save_model(Setup(Run(cp=2, stage=2, model=llama(num_hidden_layers=1)), str(tmp_path), max_steps=1))
    for on_ring, alone in run_ranks(_loop_after_training, 2, setup, timeout_s=120.0):
        assert on_ring == pytest.approx(alone, rel=1e-5)


def _evaluated_before_training(rank: int, setup: Setup) -> None:
    burst.install()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    data = Rows(draw(1, rows=setup.rows, length=setup.length)[0])
    args = arguments(setup, deepspeed=True)
    trainer = Trainer(model=load(setup), args=args, train_dataset=data, eval_dataset=data)
    trainer.evaluate()
    trainer.train()


def test_training_after_evaluation_needs_a_new_trainer(tmp_path: Path) -> None:
    setup = save_model(Setup(Run(cp=2, stage=3, model=llama(num_hidden_layers=1)), str(tmp_path), max_steps=1))
    with pytest.raises(RankError, match=r"new Trainer .* train\(\) after evaluate\(\) or predict\(\) with ZeRO-3: "):
        run_ranks(_evaluated_before_training, 2, setup, timeout_s=120.0)


def _refused(rank: int, setup: Setup, options: dict[str, Any]) -> None:
    train(replace(setup, options=options), deepspeed=True)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"label_smoothing_factor": 0.1}, "Trainer's label_smoother"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        (
            {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 2},
            "split_batches=True of accelerator_config",
        ),
    ],
)
def test_what_cannot_be_had_on_a_ring_is_refused(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    setup = save_model(Setup(Run(cp=2, stage=2, model=llama(num_hidden_layers=1)), str(tmp_path)))
    with pytest.raises(RuntimeError, match=f"{name} is not supported with burst_attention"):
        run_ranks(_refused, 2, setup, options)


def _misspelt(rank: int, setup: Setup) -> None:
    burst.install()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    args = arguments(setup, deepspeed=True)
    config = args.hf_deepspeed_config.config
    config["burst_atention"] = config.pop("burst_attention")
    Trainer(model=load(setup), args=args, train_dataset=Rows(draw(1, rows=2)[0])).train()


def test_a_misspelt_block_with_auto_in_it_is_named(tmp_path: Path) -> None:
    setup = save_model(Setup(Run(cp=2, stage=2, model=llama(num_hidden_layers=1)), str(tmp_path)))
    with pytest.raises(
        RankError, match=r'not rings, since .* no block "burst_attention" .*, only "burst_atention"; wr'
    ):
        run_ranks(_misspelt, 2, setup)


def _other_mean(rank: int, setup: Setup, tells_accelerate: bool) -> list[float]:
    """Losses that Trainer logged; without sp_size there are rings of one."""
    burst.install()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    args = arguments(setup, deepspeed=True)
    if not tells_accelerate:
        args.parallelism_config = None
    data = Rows(draw(1, rows=setup.rows, length=setup.length)[0])
    trainer = Trainer(model=load(setup), args=args, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("cp", [1, 2])
def test_a_mean_that_trainer_does_not_make_is_refused(tmp_path: Path, cp: int) -> None:
    """With rings each ring's own; on rings of one that over all tokens, if Trainer is told not to make it."""
    loss = "mean_of_ranks" if cp > 1 else "token_mean"
    options = {} if cp > 1 else {"average_tokens_across_devices": False}
    model = llama(num_hidden_layers=1)
    run = Run(cp=cp, stage=2, model=model, block={"loss": loss, "context_parallel_size": cp})
    setup = save_model(Setup(run, str(tmp_path), options=options))
    told = f'"loss": "{loss}" of burst_attention (is not supported with Trainer|needs average_tokens_across_devices)'
    with pytest.raises(RuntimeError, match=told):
        run_ranks(_other_mean, 2, setup, cp > 1, timeout_s=120.0)


def test_trainer_on_rings_of_one_makes_the_means_that_it_makes_without(tmp_path: Path) -> None:
    """With unequal numbers of labels: by default one mean over the tokens of all ranks, else that of each rank."""
    losses = {}
    for averages in (True, False):
        for block in (None, {"context_parallel_size": 1}, {"context_parallel_size": 1, "loss": "token_mean"}):
            if not averages and block and "loss" in block:
                continue  # refused, see above
            config = {} if block is not None else {"burst_attention": {"enabled": False}}
            run = Run(
                cp=1, stage=2, accumulation=2, model=llama(num_hidden_layers=1), block=block or {}, config=config
            )
            setup = save_model(Setup(run, str(tmp_path), options={"average_tokens_across_devices": averages}))
            losses[averages, str(block)] = run_ranks(_other_mean, 2, setup, False, timeout_s=120.0)[0]
    for (averages, block), found in losses.items():
        assert found == pytest.approx(losses[averages, "None"], rel=1e-5), block
    assert losses[True, "None"] != pytest.approx(losses[False, "None"], rel=1e-4)
