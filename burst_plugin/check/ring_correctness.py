"""Whether the ring computes what one rank would: every way to run it, against the definition in float64.

Every rank compares its own part, so that a rank whose GPU or link is at fault is named.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin.attention import burst_attention
from burst_plugin.check.findings import CORRECTNESS, FAILED, NOT_SHOWN, OK, Finding
from burst_plugin.check.kernel_correctness import SHARED
from burst_plugin.check.problem import BOUNDS, Problem, definition, differences, worst
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.world import Outcome, World
from burst_plugin.context import ContextParallel
from burst_plugin.schedule.rings import SCHEDULES, SPARSE
from burst_plugin.sequence.layout import Tokens, even_length
from burst_plugin.sequence.masks import Causal, Documents, Mask
from burst_plugin.training.memory import GIB
from burst_plugin.types import BOTH, SIDES

MEMORY = "memory of NCCL"
_DIM = 64
_SHARED_STEPS = 3  # where ranks take turns on a GPU, and a message takes milliseconds
_MOST_TOKENS = 2048  # of the whole sequence: the definition has all its scores at once, in float64


@dataclass(frozen=True)
class RingCase:
    """One way to run the ring, which is compared with the definition of attention.

    name: for messages. options: of `Strategy`. tokens: of the sequence.
    documents: the lengths of its documents, none for one causal sequence. cu_seqlens: their bounds.
    recomputes: whether a checkpoint runs the forward pass again. rings: how many rings of these options take turns.
    """

    name: str
    options: Mapping[str, Any]
    tokens: int
    documents: tuple[int, ...] = ()
    recomputes: bool = False
    rings: int = 1
    cu_seqlens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ends = [0]
        for length in self.documents:
            ends.append(ends[-1] + length)
        object.__setattr__(self, "cu_seqlens", tuple(ends))

    @property
    def mask(self) -> Mask:
        """Return the mask of the sequence: causal, within documents if there are several."""
        return Causal() & Documents(self.cu_seqlens) if self.documents else Causal()

    def allowed(self, device: torch.device) -> Tensor:
        """Return the mask as a bool tensor [S, S], True where a query may attend to a key."""
        allowed = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=device).tril()
        if self.documents:
            inside = torch.zeros_like(allowed)
            for start, stop in pairwise(self.cu_seqlens):
                inside[start:stop, start:stop] = True
            allowed &= inside
        return allowed


def heads_for(ranks: int) -> tuple[int, int]:
    """Return (query heads, key heads) that `ranks` ranks can exchange: even numbers, in the ratio 2 to 1."""
    q_heads = 8 if 8 % ranks == 0 else (4 if ranks % 2 else 2) * ranks
    return q_heads, q_heads // 2


def ring_cases(world: World, tokens: int) -> Iterator[RingCase]:
    """Yield the ways to run a ring of all ranks of `world` on about `tokens` tokens, the plainest first."""
    ranks, nodes = world.size, _node_sizes(world.size)
    for per_node, (forward, backward) in product(nodes, product(SIDES, SIDES)):
        name = f"ring {ranks // per_node}x{per_node}, moves {forward}, {backward}"
        yield RingCase(name, {"ranks_per_node": per_node, "forward": forward, "backward": backward}, tokens)
    yield RingCase("both sides move", {"forward": BOTH, "backward": BOTH}, tokens)
    for schedule in SCHEDULES:
        if schedule in SPARSE:
            long = tokens - 3 * (tokens // 8)
            documents = (tokens // 8, long, tokens // 8, tokens // 8)
            yield RingCase(f"{schedule} by documents", {"schedule": schedule}, tokens, documents)
        else:
            options = {"schedule": schedule, "ranks_per_node": nodes[-1], "parts": 2}
            yield RingCase(f"{schedule} in 2 parts", options, tokens)
    for degree in sorted({2, ranks}):
        if ranks % degree == 0:
            name = f"heads exchanged by {degree}"
            yield RingCase(name, {"ulysses_degree": degree, "ranks_per_node": ranks}, tokens)
            name = f"blocks gathered by {degree}"
            yield RingCase(name, {"mesh_degree": degree, "ranks_per_node": ranks}, tokens)
    yield RingCase("uneven lengths", {}, tokens - 3)
    yield RingCase("recomputation", {}, tokens, recomputes=True)
    yield RingCase("two rings in turn", {"ranks_per_node": nodes[-1]}, tokens, rings=2)


def _node_sizes(ranks: int) -> list[int]:
    """Return the numbers of ranks per node to try: all ranks, and half of them, as on two nodes."""
    return [ranks, ranks // 2] if ranks % 2 == 0 else [ranks]


def check_rings(world: World, settings: Settings, *, is_bound: bool = False) -> Iterator[Finding]:
    """Yield a finding per way to run the ring, one for `close`, and on GPUs one for memory; collective.

    is_bound: whether the process group of `world` is bound to a device (`device_id`); then only the first and the
    last way are run. An error in the middle of a pass ends the section, since messages may still be under way. With
    one rank nothing is shown.
    """
    if world.size == 1:
        reason = "there is one rank, which has no ring; start 2 or more, which may share a GPU"
        yield Finding(CORRECTNESS, NOT_SHOWN, "ring", reason)
        return
    sizes = settings.sizes(world.device)
    rows = max(16, min(sizes.tile // 3, _MOST_TOKENS // world.size))
    cases = list(ring_cases(world, even_length(rows * world.size, world.size)))
    if is_bound:
        cases = [replace(ring, name=f"{ring.name}, device_id") for ring in (cases[0], cases[-1])]
    outside = {}
    steps = min(sizes.steps, _SHARED_STEPS) if world.shares_gpu else sizes.steps
    kernel = load_kernel(settings.kernel)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    for ring in cases:
        start = time.perf_counter()
        outcomes = world.attempt(ring.name, partial(_run_steps, world, ring, kernel, dtype, steps))
        yield _finding(world, ring, outcomes, BOUNDS[dtype], time.perf_counter() - start)
        if any(outcome.error and not outcome.error.startswith("ValueError") for outcome in outcomes):
            yield Finding(CORRECTNESS, NOT_SHOWN, "other rings", f"the ring ended in: {ring.name}")
            return
        if not first_error(outcomes):
            outside[ring.name] = [outcome.value["outside_bytes"] for outcome in outcomes]
    yield from _check_close(world)
    if outside and world.device.type == "cuda":
        yield memory_finding(world, outside)
    full_steps = replace(settings, quick=False).sizes(world.device).steps
    if steps < full_steps:
        leave_out = "--ranks" if world.shares_gpu else "--quick"
        yield Finding(
            CORRECTNESS, NOT_SHOWN, f"{full_steps} steps", f"each ring ran for {steps}; leave out {leave_out}"
        )


def _run_steps(world: World, ring: RingCase, kernel: Any, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """Run some steps on this rank; return its errors by step, the kernel, and its traffic beside the expected one."""
    heads = heads_for(world.size)
    problem = Problem.draw((ring.tokens, ring.tokens), heads, (_DIM, _DIM), dtype, world.device)
    cps = [world.ring(**{"kernel": kernel, **ring.options}) for _ in range(ring.rings)]
    tokens, outside = Tokens(ring.tokens), world.outside_bytes()
    # A comparison waits for the GPU, and steps have to follow each other without that: all are compared at the end.
    by_step = [_step(cps[number % ring.rings], problem, ring, tokens) for number in range(steps * ring.rings)]
    world.synchronize()
    outside = world.outside_bytes() - outside
    expected = definition(problem, ring.allowed(world.device))
    expected_here = [cps[0].shard(x, 2 if x.dim() == 3 else 1, tokens) for x in expected]
    errors = [differences(results, expected_here) for results in by_step]
    traffic = [(cp.traffic(), cp.expected_traffic()) for cp in cps]
    for cp in cps:
        cp.close()
    sent = sum(sum(by_traffic.values()) for by_traffic in traffic[0][0].values())
    unequal = next((f"{sent} instead of {due}" for sent, due in traffic if sent != due), "")
    kernel_name = cps[0].describe().get("kernel", "")
    return {"errors": errors, "kernel": kernel_name, "traffic": unequal, "sent": sent, "outside_bytes": outside}


def _step(cp: ContextParallel, problem: Problem, ring: RingCase, tokens: Tokens) -> tuple[Tensor, ...]:
    """Return this rank's out, lse, dq, dk, dv."""
    q, k, v = (cp.shard(x, tokens=tokens).requires_grad_() for x in problem[:3])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return burst_attention(q, k, v, cp, mask=ring.mask, tokens=tokens, return_lse=True)

    out, lse = checkpoint(attend, q, k, v, use_reentrant=False) if ring.recomputes else attend(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), cp.shard(problem.dout, tokens=tokens))
    return out.detach(), lse, *grads


