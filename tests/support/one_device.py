"""Gloo's groups of a process on one device: one thread waits for the messages of all of them."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

__all__ = ["use_one_device"]


def use_one_device() -> None:
    """Have all groups that this process and those forked from it make with gloo use one device.

    By default each has a device of its own, whose thread looks a hundred times a second whether it shall end.
    Megatron makes some thirty groups: on four ranks such threads took an eighth of the time of its tests.
    """
    gloo = dist.ProcessGroupGloo
    original = gloo.__init__

    @functools.wraps(original)
    def on_one_device(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = timeout  # or options, from whoever wants others
        if isinstance(timeout, timedelta):
            options = gloo._Options()
            options._devices, options._timeout = [_device(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"))], timeout
        original(self, store, rank, size, options)

    mock.patch.object(gloo, "__init__", on_one_device).start()  # until the process ends


@functools.cache
def _device(process: int, interface: str | None) -> Any:
    """Return the device of this process, since the threads of another one stay behind when it forks."""
    gloo = dist.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()
