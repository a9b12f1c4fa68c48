"""The section "safe" can fail: ranks that go on, or do not name the one at fault, and rings that never get so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from burst_plugin.check import fault_tolerance
from burst_plugin.check.findings import FAILED, NOT_SHOWN, OK
from burst_plugin.check.processes import RankEnd
from burst_plugin.check.settings import Settings


class Processes:
    """Processes of two ranks that say that rank 1 fails after 3 s, if it does, and end as `ended` says."""

    def __init__(self, ended: dict[int, RankEnd], fails: bool = True) -> None:
        self.ended, self._fails = ended, fails
        self.elapsed_s, self.limit_s = 3.0, 120.0

    def messages(self, enough: Any) -> Iterator[tuple[int, str]]:
        if self._fails:
            yield 1, "fails"


@pytest.mark.parametrize(
    ("ended", "fails", "verdict", "said"),
    [
        ({0: RankEnd(None, "RingError: rank 1 gave up", 4.5)}, True, OK, "all others ended 1.5 s later; rank 0 said"),
        ({}, True, FAILED, "rank 1 raises, and 30 s later ranks [0] still run"),
        (
            {0: RankEnd(None, "RingError: timed out", 4.5)},
            True,
            FAILED,
            "rank 0 does not name rank 1; it said: Ring",
        ),
        ({0: RankEnd(None, "", 4.5)}, True, FAILED, "rank 0 does not name rank 1; it said: nothing"),
        ({0: RankEnd(None, "killed by SIGABRT", 4.5)}, True, FAILED, "rank 0 does not name rank 1; it said: killed"),
        ({0: RankEnd(None, "no port", 1.0)}, False, FAILED, "the ring did not get that far; rank 0: no port"),
    ],
)
def test_all_ranks_have_to_end_and_name_the_one_at_fault(
    ended: dict[int, RankEnd], fails: bool, verdict: str, said: str
) -> None:
    processes = Processes(ended, fails)
    finding = fault_tolerance.outcome_of("raises", processes, 2, 30.0)  # type: ignore[arg-type]
    assert finding.verdict == verdict
    assert said in finding.text
    assert processes.limit_s == (33.0 if fails else 120.0)


def test_one_rank_cannot_be_missed() -> None:
    (finding,) = fault_tolerance.check_fault_tolerance(Settings(), 1, torch.device("cpu"))
    assert finding.verdict == NOT_SHOWN
