"""What the package's own Python costs per visit: posting, merging, bookkeeping.

Tensors are tiny, the kernel returns constants, and messages cost next to nothing: all ranks in one process with plain
copies between them, or two processes on gloo. A step is `--layers` forward passes and then as many backward ones.

`own_s` is the time without what torch.distributed takes to post and to wait. On gloo a pass also has the autograd
function and the consistency check of every call. So what a visit takes there, `visit_s`, is told from calls with 4
times as many visits, their heads in 4 parts; `call_s` is what is left of a call.
Growth is shown by the memory that Python holds, and by buffers, after the first steps and after the last.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import RefusedError
from benchmarks.report.files import Recording, Row, default_path
from burst_plugin import Causal, ContextParallel, Strategy, Topology, burst_attention
from burst_plugin.check.performance import StubKernel
from burst_plugin.types import DIRECTIONS
from tests.support.in_process_ring import InProcessRing
from tests.support.ranks import run_ranks

GOAL_S = 200e-6
_PARTS = 4  # into which heads are cut to have more visits in a call on gloo
_TOKENS, _HEADS, _DIM = 4, _PARTS, 8  # of a rank's q, k and v
_WARM_UP = 2  # steps, in which buffers are made

Layer = Callable[[], Callable[[], object]]  # runs a forward pass, and returns what runs its backward pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--layers", type=int, default=8, help="attention layers of a step")
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the ring in one process, two to a node")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of the result (default: in benchmarks/results)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, save; returns 1 if any transport, schedule, moving side or direction misses the goal."""
    if options.layers < 1 or options.steps < 10 or options.ranks < 2 or options.ranks % 2:
        raise RefusedError("expected --layers of at least 1, --steps of at least 10, and --ranks even")
    torch.set_num_threads(1)
    settings = {name: getattr(options, name) for name in ("layers", "steps", "ranks")}
    recording = Recording("overhead", settings, options.out or default_path("overhead"))
    rows = recording.measure(partial(measure, **settings))
    print(*map(_line, rows), sep="\n")
    recording.save()
    return 0 if all(row["visit_s"] < GOAL_S for row in rows) else 1


