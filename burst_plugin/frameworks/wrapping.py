"""Functions that adapters share: wrapping functions, listing hooks, naming arguments, and announcing a ring."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from burst_plugin.context import ContextParallel


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `owner.name`, a function or class, by a wrapper that calls `around(original, ...)`; return the wrapper.

    `owner` is a module or a class. `around` gets the original, then the arguments of the call (with `self` for
    methods), and its result is the result of the call.
    """
    original = getattr(owner, name)

    @functools.wraps(original, updated=() if isinstance(original, type) else functools.WRAPPER_UPDATES)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    return wrapper


def wrap_everywhere(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the function `owner.name` by a wrapper, in `owner` and in all modules that imported it by this name.

    A call of the wrapper returns `around(original, ...)`, where `original` is the replaced function and `...` are the
    arguments of the call. Only modules that are loaded already are changed.
    """
    original = getattr(owner, name)
    wrapper = wrap(owner, name, around)
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})  # looking up an attribute may import things
        if names.get(name) is original:
            names[name] = wrapper


def bind(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Return the arguments of the call `function(*args, **kwargs)` by the names of its parameters, in their order.

    Raises TypeError for arguments that `function` does not take.
    """
    return inspect.signature(function).bind(*args, **kwargs)


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the call `function(*args, **kwargs)` by name; arguments that are None are left out.

    Arguments that `function` takes as its own `**kwargs` are entries of the dict, too. Raises TypeError for arguments
    that it does not take.
    """
    signature = inspect.signature(function)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return {name: value for name, value in arguments.items() if value is not None}


def announce(cp: ContextParallel, **asked: str) -> None:
    """Print on rank 0 that there is a ring, its number of ranks and its options; a logger might not print it.

    `asked` are texts by the name of an option, which replace the ring's: for options that each batch decides anew.
    """
    if dist.get_rank() == 0:
        described = ", ".join(f"{name} {value}" for name, value in (cp.describe() | asked).items())
        print(f"burst_plugin: context_parallel_size={cp.ranks}: {described}", flush=True)


_KINDS = ("forward_pre", "forward", "backward_pre", "backward")


def hooks_of_others(module: torch.nn.Module, harmless: tuple[str, ...]) -> list[str]:
    """Return the forward and backward hooks of a module, a text for each, except hooks defined in harmless modules.

    `harmless` are the beginnings of the names of Python modules, such as "burst_plugin.".
    """
    descriptions = []
    for kind in _KINDS:
        for hook in getattr(module, f"_{kind}_hooks").values():
            home, name = _origin(hook)
            if not home.startswith(harmless):
                descriptions.append(f"{kind} hook {home}.{name}")
    return descriptions


def remove_forward_hooks(module: torch.nn.Module, homes: tuple[str, ...]) -> None:
    """Remove the hooks on a module's forward that are defined in `homes`, the names of Python modules.

    Needs no handles, which a deep copy of a model lacks, while it has the model's hooks.
    """
    for kind in ("forward_pre", "forward"):
        hooks = getattr(module, f"_{kind}_hooks")
        for number in [number for number, hook in hooks.items() if _origin(hook)[0] in homes]:
            for flags in ("_with_kwargs", "_always_called"):
                getattr(module, f"_{kind}_hooks{flags}", {}).pop(number, None)
            del hooks[number]


def _origin(hook: Any) -> tuple[str, str]:
    """Return the module that defines a hook, and the hook's name there."""
    while isinstance(hook, partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(named.__module__), named.__qualname__
