"""The frameworks that there are adapters for: packages beside this file, imported by name when they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["FRAMEWORKS", "adapter_module"]

FRAMEWORKS = ("megatron", "deepspeed")


def adapter_module(framework: str, name: str = "") -> ModuleType:
    """The package of a framework's adapter, or a module of it."""
    return importlib.import_module(f"burst_plugin.{framework}{f'.{name}' if name else ''}")
