"""`bench host`: what the host takes for a rank's step beside the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("psutil", reason="psutil is not installed")

from benchmarks.__main__ import main
from benchmarks.attention_ranks import Whole
from benchmarks.host import measure
from benchmarks.report.files import load
from burst_plugin import Strategy
from tests.support.emulated_gpu import SleepingKernel

TINY = ("--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--dtype", "float32", "--rounds", "2")


def test_both_directions_are_measured_at_every_size(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    assert main(["host", *TINY, "--ranks", "2", "--rows", "16", "32", "--out", str(out)]) == 0
    rows = load(out).rows
    assert [(row["rows"], row["direction"]) for row in rows] == [
        (size, direction) for size in (16, 32) for direction in ("forward", "backward")
    ]
    for row in rows:
        for name in ("host_s", "launch_s", "own_s", "step_s", "kernel_s"):
            assert 0 < row[f"{name}_min"] <= row[name] <= row[f"{name}_max"], name
        assert row["host_s_min"] <= row["step_s_min"]


def test_time_in_the_kernel_is_told_from_the_rest() -> None:
    """With a kernel that sleeps, in one call per visit without a mask, and on a CPU while the host waits."""
    rows, ranks, forward_s, backward_s = 16, 2, 0.02, 0.04
    whole = Whole.draw((1, ranks * rows, 4, 4, 8), torch.float32, torch.device("cpu"))
    kernel = SleepingKernel(rows * rows * 4, forward_s, backward_s)
    for row, whole_s in zip(measure(whole, ranks, 2, Strategy(kernel=kernel)), (forward_s, backward_s), strict=True):
        pairs = ranks * rows * (ranks * rows + 1) / 2 / (ranks * rows) ** 2  # what the causal mask leaves
        for name in ("kernel_s", "launch_s"):
            assert pairs * whole_s * 0.9 <= row[name], name
        assert 0 < row["own_s"] <= row["host_s"] - 0.9 * pairs * whole_s
        assert row["host_s"] <= row["step_s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kv-heads", "3"), "--heads 4 is not a multiple of --kv-heads 3"),
        (("--rows", "64", "15"), "--rows 15 cannot be cut in two; use 16"),
        (("--rounds", "0"), "have to be 1 or more"),
    ],
    ids=str,
)
def test_bad_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["host", *TINY, "--rows", "16", *arguments, "--out", str(tmp_path / "none")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
