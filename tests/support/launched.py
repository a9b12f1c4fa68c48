"""Ranks of an example, as torchrun would start them, but forked from one process that has imported what they import.

    done = launched(4, ["examples/kv_cache.py"], imports=["torch"])

Each of torchrun's processes imports PyTorch and the frameworks by itself, most of the time of a small example.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

__all__ = ["launched"]

ROOT = Path(__file__).parents[2]
_HERE = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def launched(
    ranks: int, command: Sequence[str], imports: Sequence[str] = ("torch",), timeout_s: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run a script, or "-m" and a module, with its arguments, on so many ranks of one node; return what they printed.

    The exit status is that of the first rank that fails, which ends the others.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tests.support.launched", str(ranks), str(port), ",".join(imports), *command]
    environment = {**os.environ, **_HERE}
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=environment)


def _launch(ranks: int, port: int, command: list[str]) -> int:
    """Fork the ranks, and wait for them. Return the exit status of all together."""
    gc.collect()
    gc.freeze()
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in shared.items()})
    running = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            os._exit(_run(command))
        running.add(pid)
    status = 0
    while running:
        pid, waited = os.wait()
        running.discard(pid)
        if waited and not status:
            status = os.waitstatus_to_exitcode(waited) or 1
            for other in running:
                os.kill(other, 9)
    return status


def _run(command: list[str]) -> int:
    """Run the script as `__main__`, and return its exit status; gloo's threads may abort an orderly exit."""
    status = 0
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    number, at, names, *rest = sys.argv[1:]
    for name in names.split(","):
        importlib.import_module(name)
    sys.exit(_launch(int(number), int(at), rest))
