"""Repairs of how Megatron weighs tokens in losses where context-parallel ranks have unequal numbers of them.

Megatron divides the loss of a rank by that rank's own number of tokens, and takes the mean of the ranks. Of ranks
with 2 and 6 tokens in the loss, a token of the first counts three times as much as one of the second. Here the losses
of all ranks are divided by the mean number, 4, so that loss and gradients equal one rank's. The numbers of tokens
that loss functions return are added up over the ranks, since a script need not count the batch's loss mask.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction
from megatron.core.utils import unwrap_model
from torch import Tensor

from burst_plugin.frameworks.wrapping import bind, wrap, wrap_everywhere
from burst_plugin.megatron.flags.arguments import parsed_arguments
from burst_plugin.megatron.flags.config import asks_for_burst, is_hybrid, weighs_losses
from burst_plugin.megatron.registry import Registry, group_of

_PREDICTS = "process_mtp_loss"  # from 0.17 on; until 0.16 it is a part of GPTModel.forward


def hook_loss_weights(registry: Registry) -> str:
    """Have Megatron divide losses by the mean number of tokens over all context-parallel ranks.

    It wraps the functions that compute the main loss and that of multi-token prediction. registry: the rings. Returns
    a line for the report of `install()`.
    """
    wrap_everywhere(schedules, "forward_step_calc_loss", partial(scaled_main_loss, registry))
    prediction = PredictionLoss(registry)
    if hasattr(multi_token_prediction, _PREDICTS):
        wrap_everywhere(multi_token_prediction, _PREDICTS, prediction.process)
        wrap(multi_token_prediction, "roll_tensor", prediction.roll)
    else:
        wrap(gpt_model.GPTModel, "forward", prediction.process_model)
        wrap(gpt_model, "roll_tensor", prediction.roll)
    return "losses weigh the tokens of all context-parallel ranks alike, also where some have fewer of them"


def _group_of(model: Any) -> dist.ProcessGroup:
    return group_of(getattr(unwrap_model(model), "pg_collection", None))


def scaled_main_loss(registry: Registry, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a loss by `forward_step_calc_loss`, scaled so that Megatron's division of it comes out right.

    Raises ValueError for a loss function that returns two values where Megatron would make wrong gradients.
    """
    call = bind(original, *args, **kwargs)
    config, loss_func = call.arguments["config"], call.arguments["loss_func"]
    if loss_func is not None and registry.identity.computes_edges:
        call.arguments["loss_func"] = partial(_of_all_edges, loss_func)
        return original(*call.args, **call.kwargs)
    if loss_func is None or not asks_for_burst(config):
        return original(*args, **kwargs)
    model = call.arguments["model"]

    def scaled(output: Tensor, **options: Any) -> Any:
        values = loss_func(output, **options)
        if options:  # what a script collects besides losses
            return values
        if len(values) == 3 and not torch.is_grad_enabled() and getattr(parsed_arguments(), "sft", False):
            *values, reported = values
            return *values, _reported_by_all(registry, reported, _group_of(model))
        if len(values) == 2:
            _check_mean(registry, values[0], config, model)
            return values
        if config.calculate_per_token_loss or is_hybrid(config):
            return values
        loss, count, reported = values
        group = _group_of(model)
        total = _over_ranks(registry, "the loss", count.to(loss.device), group).clamp(min=1)
        return loss * (count.clamp(min=1) * group.size() / total), count, reported

    call.arguments["loss_func"] = scaled
    return original(*call.args, **call.kwargs)


