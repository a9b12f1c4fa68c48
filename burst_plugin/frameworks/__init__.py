"""The frameworks that have adapters: packages beside this one, each imported only when it is needed."""

from __future__ import annotations

import importlib

from burst_plugin.frameworks.description import Framework

__all__ = ["FRAMEWORKS", "all_frameworks", "framework"]

FRAMEWORKS = ("megatron", "deepspeed")


def framework(name: str) -> Framework:
    """Return the description of the framework called `name`, one of `FRAMEWORKS`, from its adapter.

    It is `FRAMEWORK` in `burst_plugin.<name>.framework`, which is imported.
    """
    found: Framework = importlib.import_module(f"burst_plugin.{name}.framework").FRAMEWORK
    return found


def all_frameworks() -> list[Framework]:
    """Return the descriptions of all frameworks that have an adapter, whether they are installed or not."""
    return [framework(name) for name in FRAMEWORKS]
