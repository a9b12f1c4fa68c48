"""`bench latents`: latents and expanded keys and values are timed on an emulated cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.report.files import load
from tests.support.netns import EmulatedCluster

pytestmark = [pytest.mark.netns, pytest.mark.alone]


@pytest.mark.skipif(EmulatedCluster.unavailable() is not None, reason="no cluster can be emulated here")
def test_all_ways_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = ["--topologies", "2x2", "--rates", "1000", "--tokens", "256", "--heads", "16", "--rounds", "1"]
    times = ["--visit-ms", "10", "25", "--indexed-ms", "10", "10", "25"]
    assert main(["latents", *small, *times, "--out", str(out)]) == 0
    rows = {(row["contender"], row["direction"]): row for row in load(out).rows}
    assert {way for way, _ in rows} == {"latents", "expanded", "ring", "gathered"}
    for direction in ("forward", "backward"):  # with 16 heads keys have 8.9 times the numbers of latents
        assert rows["expanded", direction]["nic_bytes"] > 5 * rows["latents", direction]["nic_bytes"]
        assert rows["gathered", direction]["nic_bytes"] > rows["ring", direction]["nic_bytes"]
