"""Losses of a user's own models in training: the mean over a rank's labels becomes the mean over all labels.

The same happens to the loss of a user's module around a model of transformers, computed from the model's outputs for
a shard. Here are also checks of the form of a loss, and outputs of models that may be read, but not trained on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from burst_plugin.activations.deferred_logits import LazyLogits
from burst_plugin.activations.loss_check import are_classes, summed_loss, tolerance_of
from burst_plugin.batch import IGNORED_LABEL
from burst_plugin.deepspeed.config import TOKEN_MEAN
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.frameworks.wrapping import by_name

_LABELS = "shift_labels"


class OwnLosses:
    """Hooks on a model's forward in training that turn the loss of a rank's shard into the mean over all labels.

    At forwards 1, 2, 4, 8, ... the loss is compared with the mean cross entropy of the logits beside it and of labels
    among the model's arguments, whatever their names.
    """

    def __init__(self, session: Session, model: torch.nn.Module) -> None:
        self._session = session
        self._forwards = 0
        self._made_before = 0  # losses that are right already, when the model's forward began
        self._is_mean = False  # over a rank's own labels
        self._has_warned = False  # of a loss that is averaged over ranks as it is
        self._labels = ""  # where they are among the arguments; "" where nothing can be compared
        self._logits: Any = None  # where they are in what the model returns
        before, after = (torch.compiler.disable(hook) for hook in (self._before, self._after))  # type: ignore[no-untyped-call]
        self._handles = [
            model.register_forward_pre_hook(before),
            model.register_forward_hook(after, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def _before(self, model: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._made_before = self._session.losses_made
        self._session.note_step()  # its parts may be called past the hooks that do

    def _after(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output of a model with a loss that is right on the ring; collective.

        A loss is right already if the model calls `token_mean_loss`, or returns the loss of a model that got labels.

        Raises:
            ValueError: on every rank, for another loss where ranks have unequal numbers of labels.
        """
        session, trains = self._session, model.training and torch.is_grad_enabled()
        if session.losses_made != self._made_before or session.leaves_losses or session.computes_edges or not trains:
            return output
        floats = _floats(output)
        place = _place_of_loss(floats)
        if place is None:
            return output
        loss, arguments = floats.pop(place), _integers(by_name(model.forward, args, kwargs))
        self._forwards += 1
        if self._forwards & (self._forwards - 1) == 0:
            self._compare(loss, floats, arguments)
        if self._labels not in arguments:
            return output
        whole = self._of_whole_batch(loss, arguments[self._labels], floats.get(self._logits))
        return _with(output, place, whole)

    def _of_whole_batch(self, loss: Tensor, labels: Tensor, logits: Tensor | None) -> Tensor:
        """Return the loss of the whole batch; for another kind of loss its mean over ranks, with a warning."""
        count = float((labels != IGNORED_LABEL).sum())
        total, ranks = self._sum_and_ranks(count)
        if not self._is_mean:
            if self._any(count * ranks != total):
                raise ValueError(
                    "the model's own loss is not the mean cross entropy over a rank's shift_labels. Ranks have "
                    "unequal numbers of labels here, so it cannot be turned into the loss of the whole batch: return "
                    "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels) in its place, to which other terms "
                    "may be added, or compute a loss of another kind outside of the model, from its logits"
                )
            self._warn_of_mean_over_ranks()
            return self._session.of_whole_batch(loss, True)
        part = loss * (count * ranks / max(total, 1.0))
        if not count and logits is not None:  # a mean over none is NaN, and so may its gradient be
            part = (logits.flatten()[:1].sum() * 0.0).to(loss.dtype).view(loss.shape)
        return self._session.of_whole_batch(part, True)

    def _warn_of_mean_over_ranks(self) -> None:
        if not self._has_warned:
            warnings.warn(
                "the model's own loss is not the mean cross entropy over a rank's shift_labels, and is averaged over "
                "ranks. This is the loss of the whole batch only if it is a mean of terms that belong to single "
                "tokens: not with class weights, nor with sums or maxima over rows. For another loss return "
                "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels) with other terms added, or compute it "
                "from context().unshard(logits, loss='own')",
                stacklevel=2,
            )
        self._has_warned = True

    def _compare(self, loss: Tensor, logits: Mapping[Any, Tensor], labels: Mapping[str, Tensor]) -> None:
        """Note whether a loss is a mean, and over which labels; collective. Warn once if nothing can be compared."""
        logits = {place: x for place, x in logits.items() if x.dim() > 1}
        for self._logits, x in logits.items():
            for self._labels, y in labels.items():
                if not self._any(_differs(loss, x, y)):
                    self._is_mean = True
                    return
        self._is_mean, self._labels = False, _LABELS if logits and _LABELS in labels else ""
        if self._forwards == 1 and not self._labels:
            description = "without the logits that it is computed from"
            if logits:
                description = "that is not the mean cross entropy over any labels among its arguments"
            warnings.warn(
                f"the model returns a loss {description}, so it cannot be checked: make sure that it is "
                "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels), or return the logits as well, and "
                "name that argument shift_labels",
                stacklevel=2,
            )

    def _sum_and_ranks(self, count: float) -> tuple[float, int]:
        """Return the labels of all ranks that the loss is a mean over, and the number of these ranks; collective."""
        session = self._session
        if session.loss == TOKEN_MEAN:
            return session.sum_over_ranks(count), session.ranks
        return session.sum_over_ring(count), session.cp.ranks

    def _any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank of any ring; collective."""
        return self._session.sum_over_ranks(float(condition)) > 0


def _floats(output: Any) -> dict[Any, Tensor]:
    """Return the tensors of floats in the output of a model, by their places."""
    items: Any = ()
    if isinstance(output, Tensor):
        items = [("", output)]
    elif isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, tuple | list):
        items = enumerate(output)
    elif hasattr(output, "__dict__"):
        items = vars(output).items()
    items = [(place, x) for place, x in items if isinstance(x, Tensor) and not isinstance(x, LazyLogits)]
    return {place: x for place, x in items if x.is_floating_point()}


def _place_of_loss(floats: Mapping[Any, Tensor]) -> Any:
    """Return the place of the loss: "loss", else of the first single number with a gradient; None without any."""
    losses = [place for place, x in floats.items() if x.numel() == 1 and x.requires_grad]
    return "loss" if "loss" in losses else next(iter(losses), None)


def _integers(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors that may be labels, in arguments or one level below, by place; `shift_labels` first."""
    integers: dict[str, Tensor] = {}
    for name, value in arguments.items():
        inner: Any = [("", value)]
        if isinstance(value, Mapping):
            inner = value.items()
        elif isinstance(value, tuple | list):
            inner = enumerate(value)
        for key, x in inner:
            if isinstance(x, Tensor) and x.dim() > 1 and x.dtype in (torch.int64, torch.int32):
                integers[f"{name} {key}".rstrip()] = x
    return dict(sorted(integers.items(), key=lambda item: item[0] != _LABELS))


