"""Imports of forked processes, repeated in the one that forks: the next ones find the modules there.

Functions of ranks import frameworks where they use them, and nearly all tests of a file the same ones. In the tests
of Megatron's recurrent layers that took a sixth of the ranks' time.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

_PACKAGES = {
    "accelerate",
    "burst_plugin",
    "deepspeed",
    "diffusers",
    "megatron",
    "peft",
    "torch",
    "transformers",
    "trl",
}
_noted: dict[str, bool] = {}  # by name, in order: whether it was repeated, or could not be


def write_imports(path: Path, last: str) -> None:
    """Write to a file what this process has imported after the module `last`, in order.

    Only these are looked at: to look at all would copy thousands of pages that are shared with the parent.
    """
    names = [*takewhile(lambda name: name != last, reversed(sys.modules))]
    path.write_text("\n".join(name for name in reversed(names) if getattr(sys.modules[name], "__spec__", None)))


def note_imports(path: Path) -> None:
    """Note what a process has written to a file, if it came to that."""
    with suppress(FileNotFoundError):
        for name in path.read_text().split():
            _noted.setdefault(name, False)


def repeat_imports() -> None:
    """Import what was noted, of packages that are there. Not while tests replace anything: modules may keep it.

    What cannot be imported here is left alone: a process may have made a module, or found it on another path.
    """
    for name in [name for name, repeated in _noted.items() if not repeated]:
        _noted[name] = True
        package = name.partition(".")[0]
        if package in _PACKAGES and package in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)
