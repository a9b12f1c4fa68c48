"""Running the sections of `burst check`, in spawned processes or in the ranks that a launcher has started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from burst_plugin.check.fault_tolerance import check_fault_tolerance
from burst_plugin.check.findings import (
    CORRECTNESS,
    FAILED,
    FAULT_TOLERANCE,
    NOT_SHOWN,
    PERFORMANCE,
    RECOMMENDATION,
    Finding,
)
from burst_plugin.check.kernel_correctness import FAR, check_far_offsets, check_kernels
from burst_plugin.check.performance import check_performance
from burst_plugin.check.processes import RankProcesses
from burst_plugin.check.recommendation import recommend_strategy
from burst_plugin.check.recurrent_correctness import check_recurrent
from burst_plugin.check.ring_correctness import MEMORY, check_rings
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.world import LateError, MissedError, World, joined, launcher_environment
from burst_plugin.topology import Topology

_LIMIT_S = 1800.0  # of all sections together
_FAULT_TOLERANCE_S = 600.0  # of that section, while the ranks of a launcher wait for the first one
_RANKS_ON_CPUS = 4
_GRACE_S = 15.0  # between the ends of the first and of the last rank
_UNTIMED = (CORRECTNESS, FAULT_TOLERANCE)

BOUND = "groups bound to a device"
ONLY_GPUS = (FAR, MEMORY, BOUND)
"""What is listed as not shown where there are none."""


def _check_correctness(world: World, settings: Settings) -> Iterator[Finding]:
    yield from check_kernels(world, settings)
    yield from check_far_offsets(world, settings)
    yield from check_rings(world, settings)
    yield from check_recurrent(world)


_TOGETHER: Mapping[str, Callable[[World, Settings], Iterator[Finding]]] = MappingProxyType(
    {CORRECTNESS: _check_correctness, PERFORMANCE: check_performance, RECOMMENDATION: recommend_strategy}
)
"""The sections that all ranks run together, by name."""


def is_first() -> bool:
    """Return whether this process is the one that prints: rank 0 of a launcher, or the only one."""
    place = launcher_environment()
    return place is None or place[0] == 0


def check(settings: Settings, ranks: int | None = None, problem: str = "") -> Iterator[Finding]:
    """Run the sections of the settings, and yield findings as they come; all ranks of a launcher yield equal ones.

    Args:
        settings: what is checked.
        ranks: how many to spawn, by default one for each GPU, or 4 on CPUs; a launcher brings its own ranks. If there
            are fewer GPUs, ranks share them, and only checks without timing run.
        problem: why the first rank cannot begin, which it tells the others of a launcher; "" if it can.

    Raises ValueError, before anything is measured, for `problem`, a kernel that cannot be loaded, ranks that do not
    divide into nodes, and ranks beside a launcher's.
    """
    place = launcher_environment()
    if problem and place is None:
        raise ValueError(problem)
    load_kernel(settings.kernel)
    if place is not None and ranks is not None and ranks != place[1]:
        raise ValueError(f"ranks={ranks} contradicts the launcher, which has started {place[1]}; leave it out")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = place[1] if place is not None else ranks or gpus or _RANKS_ON_CPUS
    if settings.ranks_per_node is not None:
        Topology.from_sizes(asked, ranks_per_node=settings.ranks_per_node)
    if place is not None:
        yield from _of_machine(settings.sections, int(os.environ.get("LOCAL_WORLD_SIZE", asked)), gpus)
        yield from _in_launcher(settings, place, gpus, problem)
        if gpus and CORRECTNESS in settings.sections:
            yield Finding(
                CORRECTNESS,
                NOT_SHOWN,
                BOUND,
                "a launcher's ranks join without a device; run burst check without a launcher",
            )
        return
    yield from _of_machine(settings.sections, asked, gpus)
    if 0 < gpus < asked:
        timed = [section for section in settings.sections if section not in _UNTIMED]
        text = f"{asked} ranks share {gpus} of them, so times would say little; leave out --ranks"
        yield from (Finding(section, NOT_SHOWN, "GPUs of their own", text) for section in timed)
        untimed = tuple(section for section in settings.sections if section in _UNTIMED)
        settings = replace(settings, sections=untimed)
    yield from spawned(settings, asked)


def _of_machine(sections: tuple[str, ...], local: int, gpus: int) -> Iterator[Finding]:
    """Yield a finding for each check that this machine cannot make."""
    if not gpus:
        yield Finding(sections[0], NOT_SHOWN, "GPUs", "torch sees none: ranks run on CPUs, over gloo instead of NCCL")
        if CORRECTNESS in sections:
            yield from (Finding(CORRECTNESS, NOT_SHOWN, what, "there are no GPUs") for what in ONLY_GPUS)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if local > cores and PERFORMANCE in sections:
            text = f"{local} ranks share {cores} processors, so times measure neither"
            yield Finding(PERFORMANCE, NOT_SHOWN, "ranks of their own speed", text)


def spawned(settings: Settings, ranks: int) -> Iterator[Finding]:
    """Run the sections in processes that are spawned here."""
    if any(section in _TOGETHER for section in settings.sections):
        yield from in_processes(settings, ranks)
    if CORRECTNESS in settings.sections and ranks > 1 and device_kind().type == "cuda":
        yield from in_processes(settings, ranks, is_bound=True)
    if FAULT_TOLERANCE in settings.sections:
        yield from check_fault_tolerance(settings, ranks, device_kind())


def device_kind() -> torch.device:
    """Return the kind of device that ranks of a check run on: GPUs if torch sees any."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_processes(settings: Settings, ranks: int, *, is_bound: bool = False) -> Iterator[Finding]:
    """Yield the findings of sections in new processes. is_bound: whether their groups are bound to their GPUs."""
    start, section, last = time.monotonic(), CORRECTNESS if is_bound else settings.sections[0], ""
    with RankProcesses(ranks, spawned_rank, settings, is_bound, limit_s=_LIMIT_S) as processes:

        def enough() -> bool:
            """Return whether a rank ended so long ago that the others will not end."""
            ends = [end.after_s for end in processes.ended.values()]
            return bool(ends) and processes.elapsed_s > min(ends) + _GRACE_S

        for _, finding in processes.messages(enough):
            section, last = finding.section, f", after {finding.what}"
            yield finding
        errors = {rank: end.error for rank, end in sorted(processes.ended.items()) if end.error}
        causes = {rank: text for rank, text in errors.items() if not text.startswith(MissedError.__name__)}
        running = {rank: "it still runs" for rank in range(ranks) if rank not in processes.ended}
        for rank, text in (causes or errors or running).items():
            yield Finding(section, FAILED, f"rank {rank}", text + last, {}, time.monotonic() - start)