def _finding(world: World, ring: RingCase, outcomes: list[Outcome], bound: float, seconds: float) -> Finding:
    """Return the finding of a ring: which rank met an error, is off, or sent other bytes than the schedule counts."""
    error_message = first_error(outcomes)
    if error_message:
        return Finding(CORRECTNESS, FAILED, ring.name, error_message, {}, seconds)
    values = [outcome.value for outcome in outcomes]
    errors = [_largest_of_steps(value["errors"]) for value in values]
    largest = [worst(of_rank) for of_rank in errors]  # (result, error) by rank
    rank = max(range(world.size), key=lambda peer: (math.isnan(largest[peer][1]), largest[peer][1]))
    result, error = largest[rank]
    kernel = values[rank]["kernel"]
    figures = {"largest_error": error, "rank": rank, "kernel": kernel, "sent_bytes": values[rank]["sent"]}
    if not error <= bound:
        wrong_ranks = [peer for peer, (_, value) in enumerate(largest) if not value <= bound]
        where = "on every rank" if len(wrong_ranks) == world.size else f"on {', '.join(map(world.name, wrong_ranks))}"
        wrong_results = ", ".join(name for name, value in errors[rank].items() if not value <= bound)
        by_step = zip(*(value["errors"] for value in values), strict=True)  # of all ranks
        wrong_steps = [any(not worst(of_rank)[1] <= bound for of_rank in step) for step in by_step]
        when = f"first in step {wrong_steps.index(True) + 1} of {len(wrong_steps)}"
        text = f"{wrong_results} off by up to {error:.1e} (bound {bound:.0e}), {where}, {when}; kernel {kernel}"
        return Finding(CORRECTNESS, FAILED, ring.name, text, figures, seconds)
    for peer, value in enumerate(values):
        if value["traffic"]:
            text = f"{world.name(peer)} sent other bytes than the schedule counts: {value['traffic']}"
            return Finding(CORRECTNESS, FAILED, ring.name, text, figures, seconds)
    text = f"largest error {error:.1e} ({result}, rank {rank}), kernel {kernel}, bytes as scheduled"
    return Finding(CORRECTNESS, OK, ring.name, text, figures, seconds)


