"""Ranks of this machine that form a gloo group over the loopback interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ranks import Outcome, join_gloo, launch, launcher_environment

__all__ = ["launch_local"]


def launch_local(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, init: bool = True
) -> list[Outcome]:
    """Run `fn(rank, *args)` in `world_size` forked processes, as `benchmarks.ranks.launch`; nothing is raised.

    Args:
        timeout_s: for all ranks together; the process group's own is half of it.
        init: whether the default process group is initialised before `fn`.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")

    def enter(rank: int, directory: Path) -> None:
        os.environ.update(launcher_environment(rank, world_size, ranks_per_node=world_size))
        if init:
            join_gloo(rank, world_size, directory, loopback, timeout_s / 2)

    return launch(fn, world_size, args, enter, timeout_s=timeout_s)
