"""Losses of models outside of transformers, whose code may not know that labels of a shard are shifted already.

Code of a model hub, or of a user's class, often shifts labels itself. On a shard that would train wrongly in silence.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.activations.deferred_logits import LazyLogits
from burst_plugin.activations.loss_check import summed_loss, tolerance_of
from burst_plugin.batch import IGNORED_LABEL, SHARD_KEY
from burst_plugin.huggingface.router_losses import asks_for_router_loss

_CHECKED = "_burst_plugin_losses"  # of a model: its forwards with a loss so far


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
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if shard is None or shard.as_given or labels is None or loss is None or not model.training:
        return
    count = getattr(model, _CHECKED, 0) + 1
    setattr(model, _CHECKED, count)
    if count & (count - 1):
        return
    problem = ""
    if isinstance(logits, torch.Tensor) and not isinstance(logits, LazyLogits) and logits.shape[:-1] == labels.shape:
        given, name = kwargs.get("num_items_in_batch"), type(model).__name__
        if _is_mean(loss, logits[:, :-1], labels[:, 1:], given) and not _is_mean(loss, logits, labels, given):
            problem = (
                f"{name} shifts labels by one token to compute its loss, but labels of a shard are shifted already: "
                "leave labels out, and compute the loss from its logits and shift_labels"
            )
        elif count == 1 and not (_is_mean(loss, logits, labels, given) or asks_for_router_loss(model, kwargs)):
            warnings.warn(
                f"the loss of {name} is not the cross entropy of its logits over labels, divided by "
                "num_items_in_batch: make sure that it is a sum over a rank's tokens with labels that are shifted "
                "already, divided by the labels of all ranks",
                stacklevel=2,
            )
    shard.cp.agree({"loss": "checked"}, problem)


def _is_mean(loss: Tensor, logits: Tensor, labels: Tensor, given: Any) -> bool:
    """Return whether a loss is the cross entropy over labels, divided by their number or by the number given.

    Also where there are no labels, and so nothing to compare.
    """
    count = int((labels != IGNORED_LABEL).sum())
    with torch.no_grad():
        total, got = summed_loss(logits.flatten(0, -2), labels.flatten()), float(loss.detach())
    means = [total / float(each) for each in (count, given) if each]
    return not count or any(abs(got - mean) <= tolerance_of(loss) * max(abs(mean), 1.0) for mean in means)
