"""The options of `Strategy` as command-line flags, from its fields."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from dataclasses import Field
from typing import Any

from burst_plugin.strategy import AUTO


def number_or_word(text: str) -> float | str:
    """Parse a number, or else a word."""
    try:
        return float(text)
    except ValueError:
        return text


_BY_TYPE: dict[str, dict[str, Any]] = {
    "bool": {"action": argparse.BooleanOptionalAction},
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "float | str": {"type": number_or_word, "metavar": "{X,none,all}"},
    "int | tuple[int, int]": {"type": int, "metavar": "N", "nargs": "+"},  # one for both passes, or one for each
}


def flag_keywords(option: Field[Any]) -> dict[str, Any]:
    """Return keyword arguments of `ArgumentParser.add_argument` for a field of `Strategy`."""
    choices = sorted(option.metadata["choices"], key=lambda choice: choice != AUTO)  # "auto" first
    words = option.metadata.get("words", ())
    keywords = {"choices": choices} if choices else _whole_or(words) if words else _BY_TYPE[str(option.type)]
    default = [option.default] if "nargs" in keywords else option.default
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", option.metadata["help"])  # links are of no use on a terminal
    return {**keywords, "default": default, "help": text.replace("`", "").replace("%", "%%")}


def _whole_or(words: Collection[str]) -> dict[str, Any]:
    """Return the keyword arguments for a whole number or one of some words."""

    def whole_or_word(text: str) -> int | str:
        return text if text in words else int(text)

    return {"type": whole_or_word, "metavar": f"{{N,{','.join(words)}}}"}
