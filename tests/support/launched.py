"""Commands as a user starts them, or as torchrun starts its ranks, but forked from the tests' own process.

    done = launched(["examples/grpo.py", "--smoke"], ranks=2, imports=["transformers"])

A process of its own imports PyTorch and the frameworks by itself, most of the time of a small example.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.processes import launch
from tests.support.ranks import launcher_environment

ROOT = Path(__file__).parents[2]
_HERE = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def launched(
    command: Sequence[str], *, ranks: int | None = None, imports: Sequence[str] = (), timeout_s: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run a script, or "-m" and a module, with its arguments; return what it printed.

    It runs by itself or, if a number of `ranks` is given, on all ranks of one node; then the exit status is that of
    the first one that failed. `imports` are imported first, and stay so in this process.
    """
    for name in imports:
        importlib.import_module(name)
    meeting = {} if ranks is None else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]

        def enter(rank: int, directory: Path) -> None:
            os.environ.update({**_HERE, **meeting})
            if ranks is not None:
                os.environ.update(launcher_environment(rank, ranks, ranks_per_node=ranks))
            os.chdir(ROOT)
            _print_to(*printed)

        outcomes = launch(lambda rank: _run(command), ranks or 1, (), enter, timeout_s=timeout_s)
        out, err = (path.read_text() if path.exists() else "" for path in printed)
    for outcome in outcomes:  # scripts may leave by `os._exit`
        if status := outcome.exitcode if outcome.error else outcome.value:
            return subprocess.CompletedProcess(command, status, out, f"{err}\n{outcome.error or ''}")
    return subprocess.CompletedProcess(command, 0, out, err)


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _print_to(out: Path, err: Path) -> None:
    """Have all that this process prints go to the ends of these files, by way of file descriptors 1 and 2."""
    for number, (name, path) in enumerate((("stdout", out), ("stderr", err)), 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115, as long as the process


def _run(command: Sequence[str]) -> int:
    """Run the script as `__main__`, and return its exit status."""
    status = 0
    try:
        if command[0] == "-m":
            sys.argv = [*command[1:]]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*command]
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    return status
