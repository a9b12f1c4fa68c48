"""A plan against a training step on a real GPU: see `support.real_step`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
ROOT = Path(__file__).parents[2]


def measured(path: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.real_step", "--out", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "OVERFLOW" not in done.stdout + done.stderr, "the optimizer made no step"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_the_step_runs_with_a_toy_on_cpus(tmp_path: Path) -> None:
    found = measured(tmp_path / "step.json", "--layers", "2", "--tokens", "2048")
    assert len(found["steps"]) == 3
    assert all(step["host_pages_gib"] > 0 for step in found["steps"])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_a_million_tokens_take_what_the_plan_says(device: str, tmp_path: Path) -> None:
    found = measured(tmp_path / "step.json", "--layers", "2")
    planned, step = found["planned_gib"], found["steps"][-1]
    left, nccl = planned["left for CUDA, NCCL and the allocator"], planned["NCCL's buffers"]
    peak = max(step["forward_peak_gib"], step["backward_peak_gib"], step["step_peak_gib"])
    assert peak == pytest.approx(sum(planned.values()) - left - nccl, rel=0.1)
    assert step["outside_gib"] < left
