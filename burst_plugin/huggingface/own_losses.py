"""Losses that would train wrongly in silence on a shard: of labels shifted twice, and means over a rank's own labels.

Models outside of transformers may not know that labels of a shard are shifted already: code of a model hub, or of a
user's class, often shifts them itself. `model.forward(...)` goes past hooks, which ask for the number of all labels.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from burst_plugin.activations.deferred_logits import LazyLogits
from burst_plugin.activations.loss_check import are_classes, router_loss_in, summed_loss, tolerance_of
from burst_plugin.batch import IGNORED_LABEL, SHARD_KEY
from burst_plugin.frameworks.wrapping import bind
from burst_plugin.huggingface.chunked_loss import refuse_own_mean
from burst_plugin.huggingface.router_losses import asks_for_router_loss

_CHECKED = "_burst_plugin_losses"  # of a model: its forwards with a loss so far
_REFUSES = "_burst_plugin_refuses_own_means"  # of a loss function


def refuse_own_means() -> None:
    """Have transformers' loss of labels refuse a shard without `num_items_in_batch`; further calls change nothing."""
    for name, original in LOSS_MAPPING.items():
        if original.__name__ == "ForCausalLMLoss" and not hasattr(original, _REFUSES):
            LOSS_MAPPING[name] = _refusing(original)


def _refusing(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        shard = kwargs.get(SHARD_KEY)
        if shard is not None and not torch.compiler.is_compiling():
            arguments = bind(original, *args, **kwargs).arguments
            if arguments.get("num_items_in_batch") is None and arguments.get("labels") is not None:
                refuse_own_mean("a forward", shard)
        return original(*args, **kwargs)

    setattr(loss, _REFUSES, True)
    return loss


def watch_own_loss(pretrained: PreTrainedModel) -> None:
    """Add a hook that compares the loss of a shard with its logits, if the model's code is not of transformers."""
    forward: Any = inspect.unwrap(type(pretrained).forward)
    if not str(getattr(forward, "__module__", "")).startswith("transformers."):
        pretrained.register_forward_hook(_check_loss, with_kwargs=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_loss(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
    """Raise ValueError on every rank if a loss is of labels that were shifted twice; collective.

    Warn of any other loss than the cross entropy. It looks at forwards 1, 2, 4, 8, ... in training.
    """
    shard, labels = kwargs.get(SHARD_KEY), kwargs.get("labels")
    loss = getattr(output, "loss", None)
    if shard is None or shard.as_given or labels is None or loss is None or not model.training:
        return
    count = getattr(model, _CHECKED, 0) + 1
    setattr(model, _CHECKED, count)
    if count & (count - 1):
        return
    problem = ""
    if not asks_for_router_loss(model, kwargs) or router_loss_in(model, output) is not None:
        problem = _problem(model, output, labels, kwargs.get("num_items_in_batch"), is_first=count == 1)
    shard.cp.agree({"loss": "checked"}, problem)


def _problem(model: PreTrainedModel, output: Any, labels: Any, divisor: Any, *, is_first: bool) -> str:
    """Return the reason why a loss is wrong; "" for none, or where nothing can be compared. Warn of other losses.

    divisor: the number that the sum over labels is divided by; None for the number of labels.
    """
    logits: Any = getattr(output, "logits", None)
    loss, name = output.loss, type(model).__name__
    if isinstance(logits, LazyLogits) or not _can_compare(loss, logits, labels):
        return ""
    of_router = router_loss_in(model, output)
    got = float(loss.detach()) - (0.0 if of_router is None else float(of_router.detach()))
    tolerance, errors = tolerance_of(loss, logits), []
    for first in (0, 1):  # as labels are, and shifted once more
        rows, targets = logits[:, : logits.shape[1] - first], labels[:, first:].long()
        count = int((targets != IGNORED_LABEL).sum())
        if not count:
            return ""
        with torch.no_grad():
            total = sum(summed_loss(x, y) for x, y in zip(rows, targets, strict=True))
        divisors = {float(each) for each in (count, divisor) if each}
        errors.append(min(abs(got - total / each) / max(total, count) * each for each in divisors))
        if not first and errors[0] <= tolerance:
            return ""
    if errors[1] <= tolerance and 10 * errors[1] < errors[0]:
        return (
            f"{name} shifts labels by one token to compute its loss, but labels of a shard are shifted already: "
            "leave labels out, and compute the loss from its logits and shift_labels"
        )
    if is_first:
        warnings.warn(
            f"the loss of {name} is not the cross entropy of its logits over labels, divided by num_items_in_batch: "
            "make sure that it is a sum over a rank's tokens with labels that are shifted already, divided by the "
            "labels of all ranks",
            stacklevel=2,
        )
    return ""


def _can_compare(loss: Any, logits: Any, labels: Any) -> bool:
    """Return whether a loss is one number, and labels are numbers of logits."""
    if not all(isinstance(x, Tensor) for x in (loss, logits, labels)):
        return False
    if loss.numel() != 1 or logits.dim() != 3 or logits.shape[:-1] != labels.shape:
        return False
    return labels.dtype in (torch.int32, torch.int64) and are_classes(labels, logits)
