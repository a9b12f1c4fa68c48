"""`bench recurrent`: every way to compute a layer is timed on an emulated cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.recurrent_ranks import WAYS
from benchmarks.report.files import load
from tests.support.netns import EmulatedCluster

pytestmark = [pytest.mark.netns, pytest.mark.alone]


@pytest.mark.skipif(EmulatedCluster.unavailable() is not None, reason="no cluster can be emulated here")
def test_every_way_is_timed_beside_its_kernels(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = ["--topologies", "2x2", "--rates", "1000", "--tokens", "1024", "--kernel-ms", "100", "100"]
    assert main(["recurrent", *small, "--rounds", "1", "--out", str(out)]) == 0
    rows = [row for row in load(out).rows if row["direction"] == "both"]
    assert {(row["layer"], row["contender"]) for row in rows} == {
        (layer, way) for layer in ("delta_rule", "mamba2") for way in WAYS
    }
    least = {(row["layer"], row["contender"]): row["nic_bytes"] for row in rows}
    for layer in ("delta_rule", "mamba2"):
        assert least[layer, "states"] < least[layer, "contiguous"] < least[layer, "heads"]
    # Heads run a delta rule's kernel once, all others compute its pieces twice.
    assert all(row["time_s"] > 0.5 * row["bound_s"] for row in rows)
