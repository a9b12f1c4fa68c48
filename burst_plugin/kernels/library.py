"""Libraries that may be installed: imported once, when a kernel first uses one."""

from __future__ import annotations

import importlib
import re
from functools import cache
from types import ModuleType


@cache
def find(name: str) -> ModuleType | str:
    """Return the module called `name`, imported, or a text that says why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # builds for another torch or GPU fail in many ways
        return f"{name} cannot be imported: {type(error).__name__}: {error}"


def load(name: str) -> ModuleType:
    """Return the module called `name`, imported. Raise RuntimeError, with the reason, if it cannot be.

    A kernel refuses cases without its library before it gets here.
    """
    module = find(name)
    if isinstance(module, str):
        raise RuntimeError(module)
    return module


def older(version: str, than: tuple[int, ...]) -> bool:
    """Return whether a version is older than `than`, such as "2.6.3.post1" than (2, 7).

    Only as many numbers as `than` has are compared. A version without numbers is older.
    """
    return tuple(map(int, re.findall(r"\d+", version)[: len(than)])) < than
