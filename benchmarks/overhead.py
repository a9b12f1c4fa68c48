"""What the package's own Python costs per visit: posting, merging, bookkeeping.

Tensors are tiny, the kernel returns constants, and messages cost next to nothing: all ranks in one process with plain
copies between them, or two processes on gloo. What is left is the package. A step is `--layers` forward passes and
then as many backward ones, the last layer first.

`own_s` is the time without what torch.distributed takes to post and to wait, that is, for the other process and for
gloo, which takes hundreds of microseconds to post; `wall_s` is all of it. On gloo a pass also has the autograd
function and the consistency of all ranks before every call; in one process it has neither. So what a visit takes on
gloo, `visit_s`, is told from calls with 4 times as many visits, their heads in 4 parts; `call_s` is what is left of a
call. A process that has waited finds its caches cold: sleeping 2 ms at every wait doubles the time in one process.

Growth is shown by the first and the last tenth of all steps, and by the memory that Python holds after them. New
tensors are counted in one step soon after the start and in the last one. Buffers of the ring are not among them:
those are made in the first two steps.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.limits import RefusedError
from benchmarks.results import Watch, save
from benchmarks.tiny import ConstantKernel, CountedTensors
from burst_plugin import ContextParallel, Strategy, Topology, VirtualRing, burst_attention
from burst_plugin.attention import backward_program, forward_program
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.kernels import Kernel, Queries
from burst_plugin.ring.call import Call
from burst_plugin.ring.choices import prepare
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.types import DIRECTIONS
from tests.support.ranks import run_ranks

GOAL_S = 200e-6
_PARTS = 4  # into which heads are cut to have more visits in a call on gloo
_SHAPE = (1, 4, _PARTS, 8)  # of a rank's q, k and v: [batch, tokens, heads, head dim]
_COUNTED_STEP = 3  # the first step after those in which buffers are made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--layers", type=int, default=8, help="attention layers of a step")
    parser.add_argument("--steps", type=int, default=100, help="steps; growth is the last tenth over the first")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the ring in one process, two to a node")
    parser.add_argument("--out", type=Path, help="file of the result; by default one in benchmarks/results")


def run(options: argparse.Namespace) -> int:
    """Measure, print and save one row per transport, schedule, moving and direction; 1 if any misses the goal."""
    if options.layers < 1 or options.steps < 10 or options.ranks < 2 or options.ranks % 2:
        raise RefusedError("expected --layers of at least 1, --steps of at least 10, and --ranks even")
    torch.set_num_threads(1)
    with Watch() as watch:
        rows = measure(options.layers, options.steps, options.ranks)
    for row in rows:
        print(_line(row))
    settings = {name: getattr(options, name) for name in ("layers", "steps", "ranks")}
    save("overhead", settings, rows, watch.load, options.out)
    return 0 if all(row["visit_s"] < GOAL_S for row in rows) else 1


def measure(layers: int, steps: int, ranks: int) -> list[dict[str, Any]]:
    """All rows; times are per visit, medians over steps, in seconds."""
    rows = []
    for topology in (Topology(1, ranks), Topology(ranks // 2, 2)):
        for moving in ("kv", "q"):
            strategy = Strategy(backward=moving)
            books = Books(_in_process(topology, strategy), layers).keep(steps)
            rows += books.rows(f"{topology.ranks} ranks in one process", topology, moving, ranks * ranks)
    for moving in ("kv", "q"):
        few, many = (_gloo_rows(moving, parts, layers, steps) for parts in (1, _PARTS))
        rows += [row | _by_visits(row, more) for row, more in zip(few, many, strict=True)]
    return rows


def _gloo_rows(moving: str, parts: int, layers: int, steps: int) -> list[dict[str, Any]]:
    arguments = (moving, parts, layers, steps)
    every = run_ranks(_over_gloo, 2, *arguments, timeout_s=60.0 + 0.05 * parts * steps * layers)
    return every[0].rows("2 processes on gloo", Topology(1, 2), moving, 2 * parts)


def _by_visits(few: dict[str, Any], many: dict[str, Any]) -> dict[str, float]:
    """A call's time as that of its visits and the rest, from calls of 2 and of 2 * `_PARTS` visits."""
    calls = (few["own_s"] * 2, many["own_s"] * 2 * _PARTS)
    visit_s = (calls[1] - calls[0]) / (2 * _PARTS - 2)
    return {"visit_s": visit_s, "call_s": calls[0] - 2 * visit_s}


