"""Processes of one machine, one per rank: spawned, listened to, and ended, however each of them ends.

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

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1


class RankEnd(NamedTuple):
    """How the process of a rank ended, with its result or its error.

    value: what its function returned. error: what went wrong, "" for nothing. after_s: the seconds from the start of
    the processes to this end.
    """

    value: Any
    error: str
    after_s: float


class RankProcesses:
    """A context manager that starts a process for each of `ranks` ranks, and kills any that still run at its exit.

    Each runs `work(rank, ranks, directory, send, *arguments)`. `work` has to be a function of a module; its
    arguments, what it returns, and what it passes to `send` have to be picklable. `messages` yields what is sent.
    `directory` is a folder for these processes alone, gone afterwards.

    limit_s: how many seconds after the start `messages` stops listening; may be changed meanwhile.
    ended: by rank, the ends that `messages` has noticed so far.
    """

    def __init__(self, ranks: int, work: Callable[..., Any], *arguments: Any, limit_s: float) -> None:
        self.limit_s = limit_s
        self.ended: dict[int, RankEnd] = {}
        self._ranks, self._work, self._arguments = ranks, work, arguments
        self._processes: dict[int, Any] = {}
        self._pipes: dict[Connection, int] = {}
        self._start = 0.0

    def __enter__(self) -> RankProcesses:
        self._directory = Path(tempfile.mkdtemp(prefix="burst-check-"))
        self._start = time.monotonic()
        context = multiprocessing.get_context("spawn")
        for rank in range(self._ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (self._work, rank, self._ranks, self._directory, theirs, self._arguments, os.getpid())
            process = context.Process(target=_run_rank, args=arguments, name=f"burst check, rank {rank}")
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

    def messages(self, enough: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, Any]]:
        """Yield (rank, message) until all ranks have ended, `enough()` is true, or `limit_s` seconds have passed.

        Ranks that are missing in `ended` then still run.
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
                    self._note_exit(rank)
                    continue
                if kind == "message":
                    yield rank, value
                elif kind == "raised":
                    self.ended[rank] = RankEnd(None, value, self.elapsed_s)
                else:
                    self.ended[rank] = RankEnd(value, "", self.elapsed_s)

    def _note_exit(self, rank: int) -> None:
        """Note how a process ended that has closed its pipe without a word."""
        process = self._processes[rank]
        process.join()
        if rank not in self.ended:
            code = process.exitcode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            self.ended[rank] = RankEnd(None, how, self.elapsed_s)


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def _run_rank(
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
        value = work(rank, ranks, directory, lambda message: pipe.send(("message", message)), *arguments)
        pipe.send(("returned", value))
    except BaseException as error:
        status = 1
        pipe.send(("raised", error_text(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
