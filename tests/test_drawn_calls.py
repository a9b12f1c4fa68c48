"""Attention with all options drawn at once: exact, and the schedule's bytes, whatever comes.

`BURST_SOAK=20000 bash tests/run.sh tests/test_drawn_calls.py` draws that many cases, other ones every time, instead
of the same 200. A case that fails is printed as one line of shell, as small as it could be made.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, note, settings

from burst_plugin import kernels
from tests.support.drawn import Drawn
from tests.support.draws import calls

SOAK = int(os.environ.get("BURST_SOAK", "0"))
FEW = 200  # in which all values of all options come, most of them ten times and more
DRAWN = settings(
    deadline=None,
    derandomize=not SOAK,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
MOST_REFUSED = 0.1  # of the cases, so that it stays attention that is drawn


@pytest.mark.slow
@pytest.mark.timeout(900 + 2 * SOAK)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("selects", [False, True], ids=["anything", "selections"])
def test_attention_is_exact_whatever_is_asked_for(selects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "warn_once", lambda text: None)  # of slow kernels
    outcomes: Counter[str] = Counter()

    @settings(DRAWN, max_examples=SOAK or (100 if selects else FEW))
    @given(calls(selects))
    def check(case: Drawn) -> None:
        note(case.line)
        outcomes["refused" if case.check() else "exact"] += 1

    check()
    assert outcomes["refused"] <= MOST_REFUSED * outcomes.total(), outcomes
