"""Known classes of transformers: whether their code is from a known release, and how it is replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from burst_plugin.frameworks.wrapping import wrap

_MARK = "_burst_plugin_replaced_by"  # of a function that has been replaced: the names of all functions in its place


def problem_of_code(kind: type, used: Iterable[str]) -> str:
    """Return which names in `used` the `forward` of a module's class does not use, as a problem; "" if it uses all.

    used: names of functions, modules and attributes that the code of known releases uses.
    """
    function: Any = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    return lacks(kind, [name for name in used if name not in function.__code__.co_names])


def lacks(kind: type, missing: Iterable[str]) -> str:
    """Return the problem of a class whose code does not use the names in `missing`; "" if no name is missing."""
    names = ", ".join(missing)
    known = "as in the releases of transformers that are known; use one of these"
    return f"its {kind.__name__} does not use {names}, {known}" if names else ""


def replace_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around(original, ...)` take the place of `owner.name`, uncompiled; repeated calls change nothing.

    owner: a module, or a class, of which the base that defines `name` is changed.
    """
    if isinstance(owner, type):
        owner = next(base for base in owner.__mro__ if name in vars(base))
    function: Any = around
    while isinstance(function, partial):
        function = function.func
    by, before = f"{function.__module__}.{function.__qualname__}", getattr(getattr(owner, name), _MARK, ())
    if by not in before:
        uncompiled: Callable[..., Any] = torch.compiler.disable(around)  # type: ignore[no-untyped-call]
        setattr(wrap(owner, name, uncompiled), _MARK, (*before, by))


def is_replaced(owner: Any, name: str) -> bool:
    """Return whether a function of `replace_once` is in the place of `owner.name`, or something that wraps it."""
    return hasattr(getattr(owner, name), _MARK)


def of_file(module: torch.nn.Module, name: str) -> Any:
    """Return the function, or other object, called `name` in the file that defines a module's `forward`."""
    return inspect.unwrap(type(module).forward).__globals__[name]
