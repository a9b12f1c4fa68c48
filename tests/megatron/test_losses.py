"""Losses of context-parallel ranks that count unequal numbers of tokens, as scripts count them: against one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import multi_token_prediction

from burst_plugin.megatron import packed_indices
from burst_plugin.megatron.registry import Registry
from burst_plugin.megatron.repairs.losses import PredictionLoss, scaled_main_loss
from tests.support.megatron_gpt import GptRun, StepResult, check_close, cut_batch, loss_of, one_step, random_tokens
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

Batch = dict[str, torch.Tensor]
Step = Callable[[Iterator[Batch], Any], tuple[torch.Tensor, Any]]
ONE_RANK = GptRun(layers=1)
PREDICTING = replace(ONE_RANK, layers=2, config={"mtp_num_layers": 1}, cp_comm_type="burst")  # for its repairs


def _run(batch: Batch, mask: torch.Tensor, model: Any) -> tuple[torch.Tensor, Any]:
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask)
    return output, partial(loss_of, mask)


def masked_after_the_cut() -> Step:
    """Tokens are left out of the loss when Megatron has cut the batch, as padding or prompts are."""

    def step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = cut_batch(next(data))
        return _run(batch, batch["loss_mask"] * (batch["labels"] >= 40), model)

    return step


def two_batches() -> Step:
    """Megatron cuts two batches for one step, chosen and rejected answers; the latter are shorter."""

    def step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        whole, found = next(data), []
        for row in range(2):
            batch = {name: x[row : row + 1].clone() for name, x in whole.items()}
            if row == 1:
                batch["loss_mask"][:, 8:] = 0
            found.append(cut_batch(batch))
        outputs = [_run(batch, batch["loss_mask"], model)[0] for batch in found]
        return torch.cat(outputs), partial(loss_of, torch.cat([batch["loss_mask"] for batch in found]))

    return step


def cut_ahead() -> Step:
    """Megatron cuts the next microbatch while this one is computed; every other one has few labels."""
    waiting: list[Batch] = []

    def cut(data: Iterator[Batch], number: int) -> None:
        batch = next(data, None)
        if batch is not None:
            if number % 2:
                batch["loss_mask"][:, 8:] = 0
            waiting.append(cut_batch(batch))

    numbers = iter(range(99))

    def step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        while len(waiting) < 2 and (number := next(numbers)) < 9:
            cut(data, number)
        return _run(waiting[0], waiting.pop(0)["loss_mask"], model)

    return step


def cut_by_the_script() -> Step:
    """The script cuts the batch itself, which Megatron never sees; labels are in its first half alone."""

    def step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        from megatron.core import parallel_state

        batch, group = next(data), parallel_state.get_context_parallel_group()
        length = batch["tokens"].shape[1]
        batch["loss_mask"][:, : length // 4] = 0
        batch["loss_mask"][:, length // 2 :] = 0
        rows = packed_indices(torch.tensor([0, length]), group.size(), group.rank())
        local = {name: x.index_select(1, rows) for name, x in batch.items() if x.dim() == 2}
        return _run(local, local["loss_mask"], model)

    return step


def _losses(rank: int, run: GptRun, make: Callable[[], Step]) -> StepResult:
    return one_step(run, random_tokens(run), make())


@pytest.mark.parametrize("make", [masked_after_the_cut, two_batches, cut_ahead, cut_by_the_script])
def test_every_token_that_a_script_counts_weighs_the_same(make: Callable[[], Step]) -> None:
    expected = run_ranks(_losses, 1, ONE_RANK, make)[0]
    for cp in (2, 4):
        for result in run_ranks(_losses, cp, replace(ONE_RANK, cp=cp, cp_comm_type="burst"), make):
            check_close(result, expected)


def _reported(rank: int, is_evaluation: bool) -> Any:
    """Return what Megatron hears of a loss function with --sft."""
    sys.modules["megatron.training.global_vars"] = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(sft=True))  # type: ignore[assignment]
    model = SimpleNamespace(pg_collection=SimpleNamespace(cp=dist.group.WORLD))
    config = SimpleNamespace(context_parallel_size=2, cp_comm_type="burst", calculate_per_token_loss=True)
    loss, count = torch.tensor([6.0, 1.0][rank]), torch.tensor([2, 4][rank])

    def loss_func(output: torch.Tensor) -> Any:
        return output, count, {"lm loss": torch.stack([loss, count]), "other": loss}

    def calculate(model: Any, output_tensor: torch.Tensor, loss_func: Any, config: Any) -> Any:
        return loss_func(output_tensor)

    with torch.set_grad_enabled(not is_evaluation):
        *values, reported = scaled_main_loss(Registry(None), calculate, model, loss, loss_func, config)
    assert values == [loss, count]
    return {name: x.tolist() for name, x in reported.items()}


def test_evaluations_of_conversations_report_all_ranks_tokens() -> None:
    """Megatron takes the mean of what 6 / 2 and 1 / 4 give on two ranks; a token weighs the same by 7 / 6 on both."""
    assert run_ranks(_reported, 2, False) == [
        {"lm loss": [6.0, 2.0], "other": 6.0},
        {"lm loss": [1.0, 4.0], "other": 1.0},
    ]
    for rank, reported in enumerate(run_ranks(_reported, 2, True)):
        assert reported == {"lm loss": [7.0, 6.0], "other": [6.0, 1.0][rank]}


@pytest.mark.parametrize("per_token", [False, True])
def test_so_do_those_of_token_prediction(per_token: bool) -> None:
    run = replace(PREDICTING, config={**PREDICTING.config, "calculate_per_token_loss": per_token})
    expected = run_ranks(_losses, 1, run, masked_after_the_cut)[0]
    for result in run_ranks(_losses, 2, replace(run, cp=2), masked_after_the_cut):
        check_close(result, expected)


RANKS = 4
MASKS = {  # of tokens in the loss, a row for each rank
    "uneven": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 1]]),
    "fewer_than_ranks": torch.tensor([[0, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]]),
}
TARGETS = torch.arange(20.0).reshape(RANKS, 5).sin()
PREDICTION_CASES = [
    (kind, by, per_token) for kind in MASKS for by in ("labels", "input_ids") for per_token in (False, True)
]


def _roll_rows(tensor: torch.Tensor, cp_group: Any = None, packed_seq_params: Any = None) -> Any:
    rolled = tensor.roll(-1, -1)
    rolled[:, -1] = 0
    return rolled, rolled.sum()


def _predict(
    labels: Any, loss_mask: Any, input_ids: Any, compute_language_model_loss: Any, config: Any, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss that `process_mtp_loss` logs since 0.17, and the loss that it takes gradients of."""
    roll = partial(multi_token_prediction.roll_tensor, cp_group=cp_group)
    if labels is None:
        labels, loss_mask = roll(input_ids)[0], roll(loss_mask)[0]
    in_main_loss = loss_mask.sum()
    mask, count = roll(loss_mask)
    losses = mask * compute_language_model_loss(labels, None)
    weight = (in_main_loss if config.calculate_per_token_loss else 1) / count.clamp(min=1)
    factor = config.mtp_loss_scaling_factor / config.mtp_num_layers
    return losses.sum() * (count > 0) / count.clamp(min=1), (losses * factor * weight).sum()


