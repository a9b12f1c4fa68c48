"""The section "safe", fault tolerance: a rank raises, is killed, or stops, and all others have to end soon.

The others have to say which rank failed, and why. Each case has processes of its own, since none survives it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.attention import burst_attention
from burst_plugin.check.findings import FAILED, FAULT_TOLERANCE, NOT_SHOWN, OK, Finding
from burst_plugin.check.processes import RankEnd, RankProcesses
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import joined
from burst_plugin.context import ContextParallel
from burst_plugin.kernels import Case, Grads, How, Kernel, Queries, choose_kernel

_REASON = "planted by burst check"
_START_S = 120.0  # that processes may take to start
_TIMEOUT_S = 5.0  # of messages of the ring: a rank that stops is missed after it
_MEET_S = 60.0  # that ranks may be apart when they start
_HEADS, _DIM = 4, 64


def _raise() -> None:
    raise RuntimeError(_REASON)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    time.sleep(3600.0)


WAYS_TO_FAIL: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"raises": _raise, "is killed": _die, "stops": _stop}
)


class _Failing:
    """A kernel that works for some calls, and then fails in the middle of a pass."""

    def __init__(self, kernel: Kernel, fail: Callable[[], None] | None) -> None:
        self.name, self.features = kernel.name, kernel.features
        self._kernel, self._fail, self._left = kernel, fail, 10

    def refuse(self, case: Case) -> str | None:
        """Return why the kernel refuses a case; None if it does not."""
        return self._kernel.refuse(case)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out and lse of the kernel, until this rank fails."""
        self._left -= 1
        if self._fail is not None and self._left < 0:
            self._fail()
        return self._kernel.forward(q, k, v, how)

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the gradients of the kernel."""
        return self._kernel.backward(queries, k, v, how)


def fail_together(rank: int, ranks: int, directory: Path, send: Callable[[Any], None], way: str) -> None:
    """Run attention on a ring, forward and backward, until the last rank fails; raise the error that this rank meets.

    directory: a folder in which the ranks find each other. send: is called with "fails" on the last rank just before
    it fails. way: how it fails, a key of `WAYS_TO_FAIL`: "raises", "is killed" or "stops".
    """
    is_victim = rank == ranks - 1
    with joined((rank, ranks, rank), _MEET_S, directory) as world:
        dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        case = Case(world.device.type, dtype, _HEADS, _HEADS, _DIM, _DIM)

        def fail() -> None:
            send("fails")
            WAYS_TO_FAIL[way]()

        kernel = _Failing(choose_kernel("auto", case), fail if is_victim else None)
        group = dist.new_group(timeout=timedelta(seconds=_TIMEOUT_S))
        world.together()
        cp = ContextParallel(group, kernel=kernel)
        x = torch.ones(1, 32, _HEADS, _DIM, dtype=dtype, device=world.device, requires_grad=True)
        while True:
            torch.autograd.grad(burst_attention(x, x, x, cp), x, x.detach())
            world.synchronize()


def check_fault_tolerance(settings: Settings, ranks: int, device: torch.device) -> Iterator[Finding]:
    """Let the last of several ranks fail in each known way, and yield a finding per way: whether the others noticed.

    ranks: how many processes to start on this machine for each way, at most 4, or 2 if `settings.quick`; with fewer
    than 2 nothing is shown. device: of the type that they run on; on GPUs the ways are tried one after the other.
    """
    if ranks < 2:
        reason = "there is one rank, so no other could notice that it fails; start 2 or more, which may share a GPU"
        yield Finding(FAULT_TOLERANCE, NOT_SHOWN, "a rank that fails", reason)
        return
    ranks = min(ranks, 2) if settings.quick else min(ranks, 4)
    start = time.monotonic()
    cases = {way: RankProcesses(ranks, fail_together, way, limit_s=_START_S) for way in WAYS_TO_FAIL}
    at_once = device.type == "cpu"  # on GPUs all of them together may not find room
    with ExitStack() as stack:
        for processes in cases.values() if at_once else ():
            stack.enter_context(processes)
        for way, processes in cases.items():
            with nullcontext() if at_once else processes:
                finding = outcome_of(way, processes, ranks, settings.sizes(device).dead_s)
            yield replace(finding, seconds=time.monotonic() - start)
            start = time.monotonic()


def outcome_of(way: str, processes: RankProcesses, ranks: int, limit_s: float) -> Finding:
    """Return whether all ranks but the last end within `limit_s` of its failure, and name it."""
    victim, others = ranks - 1, range(ranks - 1)
    failed_at: float | None = None
    subject = f"a rank that {way}"
    for rank, _ in processes.messages(lambda: all(other in processes.ended for other in others)):
        if rank == victim:
            failed_at = processes.elapsed_s
            processes.limit_s = failed_at + limit_s
    if failed_at is None:
        errors = (f"rank {rank}: {end.error}" for rank, end in processes.ended.items() if end.error)
        text = f"the ring did not get that far; {next(errors, 'no rank has ended')}"
        return Finding(FAULT_TOLERANCE, FAILED, subject, text)
    running = [rank for rank in others if rank not in processes.ended]
    if running:
        text = f"rank {victim} {way}, and {limit_s:.0f} s later ranks {running} still run"
        return Finding(FAULT_TOLERANCE, FAILED, subject, text, {"still_run": running})
    ends: list[RankEnd] = [processes.ended[rank] for rank in others]
    after_s = max(0.0, max(end.after_s for end in ends) - failed_at)
    silent = [rank for rank in others if f"rank {victim}" not in ends[rank].error]
    if silent:
        said = ends[silent[0]].error or "nothing"
        text = f"ended after {after_s:.1f} s, but rank {silent[0]} does not name rank {victim}; it said: {said}"
        return Finding(FAULT_TOLERANCE, FAILED, subject, text, {"after_s": after_s})
    said = ends[0].error
    text = f"all others ended {after_s:.1f} s later; rank 0 said: {said.split('; ')[0][:200]}"
    return Finding(FAULT_TOLERANCE, OK, subject, text, {"after_s": after_s, "said": said})
