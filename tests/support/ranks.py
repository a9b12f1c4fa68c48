"""Run a function as several ranks that form a gloo group over the loopback interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burst_plugin import ContextParallel, Strategy, burst_attention
from tests.support.processes import Outcome, RankError, launch, values

__all__ = [
    "Outcome",
    "RankError",
    "as_on_gpus",
    "error_of_survivor",
    "join_gloo",
    "last_lines",
    "launcher_environment",
    "run_ranks",
    "run_ranks_outcomes",
]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    init: bool = True,
    expect_dead: Collection[int] = (),
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` processes and return what each returned, in rank order.

    The processes are forked, so `fn` may be a closure and `args` anything; what `fn` returns has to be
    picklable (tensors are fine). Each rank computes on one thread and starts from the parent's random state.

    Args:
        timeout_s: limit for all ranks together; the process group's own is half of it.
        init: whether the default process group, gloo over loopback, is initialised before `fn`.
        expect_dead: ranks that have to end without returning or raising; their value is None.

    Raises:
        RankError: with the traceback, or the manner of death, of every rank that failed.
    """
    return values(run_ranks_outcomes(fn, world_size, *args, timeout_s=timeout_s, init=init), expect_dead)


def run_ranks_outcomes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, init: bool = True
) -> list[Outcome]:
    """Run as `run_ranks` does, but return the `Outcome` of each rank; nothing is raised for ranks that fail."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")

    def enter(rank: int, directory: Path) -> None:
        os.environ.update(launcher_environment(rank, world_size, ranks_per_node=world_size))
        if init:
            join_gloo(rank, world_size, directory, loopback, timeout_s / 2)

    return launch(fn, world_size, args, enter, timeout_s=timeout_s)


def join_gloo(rank: int, world_size: int, directory: Path, interface: str, timeout_s: float) -> None:
    """Initialise the default process group on gloo over one network interface, with a store in `directory`.

    The store is a file, so it needs no port and is reached from every network namespace. Returns once all ranks
    have joined: a rank that then dies at once breaks no connection in the making.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = interface
    timeout = timedelta(seconds=timeout_s)
    store = dist.FileStore(str(directory / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{peer}" for peer in range(world_size)], timeout)


def launcher_environment(rank: int, world_size: int, ranks_per_node: int) -> dict[str, str]:
    """Return the variables by which a launcher tells a rank its place, named as torchrun names them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(rank // ranks_per_node),
        "GROUP_WORLD_SIZE": str(world_size // ranks_per_node),
    }


def as_on_gpus(cp: ContextParallel) -> ContextParallel:
    """Return `cp`, whose ranks compare calls 1, 2, 4, 8, ... only from now on, as gloo is never asked to."""
    cp.rank_state.strategy = replace(cp.rank_state.strategy, check="sparse")
    return cp


def last_lines(fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 60.0) -> list[str]:
    """Return the last line of each rank's error, or nothing where it had none."""
    outcomes = run_ranks_outcomes(fn, ranks, *args, timeout_s=timeout_s)
    return [(outcome.error or "").strip().splitlines()[-1] if outcome.error else "" for outcome in outcomes]


def error_of_survivor(**options: Any) -> str:
    """Return the error of one of two ranks, of which the other ends before the backward pass of its third call."""

    def end_early(rank: int) -> None:
        cp = as_on_gpus(ContextParallel(dist.group.WORLD, strategy=Strategy(**options)))
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        for _ in range(3):  # the third is not compared, nor its backward pass
            out = burst_attention(x, x, x, cp)
        if rank == 1:
            os._exit(1)
        out.sum().backward()

    error = run_ranks_outcomes(end_early, 2)[0].error
    assert error is not None
    return error
