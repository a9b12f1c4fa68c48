"""What the commands share: values of options, read and checked, and a line of standard error that shows progress."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

# The bounds are far beyond any machine or model, so that a value outside them is a typing error or in a wrong unit.
# Within them all times computed are finite, and every loop ends soon.
_MOST_TOKENS = 10**12
_MOST_HEADS = 100_000
_SUFFIXES = MappingProxyType({"": 1, "k": 2**10, "m": 2**20, "g": 2**30})
_BAR_WIDTH = 30


def write_json(path: Path, content: object) -> None:
    """Write a command's results to a file as JSON. Raise ValueError if the path cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error.strerror}; give a file") from error


def check_writable(option: str, path: Path) -> None:
    """Raise ValueError if a file cannot be written at `path`, before the work whose results it is for.

    option: the option that gave the path, for the message.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        reason = f"{path} is a folder" if path.is_dir() else f"there is no folder {folder}"
        raise ValueError(f"{option} {path} cannot be written: {reason}; give a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: permission denied; give another file")


def whole(unit: str, most: int) -> Callable[[str], int]:
    """Return a parser of options for argparse, which takes whole numbers from 1 to `most`.

    unit: what is counted, such as "ranks", for the message on other values.
    """

    def parse(text: str) -> int:
        if not _is_whole(text, most):
            raise argparse.ArgumentTypeError(f"got {_short(text)}, expected a whole number of {unit}, 1 to {most:,}")
        return int(text)

    return parse


def number(what: str, least: float = 1e-3, most: float = 1e6) -> Callable[[str], float]:
    """Return a parser of options for argparse, which takes finite numbers from `least` to `most`.

    what: what is expected, such as "GB/s, such as 400", for the message on other values.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # nan is not, either
            raise argparse.ArgumentTypeError(f"got {_short(text)}, expected {what}, {least:g} to {most:,.0f}")
        return value

    return parse


def tokens(text: str) -> int:
    """Return the number of tokens that a text gives, such as 131072, 128k or 1.5m; k is 1024, m is 1024 ** 2.

    Raises argparse.ArgumentTypeError for other texts, and for numbers out of bounds.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", text.strip().lower().replace(",", ""), re.ASCII)
    value = float(match[1]) * _SUFFIXES[match[2]] if match else 0.0
    if not 1 <= value <= _MOST_TOKENS or value % 1:
        raise argparse.ArgumentTypeError(
            f"got {_short(text)}, expected a number of tokens such as 131072, 128k (131,072) or 1m (1,048,576), "
            f"1 to {_MOST_TOKENS:,}"
        )
    return int(value)


def heads(text: str) -> tuple[int, int]:
    """Return (query heads, key/value heads) from a text such as 32/8.

    Raises argparse.ArgumentTypeError for other texts, and where the second does not divide the first.
    """
    numbers = text.split("/")
    if len(numbers) != 2 or not all(_is_whole(part, _MOST_HEADS) for part in numbers):
        raise argparse.ArgumentTypeError(
            f"got {_short(text)}, expected query heads / key/value heads, such as 32/8, each 1 to {_MOST_HEADS:,}"
        )
    q_heads, kv_heads = map(int, numbers)
    if q_heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"got {text}, but {kv_heads} key/value heads do not divide {q_heads} query heads; write for example 32/8"
        )
    return q_heads, kv_heads


def _is_whole(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


class StatusLine:
    """A line of progress on standard error, shown only if that is a terminal, and `wanted` is true."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._is_shown = wanted and sys.stderr.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Show a text in place of the one shown before."""
        if self._is_shown:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = max(self._width, len(text))

    def erase(self) -> None:
        """Erase the line, so that other output can take its place."""
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
            self._width = 0

    def bar(self, done: int, total: int, title: str = "pricing", end: str = "") -> None:
        """Show a progress bar, filled to `done` of `total` parts.

        title: the text before it. end: the text after it, by default the two numbers.
        """
        filled = _BAR_WIDTH * min(done, total) // total
        self.show(f"{title} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {end or f'{done}/{total}'}")

    def progress(self, done: int, total: int) -> None:
        """Show how many of `total` plans have been priced, as a bar; erase it when all are done."""
        if done < total:
            self.bar(done, total)
        else:
            self.erase()
