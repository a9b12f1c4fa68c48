"""`tools/on_a_gpu.sh`: its steps on their stand-ins, and which of them run when some fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("psutil", reason="psutil is not installed")

from benchmarks.report.files import load
from tests.comm.test_nccl import BOUNDS
from tests.support.exactness import RINGS

ROOT = Path(__file__).parents[2]
SCRIPT = ["bash", str(ROOT / "tools" / "on_a_gpu.sh")]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

# Stands for Python on a machine with a GPU: notes what it is to run, fails or hangs where NAME is in it.
PRETENDED = """\
#!/usr/bin/env bash
[ "$1" = -c ] && { echo yes; exit; }
echo "$*" >>"$CALLS"
case "$*" in *"${FAILS:-nothing}"*) echo it broke; exit 3 ;; esac
case "$*" in *"${HANGS:-nothing}"*) exec sleep 60 ;; esac
echo fine
"""


class Pretended:
    """The script with a Python that only notes what it is to run."""

    def __init__(self, directory: Path) -> None:
        self.python, self.results, self._calls = directory / "python", directory / "results", directory / "calls"
        self.python.write_text(PRETENDED)
        self.python.chmod(0o755)

    def start(self, **environment: str) -> subprocess.Popen[str]:
        self._calls.write_text("")
        own = {"PY": str(self.python), "CALLS": str(self._calls), **environment}
        command = [*SCRIPT, str(self.results)]
        return subprocess.Popen(command, env=ENVIRONMENT | own, stdout=subprocess.PIPE, text=True)

    def run(self, **environment: str) -> tuple[int, str]:
        process = self.start(**environment)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    def names(self, suffix: str) -> set[str]:
        return {path.stem for path in self.results.glob(f"*{suffix}")}


@pytest.fixture
def pretended(tmp_path: Path) -> Pretended:
    return Pretended(tmp_path)


@pytest.mark.slow
def test_every_step_runs_on_its_stand_in(tmp_path: Path) -> None:
    own_test = tmp_path / "gpu-test_real_step.txt"  # takes ten seconds, and is a test on CPUs anyway
    own_test.write_text("= 1 passed\n")
    environment = ENVIRONMENT | {"PY": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=280)
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    host = load(tmp_path / "host.json").rows
    assert {row["direction"] for row in host} == {"forward", "backward"}
    assert len({row["rows"] for row in host}) == 3
    assert all(row["own_s"] > 0 and row["kernel_s"] > 0 for row in host)
    assert json.loads((tmp_path / "check.json").read_text())["passed"]
    assert all(row["virtual"] and row["error"] < 2e-6 for row in load(tmp_path / "virtual.json").rows)
    tests = [*tmp_path.glob("gpu-*.txt"), *tmp_path.glob("nccl-*.txt")]
    assert len(tests) >= 5, "of each file with tests for GPUs, and NCCL"
    assert "gpu-test_real_step: done before" in done.stdout
    for path in tests:
        assert re.search(r"= [1-9]\d* passed", path.read_text().splitlines()[-1]), path.name


def test_a_step_that_fails_or_hangs_stops_no_other_and_is_made_again(pretended: Pretended) -> None:
    status, said = pretended.run(FAILS="cli check", HANGS="benchmarks host", STEP_SECONDS="1")
    assert status == 1
    assert "check: FAILED with 3" in said
    assert "host: OUT OF TIME" in said
    assert said.splitlines()[-1] == "not done: host check"
    assert pretended.names(".log") == {"host", "check"}
    assert (pretended.results / "check.log").read_text() == "it broke\n"
    assert pretended.names(".txt") >= {"virtual", "nccl-others", "gpu-test_kernels"}
    assert len(pretended.calls) == len(pretended.names(".txt")) + 2

    status, said = pretended.run()
    assert status == 0
    assert ["benchmarks host" in pretended.calls[0], "cli check" in pretended.calls[1]] == [True, True]
    assert len(pretended.calls) == 2, "the others were done before"
    assert "virtual: done before" in said
    assert not pretended.names(".log")
    assert (pretended.results / "check.txt").read_text() == "fine\n"


def test_what_is_interrupted_at_once_is_not_done(pretended: Pretended) -> None:
    process = pretended.start(HANGS="cli check")
    while not any("cli check" in call for call in pretended.calls):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)  # less than the step would take
    assert process.returncode == 130
    assert pretended.names(".txt") == {"host"}


def test_on_a_gpu_sizes_are_those_of_models_and_no_test_is_left_out(pretended: Pretended) -> None:
    assert pretended.run()[0] == 0
    calls = pretended.calls
    assert "--rows 1024 4096 16384" in calls[0]
    marked = [call.split() for call in calls if "-m gpu" in call]
    files = {path for path in ROOT.glob("tests/**/test_*.py") if re.search(r"mark\.gpu\b", path.read_text())}
    assert {ROOT / words[-1] for words in marked} == files
    worlds = {f"{str(dtype).removeprefix('torch.')}-{ranks}" for dtype in BOUNDS for ranks, _ in RINGS}
    chosen = [call.split(" -k ")[1].split(" tests/")[0] for call in calls if "-m nccl" in call]
    assert set(chosen[:-1]) == worlds
    assert chosen[-1] == f"not ({' or '.join(chosen[:-1])})"
