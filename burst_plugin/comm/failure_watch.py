"""Why ranks wait: what the ranks of a ring publish in a store, and a thread that reads it."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from torch._C._distributed_c10d import Store

from burst_plugin.comm.call_identity import Progress, by_rank

FIRST_FAILURE = "first_failure"  # the key in a ring's store
_WAITS, _EPOCH = "ranks_that_wait", "waits_so_far"
PERIOD_S, _LEAST_PERIOD_S = 10.0, 0.2
_END_S = 2.0  # for which the end of the process waits for watches, whose stores may be gone
SHORT_S = 5.0  # shorter waits are not published

_LOG = logging.getLogger(__name__)


class Board:
    """One rank's access to the store of a ring: which rank failed first, and where all ranks are while any waits.

    Args:
        store: shared by the ranks of the ring.
        rank: this rank's number in the group.
        names: for every rank, text besides its number: its global rank and its host.
        progress: where this rank is, which it publishes.
        late_after: seconds of waiting after which a rank logs it.

    `ended` is set where another thread tells this rank to end: it says why.
    """

    def __init__(
        self, store: Store, rank: int, names: Sequence[str], progress: Progress, late_after: float = 60.0
    ) -> None:
        self.store, self.rank, self.progress, self.late_after = store, rank, progress, late_after
        self.ended = ""  # why this rank was told to end, by another thread
        self._names = names
        self._is_counted = False  # among the ranks that wait
        self._epoch = 0  # the number of the wait of this rank
        self._reported: object = None  # the last wait that was logged

    def name_of(self, rank: int) -> str:
        """Return text to follow a rank's number, such as " (global rank 5 on host)"; "" for a rank without a name."""
        return f" ({self._names[rank]})" if rank < len(self._names) else ""

    def report_failure(self, text: str) -> str:
        """Record `text`, why this rank gives up, unless another rank gave up first; return the first rank's text."""
        try:
            first: bytes = self.store.compare_set(FIRST_FAILURE, "", text)
        except RuntimeError:  # the store went with the rank that hosted it
            return text
        return first.decode()

    def report_fault(self, fault: str) -> None:
        """Record that NCCL's watchdog found a `fault` on this rank, such as "time-out", and where all ranks are."""
        others = (rank for rank in range(len(self._names)) if rank != self.rank)  # first: this one is not at fault
        silent = dict.fromkeys(others, "it does not say where it is")
        where = by_rank(silent | self.places(), len(self._names), self.name_of)
        here = f"rank {self.rank}{self.name_of(self.rank)}"
        self.report_failure(f"NCCL waits in vain on {here} ({fault}), where ranks have come to: {where}")

    def publish(self, waits: bool = False) -> None:
        """Publish where this rank is if any rank has been waiting for some seconds; log a long wait of this one.

        waits: whether this rank is known to wait although its `progress` does not say so, as where its GPU waits.
        """
        waiting = self.progress.waiting
        waited = 0.0 if waiting is None else monotonic() - waiting[1]
        self._count(waits or waited >= min(SHORT_S, self.late_after))
        if self.store.add(_WAITS, 0) > 0:
            self.store.set(_place_key(self.rank), f"{self.store.add(_EPOCH, 0)} {self.progress}")
        if waiting is not None and waited >= self.late_after and waiting != self._reported:
            self._reported = waiting
            peer = waiting[0]
            there = self.places().get(peer, "at a place that it has not told yet")
            _LOG.warning(
                "rank %d%s has waited %.0f s for rank %d%s, %s; that one is %s",
                *(self.rank, self.name_of(self.rank), waited, peer, self.name_of(peer), self.progress, there),
            )

    def _count(self, waits: bool) -> None:
        """Add this rank to the count of waiting ranks, or remove it."""
        if waits != self._is_counted:
            self.store.add(_WAITS, 1 if waits else -1)
            self._epoch = self.store.add(_EPOCH, 1) if waits else self._epoch
            self._is_counted = waits

    def close(self) -> None:
        """Remove this rank from the count of waiting ranks. Raise RuntimeError if the store is gone."""
        self._count(False)

    def places(self) -> dict[int, str]:
        """Return, by rank, texts of where ranks are: this one, and others that said so since it began to wait."""
        places = {self.rank: str(self.progress)}
        try:
            for rank in range(len(self._names)):
                if rank != self.rank and self.store.check([_place_key(rank)]):
                    epoch, _, place = self.store.get(_place_key(rank)).decode().partition(" ")
                    if int(epoch) >= self._epoch:
                        places[rank] = place
        except RuntimeError:  # the store went with the rank that hosted it
            pass
        return places

    def unlike_places(self) -> str:
        """Return a text that says where each rank is in its program; an empty one if all ranks are at one place."""
        places = self.places()
        if len(places) < 2 or len({text.split(", ring step")[0] for text in places.values()}) == 1:
            return ""
        return f"ranks are at different places: {by_rank(places, len(self._names))}"


