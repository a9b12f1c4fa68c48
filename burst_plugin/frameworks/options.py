"""The options of `Strategy` as command-line flags and as the table of docs/options.md, from its fields."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from dataclasses import Field, fields
from typing import Any

from burst_plugin.frameworks import all_frameworks
from burst_plugin.strategy import AUTO, Strategy

__all__ = ["flag_keywords", "table"]


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


def table() -> str:
    """Return the table of docs/options.md in Markdown: a row per option, and how frameworks write it."""
    by_name = [each.title for each in all_frameworks() if each.written is None]
    other_ways = [(each.title, each.written) for each in all_frameworks() if each.written is not None]
    rows = [[f"field and {' and '.join(by_name)} key", *(title for title, _ in other_ways), "default", "values"]]
    rows.append(["---"] * len(rows[0]))
    for option in fields(Strategy):
        ways = [written(option.name) for _, written in other_ways]
        rows.append([f"`{option.name}`", *ways, f"`{_shown(option.default)}`", option.metadata["help"]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)
