"""Rules about a framework's options beside burst attention; adapters have tables of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Rule", "broken_rules", "off", "one_of"]


class Rule(NamedTuple):
    """A rule about an option. allowed: returns whether a value can be honoured. instead: what to write if not."""

    allowed: Callable[[Any], bool]
    instead: str


def off(value: Any) -> bool:
    """Return whether an option is switched off, or not set."""
    return not value


def one_of(*names: str | None) -> Callable[[Any], bool]:
    """Return a function that allows these values, and enum members of these names; None stands for not set."""
    return lambda value: getattr(value, "name", value) in names


def broken_rules(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield options with values that cannot be honoured: name, value, and what to write instead."""
    for name, rule in rules.items():
        if name in values and not rule.allowed(values[name]):
            yield name, values[name], rule.instead