def measure(layers: int, steps: int, ranks: int) -> list[Row]:
    """Return all rows; times are per visit, medians over steps, in seconds."""
    rows = []
    for topology in (Topology(1, ranks), Topology(ranks // 2, 2)):
        for moving in ("kv", "q"):
            books = _in_process(topology, moving, layers, steps)
            rows += books.rows(f"{ranks} ranks in one process", topology, moving, layers * ranks * ranks)
    for moving in ("kv", "q"):
        found = []
        for parts in (1, _PARTS):
            books, _ = run_ranks(_over_gloo, 2, moving, parts, layers, steps, timeout_s=60.0 + 0.2 * steps * layers)
            found.append(books.rows("2 processes on gloo", Topology(1, 2), moving, layers * 2 * parts))
        rows += [few | _by_visits(few, more) for few, more in zip(*found, strict=True)]
    return rows


def _by_visits(few: Row, more: Row) -> Row:
    """Return a call's time as that of its visits and the rest, from calls of 2 and of 2 * `_PARTS` visits."""
    calls = (few["own_s"] * 2, more["own_s"] * 2 * _PARTS)
    visit_s = (calls[1] - calls[0]) / (2 * _PARTS - 2)
    return {"visit_s": visit_s, "call_s": calls[0] - 2 * visit_s}


def _line(row: Row) -> str:
    us = {name: f"{row[name] * 1e6:.0f}" for name in row if name.endswith("_s") or "_s_" in name}
    rest = f" and {us['call_s']} per call" if row["call_s"] else ""
    return (
        f"{row['transport']:<24} {row['nodes']}x{row['ranks_per_node']} {row['direction']:<8} {row['moving']:<2} "
        f"{us['visit_s']:>4} us per visit{rest} ({us['own_s']} in all, {us['own_s_min']} .. {us['own_s_max']}); "
        f"buffers of {row['buffer_bytes']} -> {row['buffer_bytes_late']} bytes"
    )


def _in_process(topology: Topology, moving: str, layers: int, steps: int) -> Books:
    """Run steps of all ranks in this process, without the autograd function and the consistency check."""
    qkv = [torch.randn(1, topology.ranks * _TOKENS, _HEADS, _DIM) for _ in range(3)]
    ring = InProcessRing(topology, Strategy(backward=moving, kernel=StubKernel()), qkv, Causal())
    douts = [x.q for x in ring.inputs]

    def layer() -> Callable[[], object]:
        _, saved = ring.forward()
        return partial(ring.backward, saved, douts)

    return Books(layer, ring.buffer_bytes, layers, steps)


def _over_gloo(rank: int, moving: str, parts: int, layers: int, steps: int) -> Books:
    """Run steps of one of two processes, with everything that a call does."""
    strategy = Strategy(backward=moving, parts=parts, kernel=StubKernel())
    cp, shape = ContextParallel(dist.group.WORLD, strategy=strategy), (1, _TOKENS, _HEADS, _DIM)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    dout = torch.ones(shape)

    def layer() -> Callable[[], object]:
        out = burst_attention(q, k, v, cp)
        return partial(torch.autograd.grad, out, (q, k, v), dout)

    return Books(layer, cp.allocated_bytes, layers, steps)


class Books:
    """What steps of some layers took, one entry per step."""

    def __init__(self, layer: Layer, buffer_bytes: Callable[[], int], layers: int, steps: int) -> None:
        """Run the steps, and then some in which memory is watched."""
        self.own_s: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        self.buffers: list[int] = []

        def step(clocked: Callable[[str], AbstractContextManager[object]]) -> None:
            with clocked("forward"):
                backwards = [layer() for _ in range(layers)]
            with clocked("backward"):
                while backwards:
                    backwards.pop()()
            self.buffers.append(buffer_bytes())

        for _ in range(_WARM_UP + steps):
            step(self._timed)
        tracemalloc.start()
        held = []
        for more in (1, max(10, steps // 10)):
            for _ in range(more):
                step(lambda direction: nullcontext())
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        self.python_bytes = held[1] - held[0]

    def rows(self, transport: str, topology: Topology, moving: str, visits: int) -> list[Row]:
        """Return one row per direction; `visits` are those of one step, of all ranks in the process."""
        where = {"transport": transport, "nodes": topology.nodes, "ranks_per_node": topology.ranks_per_node}
        rows = []
        for direction in DIRECTIONS:
            own = [seconds / visits for seconds in self.own_s[direction][_WARM_UP:]]
            typical = median(own)
            row = {"own_s": typical, "own_s_min": min(own), "own_s_max": max(own), "visit_s": typical, "call_s": 0.0}
            row |= {"buffer_bytes": self.buffers[1], "buffer_bytes_late": self.buffers[-1]}
            row |= {"python_bytes_grown": self.python_bytes, "moving": moving if direction == "backward" else "kv"}
            rows.append(row | where | {"direction": direction})
        return rows

    @contextmanager
    def _timed(self, direction: str) -> Iterator[None]:
        """Note the seconds of a pass, without each post to torch.distributed and each wait for it."""
        inside: list[float] = []

        def timed(call: Callable[..., Any], *arguments: object) -> Any:
            start = time.perf_counter()
            found = call(*arguments)
            inside.append(time.perf_counter() - start)
            return found

        def post(call: Callable[..., dist.Work]) -> Callable[..., SimpleNamespace]:
            return lambda *message: SimpleNamespace(wait=partial(timed, timed(call, *message).wait))

        group = dist.ProcessGroup
        with mock.patch.multiple(group, send=post(group.send), recv=post(group.recv)):
            start = time.perf_counter()
            yield
            wall_s = time.perf_counter() - start
        self.own_s[direction].append(wall_s - sum(inside))
