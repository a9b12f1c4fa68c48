"""`bench latents`: latents and expanded keys and values are timed on an emulated cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.report.files import load
from tests.support.netns import EmulatedCluster

pytestmark = [pytest.mark.netns, pytest.mark.alone]


@pytest.mark.skipif(EmulatedCluster.unavailable() is not None, reason="no cluster can be emulated here")
def test_both_ways_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = ["--topologies", "2x2", "--rates", "1000", "--tokens", "256", "--heads", "16", "--visit-ms", "10", "25"]
    assert main(["latents", *small, "--rounds", "1", "--out", str(out)]) == 0
    rows = {(row["contender"], row["direction"]): row for row in load(out).rows}
    assert len(rows) == 6
    for direction in ("forward", "backward"):  # with 16 heads keys have 8.9 times the numbers of latents
        assert rows["expanded", direction]["nic_bytes"] > 5 * rows["latents", direction]["nic_bytes"]
