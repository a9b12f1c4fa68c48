"""Run one function in several forked processes, one per rank, and report every way in which a rank can end.

`launch` knows nothing of torch.distributed: the caller's `enter` makes the process a member of a process group or of
a network namespace before the function runs. Results are handed over in files of a private directory, so they may be
of any size. A process exits by `os._exit`, since gloo may abort in a normal interpreter exit.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tests.support.imports import note_imports, write_imports

POLL_S = 0.002
REAP_S = 0.05  # how often the parent looks while no rank ends
LINGER_S = 2.0  # how long a finished rank waits for the others, so that no peer sees a reset connection
STACK_S = 1.0  # how long a late rank may take to write its stack before it is killed
_PR_SET_PDEATHSIG = 1
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

Enter = Callable[[int, Path], None]


@dataclass(frozen=True)
class Outcome:
    """The way in which one rank ended.

    `error` is None exactly if the function returned; then `value` is what it returned. `exitcode` is 0 after
    a return, 1 after an exception, what the rank gave to `os._exit`, or minus the signal that ended it.
    `reported` is False for a rank that was killed, exited or ran out of time.
    """

    value: Any
    error: str | None
    exitcode: int
    reported: bool


class RankError(RuntimeError):
    """At least one rank failed. `errors` maps each such rank to its traceback or to how it died."""

    def __init__(self, errors: Mapping[int, str], world_size: int) -> None:
        self.errors = dict(errors)
        parts = [f"{len(self.errors)} of {world_size} ranks failed: {sorted(self.errors)}"]
        parts += [f"--- rank {rank} ---\n{self.errors[rank].rstrip()}" for rank in sorted(self.errors)]
        super().__init__("\n".join(parts))


def values(outcomes: Sequence[Outcome], expect_dead: Collection[int] = ()) -> list[Any]:
    """Return the value of each rank, in rank order.

    Ranks in `expect_dead` have to end without reporting (their value is None); all others have to return.

    Raises:
        RankError: if one of them did not.
    """
    unknown = [rank for rank in expect_dead if not 0 <= rank < len(outcomes)]
    if unknown:
        raise ValueError(f"expect_dead has ranks {unknown}; expected ranks of 0 .. {len(outcomes) - 1}")
    errors = {}
    for rank, outcome in enumerate(outcomes):
        if rank in expect_dead:
            if outcome.reported:
                how = f"raised:\n{outcome.error}" if outcome.error else "returned"
                errors[rank] = f"expected to die without a report, but it {how}"
        elif outcome.error is not None:
            errors[rank] = outcome.error
    if errors:
        raise RankError(errors, len(outcomes))
    return [outcome.value for outcome in outcomes]


def launch(
    fn: Callable[..., Any], world_size: int, args: Sequence[Any], enter: Enter, *, timeout_s: float
) -> list[Outcome]:
    """Run `enter(rank, directory)` and then `fn(rank, *args)` in `world_size` forked processes.

    `directory` is the same for all ranks, private to this call, and gone when it returns. `fn` and `args`
    need not be picklable; what `fn` returns is carried by `torch.save`. Each process computes on one thread.
    No process is left, not even if this one is interrupted or, on Linux, killed.

    Where torch sees a GPU, a backward in this process spoils autograd for the processes that it forks later (torch
    then says so); launch first, or hide the GPU.

    Args:
        timeout_s: limit for all ranks together; a rank that is not done by then writes its stack and is killed.

    Returns:
        The outcome of each rank, in rank order. Failures are outcomes, too: see `values`.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; expected at least 1")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}; expected more than 0 seconds")
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="burst-ranks-"))
    crew = _Crew(directory, world_size)
    parent, imported, last = os.getpid(), directory / "imported", next(reversed(sys.modules))

    def body(rank: int) -> Any:
        enter(rank, directory)
        _die_with(parent)
        value = fn(rank, *args)
        if rank == 0:
            write_imports(imported, last)
        return value

    try:
        for rank in range(world_size):
            crew.fork(rank, body)
        crew.reap_until(lambda: False, timeout_s)
        late = crew.stop()
        note_imports(imported)
        ended = enumerate(crew.exitcodes[rank] for rank in range(world_size))
        return [_outcome(directory, rank, exitcode, late.get(rank), timeout_s) for rank, exitcode in ended]
    finally:
        crew.kill(crew.running)
        shutil.rmtree(directory, ignore_errors=True)


