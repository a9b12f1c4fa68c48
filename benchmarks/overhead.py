"""What the package's own Python costs per visit: posting, merging, bookkeeping.

Tensors are tiny, the kernel returns constants, and messages cost next to nothing: all ranks in one process with plain
copies between them, or two processes on gloo. A step is `--layers` forward passes and then as many backward ones.

Last come whole calls, forward and backward, of small tensors over gloo, by turns with other libraries: where work is
short, the host is what users wait for. Ranks of GPUs compare few calls, those of CPUs each one; both are measured.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import RefusedError
from benchmarks.contenders.burst import BURST
from benchmarks.contenders.protocol import Case
from benchmarks.contenders.ring_flash_attn import RingFlashAttn
from benchmarks.contenders.ulysses import Ulysses
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

PEER_RANKS, PEER_TOKENS = (2, 4), (64, 512, 4096)  # of the whole sequence
COMPARING, NOT_COMPARING = "burst, every call compared", "burst"
_PEERS = {NOT_COMPARING: BURST[0], "ring-flash-attn, zigzag": RingFlashAttn(), "DeepSpeed-Ulysses": Ulysses()}
_PEER_HEADS, _PEER_DIM = (4, 4), 16

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
    beside = recording.measure(partial(beside_peers, PEER_RANKS, PEER_TOKENS, options.steps))
    print(*map(_peer_line, beside), sep="\n")
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


def beside_peers(ranks_of: Sequence[int], tokens_of: Sequence[int], rounds: int) -> list[Row]:
    """Return what a call takes the slowest rank, a row for each library and number of ranks and of tokens."""
    rows = []
    for ranks, tokens in product(ranks_of, tokens_of):
        by_rank = run_ranks(_calls_by_turns, ranks, tokens // ranks, rounds, timeout_s=60.0 + 0.5 * rounds)
        for name in by_rank[0]:
            slowest = [max(took) for took in zip(*(of_rank[name] for of_rank in by_rank), strict=True)]
            rows.append({"library": name, "ranks": ranks, "tokens": tokens, "call_s": median(slowest)})
    return rows


def _calls_by_turns(rank: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return by library the seconds of each call of this rank."""
    ranks = dist.get_world_size()
    case = Case(1, ranks, tokens, *_PEER_HEADS, _PEER_DIM, torch.bfloat16, causal=True)
    of_library = {name: found for name, found in _PEERS.items() if not found.reason(case)}
    attends = {name: found.configurations(case)[0].prepare(case, None) for name, found in of_library.items()}
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=ranks)
    attends[COMPARING] = replace(attends[NOT_COMPARING], call=partial(burst_attention, cp=cp))
    qkv = [torch.randn(1, ranks * tokens, heads, _PEER_DIM).bfloat16() for heads in (4, 4, 4)]
    leaves = {name: [session.shard(x).requires_grad_() for x in qkv] for name, session in attends.items()}
    took_s: dict[str, list[float]] = {name: [] for name in attends}
    for turn, (name, session) in product(range(_WARM_UP + rounds), attends.items()):
        dist.barrier()
        start = time.perf_counter()
        out = session.attend(*leaves[name])
        out.backward(out.detach())
        if turn >= _WARM_UP:
            took_s[name].append(time.perf_counter() - start)
    return took_s


def _peer_line(row: Row) -> str:
    what = f"{row['ranks']} ranks, {row['tokens']:>4} tokens  {row['library']:<28}"
    return f"{what} {row['call_s'] * 1e3:7.2f} ms per call"


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
