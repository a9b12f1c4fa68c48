"""Replacing a module's `forward`, to run in chunks, and restoring it: hooks see the same module all along."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class ReplacedForward:
    """Takes the place of the `forward` of one module, which keeps its hooks, name and parameters.

    A subclass computes in `__call__`; its user assigns it: `module.forward = Subclass(module, chunk)`.

    chunk: how many tokens or heads the subclass works on at a time. earlier: the `forward` that the module had.
    """

    def __init__(self, module: torch.nn.Module, chunk: int) -> None:
        self.module, self.chunk = module, chunk
        self.earlier = module.forward  # a method, or what others have put there
        self._was_set = "forward" in vars(module)
        self._name = next(iter(inspect.signature(module.forward).parameters), "")
        self._hook = module.register_forward_pre_hook(self._input_first, prepend=True, with_kwargs=True)

    def _input_first(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call with the input as the first positional one, and in need of a gradient.

        Hooks that come after this one, such as ZeRO-3's, consider the backward pass of a module done once all
        positional inputs that need gradients have them: at once, if there are none.
        """
        by_name = dict(kwargs)
        x, *other_args = args or (by_name.pop(self._name),)
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
        if trains and isinstance(x, Tensor) and not x.requires_grad:
            x = x.detach().requires_grad_()
            x.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        return (x, *other_args), by_name

    def restore(self) -> None:
        """Give the module back the `forward` that it had before."""
        self._hook.remove()
        if self._was_set:
            self.module.forward = self.earlier
        else:
            del self.module.forward


def _drop_gradient(x: Tensor) -> None:
    x.grad = None


def restore_forward(module: torch.nn.Module) -> bool:
    """Give a module back the `forward` that it had before a `ReplacedForward`; return whether it had one."""
    ours = vars(module).get("forward")
    if not isinstance(ours, ReplacedForward):
        return False
    ours.restore()
    return True


@contextmanager
def in_place_of(module: torch.nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Have `module` return `values`, by name, in place of its parameters or submodules inside the `with` block.

    The parameters and submodules stay registered, as ZeRO-3 needs.
    """
    vars(module).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(module)[name]
