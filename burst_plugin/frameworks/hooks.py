"""Hooks on a module whose output is replaced for a while: those that would get something else than they expect."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

_KINDS = ("forward_pre", "forward", "backward_pre", "backward")


def hooks_of_others(module: torch.nn.Module, harmless: tuple[str, ...]) -> list[str]:
    """Return the hooks of a module, described, but for those defined in modules that begin with one of `harmless`."""
    found = []
    for kind in _KINDS:
        for hook in getattr(module, f"_{kind}_hooks").values():
            home, name = _origin(hook)
            if not home.startswith(harmless):
                found.append(f"{kind} hook {home}.{name}")
    return found


def _origin(hook: Any) -> tuple[str, str]:
    """Return the module in which a hook is defined, and its name there."""
    while isinstance(hook, partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(named.__module__), named.__qualname__
