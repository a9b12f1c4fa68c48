"""Rules about a framework's options beside burst attention; adapters have tables of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_ABSENT = object()


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


def broken_rules(rules: Mapping[str, Rule], options: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield options with values that cannot be honoured: name, value, and what to write instead.

    options: values by name, or an object that has them as attributes; not all rules need have one.
    """
    for name, rule in rules.items():
        value = options.get(name, _ABSENT) if isinstance(options, Mapping) else getattr(options, name, _ABSENT)
        if value is not _ABSENT and not rule.allowed(value):
            yield name, value, rule.instead