def _differs(loss: Tensor, logits: Tensor, labels: Tensor) -> bool:
    """Return whether a loss is not the mean cross entropy of `logits` over `labels`; False if there are no labels."""
    count = int((labels != IGNORED_LABEL).sum())
    if logits.numel() != labels.numel() * logits.shape[-1]:
        return True
    if not count:
        return False
    if not are_classes(labels, logits):
        return True
    with torch.no_grad():
        mean = summed_loss(logits.flatten(0, -2), labels.flatten().long()) / count
    return not abs(float(loss.detach()) - mean) <= tolerance_of(loss, logits) * max(mean, 1.0)


def _with(output: Any, place: Any, loss: Tensor) -> Any:
    """Return `output` with another loss at this place."""
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, tuple | list):
        items = (*output[:place], loss, *output[place + 1 :])
        return output._make(items) if hasattr(output, "_make") else type(output)(items)
    if isinstance(output, MutableMapping):
        output[place] = loss
    else:
        setattr(output, place, loss)
    return output


def check_form_of_loss(model_name: str, output: Any) -> None:
    """Raise ValueError if a model returned a tuple, a loss in a plain mapping, or a loss of more than one number.

    `output` is what the model returned; `model_name` names the model in the error.
    """
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
            f"{model_name} returns {form}, in which no loss is found that could be scaled to the whole batch: have "
            "it return a ModelOutput with a scalar loss (in transformers: leave out return_dict=False)"
        )


class _ForReadingOnly(torch.autograd.Function):
    """The identity, whose backward pass is refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError(
            "a loss was computed from the output of a model that cuts its batch in its forward: it covers this "
            "rank's tokens only, and only the model's own loss is scaled to the whole batch. Cut the batch before, "
            "by burst_plugin.deepspeed.shard_batch, and compute the loss on a rank's tokens, as token_mean_loss does"
        )


def for_reading_only(x: Any) -> Any:
    """Return logits or hidden states with a backward pass that raises ValueError, so that no loss is made of them.

    They are of this rank's tokens, but a user who gave a whole batch would take them for values of all tokens. `x` is
    a tensor, `LazyLogits`, or lists and tuples of such; anything else is returned as it is.
    """
    if isinstance(x, LazyLogits):
        return x.then(for_reading_only)
    if isinstance(x, tuple | list):
        return type(x)(map(for_reading_only, x)) if type(x) in (tuple, list) else x
    return _ForReadingOnly.apply(x) if isinstance(x, Tensor) and x.requires_grad else x  # type: ignore[no-untyped-call]


def refuse_backward(*outputs: Any) -> None:
    """Have backward passes through these outputs, of a model in evaluation mode, raise ValueError.

    There each rank computes whole batches by itself, and the loss of a shard becomes the loss of one ring, not of
    all. Outputs without a gradient are ignored.
    """

    def refuse(grad: Tensor) -> None:
        raise ValueError(
            "backward pass of a model in evaluation mode, in which batches are not cut and losses do not count other "
            "ranks. Call engine.train() first; to train without dropout, set dropout to 0"
        )

    for x in outputs:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(refuse)  # type: ignore[no-untyped-call]