def spawned_rank(
    rank: int, ranks: int, directory: Path, send: Callable[[Any], None], settings: Settings, is_bound: bool = False
) -> None:
    """Run the sections on one rank, in a process of its own; rank 0 passes findings to `send`.

    directory: a folder in which the ranks find each other. is_bound: whether to bind the process group to the rank's
    GPU, and check rings alone. Raises MissedError if another rank met an error first.
    """
    timeout_s = settings.sizes(device_kind()).timeout_s
    with joined((rank, ranks, rank), timeout_s, directory, settings.ranks_per_node, is_bound=is_bound) as world:
        try:
            findings = check_rings(world, settings, is_bound=True) if is_bound else run_sections(world, settings)
            for finding in findings:
                if rank == 0:
                    send(finding)
            _wait_for_all(world)
        except Exception as error:
            first = world.first_error(error)
            if first.startswith(f"rank {rank}: "):
                raise
            raise MissedError(first) from error


def _wait_for_all(world: World) -> None:
    """Wait for all ranks, so that none sees a connection end; do not wait if a rank was late already."""
    if not world.is_late:
        world.exchange("the end", None)


def run_sections(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield the findings of all sections in `settings` but fault tolerance, which ranks run together; collective.

    If a rank does not report in time, a failed finding names it and is the last.
    """
    for section in settings.sections:
        if section in _TOGETHER:
            try:
                yield from _TOGETHER[section](world, settings)
            except LateError as error:
                world.is_late = True
                yield Finding(section, FAILED, str(error).split(" did not")[0], str(error))
                return


def _in_launcher(settings: Settings, place: tuple[int, int, int], gpus: int, problem: str) -> Iterator[Finding]:
    """Run the sections in the ranks of a launcher; fault tolerance in further processes on the first node.

    Raises ValueError on every rank if the first one has a `problem`: the others would wait for it.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", place[1]))
    with joined(place, settings.sizes(device_kind()).timeout_s, None, settings.ranks_per_node) as world:
        problem = world.exchange("its arguments", problem)[0]
        if problem:
            _wait_for_all(world)
            raise ValueError(problem)
        try:
            yield from run_sections(world, settings)
        except Exception as error:  # of this rank, or of one that it missed; the others meet theirs
            world.is_late = True
            culprit, _, text = world.first_error(error).partition(": ")
            yield Finding(settings.sections[0], FAILED, culprit, text)
        if FAULT_TOLERANCE in settings.sections and not world.is_late:
            ranks = min(local, gpus) if gpus else local
            findings = check_fault_tolerance(settings, ranks, world.device) if world.rank == 0 else ()
            entries = world.exchange(FAULT_TOLERANCE, [finding.as_dict() for finding in findings], _FAULT_TOLERANCE_S)
            yield from (Finding(**fields) for fields in entries[0])
            if local < world.size:
                text = "only processes of the first node took part"
                yield Finding(FAULT_TOLERANCE, NOT_SHOWN, "a rank that fails on another node", text)
        _wait_for_all(world)
