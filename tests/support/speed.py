"""How fast this machine runs Python just now, for bounds on the processor's time."""

from __future__ import annotations

import timeit

_USUAL_S = 50e-9  # a call of a function that does nothing, on the machine that bounds are meant for


def slowness() -> float:
    """Return how many times as long such a call takes now, at least 1: shared hosts vary fourfold."""
    calls = 20_000
    return max(1.0, min(timeit.repeat(lambda: None, number=calls, repeat=9)) / calls / _USUAL_S)
