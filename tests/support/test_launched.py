"""Commands that are forked from the tests' own process end, print and fail as those of processes of their own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.launched import launched


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no such thing')", 1, "no such thing"),
        ("os._exit(0)", 0, ""),
        ("os._exit(4)", 4, ""),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "killed by signal 9"),
        ("time.sleep(60)", -signal.SIGKILL, "not done after 1 s"),
    ],
)
def test_the_exit_status_is_that_of_the_rank_that_fails(ending: str, status: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    rank = 'os.environ.get("RANK", "none")'
    script.write_text(
        f"import os, signal, sys, time\nprint(sys.argv[1], {rank}, flush=True)\nif {rank} != '0':\n    {ending}\n"
    )
    for ranks, printed in ((None, {"word none"}), (2, {"word 0", "word 1"})):
        done = launched([str(script), "word"], ranks=ranks, timeout_s=1.0 if "sleep" in ending else 20.0)
        assert done.returncode == status, done.stderr
        assert {*done.stdout.splitlines()} == printed
        assert said in done.stderr


def test_a_module_runs_and_leaves_this_process_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = [*sys.argv], [*sys.path], Path.cwd()
    done = launched(["-m", "burst_plugin.cli", "--help"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: burst ")
    assert ([*sys.argv], [*sys.path], Path.cwd()) == before
    assert capfd.readouterr() == ("", "")
