"""Libraries that may be installed: imported when a kernel first needs one, and once."""

from __future__ import annotations

import importlib
import re
from functools import cache
from types import ModuleType

__all__ = ["find", "load", "older"]


@cache
def find(name: str) -> ModuleType | str:
    """The module called `name`, or why there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # builds for another torch or GPU fail in as many ways as there are
        return f"{name} cannot be imported: {type(error).__name__}: {error}"


def load(name: str) -> ModuleType:
    """The module called `name`; RuntimeError if there is none, as `Kernel.refuse` says beforehand."""
    module = find(name)
    if isinstance(module, str):
        raise RuntimeError(module)
    return module


def older(version: str, than: tuple[int, ...]) -> bool:
    """Whether "2.6.3.post1" is older than (2, 7); versions without numbers are taken for old."""
    return tuple(map(int, re.findall(r"\d+", version)[: len(than)])) < than
