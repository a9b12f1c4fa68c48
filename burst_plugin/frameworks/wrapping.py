"""What adapters share: wrapping a framework's functions, arguments by name, and announcing a ring."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from burst_plugin.context import ContextParallel


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `owner.name`, a function or a class, by a wrapper that calls `around(original, ...)`, and return it."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=() if isinstance(original, type) else functools.WRAPPER_UPDATES)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    return wrapper


def wrap_everywhere(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Do what `wrap` does, also in modules that have imported the function by its name before."""
    original = getattr(owner, name)
    wrapper = wrap(owner, name, around)
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})  # looking up an attribute may import things
        if names.get(name) is original:
            names[name] = wrapper


def bind(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Return the arguments of a call of `function` by their names, in the order of its parameters."""
    return inspect.signature(function).bind(*args, **kwargs)


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, without those that are None."""
    signature = inspect.signature(function)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return {name: value for name, value in given.items() if value is not None}


def announce(cp: ContextParallel, **asked: str) -> None:
    """Print on rank 0 that there is a ring; a logger might not. `asked`: options that each batch decides anew."""
    if dist.get_rank() == 0:
        described = ", ".join(f"{name} {value}" for name, value in (cp.describe() | asked).items())
        print(f"burst_plugin: context_parallel_size={cp.ranks}: {described}", flush=True)
