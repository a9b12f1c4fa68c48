"""Libraries that may be installed: imported once, when a kernel first uses one."""

from __future__ import annotations

import importlib
import re
from functools import cache
from types import ModuleType


@cache
def find(name: str) -> ModuleType | str:
    """Return the module called `name`, or why there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # builds for another torch or GPU fail in many ways
        return f"{name} cannot be imported: {type(error).__name__}: {error}"


def load(name: str) -> ModuleType:
    """Return the module called `name`. Raise RuntimeError if there is none, as `Kernel.refuse` says beforehand."""
    module = find(name)
    if isinstance(module, str):
        raise RuntimeError(module)
    return module


def older(version: str, than: tuple[int, ...]) -> bool:
    """Return whether a version such as "2.6.3.post1" is older than (2, 7); one without numbers counts as old."""
    return tuple(map(int, re.findall(r"\d+", version)[: len(than)])) < than
