"""`burst init`: what it writes runs as it is, and its losses fall."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from burst_plugin.cli import main
from tests.support.megatron_lm import ROOT, checkout


def _run(folder: Path, command: str) -> list[float]:
    """Run a command line in a folder; return the losses that it prints."""
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": bin_folder, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [float(text) for text in re.findall(r"(?:loss|'loss':) '?(\d+\.\d+)", done.stdout)]


@pytest.mark.parametrize("kind", ["pytorch", "deepspeed", "trainer"])
def test_what_is_written_trains(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind != "pytorch" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    assert main(["init", kind, str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"Written to {tmp_path / 'run'}: ")
    assert ("--cpu" in said[1]) == (kind != "pytorch" and torch.cuda.device_count() < 2)
    losses = _run(tmp_path, said[1].replace("torchrun ", "torchrun --standalone "))
    assert len(losses) >= 4
    assert losses[-1] < losses[0] - 0.2
    assert main(["init", kind, str(tmp_path / "run")]) == 1
    assert "has " in (refusal := capsys.readouterr().err)
    assert "already; give another folder" in refusal


@pytest.mark.megatron
def test_what_is_written_for_megatron_trains(tmp_path: Path) -> None:
    tree = checkout("core_v0.16.1", tmp_path)
    assert main(["init", "megatron", str(tmp_path / "run")]) == 0
    done = subprocess.run(
        ["bash", "train.sh", str(tree)],
        cwd=tmp_path / "run",
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    losses = [float(text) for text in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 5, (done.stdout + done.stderr)[-4000:]
    assert losses[-1] < losses[0]
