"""What a model returned: losses in a form that is not found, and tensors that are for reading only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from burst_plugin.batch import IGNORED_LABEL

_TOKENS_AT_ONCE = 1024
_LOSS_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # between a model's loss and that of its logits
_LOW_PRECISION_TOLERANCE = 1e-2  # for logits of other types


def check_form_of_loss(model_name: str, output: Any) -> None:
    """Raise ValueError if a loss in what a model returned has a form in which it is not found."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    form = ""
    if isinstance(output, tuple):
        form = "a tuple"
    elif loss is not None and getattr(output, "loss", None) is None:
        form = f"a {type(output).__name__}"
    elif isinstance(loss, Tensor) and loss.dim():
        form = f"losses of shape {list(loss.shape)}"
    if form:
        raise ValueError(
            f"{model_name} returns {form}, in which the loss of this rank's tokens cannot be found, to make it "
            "that of the whole batch: have it return a ModelOutput with a scalar loss (in transformers: leave out "
            "return_dict=False)"
        )


class _ForReadingOnly(torch.autograd.Function):
    """The same tensor, whose backward pass is refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError(
            "a loss was computed from what a model returned for a batch that was cut in its forward: that is of this "
            "rank's tokens, and only the model's own loss becomes that of the whole batch. Cut the batch before, by "
            "burst_plugin.deepspeed.shard_batch, and compute the loss on a rank's tokens, as token_mean_loss does"
        )


def for_reading_only(x: Any) -> Any:
    """Return logits or hidden states of this rank's tokens so that no loss can be made of them.

    Their user gave a whole batch, and would take them for those of all tokens.
    """
    if isinstance(x, tuple | list):
        return type(x)(map(for_reading_only, x)) if type(x) in (tuple, list) else x
    return _ForReadingOnly.apply(x) if isinstance(x, Tensor) and x.requires_grad else x  # type: ignore[no-untyped-call]


def refuse_backward(*outputs: Any) -> None:
    """Refuse backward passes through what a model returned in evaluation.

    Each rank has computed whole batches by itself; and the loss of a shard becomes that of one ring, not of all.
    """

    def refuse(grad: Tensor) -> None:
        raise ValueError(
            "backward pass of a model in evaluation, whose batches are not cut and whose losses are not those of all "
            "ranks. Train it in training mode (engine.train()), with dropout set to 0 if that is the point of it"
        )

    for x in outputs:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(refuse)  # type: ignore[no-untyped-call]


def summed_loss(logits: Tensor, labels: Tensor) -> float:
    """Return the summed cross entropy of logits [T, V], by pieces: logits of a long sequence fill a GPU."""
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for piece, targets in zip(*(torch.split(x, _TOKENS_AT_ONCE) for x in (logits, labels)), strict=True):
        total += torch.nn.functional.cross_entropy(
            piece.float(), targets, ignore_index=IGNORED_LABEL, reduction="sum"
        )
    return float(total)


def tolerance_of(logits: Tensor) -> float:
    """Return the relative difference that may be between a model's loss and that of its logits."""
    return _LOSS_TOLERANCE.get(logits.dtype, _LOW_PRECISION_TOLERANCE)
