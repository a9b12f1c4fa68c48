"""Flags of scripts: options of `Strategy`, rules about a framework's other options, and one message for a refusal."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from burst_plugin.strategy import AUTO


def number_or_word(text: str) -> float | str:
    """Return `text` as a float if it is a number, else `text` itself; the `type` of an option of `ArgumentParser`."""
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
    """Return the keyword arguments of `ArgumentParser.add_argument` for a flag that sets a field of `Strategy`."""
    choices = sorted(option.metadata["choices"], key=lambda choice: choice != AUTO)  # "auto" first
    words = option.metadata.get("words", ())
    keywords = {"choices": choices} if choices else _whole_or(words) if words else _BY_TYPE[str(option.type)]
    default = [option.default] if "nargs" in keywords else option.default
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", option.metadata["help"])  # links are of no use on a terminal
    return {**keywords, "default": default, "help": text.replace("`", "").replace("%", "%%")}


def _whole_or(words: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments for a whole number or one of some words."""

    def whole_or_word(text: str) -> int | str:
        if text in words:
            return text
        try:
            return int(text)
        except ValueError:
            instead = " or ".join([", ".join(["a number", *words[:-1]]), words[-1]])
            raise argparse.ArgumentTypeError(f"{text!r} is not valid; use {instead}") from None

    return {"type": whole_or_word, "metavar": f"{{N,{','.join(words)}}}"}


_ABSENT = object()


class Rule(NamedTuple):
    """A rule about the value of an option of a framework.

    allowed: returns whether a value can be honoured.
    instead: the text that says what to write in place of other values.
    """

    allowed: Callable[[Any], bool]
    instead: str


def off(value: Any) -> bool:
    """Return whether `value` means that an option is off or not set: whether it is false, 0, empty or None."""
    return not value


def one_of(*names: str | None) -> Callable[[Any], bool]:
    """Return a function that says whether a value is one of `names`, or an enum member with such a name.

    None among `names` allows None, an option that is not set.
    """
    return lambda value: getattr(value, "name", value) in names


def broken_rules(rules: Mapping[str, Rule], options: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, what to write instead) for each option whose value a rule does not allow.

    Args:
        rules: the rules by the names of options.
        options: the values by name, or an object with them as attributes; options that are not there break no rule.
    """
    for name, rule in rules.items():
        value = options.get(name, _ABSENT) if isinstance(options, Mapping) else getattr(options, name, _ABSENT)
        if value is not _ABSENT and not rule.allowed(value):
            yield name, value, rule.instead


_KEY = "burst_plugin/refused"
PATIENCE = timedelta(seconds=10)  # ranks have met already, and rank 0 refuses what all of them refuse


@contextmanager
def exit_if_refused() -> Iterator[None]:
    """Turn a ValueError that all ranks raise in this context into exit status 1 and one message, without tracebacks.

    Rank 0 prints the message to stderr. The other ranks wait for that, up to 10 seconds, since a launcher ends all
    ranks once the first has failed; a rank that has waited in vain prints the message itself.

    Raises:
        SystemExit: in place of the ValueError.
    """
    try:
        yield
    except ValueError as error:
        _tell_once(f"burst_plugin: {error}")
        raise SystemExit(1) from None


def _tell_once(message: str) -> None:
    if not dist.is_initialized():
        print(message, file=sys.stderr, flush=True)
        return
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # of a store whose host has gone: nobody waits there
            store.set(_KEY, "")
        return
    try:
        store.wait([_KEY], PATIENCE)
    except dist.DistNetworkError:  # the store has gone with rank 0, which had said so before
        return
    except RuntimeError:
        print(message, file=sys.stderr, flush=True)
