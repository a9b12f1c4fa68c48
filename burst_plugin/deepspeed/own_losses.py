"""Losses that models of one's own return in training: the mean over a rank's labels becomes that over all ranks'."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from burst_plugin.batch import IGNORED_LABEL
from burst_plugin.deepspeed.config import TOKEN_MEAN
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.deepspeed.outputs import summed_loss, tolerance_of

__all__ = ["OwnLosses"]


class OwnLosses:
    """What is known of the losses that a model returns for its shards in training."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._forwards = 0
        self._is_mean: bool | None = None  # over a rank's own labels; None: it comes without its logits

    def of_whole_batch(self, output: Any, labels: Tensor) -> Any:
        """Return what a model returned for `labels` [B, S_local], with a loss that is right on the ring; collective.

        At forwards 1, 2, 4, 8, ... the loss is compared with the mean cross entropy of the logits beside it.

        Raises:
            ValueError: on every rank, for another loss where ranks have unequal numbers of labels.
        """
        loss, logits = _parts(output)
        if loss is None or not loss.requires_grad:
            return output
        self._forwards += 1
        count = float((labels != IGNORED_LABEL).sum())
        total, ranks = self._sum_and_ranks(count)
        if self._forwards & (self._forwards - 1) == 0:
            self._compare(loss, logits, labels, count)
        if self._is_mean is None:
            return output
        if not self._is_mean:
            if self._any(count * ranks != total):
                raise ValueError(
                    "the model's own loss is not the mean cross entropy over a rank's shift_labels, of which ranks "
                    "have unequal numbers here, so that it cannot become that of the whole batch: return "
                    "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels) in its place, to which other terms "
                    "may be added, or compute a loss of another kind outside of the model, from its logits"
                )
            return output
        part = loss * (count * ranks / max(total, 1.0))
        if not count and logits is not None:  # a mean over none is NaN, and so may its gradient be
            part = (logits.flatten()[:1].sum() * 0.0).to(loss.dtype)
        return _with_loss(output, self._session.of_whole_batch(part, True))

    def _compare(self, loss: Tensor, logits: Tensor | None, labels: Tensor, count: float) -> None:
        """Note what kind of loss it is; collective. Warn once of one that nothing can be compared with."""
        if logits is None or logits.numel() != labels.numel() * logits.shape[-1]:
            if self._forwards == 1:
                warnings.warn(
                    "the model returns a loss without the logits of which it is made, so that nothing can be "
                    "compared with it: make sure that it is "
                    "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels), or return the logits as well",
                    stacklevel=2,
                )
            self._is_mean = None
            return
        with torch.no_grad():
            mean = summed_loss(logits.flatten(0, -2), labels.flatten()) / max(count, 1.0)
        differs = count > 0 and abs(float(loss.detach()) - mean) > tolerance_of(logits) * max(mean, 1.0)
        self._is_mean = not self._any(differs)

    def _sum_and_ranks(self, count: float) -> tuple[float, int]:
        """Return the labels of all ranks that the loss is a mean over, and the number of these ranks; collective."""
        session = self._session
        if session.loss == TOKEN_MEAN:
            return session.sum_over_ranks(count), session.ranks
        return session.sum_over_ring(count), session.cp.ranks

    def _any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank of any ring; collective."""
        return self._session.sum_over_ranks(float(condition)) > 0


def _parts(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the scalar loss and the logits in what a model returned, None where there are none."""
    loss: Any = None
    logits: Any = None
    if isinstance(output, tuple):
        loss, logits, *_ = (*output, None, None)
    elif isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
    elif isinstance(output, Tensor):
        loss = output
    else:
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    is_loss = isinstance(loss, Tensor) and not loss.dim()
    return loss if is_loss else None, logits if isinstance(logits, Tensor) and logits.dim() > 1 else None


def _with_loss(output: Any, loss: Tensor) -> Any:
    """Return `output`, in which `_parts` found a loss, with another one."""
    if isinstance(output, tuple):
        return output._make((loss, *output[1:])) if hasattr(output, "_make") else (loss, *output[1:])
    if isinstance(output, MutableMapping):
        output["loss"] = loss
    else:
        output.loss = loss
    return output
