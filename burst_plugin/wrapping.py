"""How adapters change a framework at run time: a function of its own, called with the one that it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["wrap"]


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `owner.name`, function or class, by what calls `around(original, *args, **kwargs)`; returns that."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=() if isinstance(original, type) else functools.WRAPPER_UPDATES)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    return wrapper
