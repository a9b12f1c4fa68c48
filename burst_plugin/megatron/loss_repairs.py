"""Repairs of how Megatron weighs tokens in losses where context-parallel ranks have unequal numbers of them.

It divides the loss of a rank by that rank's own number of tokens, and takes the mean of the ranks. Of ranks with 2
and 6 tokens in the loss, a token of the first counts three times as much as one of the second. Here all are divided
by the ranks' mean, 4, so that a loss and its gradients are those of one rank.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from burst_plugin.frameworks.wrapping import wrap, wrap_everywhere
from burst_plugin.megatron.config import asks_for_burst, is_hybrid

__all__ = ["count_no_labels_as_one", "weigh_tokens_alike"]

_PREDICTS = "process_mtp_loss"  # from 0.17 on; until 0.16 it is a part of GPTModel.forward


def weigh_tokens_alike() -> None:
    """Divide losses by the mean number of tokens of all context-parallel ranks."""
    wrap_everywhere(schedules, "forward_step_calc_loss", _main_loss)
    if not hasattr(multi_token_prediction, _PREDICTS):
        wrap(gpt_model, "roll_tensor", _rolled_and_mean_count)
        return
    prediction = _PredictionLoss()
    wrap_everywhere(multi_token_prediction, _PREDICTS, prediction.process)
    wrap(multi_token_prediction, "roll_tensor", prediction.roll)


def _weighs(config: Any) -> bool:
    return asks_for_burst(config) and not is_hybrid(config)


def _total(count: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `count` over `group`, float32, without a host sync."""
    total = count.detach().float()
    dist.all_reduce(total, group=group)
    return total


def _main_loss(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what `forward_step_calc_loss` does, with a loss that is scaled so that its division comes out right."""
    given = inspect.signature(original).bind(*args, **kwargs)
    config, loss_func = given.arguments["config"], given.arguments["loss_func"]
    if loss_func is None or config.calculate_per_token_loss or not _weighs(config):
        return original(*args, **kwargs)
    group = parallel_state.get_context_parallel_group()

    def scaled(output: Tensor, **options: Any) -> Any:
        found = loss_func(output, **options)
        if options or len(found) != 3:  # not a loss, or one that is a mean already
            return found
        loss, count, reported = found
        return loss * (count.clamp(min=1) * group.size() / _total(count, group).clamp(min=1)), count, reported

    given.arguments["loss_func"] = scaled
    return original(*given.args, **given.kwargs)


def _rolled_and_mean_count(original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Do what `roll_tensor` does, and return the ranks' mean count, by which Megatron divides."""
    rolled, count = original(*args, **kwargs)
    group = inspect.signature(original).bind(*args, **kwargs).arguments.get("cp_group")
    if group is None or group.size() == 1:
        return rolled, count
    return rolled, _total(count, group) / group.size()


class _PredictionLoss:
    """The loss of multi-token prediction, which Megatron weighs by ranks with `--calculate-per-token-loss`, too."""

    def __init__(self) -> None:
        self._is_under_way = False
        self._share: Tensor | None = None  # of the main loss's tokens that are this rank's

    def process(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what `process_mtp_loss` does."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        config, group = given["config"], given.get("cp_group")
        if group is None or group.size() == 1 or not _weighs(config):
            return original(*args, **kwargs)
        self._is_under_way = True
        mask = given.get("loss_mask")
        if config.calculate_per_token_loss and mask is not None:
            self._share = mask.sum() / _total(mask.sum(), group).clamp(min=1)
        try:
            return original(*args, **kwargs)
        finally:
            self._is_under_way, self._share = False, None

    def roll(self, original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Do what `roll_tensor` does; return the count by which that division comes out right.

        With `--calculate-per-token-loss` Megatron multiplies by this rank's tokens in the main loss. What counts is
        the number of all ranks, since main loss and prediction are divided by it in the end.
        """
        if not self._is_under_way:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        rolled, mean = _rolled_and_mean_count(original, *args, **kwargs)
        if self._share is None:
            return rolled, mean
        group = inspect.signature(original).bind(*args, **kwargs).arguments["cp_group"]
        return rolled, mean * group.size() * self._share


def count_no_labels_as_one() -> None:
    """Divide the loss of token prediction by 1 at least; Megatron divides by a rank's number of labels, even by 0."""

    def roll(original: Any, *args: Any, **kwargs: Any) -> Any:
        rolled, total = original(*args, **kwargs)
        return rolled, torch.where(total == 0, torch.ones_like(total), total)

    wrap(gpt_model, "roll_tensor", roll)
