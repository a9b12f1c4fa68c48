"""Gloo's threads in the ranks of tests: few of them, and none interrupts its own rank."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist


def calm_gloo_threads() -> None:
    """Give gloo's groups of each process one device, and let threads wait for their turn; also in forked processes.

    By default each group has a device of its own, whose thread wakes up a hundred times a second to see whether it
    has to end. Megatron makes some thirty: on four ranks their threads took an eighth of the time of its tests.

    A thread that wakes up interrupts its own rank in the middle of a message, finds the connection locked, and tries
    again for some 3 ms. Threads of batch jobs do not interrupt, nor do those of idle priority, as tests/run.sh has
    them: a seventh less processor time with several ranks.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) != os.SCHED_IDLE:
        with suppress(OSError):  # forbidden in some containers
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gloo = dist.ProcessGroupGloo
    original = gloo.__init__

    @functools.wraps(original)
    def on_one_device(self: Any, store: Any, rank: int, size: int, timeout: Any, **further: Any) -> None:
        if not isinstance(timeout, timedelta) or any(further.values()):  # from whoever wants other options
            return original(self, store, rank, size, timeout, **further)
        options = gloo._Options()
        options._devices, options._timeout = [_device(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"))], timeout
        return original(self, store, rank, size, options)

    mock.patch.object(gloo, "__init__", on_one_device).start()  # until the process ends


@functools.cache
def _device(process: int, interface: str | None) -> Any:
    """Return the device of this process, since the threads of another one stay behind when it forks."""
    gloo = dist.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()
