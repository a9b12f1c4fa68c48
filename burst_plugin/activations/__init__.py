"""Memory of activations: which tensors the backward pass keeps, parks on the host, or recomputes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burst_plugin.activations.chunked_loss import Head, linear_cross_entropy, token_log_probs

__all__ = ["Head", "linear_cross_entropy", "token_log_probs"]


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that importing the package takes less time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("burst_plugin.activations.chunked_loss"), name)
