"""Run a function as several ranks that form a gloo group over the loopback interface."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from benchmarks.loopback import launch_local
from benchmarks.ranks import Outcome, RankError, values
from burst_plugin import ContextParallel

__all__ = ["Outcome", "RankError", "as_on_gpus", "last_lines", "run_ranks", "run_ranks_outcomes"]


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
    """As `run_ranks`, but however a rank ends, it is returned as its `Outcome`; nothing is raised for it."""
    return launch_local(fn, world_size, *args, timeout_s=timeout_s, init=init)


def as_on_gpus(cp: ContextParallel) -> ContextParallel:
    """Return `cp`, whose ranks compare calls 1, 2, 4, 8, ... only from now on, as gloo is never asked to."""
    cp.strategy = replace(cp.strategy, check="sparse")
    return cp


def last_lines(fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 60.0) -> list[str]:
    """Return the last line of each rank's error, or nothing where it had none."""
    outcomes = run_ranks_outcomes(fn, ranks, *args, timeout_s=timeout_s)
    return [(outcome.error or "").strip().splitlines()[-1] if outcome.error else "" for outcome in outcomes]