def _reported_by_all(registry: Registry, reported: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the report of an evaluation with --sft, with losses and numbers of tokens added up over the ranks.

    Megatron divides a rank's loss by the rank's number of tokens, and takes the mean of ranks and microbatches.
    """
    return {
        name: _over_ranks(registry, name, x, group) if isinstance(x, Tensor) and x.numel() == 2 else x
        for name, x in reported.items()
    }


_THREE_VALUES = "return three, (the sum of this rank's losses, its number of tokens, reported)"


def _check_mean(registry: Registry, loss: Tensor, config: Any, model: Any) -> None:
    """Raise ValueError on every rank unless a loss without a number of tokens is one that all ranks have in common.

    Megatron multiplies it by the context-parallel ranks, over which it takes the mean of gradients then, or their sum
    with `--calculate-per-token-loss`. Ranks compare their losses: on CPUs in every step, on GPUs, where that stalls
    the host, in steps 1, 2, 4, 8, ..., unless the strategy says check="always".
    """
    if config.calculate_per_token_loss or is_hybrid(config):
        options = "hybrid_context_parallel=True"
        if not is_hybrid(config):
            options = f"calculate_per_token_loss=True and context_parallel_size={config.context_parallel_size}"
        raise ValueError(
            f"the loss function returned two values, (loss, reported), with {options}: Megatron would multiply "
            f"gradients by the number of ranks, and not divide them by tokens; {_THREE_VALUES}"
        )
    group = _group_of(model)
    ring = next((ring for ring in registry.rings() if ring.group is group), None)
    if ring is None or not torch.is_grad_enabled() or not registry.is_due(ring, "loss", cheap=not loss.is_cuda):
        return
    ring.meet("the loss")
    bounds = torch.stack([loss.detach(), -loss.detach()]).float()
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = bounds[0].item(), -bounds[1].item()
    if highest - lowest > max(1e-5, torch.finfo(loss.dtype).eps) * max(abs(highest), abs(lowest)):
        raise ValueError(
            f"the loss function returned two values, (loss, reported), and losses of context_parallel_size="
            f"{group.size()} ranks differ, from {lowest:.6g} to {highest:.6g}. Megatron takes such a loss for one "
            f"that all ranks of a sequence have in common: gradients of means over a rank's own tokens would be "
            f"{group.size()} times too large. Either {_THREE_VALUES}; or return the mean over the tokens of all "
            "ranks, which is the same on each"
        )


def _of_all_edges(loss_func: Callable[..., Any], output: Tensor, **options: Any) -> Any:
    """Return a loss function's values of edges. Raise ValueError for three, which Megatron would divide by ranks."""
    values = loss_func(output, **options)
    if not options and len(values) == 3:
        raise ValueError(
            "the loss function of rollouts in a prefix tree returned three values, for which Megatron divides "
            "gradients by the context-parallel ranks, though each has the loss of all edges; return two, "
            "(loss, reported)"
        )
    return values


class PredictionLoss:
    """The loss of multi-token prediction, which Megatron divides by a rank's own tokens, per token or not."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._weighs = False  # whether a loss that is to be repaired is being computed
        self._multiplies = False  # whether losses of tokens are multiplied by the ranks, and counts need no division

    def process(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `process_mtp_loss` with losses of tokens multiplied by the ranks, to be divided by all ranks' tokens.

        Megatron takes the mean over ranks in the end. With `--calculate-per-token-loss` it also multiplies by this
        rank's tokens in the main loss, and divides by all ranks' tokens later. Here the scaling factor is multiplied
        by the ranks' mean of them, in a configuration without this option.
        """
        call = bind(original, *args, **kwargs)
        arguments = call.arguments
        config, loss = arguments["config"], arguments["compute_language_model_loss"]
        group, mask = arguments.get("cp_group"), _mask_of_floats(arguments)
        if not _predicts(config) or group is None or group.size() == 1 or mask is None:
            return original(*args, **kwargs)
        arguments["loss_mask"] = mask
        arguments["compute_language_model_loss"] = lambda *given, **options: loss(*given, **options) * group.size()
        self._weighs = self._multiplies = True
        try:
            if config.calculate_per_token_loss:
                arguments["config"] = copy(config)
                arguments["config"].calculate_per_token_loss = False
                arguments["config"].mtp_loss_scaling_factor *= self._in_main_loss(arguments) / group.size()
            return original(*call.args, **call.kwargs)
        finally:
            self._weighs = self._multiplies = False

    def _in_main_loss(self, arguments: dict[str, Any]) -> Tensor:
        """Return the tokens of all ranks in the main loss: without labels they are the next tokens of `input_ids`."""
        group, mask = arguments["cp_group"], arguments["loss_mask"]
        if arguments["labels"] is None:
            packed = arguments.get("packed_seq_params")
            mask, _ = multi_token_prediction.roll_tensor(mask, cp_group=group, packed_seq_params=packed)
        return _over_ranks(self._registry, "the main loss", mask.sum(), group)

    def process_model(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `GPTModel.forward`, which computes the loss of multi-token prediction until 0.16."""
        if not _predicts(model.config):
            return original(model, *args, **kwargs)
        call = bind(original, model, *args, **kwargs)
        call.arguments["loss_mask"] = _mask_of_floats(call.arguments)
        self._weighs = True
        try:
            return original(*call.args, **call.kwargs)
        finally:
            self._weighs = False

    def roll(self, original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Run `roll_tensor`, and return a count that makes Megatron's division by it come out right.

        The count is of all ranks' tokens, or their mean where a rank's losses are as they were. `process_mtp_loss`
        takes any count below 1 for 1, as such a mean may be.
        """
        rolled, count = original(*args, **kwargs)
        group = bind(original, *args, **kwargs).arguments.get("cp_group")
        if not self._weighs or not rolled.is_floating_point() or group is None or group.size() == 1:
            return rolled, count
        total = _over_ranks(self._registry, "the loss of token prediction", rolled.sum(), group)
        total += total == 0  # not of `count`, which may be 1 for no token
        return rolled, total if self._multiplies else total / group.size()


def _predicts(config: Any) -> bool:
    return bool(weighs_losses(config) and config.mtp_num_layers)


def _mask_of_floats(arguments: dict[str, Any]) -> Tensor | None:
    """Return the loss mask that a model is given, or ones, in floats, so that `roll` can tell it from the labels.

    Scripts also give integers or bools; Megatron's own ones are integers. Without labels, in reinforcement learning,
    Megatron predicts `input_ids` from 0.19 on.
    """
    mask: Tensor | None = arguments.get("loss_mask")
    if mask is not None:
        return mask if mask.is_floating_point() else mask.float()
    labels: Tensor | None = arguments.get("labels")
    if labels is None:
        labels = arguments.get("input_ids")
    return None if labels is None else torch.ones_like(labels, dtype=torch.float32)


def _over_ranks(registry: Registry, of: str, count: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a count added up over context-parallel ranks.

    Ranks first compare where they are: one that has left out attention would wait here, and others there.
    """
    for ring in registry.rings():
        if ring.group is group:
            ring.meet(of)
    total = count.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def count_no_labels_as_one() -> None:
    """Have Megatron divide the loss of multi-token prediction by 1 on a rank without labels, where it divides by 0.

    It wraps the `roll_tensor` that counts labels.
    """

    def roll(original: Any, *args: Any, **kwargs: Any) -> Any:
        rolled, total = original(*args, **kwargs)
        return rolled, torch.where(total == 0, torch.ones_like(total), total)

    wrap(gpt_model, "roll_tensor", roll)