def _predicted(rows: slice, group: Any) -> dict[tuple[str, str, bool], tuple[torch.Tensor, torch.Tensor]]:
    """Return logged losses and losses for gradients of some ranks' tokens, with the plugin where there is a group."""
    prediction = PredictionLoss(Registry(None))
    process: Any = _predict if group is None else partial(prediction.process, _predict)
    roll = _roll_rows if group is None else partial(prediction.roll, _roll_rows)
    found = {}
    for kind, by, per_token in PREDICTION_CASES:
        config = SimpleNamespace(
            context_parallel_size=RANKS,
            cp_comm_type="burst",
            hybrid_context_parallel=False,
            calculate_per_token_loss=per_token,
            mtp_num_layers=2,
            mtp_loss_scaling_factor=0.3,
        )
        given = {"labels": None, "input_ids": None, by: TARGETS[rows]}
        with mock.patch.object(multi_token_prediction, "roll_tensor", roll):
            found[kind, by, per_token] = process(
                loss_mask=MASKS[kind][rows],
                compute_language_model_loss=lambda labels, logits: labels + 2,
                config=config,
                cp_group=group,
                **given,
            )
        assert (config.calculate_per_token_loss, config.mtp_loss_scaling_factor) == (per_token, 0.3)
    return found


def _predicted_by_rank(rank: int) -> Any:
    return _predicted(slice(rank, rank + 1), dist.group.WORLD)


def test_token_prediction_since_0_17_weighs_and_logs_tokens_of_all_ranks() -> None:
    """Megatron logs the ranks' mean, and takes the mean of their gradients, or the sum per token."""
    expected = _predicted(slice(RANKS), None)
    by_rank = run_ranks(_predicted_by_rank, RANKS)
    for case, (logged, loss) in expected.items():
        of_ranks = torch.tensor([result[case] for result in by_rank])
        torch.testing.assert_close(of_ranks[:, 0].mean(), logged)
        torch.testing.assert_close(of_ranks[:, 1].sum() / (1 if case[2] else RANKS), loss)


def _nothing_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count tokens, with a main loss of 0, beside which other losses are seen."""
    total, count, reported = loss_of(mask, output)
    return 0 * total, count, reported


def _predicting_alone(rank: int, run: GptRun, kind: str) -> dict[str, torch.Tensor]:
    """Return gradients of token prediction alone, with a loss mask of that kind, which is in a text's first part."""

    def step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = cut_batch(next(data))
        mask = batch["loss_mask"] * (batch["position_ids"] < 24)
        given = {"floats": mask, "integers": mask.long(), "bools": mask.bool(), "none": None}[kind]
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=given)
        return output, partial(_nothing_of, mask)

    return one_step(run, random_tokens(run), step).grads


