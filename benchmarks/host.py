"""What the host takes for a rank's step of the ring, beside what the kernel takes.

All ranks take turns in this process, on its GPU if it has one, with a copy in memory for every message. The host is
behind, and the device idle, where `host_s` is above `kernel_s`. On CPUs the host does the work of the device, too.

All times are per visit, medians over rounds: `host_s` until a pass is queued, of which `launch_s` in calls of the
kernel and `own_s` elsewhere; `step_s` until it is done; `kernel_s` is what the kernel's calls take on the device, one
right after the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import RefusedError
from benchmarks.attention import DTYPES
from benchmarks.attention_ranks import Whole, synchronize
from benchmarks.report.files import Recording, Row, default_path
from burst_plugin import Causal, Strategy, Topology
from burst_plugin.kernels import Grads, How, Kernel, Queries
from burst_plugin.sequence.layout import even_length
from burst_plugin.types import DIRECTIONS
from tests.support.in_process_ring import InProcessRing

_QUEUED_CYCLES = 50_000_000  # of a GPU, some 30 ms: more than the host takes to launch the kernels of a pass
_DEFAULTS = Strategy()
_WARM_UP = 2  # rounds, in which buffers are made and kernels compiled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens of a rank")
    add("--ranks", type=int, default=4, help="ranks of the ring: few, so that a pass fits into a GPU's queue")
    add("--heads", type=int, default=32, help="query heads")
    add("--kv-heads", type=int, default=8, help="key and value heads")
    add("--head-dim", type=int, default=128)
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--rounds", type=int, default=10, help="measurements of each pass")
    add("--out", type=Path, metavar="FILE", help="of the result (default: in benchmarks/results)")


def run(options: argparse.Namespace) -> int:
    """Measure, print and save."""
    _check(options)
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    device = torch.device("cuda" if on_gpu else "cpu")
    recording = Recording("host", vars(options), options.out or default_path("host", on_gpu), on_gpu)
    heads = (options.heads, options.kv_heads, options.head_dim)
    for rows in options.rows:
        whole = Whole.draw((1, options.ranks * rows, *heads), DTYPES[options.dtype], device)
        found = recording.measure(partial(measure, whole, options.ranks, options.rounds))
        print(*map(_line, found), sep="\n", flush=True)
    recording.save()
    return 0


def _check(options: argparse.Namespace) -> None:
    sizes = ("ranks", "heads", "kv_heads", "head_dim", "rounds")
    if min(*(getattr(options, name) for name in sizes), *options.rows) < 1:
        raise RefusedError("--rows, --ranks, --heads, --kv-heads, --head-dim and --rounds have to be 1 or more")
    if options.heads % options.kv_heads:
        raise RefusedError(f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}")
    for rows in options.rows:
        if even_length(options.ranks * rows, options.ranks) != options.ranks * rows:
            raise RefusedError(f"--rows {rows} cannot be cut in two; use {rows + 1}")


def measure(whole: Whole, ranks: int, rounds: int, strategy: Strategy = _DEFAULTS) -> list[Row]:
    """Return a row for each direction, of causal attention on `whole`."""
    device, visits = whole.q.device, ranks * ranks
    ring = InProcessRing(Topology(1, ranks), strategy, whole[:3], Causal())
    kernel = NotingKernel(ring.kernels[0])
    ring.use([kernel] * ranks)
    douts = ring.shards(whole.dout)
    took: dict[str, list[_Took]] = {direction: [] for direction in DIRECTIONS}
    for _ in range(_WARM_UP + rounds):
        passes: dict[str, Callable[[], Any]] = {"forward": ring.forward}
        for direction in DIRECTIONS:
            times, result = _time_pass(passes[direction], kernel, device)
            took[direction].append(times)
            if direction == "forward":
                passes["backward"] = partial(ring.backward, result[1], douts)
        del passes, result
    alone = _kernel_alone(ring, kernel, douts, rounds)
    found = []
    for direction in DIRECTIONS:
        row: Row = {"rows": whole.q.shape[1] // ranks, "direction": direction, "ranks": ranks, "kernel": kernel.name}
        for name, times in zip(_Took._fields, zip(*took[direction][_WARM_UP:], strict=True), strict=True):
            row |= _spread(name, [seconds / visits for seconds in times])
        found.append(row | _spread("kernel_s", [seconds / visits for seconds in alone[direction]]))
    return found


class _Took(NamedTuple):
    """Seconds of one pass of all ranks."""

    host_s: float
    launch_s: float
    own_s: float
    step_s: float


class NotingKernel:
    """A kernel that measures the host's time in calls of another one, and keeps these calls if it is to."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.features, self.refuse = kernel.name, kernel.features, kernel.refuse
        self.inside_s = 0.0
        self.calls: list[Callable[[], object]] | None = None
        self._kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        return self._noted(partial(self._kernel.forward, q, k, v, how))

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """See `Kernel.backward`."""
        return self._noted(partial(self._kernel.backward, queries, k, v, how))

    def _noted(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = call()
        self.inside_s += time.perf_counter() - start
        if self.calls is not None:
            self.calls.append(call)
        return found


def _time_pass(one_pass: Callable[[], Any], kernel: NotingKernel, device: torch.device) -> tuple[_Took, Any]:
    """Return what a pass takes, and its result."""
    synchronize(device)
    kernel.inside_s = 0.0
    start = time.perf_counter()
    result = one_pass()
    host_s = time.perf_counter() - start
    synchronize(device)
    done_s = time.perf_counter() - start
    return _Took(host_s, kernel.inside_s, host_s - kernel.inside_s, done_s), result


def _kernel_alone(
    ring: InProcessRing, kernel: NotingKernel, douts: Sequence[Tensor], rounds: int
) -> dict[str, list[float]]:
    """Return by direction the device's seconds for all calls of a pass, in every round."""
    kernel.calls = []
    _, saved = ring.forward()
    forward_calls, kernel.calls = kernel.calls, []
    ring.backward(saved, douts)
    backward_calls, kernel.calls = kernel.calls, None
    by_direction = dict(zip(DIRECTIONS, (forward_calls, backward_calls), strict=True))
    seconds: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    for number in range(1 + rounds):
        for direction, calls in by_direction.items():
            took_s = _on_device(calls, douts[0].device)
            if number > 0:
                seconds[direction].append(took_s)
    return seconds


def _on_device(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the seconds of the device for these calls, which a GPU finds in its queue when it begins."""
    if device.type == "cpu":
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_QUEUED_CYCLES)
    begin.record()
    for call in calls:
        call()
    end.record()
    synchronize(device)
    return begin.elapsed_time(end) / 1e3


def _spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    return {name: median(numbers), f"{name}_min": min(numbers), f"{name}_max": max(numbers)}


def _line(row: Row) -> str:
    us = {name: f"{row[name] * 1e6:.0f}" for name in ("host_s", "own_s", "launch_s", "kernel_s", "step_s")}
    return (
        f"{row['rows']:>6} rows {row['direction']:<8} host {us['host_s']:>6} us ({us['own_s']}, and {us['launch_s']} "
        f"in {row['kernel']}), kernel {us['kernel_s']:>6} us, step {us['step_s']:>6} us"
    )