def _largest_of_steps(by_step: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest error of every result; NaN counts as larger than any."""

    def largest(name: str) -> float:
        return max((errors[name] for errors in by_step), key=lambda error: (math.isnan(error), error))

    return {name: largest(name) for name in by_step[0]}


def first_error(outcomes: list[Outcome]) -> str:
    """Return the error of the rank at fault as "rank 3: ...", not of ranks that lost it; "" if no rank met any.

    outcomes: of all ranks, in rank order.
    """
    failures = [(outcome.was_lost, rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error]
    if not failures:
        return ""
    _, rank, error = min(failures)
    return f"rank {rank}: {error}"


def memory_finding(world: World, outside: Mapping[str, list[int]]) -> Finding:
    """Return a finding on the GPU memory that NCCL and CUDA took beside PyTorch's tensors while a ring was open.

    outside: by name of the `RingCase`, the bytes of each rank's GPU that it took outside PyTorch's allocator.
    """
    if world.shares_gpu:
        return Finding(CORRECTNESS, NOT_SHOWN, MEMORY, SHARED)
    ring = max(outside, key=lambda name: max(outside[name]))
    most = max(outside[ring])
    rank = outside[ring].index(most)
    text = f"up to {most / GIB:.2f} GiB besides tensors, with what CUDA takes: {ring}, {world.name(rank)}"
    figures = {"bytes": {name: max(by_rank) for name, by_rank in outside.items()}}
    return Finding(CORRECTNESS, OK, MEMORY, text, figures)


def _check_close(world: World) -> Iterator[Finding]:
    """Yield whether a closed ring leaves no group and no buffer behind, and refuses calls."""
    start = time.perf_counter()
    outcomes = world.attempt("close", lambda: _left_by_close(world))
    error = first_error(outcomes)
    left = [f"rank {rank}: {outcome.value}" for rank, outcome in enumerate(outcomes) if outcome.value]
    text = error or "; ".join(left) or "groups and buffers are gone, and a later call is refused"
    yield Finding(CORRECTNESS, FAILED if error or left else OK, "close", text, {}, time.perf_counter() - start)


def _left_by_close(world: World) -> str:
    """Return a text on groups and bytes that a closed ring leaves behind on this rank; "" for none."""
    before = len(dist.distributed_c10d._world.pg_map)
    cp = world.ring()
    x = torch.ones(1, 8, heads_for(world.size)[0], _DIM, device=world.device, dtype=torch.bfloat16)
    burst_attention(x, x, x, cp)
    cp.close()
    left = len(dist.distributed_c10d._world.pg_map) - before
    if left or cp.allocated_bytes():
        return f"{left} process groups and {cp.allocated_bytes()} bytes are left"
    try:
        burst_attention(x, x, x, cp)
    except RuntimeError:
        return ""
    return "a closed ring still takes calls"