def _place_key(rank: int) -> str:
    return f"place/{rank}"


class FailureWatch:
    """A thread that logs, within seconds, that another rank has given up, and why; until it is closed or collected.

    Without it ranks wait for messages that do not come until PyTorch's time-out, ten minutes or more, or with gloo
    until the process of the other rank ends, which may go on. NCCL's error names neither the rank nor its reason, and
    ends the process a minute later. The thread also publishes on the board where this rank is.

    Args:
        board: the ring's board, at which the thread looks.
        period_s: seconds between two looks, at most `board.late_after`; None for 10.
        end: called with the text of the error for this rank, "" where it has raised one itself; should end the waits
            of this rank. Without it they are left to the time-out and the launcher.
        fault: returns the fault that NCCL's watchdog has found here, such as a time-out, or "". A fault ends the
            ring, too, once the other ranks have had the time to say where they are.
    """

    def __init__(
        self,
        board: Board,
        period_s: float | None = None,
        end: Callable[[str], None] | None = None,
        fault: Callable[[], str] = lambda: "",
    ) -> None:
        self._closed, self._seen = threading.Event(), threading.Event()
        period_s = min(period_s or PERIOD_S, max(board.late_after, _LEAST_PERIOD_S))
        _Watcher(self._closed, board, period_s, end, fault, self._seen).start()

    def some_gave_up(self) -> bool:
        """Return whether the thread has seen that a rank gave up; this does not look at the store."""
        return self._seen.is_set()

    def close(self) -> None:
        """Stop the thread, without waiting for its end."""
        self._closed.set()

    def __del__(self) -> None:
        self.close()


class _Watcher(threading.Thread):
    """The thread of a watch, until `closed`."""

    def __init__(self, closed: threading.Event, *arguments: Any) -> None:
        super().__init__(target=_watch, args=(closed, *arguments), name="burst_plugin watch", daemon=True)
        self.closed = closed


def _watch(
    closed: threading.Event,
    board: Board,
    period_s: float,
    end: Callable[[str], None] | None,
    fault: Callable[[], str],
    seen: threading.Event,
) -> None:
    try:
        text = _first_failure(board, period_s, fault, closed)
        if text:
            seen.set()
            _tell(board, text, end)
        board.close()
    except RuntimeError:  # the store went with the rank that hosted it
        return


@atexit.register
def _end_all() -> None:
    """End all watches before the interpreter ends: a thread that it ends inside PyTorch aborts the whole process."""
    watchers = [watcher for watcher in threading.enumerate() if isinstance(watcher, _Watcher)]
    for watcher in watchers:
        watcher.closed.set()
    until = monotonic() + _END_S
    for watcher in watchers:
        watcher.join(max(0.0, until - monotonic()))


def _first_failure(board: Board, period_s: float, fault: Callable[[], str], closed: threading.Event) -> str:
    """Look at the store until a rank has given up. Return the text that it recorded; "" if the ring closes first."""
    before = ""
    while not closed.wait(1.2 * period_s if before else period_s):  # so that others look in between
        problem = fault()
        if before and problem:
            board.report_fault(problem)
        before = problem
        board.publish(waits=bool(problem))
        if board.store.check([FIRST_FAILURE]):
            return board.store.get(FIRST_FAILURE).decode()
    return ""


def _tell(board: Board, text: str, end: Callable[[str], None] | None) -> None:
    """Log why another rank has given up, and end what this one waits for."""
    own_name = f"rank {board.rank} "
    if end is None:
        if not text.startswith(own_name):
            _LOG.error("%sof a ring waits for nothing, until PyTorch's time-out ends it: %s", own_name, text)
        return
    if text.startswith(own_name + "gave up"):  # it raises that error, and the others send it nothing any more
        end("")
        return
    _LOG.error("%sof a ring ends, with the ring's NCCL communicators: %s", own_name, text)
    board.ended = (
        f"{text}; {own_name.rstrip()} has aborted the ring, and what it computed since then is not to be used"
    )
    end(board.ended)
