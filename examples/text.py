"""The text that the examples train on: the sources of Python's standard library, or a file of yours."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["documents"]

_LEFT_OUT = {"test", "tests", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}


def documents(path: str | None = None) -> Iterator[str]:
    """One text per file, always in the same order."""
    if path:
        yield Path(path).read_text(errors="replace")
        return
    library = Path(sysconfig.get_path("stdlib"))
    for directory, inner, files in os.walk(library):
        inner[:] = sorted(set(inner) - _LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):  # a table, not a program
                yield Path(directory, name).read_text(errors="replace")
