"""Which configuration of a contender is timed: the fastest in a few trial turns, by medians."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["TRIALS", "chosen", "hopeful"]

TRIALS = 7  # of each configuration, while there are several
_HOPELESS = 1.3  # times the best after any of them, a configuration is not tried again


def hopeful(typical_s: Mapping[str, float]) -> list[str]:
    """Those to try again, by their times so far, in the order given."""
    best_s = min(typical_s.values())
    return [name for name, seconds in typical_s.items() if seconds <= _HOPELESS * best_s]


def chosen(typical_s: Mapping[str, float]) -> str:
    """The fastest."""
    return min(typical_s, key=typical_s.__getitem__)
