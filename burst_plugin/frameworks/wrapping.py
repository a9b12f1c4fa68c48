"""What adapters have in common: a framework's function in place of which another is called, and word of a ring."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from burst_plugin.context import ContextParallel

__all__ = ["announce", "wrap"]


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `owner.name`, function or class, by what calls `around(original, *args, **kwargs)`; returns that."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=() if isinstance(original, type) else functools.WRAPPER_UPDATES)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    return wrapper


def announce(cp: ContextParallel) -> None:
    """Print, on the first of all ranks, that there is a ring: not by a logger, which may keep it back."""
    if dist.get_rank() == 0:
        described = ", ".join(f"{name} {what}" for name, what in cp.describe().items())
        print(f"burst_plugin: context_parallel_size={cp.ranks}: {described}", flush=True)