def _line(row: dict[str, Any]) -> str:
    us = {name: f"{row[name] * 1e6:.0f}" for name in row if name.endswith("_s") or "_s_" in name}
    rest = f" and {us['call_s']} per call" if row["call_s"] else ""
    return (
        f"{row['transport']:<24} {row['nodes']}x{row['ranks_per_node']} {row['direction']:<8} {row['moving']:<2} "
        f"{us['visit_s']:>4} us per visit{rest} ({us['own_s']} in all, {us['own_s_min']} .. {us['own_s_max']}); "
        f"{us['first_tenth_s']} -> {us['last_tenth_s']} from the first tenth of steps to the last; "
        f"{row['operations']:.0f} operations, {row['new_tensors']:.1f} -> {row['new_tensors_late']:.1f} new tensors, "
        f"buffers of {row['buffer_bytes']} -> {row['buffer_bytes_late']} bytes"
    )


Layer = Callable[[], Callable[[], object]]  # runs a forward pass, and returns what runs its backward pass


@dataclass
class Loop:
    """Something to measure: a layer, and the bytes of all buffers of its ring."""

    layer: Layer
    buffer_bytes: Callable[[], int]


@dataclass
class Books:
    """What the steps of a `Loop` took. Lists have one entry per step; `counts` are of one step, early and late."""

    loop: Loop | None
    layers: int
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {d: [] for d in DIRECTIONS})
    own_s: dict[str, list[float]] = field(default_factory=lambda: {d: [] for d in DIRECTIONS})
    buffers: list[int] = field(default_factory=list)
    counts: list[dict[str, tuple[int, int]]] = field(default_factory=list)  # (operations, new tensors)
    python_bytes: int = 0  # what Python holds at the end, over what it held after step 3

    def keep(self, steps: int) -> Books:
        """Run the steps, the counted ones apart from the timed ones."""
        for _ in range(_COUNTED_STEP - 1):
            self._step(self._timed)
        self.counts.append(self._counted_step())
        for _ in range(steps):
            self._step(self._timed)
        self.counts.append(self._counted_step())
        self.python_bytes = self._python_growth(max(10, steps // 10))
        self.loop = None  # which cannot leave its process
        return self

    def rows(self, transport: str, topology: Topology, moving: str, visits: int) -> list[dict[str, Any]]:
        """One row per direction; `visits` are those of one call, of all ranks in the process."""
        return [self._row(d, visits) | _named(transport, topology, moving, d) for d in DIRECTIONS]

    def _row(self, direction: str, visits: int) -> dict[str, Any]:
        per_step = visits * self.layers
        clocks = (self.own_s, self.wall_s)
        own, wall = ([s / per_step for s in kept[direction][_COUNTED_STEP - 1 :]] for kept in clocks)
        tenth = max(1, len(own) // 10)
        early, late = (count[direction] for count in self.counts)
        return {
            "own_s": median(own),
            "visit_s": median(own),
            "call_s": 0.0,
            "own_s_min": min(own),
            "own_s_max": max(own),
            "first_tenth_s": median(own[:tenth]),
            "last_tenth_s": median(own[-tenth:]),
            "wall_s": median(wall),
            "operations": early[0] / per_step,
            "new_tensors": early[1] / per_step,
            "new_tensors_late": late[1] / per_step,
            "buffer_bytes": self.buffers[1],
            "buffer_bytes_late": self.buffers[-1],
            "python_bytes_grown": self.python_bytes,
        }

    def _step(self, clocked: Callable[[str], Any]) -> None:
        assert self.loop is not None
        with clocked("forward"):
            backwards = [self.loop.layer() for _ in range(self.layers)]
        with clocked("backward"):
            while backwards:
                backwards.pop()()
        self.buffers.append(self.loop.buffer_bytes())

    @contextmanager
    def _timed(self, direction: str) -> Iterator[None]:
        start = time.perf_counter()
        with _TorchDistributed() as inside:
            yield
        wall_s = time.perf_counter() - start
        self.wall_s[direction].append(wall_s)
        self.own_s[direction].append(wall_s - inside.wall_s)

    def _counted_step(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}

        @contextmanager
        def counted(direction: str) -> Iterator[None]:
            with CountedTensors() as counter:
                yield
            found[direction] = (counter.operations, counter.tensors)

        self._step(counted)
        return found

    def _python_growth(self, steps: int) -> int:
        """Bytes that Python holds more after `steps` steps."""
        tracemalloc.start()
        try:
            sizes = []
            for step in range(steps + 1):
                self._step(lambda direction: nullcontext())
                if step in (0, steps):
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        return sizes[1] - sizes[0]


class _TorchDistributed:
    """The time that is spent in posting to torch.distributed and waiting for it."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        # As the class has them: what getattr gives would not bind to a group when it is put back.
        self._originals = {name: vars(dist.ProcessGroup)[name] for name in ("send", "recv")}

    def __enter__(self) -> _TorchDistributed:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, self._timed(original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)

    def _timed(self, original: Callable[..., dist.Work]) -> Callable[..., _TimedWork]:
        def post(*message: object) -> _TimedWork:
            start = time.perf_counter()
            work = original(*message)
            self.wall_s += time.perf_counter() - start
            return _TimedWork(work, self)

        return post


@dataclass
class _TimedWork:
    work: dist.Work
    clock: _TorchDistributed

    def wait(self, *timeout: timedelta) -> None:
        start = time.perf_counter()
        self.work.wait(*timeout)
        self.clock.wall_s += time.perf_counter() - start


def _named(transport: str, topology: Topology, moving: str, direction: str) -> dict[str, Any]:
    return {
        "transport": transport,
        "nodes": topology.nodes,
        "ranks_per_node": topology.ranks_per_node,
        "moving": moving if direction == "backward" else "kv",
        "direction": direction,
    }


def _in_process(topology: Topology, strategy: Strategy) -> Loop:
    """All ranks take turns; the autograd function and the consistency between ranks are left out."""
    ring = VirtualRing(topology, strategy, network=CopyNetwork(topology.ranks, torch.device("cpu")))
    each = [Inputs(*(torch.randn(_SHAPE) for _ in range(3))) for _ in ring.rank_states]
    kernel = ConstantKernel()
    prepared = [prepare(member, mine, Request(), {}) for member, mine in zip(ring.rank_states, each, strict=True)]
    calls = [_with_kernel(call, kernel) for call in prepared]
    number = 0

    def layer() -> Callable[[], object]:
        nonlocal number
        number += 1
        mine = CallId(number)
        done = lockstep([forward_program(c, mine, x) for c, x in zip(calls, each, strict=True)])
        queries = [Queries(x.q, x.q, out.out, out.lse) for x, out in zip(each, done, strict=True)]
        each_call = [*zip(calls, each, queries, strict=True)]
        return lambda: lockstep([backward_program(c, mine, x, rows) for c, x, rows in each_call])

    pools = [member.transport.pool for member in ring.rank_states]
    return Loop(layer, lambda: sum(pool.allocated_bytes for pool in pools))


def _with_kernel(call: Call, kernel: Kernel) -> Call:
    return replace(call, kind=replace(call.kind, kernel=kernel))


def _over_gloo(rank: int, moving: str, parts: int, layers: int, steps: int) -> Books:
    """One of two processes; everything that a call does, autograd and the consistency of every call included."""
    cp = ContextParallel(dist.group.WORLD, strategy=Strategy(backward=moving, parts=parts))
    q, k, v = (torch.randn(_SHAPE, requires_grad=True) for _ in range(3))
    burst_attention(q, k, v, cp)
    kernel = ConstantKernel()
    cp.calls.update({key: _with_kernel(call, kernel) for key, call in cp.calls.items()})
    dout = torch.ones(_SHAPE)

    def layer() -> Callable[[], object]:
        out = burst_attention(q, k, v, cp)
        return lambda: torch.autograd.grad(out, (q, k, v), dout)

    return Books(Loop(layer, cp.allocated_bytes), layers).keep(steps)