@pytest.mark.parametrize(("kind", "like"), [("integers", "floats"), ("bools", "floats"), ("none", "none")])
def test_so_do_they_with_a_mask_of_any_type_or_none(kind: str, like: str) -> None:
    expected = run_ranks(_predicting_alone, 1, PREDICTING, like)[0]
    for grads in run_ranks(_predicting_alone, 2, replace(PREDICTING, cp=2), kind):
        check_close(StepResult(0, grads), StepResult(0, expected))


ROUTERS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
}


def _routing_alone(rank: int, run: GptRun) -> dict[str, torch.Tensor]:
    """Return gradients of the losses of routers alone, with a main loss that counts a part of all tokens."""

    def step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = cut_batch(next(data))
        mask = batch["loss_mask"] * (batch["labels"] >= 40)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(_nothing_of, mask)

    return one_step(run, random_tokens(run), step).grads


@pytest.mark.parametrize(
    ("sizes", "per_token"),
    [({"cp": 2}, False), ({"cp": 2}, True), ({"cp": 2, "pp": 2}, True)],
    ids=["mean_of_microbatches", "per_token", "per_token_pp2"],
)
def test_losses_of_routers_weigh_the_same_over_any_number_of_ranks(sizes: dict[str, int], per_token: bool) -> None:
    one = replace(ONE_RANK, layers=2, config=ROUTERS, per_token_loss=per_token, cp_comm_type="burst")
    expected = run_ranks(_routing_alone, 1, one)[0]
    assert expected["decoder.layers.0.mlp.router.weight"].any()
    for grads in run_ranks(_routing_alone, 2 * sizes.get("pp", 1), replace(one, **sizes)):
        check_close(StepResult(0, grads), StepResult(0, expected))


def _counting_sequences(rank: int, run: GptRun) -> StepResult:
    """Losses that are means over tokens already, summed over the ranks by the script, and counted by sequences."""

    def step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = cut_batch(next(data))
        output, _ = _run(batch, batch["loss_mask"], model)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            means = output.float().mean(1)
            count = torch.tensor(len(means))
            return means.sum(), count, torch.stack([means.sum().detach(), count.float()])

        return output, loss

    return one_step(run, random_tokens(run), step)


def test_losses_that_count_sequences_stay_as_they_are() -> None:
    expected = run_ranks(_counting_sequences, 1, ONE_RANK)[0]
    for result in run_ranks(_counting_sequences, 2, replace(ONE_RANK, cp=2, cp_comm_type="burst")):
        check_close(result, expected)


def sum_and_count(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return loss_of(mask, output)


def mean_of_a_rank(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total, count, reported = loss_of(mask, output)
    return total / count.clamp(min=1), reported


def mean_of_all_ranks(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that ranks have in common, of which each has the gradient of its own tokens."""
    from megatron.core import parallel_state

    total, count, reported = loss_of(mask, output)
    of_all = torch.stack([total.detach(), count.to(total.dtype)])
    torch.distributed.all_reduce(of_all, group=parallel_state.get_context_parallel_group())
    return (total + (of_all[0] - total).detach()) / of_all[1], reported


LOSSES = (sum_and_count, mean_of_a_rank, mean_of_all_ranks)
Combination = tuple[str, bool]  # the loss function, and whether the loss is per token


def _of_every_combination(rank: int, run: GptRun) -> dict[Combination, StepResult | str]:
    """Return what each loss function gives, per token and not, with unequal numbers of tokens; or its error."""
    results: dict[Combination, StepResult | str] = {}
    for loss in LOSSES:

        def step(data: Iterator[Batch], model: Any, loss: Any = loss) -> tuple[torch.Tensor, Any]:
            batch = cut_batch(next(data))
            mask = batch["loss_mask"] * (batch["labels"] >= 40)
            return _run(batch, mask, model)[0], partial(loss, mask)

        for per_token in (False, True):
            try:
                result: StepResult | str = one_step(replace(run, per_token_loss=per_token), random_tokens(run), step)
            except ValueError as error:
                result = str(error)
            results[loss.__name__, per_token] = result
    return results


def test_loss_functions_of_two_or_three_values_equal_one_rank_or_are_refused() -> None:
    expected = run_ranks(_of_every_combination, 1, ONE_RANK)[0]
    for cp in (2, 4):
        for results in run_ranks(_of_every_combination, cp, replace(ONE_RANK, cp=cp, cp_comm_type="burst")):
            for how in (("sum_and_count", False), ("sum_and_count", True), ("mean_of_all_ranks", False)):
                check_close(results.pop(how), expected[how])
            for loss in ("mean_of_a_rank", "mean_of_all_ranks"):
                said = results.pop((loss, True))
                assert (
                    f"two values, (loss, reported), with calculate_per_token_loss=True and context_parallel_size={cp}"
                    in said
                )
            said = results.pop(("mean_of_a_rank", False))
            assert f"losses of context_parallel_size={cp} ranks differ" in said
            assert "return three, (the sum of this rank's losses, its number of tokens, reported)" in said
            assert not results
