"""Processes of one machine, one per rank: spawned, heard, and ended, however each of them ends.

They are spawned, never forked: CUDA does not survive a fork.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Crew", "Ended"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1


class Ended(NamedTuple):
    """How a rank ended: what it returned, or its error, "" for none; seconds since the crew was started."""

    value: Any
    error: str
    after_s: float


class Crew:
    """`ranks` processes that run `work(rank, ranks, directory, say, *arguments)`; as a context manager it ends them.

    `directory` is private to the crew and gone afterwards; what a rank passes to `say` is yielded by `heard`. `work`
    has to be a function of a module, and what it gets and returns such as can be pickled. `limit_s`, which may be
    changed, is how many seconds after the start it stops listening.
    """

    def __init__(self, ranks: int, work: Callable[..., Any], *arguments: Any, limit_s: float) -> None:
        self.limit_s = limit_s
        self.ended: dict[int, Ended] = {}
        self._ranks, self._work, self._arguments = ranks, work, arguments
        self._processes: dict[int, Any] = {}
        self._pipes: dict[Connection, int] = {}
        self._start = 0.0

    def __enter__(self) -> Crew:
        self._directory = Path(tempfile.mkdtemp(prefix="burst-check-"))
        self._start = time.monotonic()
        context = multiprocessing.get_context("spawn")
        for rank in range(self._ranks):
            ours, theirs = context.Pipe(duplex=False)
            given = (self._work, rank, self._ranks, self._directory, theirs, self._arguments, os.getpid())
            process = context.Process(target=_run, args=given, name=f"burst check, rank {rank}")
            process.start()
            theirs.close()
            self._processes[rank], self._pipes[ours] = process, rank
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the processes were started."""
        return time.monotonic() - self._start

    def heard(self, enough: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, Any]]:
        """Yield (rank, what it said) until all ranks have ended, it is `enough`, or the limit has passed.

        How each ended is in `ended` then; ranks that are missing there still run.
        """
        open_pipes = dict(self._pipes)
        while open_pipes and self.elapsed_s < self.limit_s and not enough():
            for pipe in wait(list(open_pipes), _POLL_S):
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    del open_pipes[pipe]
                    self._note_end(rank)
                    continue
                if kind == "said":
                    yield rank, value
                else:
                    error, found = (value, None) if kind == "raised" else ("", value)
                    self.ended[rank] = Ended(found, error, self.elapsed_s)

    def _note_end(self, rank: int) -> None:
        """Note how a process ended that has closed its pipe."""
        process = self._processes[rank]
        process.join()
        if rank not in self.ended:
            code = process.exitcode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            self.ended[rank] = Ended(None, how, self.elapsed_s)


def _run(
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    directory: Path,
    pipe: Connection,
    arguments: tuple[Any, ...],
    parent: int,
) -> None:
    """Run the rank in its process, report, and exit at once: gloo's threads sometimes abort an orderly exit."""
    _die_with(parent)
    status = 0
    try:
        value = work(rank, ranks, directory, lambda said: pipe.send(("said", said)), *arguments)
        pipe.send(("returned", value))
    except BaseException as error:
        status = 1
        pipe.send(("raised", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
