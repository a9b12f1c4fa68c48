"""`python -m burst_plugin.run`: a script runs as it does by itself, and leaves no process behind."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import launched

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

ROOT = Path(__file__).parents[2]
LAUNCHER = ["-m", "burst_plugin.run"]

SCRIPT = """
import argparse, os, sys
import torch.distributed as dist
sys.path.insert(0, {root!r})
from tests.support.megatron_gpt import GptRun, one_step, random_tokens
parser = argparse.ArgumentParser()
parser.add_argument("--cp-comm-type")
dist.init_process_group("gloo")
run = GptRun(layers=2, cp=2, cp_comm_type=None)
run = GptRun(layers=2, cp=2, cp_comm_type=parser.parse_args().cp_comm_type)
assert __name__ == "__main__" and sys.modules["__main__"].__file__ == sys.argv[0]
loss = one_step(run, random_tokens(run)).loss
print(f"loss {{loss:.4f}}\\n", end="", flush=True)  # one write: ranks share the pipe
"""
STARTS_A_PROCESS = """
import multiprocessing
manager = multiprocessing.get_context("spawn").Manager()
print("manager", manager._process.pid)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the repository; this ends with the last process that holds its output."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_an_unmodified_script_runs_on_a_ring(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    two_ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python(*two_ranks, *LAUNCHER, "--cpu", str(script), "--cp-comm-type", "burst")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("burst_plugin in Megatron-core:") == 1
    losses = [line for line in done.stdout.splitlines() if line.startswith("loss")]
    assert len(losses) == 2
    assert len(set(losses)) == 1


def test_a_script_that_is_not_there_is_named() -> None:
    done = python(*LAUNCHER, "nowhere.py")
    assert done.returncode == 1
    assert "nowhere.py is not a file; give the training script" in done.stderr


def test_a_script_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "train.py").write_text("import beside, sys; print(beside.WORD, sys.argv[1:])")
    done = launched([*LAUNCHER, "--framework", "megatron", str(tmp_path / "train.py"), "--x"])
    assert done.stdout.splitlines()[-1] == "found ['--x']", done.stderr


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """On CPUs the launcher skips what Python does at exit; Megatron's checkpoints start a manager."""
    script = tmp_path / "train.py"
    script.write_text(STARTS_A_PROCESS)
    done = python(*LAUNCHER, "--framework", "megatron", "--cpu", str(script))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("manager")]
    assert not Path(f"/proc/{line.split()[1]}").exists()
