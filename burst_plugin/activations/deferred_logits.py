"""What a model gets in place of logits, so that its loss can be computed in chunks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_INSTEAD = "leave loss_chunk out, for whole logits"
_NAMED = {torch.tanh: "tanh", torch.mul: "__mul__", torch.div: "__truediv__"}  # functions as methods


class DeferredLogits:
    """Logits to come: hidden states, and the steps that a model takes from its head's output to the loss.

    weight: the weight of the head, if the head got it as an argument.

    Steps are elementwise, so that they can be taken chunk by chunk; anything else is refused, by a ValueError that
    begins with `refusal`.
    """

    def __init__(
        self,
        hidden: Tensor,
        refusal: str,
        weight: Tensor | None = None,
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
    ) -> None:
        self.hidden, self.refusal, self.weight, self.steps = hidden, refusal, weight, steps

    def after(self, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the function from hidden states to logits that begins with `project`.

        It does not refer to this object: the hidden states would be there as long as the loss's graph, for no one.
        """
        steps = self.steps

        def logits(rows: Tensor) -> Tensor:
            output = project(rows)
            for step in steps:
                output = step(output)
            return output

        return logits

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def tanh(self) -> DeferredLogits:
        return self._then(torch.tanh)

    def float(self) -> DeferredLogits:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        return self._then(lambda x: x.to(*args, **kwargs))

    def contiguous(self) -> DeferredLogits:
        return self

    def __mul__(self, other: Any) -> DeferredLogits:
        return self._with(operator.mul, other)

    def __truediv__(self, other: Any) -> DeferredLogits:
        return self._with(operator.truediv, other)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        logits = next(each for each in args if isinstance(each, cls))
        if func not in _NAMED or args[0] is not logits or kwargs:
            logits._refuse(getattr(func, "__name__", str(func)))
        return getattr(logits, _NAMED[func])(*args[1:])

    def __getitem__(self, index: Any) -> Any:
        return self._refuse("indexing")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    def _with(self, operation: Callable[[Any, Any], Any], other: Any) -> DeferredLogits:
        """Note a step with a number, or a tensor of one that is not trained."""
        if isinstance(other, Tensor) and (other.numel() != 1 or other.requires_grad):
            self._refuse(f"{operation.__name__} of {list(other.shape)}")
        return self._then(lambda x: operation(x, other))

    def _then(self, step: Callable[[Tensor], Tensor]) -> DeferredLogits:
        return DeferredLogits(self.hidden, self.refusal, self.weight, (*self.steps, step))

    def _refuse(self, what: str) -> Any:
        raise ValueError(
            f"{self.refusal} does more with its logits than scale or cap them before the loss ({what}); {_INSTEAD}"
        )
