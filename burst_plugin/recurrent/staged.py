"""Pieces of a layer whose states a matrix multiplies, in stages: so that both passes compute most things once.

    forward:   maps of pieces -> states enter -> outputs
    backward:  gradients of entering states -> gradients of leaving states come back -> gradients of the inputs

If autograd went back through the maps of pieces, it would go through every piece twice, once with all columns of a
map. But all that a piece has to know of others is the gradient of the state that leaves it, which the scan brings: it
is the gradient of the map's bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_plugin.ring.graph_breaks import between_graphs

Pair = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]


class Stages(ABC):
    """The stages of computing pieces, each without autograd.

    Every stage takes last the tensors that gradients are computed for, [N, ...] for N pieces. A `Stages` holds no
    tensors itself: autograd keeps it, so that checkpoints and offloading could not free them.
    """

    @abstractmethod
    def pair(self, *xs: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the transitions and biases of pieces, and tensors that the other stages take after `xs`."""

    @abstractmethod
    def outputs(self, entries: Tensor, *xs: Tensor) -> Tensor:
        """Return the outputs of pieces, given the states that enter them."""

    @abstractmethod
    def entry_gradients(self, grad: Tensor, *xs: Tensor) -> Tensor:
        """Return the gradients of the states that enter pieces, given the gradient of the outputs alone."""

    @abstractmethod
    def gradients(self, entries: Tensor, grad: Tensor, leaving: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the tensors that `pair` took.

        entries: the states that enter pieces. grad, leaving: the gradients of the outputs, and of the states that
        leave pieces.
        """


def pair_by_stages(stages: Stages, tensors: Sequence[Tensor]) -> Pair:
    """Return A and B of pieces, and the function from entering states to outputs, as `TwoPasses.pair` does."""
    between: dict[str, Any] = {}
    transition, bias = _Paired.apply(stages, between, *tensors)  # type: ignore[no-untyped-call]

    def goes_on(entries: Tensor) -> Tensor:
        out: Tensor = _Entered.apply(stages, between, entries)  # type: ignore[no-untyped-call]
        return out

    return transition, bias, goes_on


class _Paired(torch.autograd.Function):
    """The maps of pieces; its backward pass, the last one, computes the gradients of all tensors."""

    @staticmethod
    def forward(ctx: Any, stages: Stages, between: dict[str, Any], *xs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.stages, ctx.between = stages, between
        with torch.cuda.device_of(xs[0]):  # type: ignore[no-untyped-call]
            transition, bias, prepared = stages.pair(*xs)
        between["xs"] = (*(x.detach() for x in xs), *prepared)
        return transition, bias

    @staticmethod
    @between_graphs
    @once_differentiable
    def backward(ctx: Any, unused: Tensor, leaving: Tensor) -> tuple[Tensor | None, ...]:
        entries, grad, xs = ctx.between.pop("backward")
        with torch.autocast(grad.device.type, enabled=False):
            return None, None, *ctx.stages.gradients(entries, grad, leaving, *xs)


class _Entered(torch.autograd.Function):
    """The outputs of pieces; its backward pass, the first one, computes the gradients of the entering states."""

    @staticmethod
    def forward(ctx: Any, stages: Stages, between: dict[str, Any], entries: Tensor) -> Tensor:
        xs = between.pop("xs")
        ctx.stages, ctx.between = stages, between
        ctx.save_for_backward(entries, *xs)
        with torch.cuda.device_of(entries):  # type: ignore[no-untyped-call]
            return stages.outputs(entries, *xs)

    @staticmethod
    @between_graphs
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        entries, *xs = ctx.saved_tensors
        ctx.between["backward"] = entries, grad, xs
        with torch.autocast(grad.device.type, enabled=False):
            return None, None, ctx.stages.entry_gradients(grad, *xs)
