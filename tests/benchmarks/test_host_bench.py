"""`bench host`: what the host takes for a rank's step beside the kernel."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("psutil", reason="psutil is not installed")

from benchmarks.__main__ import main
from benchmarks.attention_ranks import Whole
from benchmarks.host import measure
from benchmarks.report.files import load
from burst_plugin import Strategy
from burst_plugin.kernels import Grads, How, Queries
from burst_plugin.kernels.torch_cpu import TorchCpuKernel

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


class _Slow(TorchCpuKernel):
    """A kernel that sleeps first, for at least as long as it says."""

    name = "slow"
    seconds = (0.01, 0.02)  # forward, backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds[0])
        return super().forward(q, k, v, how)

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        time.sleep(self.seconds[1])
        return super().backward(queries, k, v, how)


def test_time_in_the_kernel_is_told_from_the_rest() -> None:
    """Every visit has at least one call; on a CPU the host waits for it."""
    whole = Whole.draw((1, 32, 4, 4, 8), torch.float32, torch.device("cpu"))
    for row, slept_s in zip(measure(whole, 2, 2, Strategy(kernel=_Slow())), _Slow.seconds, strict=True):
        for name in ("kernel_s", "launch_s"):
            assert slept_s <= row[name], name
        assert 0 < row["own_s"] <= row["host_s"] - slept_s
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
