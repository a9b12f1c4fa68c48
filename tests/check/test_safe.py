"""The section "safe" can fail: ranks that go on, or do not name the one at fault, and rings that never get so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from burst_plugin.check import safe as room
from burst_plugin.check.crew import Ended
from burst_plugin.check.findings import FAILED, NOT_SHOWN, OK
from burst_plugin.check.safe import safe
from burst_plugin.check.settings import Settings


class Crew:
    """A crew of two that says that rank 1 fails after 3 s, if it does, and ends as `ended` says."""

    def __init__(self, ended: dict[int, Ended], fails: bool = True) -> None:
        self.ended, self._fails = ended, fails
        self.elapsed_s, self.limit_s = 3.0, 120.0

    def heard(self, enough: Any) -> Iterator[tuple[int, str]]:
        if self._fails:
            yield 1, "fails"


@pytest.mark.parametrize(
    ("ended", "fails", "verdict", "said"),
    [
        ({0: Ended(None, "RingError: rank 1 gave up", 4.5)}, True, OK, "all others ended 1.5 s later; rank 0 said"),
        ({}, True, FAILED, "rank 1 raises, and 30 s later ranks [0] still run"),
        (
            {0: Ended(None, "RingError: timed out", 4.5)},
            True,
            FAILED,
            "rank 0 does not name rank 1; it said: Ring",
        ),
        ({0: Ended(None, "", 4.5)}, True, FAILED, "rank 0 does not name rank 1; it said: nothing"),
        ({0: Ended(None, "killed by SIGABRT", 4.5)}, True, FAILED, "rank 0 does not name rank 1; it said: killed"),
        ({0: Ended(None, "no port", 1.0)}, False, FAILED, "the ring did not get so far; rank 0: no port"),
    ],
)
def test_what_is_safe(ended: dict[int, Ended], fails: bool, verdict: str, said: str) -> None:
    crew = Crew(ended, fails)
    finding = room._outcome("raises", crew, 2, 30.0)  # type: ignore[arg-type]
    assert finding.verdict == verdict
    assert said in finding.text
    assert crew.limit_s == (33.0 if fails else 120.0)


def test_one_rank_cannot_be_missed() -> None:
    (finding,) = safe(Settings(), 1, torch.device("cpu"))
    assert finding.verdict == NOT_SHOWN
