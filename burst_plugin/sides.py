"""What meets in a visit, and in which pass: the words that every module has for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

__all__ = ["DIRECTIONS", "OTHER_SIDE", "SIDES", "Direction", "Side"]

Side = Literal["q", "kv"]
"""Queries, or keys and values; with all that belongs to them in a pass."""
Direction = Literal["forward", "backward"]
"""Of a pass."""

SIDES: tuple[Side, Side] = ("q", "kv")
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
OTHER_SIDE: Mapping[Side, Side] = MappingProxyType({"q": "kv", "kv": "q"})
