"""How a rank ends where it would wait for ever, as with NCCL: what another one owes it never comes.

An abort of communicators ends the kernels that wait. But what these were to receive is garbage then, and whatever
the host has enqueued behind them computes with it. So the thread that trains gets an error first, which is raised
before it runs another line: also where it waits for the GPU, as soon as that wait returns.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable

import torch.distributed as dist

from burst_plugin.comm.transport import RingError

_LOG = logging.getLogger(__name__)


def abort_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort process groups, without the other ranks and without waiting.

    In a thread each: an abort may wait for its GPU, on which the kernels of another group wait for theirs.
    """
    for group in groups:
        threading.Thread(target=_abort, args=(group,), name="burst_plugin abort", daemon=True).start()


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        _LOG.error("a process group could not be aborted (%s): PyTorch's time-out ends this process", error)


def end_waiting(thread: int, abort: Callable[[], None], text: str) -> None:
    """Abort what this rank waits for; with a text, which says why, have `thread` raise RingError before that."""
    if text:
        _raise_in(thread, text)
    abort()


def _raise_in(thread: int, text: str) -> None:
    """Have `thread`, by its identifier, raise RingError before the next line of Python that it runs."""

    class Ended(RingError):  # noqa: N818
        def __init__(self) -> None:  # the interpreter makes the error, from its class alone
            super().__init__(text)

    Ended.__name__ = Ended.__qualname__ = RingError.__name__
    Ended.__module__ = RingError.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Ended))
