"""Losses of models of one's own: a mean over a rank's own labels becomes the mean over those of all ranks.

Whether a loss is such a mean shows in its gradient by the logits: at a label it is softmax - 1, times the weight that
the loss gives to a token. Values alone would not tell: at first a model's losses are alike everywhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from burst_plugin.batch import IGNORED_LABEL
from burst_plugin.deepspeed.config import TOKEN_MEAN
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.deepspeed.outputs import TOKENS_AT_ONCE, summed_loss, tolerance_of

__all__ = ["OwnLosses"]


class OwnLosses:
    """What is known of the losses that a model returns for its shards in training.

    Nothing is decided while ranks have equally many labels: a mean over a rank's labels is right then, and looks like
    one over all of them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._forwards = 0
        self._is_mean_of_rank: bool | None = None  # or gives labels of all ranks one weight; None: undecided
        self._is_readable = True
        self._has_warned = False

    def of_whole_batch(self, output: Any, labels: Tensor) -> Any:
        """Return what a model returned for `labels` [B, S_local], with a loss that is right on the ring; collective.

        It looks at the gradient at forwards 1, 2, 4, 8, ..., and at all with uneven labels until it is decided.

        Raises:
            ValueError: on every rank, for a loss that neither is the mean over a rank's labels nor gives those of all
                ranks one weight.
        """
        loss, logits = _parts(output)
        if loss is None or not loss.requires_grad or not self._is_readable:
            return output
        self._forwards += 1
        is_due = self._forwards & (self._forwards - 1) == 0
        if self._is_mean_of_rank is False and not is_due:
            return output
        count = float((labels != IGNORED_LABEL).sum())
        total = self._sum(count)
        is_mean_of_rank = True
        if is_due or self._is_mean_of_rank is None:
            skewed = self._any(abs(count * self._ranks - total) > tolerance_of(logits) * total)
            if is_due or skewed:
                weight = _weight(loss, logits, labels) if count else 0.0
                adds = skewed and _adds(loss, logits, labels, count)
                is_mean_of_rank = self._decide(weight, count / max(total, 1.0), skewed, adds, tolerance_of(logits))
        if not is_mean_of_rank or (self._is_mean_of_rank is None and not total):
            return output
        part = loss * (count * self._ranks / max(total, 1.0))
        if not count and logits is not None:  # a mean over none is NaN, and so may its gradient be
            part = (logits.flatten()[:1].sum() * 0.0).to(loss.dtype)
        return _with_loss(output, self._session.of_whole_batch(part, True))

    def _decide(self, weight: float | None, share: float, skewed: bool, adds: bool, tolerance: float) -> bool:
        """Return whether the loss is, or might as well be, the mean over a rank's labels; collective.

        Args:
            weight: what `_weight` returned for this rank; share: that of its labels in those of all ranks.
            skewed: whether a rank has clearly more labels than another one; adds: what `_adds` returned.
        """
        if self._any(weight is None) or weight is None:
            self._is_readable = False
            self._warn(
                "the model returns a loss without the logits of which it is made, so that nothing can be compared "
                "with it: make sure that it is burst_plugin.deepspeed.token_mean_loss(logits, shift_labels), or "
                "return the logits as well"
            )
            return False
        if self._any(math.isnan(weight)):
            return self._is_mean_of_rank or not skewed
        weights = self._sum(weight)
        is_even = not self._any(abs(weight - weights * share) > tolerance * abs(weights * share))
        is_mean = not self._any(share > 0 and abs(weight - 1.0) > tolerance)
        found = None if is_even and is_mean else is_mean
        changed = self._is_mean_of_rank is not None and found not in (None, self._is_mean_of_rank)
        adds = self._any(adds) and is_mean and self._is_mean_of_rank is not False
        if changed or adds or not (is_even or is_mean):
            raise ValueError(
                "the model's own loss can become that of the whole batch only if it is the mean cross entropy over "
                "the shift_labels of a rank, in every forward, and it is not: return "
                "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels) in its place, to which other terms may "
                "be added; or compute a loss of another kind outside of the model, from its logits"
            )
        if found is not None:
            self._is_mean_of_rank = found
        if found is False and not self._session.only_caller and abs(weights / self._ranks - 1.0) > tolerance:
            self._warn(
                f"gradients of the model's own loss are {weights / self._ranks:.4g} times those of the mean over the "
                "labels of a batch, since DeepSpeed takes the mean over ranks. If that is not what you want, return "
                "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels)"
            )
        return is_mean and self._is_mean_of_rank is not False

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            warnings.warn(text, stacklevel=3)
        self._has_warned = True

    @property
    def _ranks(self) -> int:
        """Return the number of ranks whose labels are to have one weight."""
        return self._session.ranks if self._session.loss == TOKEN_MEAN else self._session.cp.ranks

    def _sum(self, value: float) -> float:
        """Return the sum over these ranks; collective."""
        session = self._session
        return session.sum_over_ranks(value) if session.loss == TOKEN_MEAN else session.sum_over_ring(value)

    def _any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank of any ring; collective."""
        return self._session.sum_over_ranks(float(condition)) > 0


def _parts(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the scalar loss and the logits in what a model returned, None where there are none."""
    loss: Any = None
    logits: Any = None
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
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
    if hasattr(output, "_replace"):  # a named tuple
        return output._replace(loss=loss)
    if isinstance(output, tuple):
        return (loss, *output[1:])
    if isinstance(output, MutableMapping):
        output["loss"] = loss
    else:
        output.loss = loss
    return output


def _weight(loss: Tensor, logits: Tensor | None, labels: Tensor) -> float | None:
    """Return the weight in `loss` of the labels together: 1 for their mean, their number for their sum.

    None if the loss was not made of these logits; NaN if it cannot be measured, where all labels are foreseen.
    """
    if logits is None or logits.numel() != labels.numel() * logits.shape[-1]:
        return None
    keep = labels.flatten() != IGNORED_LABEL
    count = int(keep.sum())
    scale = 2.0 ** min(count.bit_length() - 1, 15)  # a power of two that float16 has, which has few small numbers
    try:
        start = torch.full_like(loss, scale)
        grad: Any = torch.autograd.grad(loss, logits, start, retain_graph=True, allow_unused=True)[0]
    except RuntimeError:
        return None
    if grad is None:
        return None
    found, expected = (torch.zeros((), dtype=torch.float64, device=logits.device) for _ in range(2))
    with torch.no_grad():
        pieces = (grad.flatten(0, -2), logits.flatten(0, -2), labels.flatten(), keep)
        for g, x, y, kept in zip(*(torch.split(each, TOKENS_AT_ONCE) for each in pieces), strict=True):
            at = y.clamp(min=0)[:, None]
            missing = 1.0 - torch.softmax(x.float(), -1).gather(1, at)
            clear = (missing > 0.5) & kept[:, None]  # where rounding does not matter
            found -= torch.where(clear, g.gather(1, at).double(), 0.0).sum()
            expected += torch.where(clear, missing.double(), 0.0).sum()
    return float(found / expected) * count / scale


def _adds(loss: Tensor, logits: Tensor | None, labels: Tensor, count: float) -> bool:
    """Return whether a loss is something else than the mean cross entropy over a rank's labels."""
    if not count or logits is None:
        return False
    with torch.no_grad():
        mean = summed_loss(logits.flatten(0, -2), labels.flatten()) / count
    return abs(float(loss.detach()) - mean) > tolerance_of(logits) * max(mean, 1.0)
