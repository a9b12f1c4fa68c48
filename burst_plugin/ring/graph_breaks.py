"""What `torch.compile` does not look into: calls that communicate, or that change what ranks hold.

The compiler itself is imported where a call is compiled, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def between_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that `torch.compile` does not trace: it calls `function` between two graphs.

    Outside of compiled code it simply calls `function`.
    """

    @wraps(function)
    def step(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        from burst_plugin.ring.compiled import opaque  # which imports the compiler

        result: T = opaque(function, *args, **kwargs)
        return result

    return step