class _Crew:
    """The processes of one call, by rank, from fork to reaping."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self.directory = directory
        self.world_size = world_size
        self.running: dict[int, int] = {}
        self._pipes: dict[int, int] = {}  # each ends with its rank, which holds the other side
        self.exitcodes: dict[int, int] = {}

    def fork(self, rank: int, body: Callable[[int], Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pipe, held = os.pipe()
        with undisturbed_fork() as pid:
            if pid == 0:
                _run_rank(self, rank, body)
            self.running[rank], self._pipes[rank] = pid, pipe
        os.close(held)

    def reap_until(self, enough: Callable[[], bool], limit_s: float) -> None:
        """Reap ranks as they end, until none is left, `enough()` is true, or the time is up."""
        deadline = time.monotonic() + limit_s
        while self.running and time.monotonic() < deadline and not enough():
            wait([*self._pipes.values()], min(REAP_S, limit_s))
            for rank, pid in list(self.running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._ended(rank, status)

    def stop(self) -> dict[int, str]:
        """Kill the ranks that are still in `body` and return their stacks; let those that only linger exit."""
        late = [rank for rank in self.running if not (self.directory / f"done.{rank}").exists()]
        for rank in late:
            os.kill(self.running[rank], signal.SIGUSR1)
        self.reap_until(lambda: all(map(self._stack_written, late)), STACK_S)
        self.kill(late)
        self.reap_until(lambda: False, LINGER_S)
        self.kill(self.running)
        return {rank: _read(self.directory / f"stack.{rank}") for rank in late}

    def kill(self, ranks: Collection[int]) -> None:
        ranks = [rank for rank in ranks if rank in self.running]
        for rank in ranks:
            os.kill(self.running[rank], signal.SIGKILL)
        for rank in ranks:
            self._ended(rank, os.waitpid(self.running[rank], 0)[1])

    def _ended(self, rank: int, status: int) -> None:
        """Record how a rank ended; ranks that linger need not wait for it any more."""
        del self.running[rank]
        os.close(self._pipes.pop(rank))
        self.exitcodes[rank] = os.waitstatus_to_exitcode(status)
        self.done(rank)

    def done(self, rank: int) -> None:
        with suppress(FileNotFoundError):
            (self.directory / f"done.{rank}").touch()

    def linger(self) -> None:
        """Wait until every rank is done or has died, for at most `LINGER_S`."""
        deadline = time.monotonic() + LINGER_S
        waiting = [self.directory / f"done.{rank}" for rank in range(self.world_size)]
        while waiting and time.monotonic() < deadline:
            waiting = [path for path in waiting if not path.exists()]
            time.sleep(POLL_S)

    def _stack_written(self, rank: int) -> bool:
        """Return whether the stack has been written up to `_run_rank`, near the end of the main thread's."""
        return "in _run_rank" in _read(self.directory / f"stack.{rank}")


@contextmanager
def undisturbed_fork() -> Iterator[int]:
    """Fork; signal handlers raise only at the end of the block, and never in the child."""
    with _interrupts_deferred(), warnings.catch_warnings():
        # Python 3.12 warns if the parent has threads; children use nothing that those might hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield os.fork()


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer signals to the end of the block: an exception between a fork and its record would lose the process.

    The mask is for the forked process. Here it is not enough: the system may give a signal to any thread, and Python
    then runs its handler in the main one.
    """
    caught: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in _INTERRUPTS}
        handlers = {number: handler for number, handler in handlers.items() if handler is not None}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    for number in handlers:
        signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in caught:
            signal.raise_signal(number)


def _run_rank(crew: _Crew, rank: int, body: Callable[[int], Any]) -> None:
    """Run `body` in the forked process, report, and exit; does not return."""
    exitcode = 1
    gc.freeze()  # finalizers of what was inherited may wait for threads that only the parent has
    try:
        for number in _INTERRUPTS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
        stack = open(crew.directory / f"stack.{rank}", "w")  # noqa: SIM115, stays open for the life of the process
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            _write_report(crew.directory, rank, (body(rank), None))
            exitcode = 0
        except BaseException:
            _write_report(crew.directory, rank, (None, traceback.format_exc()))
        crew.done(rank)
        sys.stdout.flush()
        sys.stderr.flush()
        if exitcode == 0:
            crew.linger()
    except BaseException:
        traceback.print_exc()
    finally:
        for child in multiprocessing.active_children():  # workers that a library started
            child.kill()
        os._exit(exitcode)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; a later change of user namespace would undo it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _write_report(directory: Path, rank: int, report: tuple[Any, str | None]) -> None:
    partial = directory / f"partial.{rank}"
    torch.save(report, partial)
    partial.rename(directory / f"report.{rank}")


def _outcome(directory: Path, rank: int, exitcode: int, stack: str | None, timeout_s: float) -> Outcome:
    path = directory / f"report.{rank}"
    if path.exists():
        try:
            value, error = torch.load(path, weights_only=False)
        except Exception:
            value, error = None, f"what it returned could not be read back:\n{traceback.format_exc()}"
        return Outcome(value, error, exitcode, reported=True)
    if stack is not None:
        where = stack.strip() or "(no stack was written)"
        error = f"not done after {timeout_s:g} s (timeout_s, for all ranks); killed. It was at:\n{where}"
    elif exitcode < 0:
        error = f"killed by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    else:
        error = f"left with exit code {exitcode} without returning or raising"
    return Outcome(None, error, exitcode, reported=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
