"""The section "fast", performance: the kernel, transfers, the ring with and without transfers, and the host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.attention import burst_attention
from burst_plugin.check.findings import FAILED, NOT_SHOWN, OK, PERFORMANCE, Finding, shown_time
from burst_plugin.check.links import SLOW, MeasuredLink, measure_links, slow_edges
from burst_plugin.check.problem import Problem
from burst_plugin.check.recurrent_rates import recurrent_finding
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.world import World
from burst_plugin.comm.copies import CopyNetwork, NullTransport
from burst_plugin.kernels import Case, Grads, How, Kernel, Queries, choose_kernel
from burst_plugin.planning.measured import rate_at
from burst_plugin.profiling.cluster_profile import KernelRate
from burst_plugin.ring.rank_state import RankState
from burst_plugin.scores import Scores
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology
from burst_plugin.types import FULL
from burst_plugin.virtual import VirtualRing

_CTAS = (0, 4, 8, 16, 32)
_WHERE = {Link.INTRA: "inside nodes", Link.INTER: "between nodes"}
_MOST_HEADS_ON_CPU = 4


def check_performance(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield findings on the speed of the kernel, the links, the whole ring and the host; collective.

    Every rank yields equal findings.
    """
    start = time.perf_counter()
    yield _kernel_finding(rates_of(world, settings), world, start)
    yield recurrent_finding(world, settings)
    start = time.perf_counter()
    topology, links = links_of(world, settings)
    for link in Link:
        if link in links:
            yield _link_finding(world, links[link], time.perf_counter() - start)
            start = time.perf_counter()
        else:
            reason = f"{topology} has no links {_WHERE[link]}"
            yield Finding(PERFORMANCE, NOT_SHOWN, f"transfers {_WHERE[link]}", reason)
    if world.size == 1:
        yield Finding(PERFORMANCE, NOT_SHOWN, "ring", "there is one rank, which has no ring; start 2 or more")
    else:
        yield _ring_finding(world, settings, links)
        if world.device.type == "cuda":
            yield thread_blocks_finding(world, settings)
    yield _host_finding(world)


def links_of(world: World, settings: Settings) -> tuple[Topology, dict[Link, MeasuredLink]]:
    """Return the topology and the measured rates of each kind of link, an empty mapping for one rank; collective.

    They are measured once for each `world`.
    """
    if "links" not in world.measured:
        cp = world.ring()
        links = measure_links(world, cp, settings.sizes(world.device)) if world.size > 1 else {}
        world.measured["links"] = cp.topology, links
        cp.close()
    topology, links = world.measured["links"]
    return topology, links


def _link_finding(world: World, link: MeasuredLink, seconds: float) -> Finding:
    sizes = ", ".join(f"{_bytes(nbytes)} {shown_time(took_s)}" for nbytes, took_s in link.by_size)
    shared = "; the ranks of a node share a NIC" if link.is_shared else ""
    text = (
        f"{link.rate.bytes_per_s / 1e9:.4g} GB/s with all ranks at once{shared}, latency "
        f"{shown_time(link.rate.latency_s)}; {sizes}"
    )
    figures = {
        "bytes_per_s": link.rate.bytes_per_s,
        "latency_s": link.rate.latency_s,
        "is_shared": link.is_shared,
        "by_size": [list(size) for size in link.by_size],
        "links": [list(edge) for edge in link.edges],
    }
    slow, usual = slow_edges(link.edges), median(edge.bytes_per_s for edge in link.edges)
    if slow:
        ends = [(world.name(edge.src), world.name(edge.dst), edge.bytes_per_s / 1e9) for edge in slow[:4]]
        named = ", ".join(f"{src} -> {dst} {rate:.4g} GB/s" for src, dst, rate in ends)
        text = f"slow: {named}; the median is {usual / 1e9:.4g} (slow is under {SLOW:.0%} of it); {text}"
    if link.damage:
        of_ranks = [(world.name(each.src), world.name(each.dst), each.wrong, each.nbytes) for each in link.damage[:4]]
        named = ", ".join(f"{src} -> {dst} {wrong} of {_bytes(nbytes)}" for src, dst, wrong, nbytes in of_ranks)
        text = f"damaged: {named} came with other bytes than were sent; {text}"
    what = f"transfers {_WHERE[link.link]}"
    return Finding(PERFORMANCE, FAILED if slow or link.damage else OK, what, text, figures, seconds)


def _bytes(count: float) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


class Rates(NamedTuple):
    """The measured speed of one kernel, called `kernel`, on full tiles of several lengths.

    by_rows: the rates of the slowest rank, for each length. by_rank: each rank's forward FLOP per second on the
    longest.
    """

    kernel: str
    by_rows: tuple[KernelRate, ...]
    by_rank: tuple[float, ...]


def rates_of(world: World, settings: Settings) -> Rates:
    """Return the speed of the kernel that the settings ask for, measured once for each `world`; collective."""
    if "rates" not in world.measured:
        world.measured["rates"] = _measure_rates(world, settings)
    rates: Rates = world.measured["rates"]
    return rates


def _measure_rates(world: World, settings: Settings) -> Rates:
    """Time the kernel on full tiles of all lengths, with all ranks at work at once; all ranks get equal rates."""
    sizes, device = settings.sizes(world.device), world.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, dim = _timed_heads(settings, device), settings.model.head_dim
    kernel = choose_kernel(load_kernel(settings.kernel), Case(device.type, dtype, *heads, dim, dim))
    by_rows = []
    for rows in sizes.rows:
        problem = Problem.draw((rows, rows), heads, (dim, dim), dtype, device)
        seconds = [_time_kernel(world, kernel, problem) for _ in range(sizes.rounds + 1)][1:]  # the first warms up
        best = [min(rounds) for rounds in zip(*seconds, strict=True)]  # a busy machine is late, and never early
        best_by_rank = world.exchange(f"kernel {kernel.name} timed", best)
        flops = 4.0 * rows * rows * heads[0] * dim
        forward_s, backward_s = map(max, zip(*best_by_rank, strict=True))
        by_rows.append(KernelRate(rows, flops / forward_s, 2.5 * flops / backward_s))
        by_rank = tuple(flops / forward_s for forward_s, _ in best_by_rank)
    return Rates(kernel.name, tuple(by_rows), by_rank)


def _timed_heads(settings: Settings, device: torch.device) -> tuple[int, int]:
    """Return the heads that kernels are timed with: the model's; on CPUs fewer, at the same ratio."""
    q_heads, kv_heads = settings.model.q_heads, settings.model.kv_heads
    if device.type == "cpu" and q_heads > _MOST_HEADS_ON_CPU:
        group = min(q_heads // kv_heads, _MOST_HEADS_ON_CPU)
        kv_heads = _MOST_HEADS_ON_CPU // group
        q_heads = kv_heads * group
    return q_heads, kv_heads


def _time_kernel(world: World, kernel: Kernel, problem: Problem) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass, begun by all ranks together."""
    q, k, v, dout = problem
    how = How(FULL, Scores(scale=q.shape[3] ** -0.5))
    with torch.no_grad():
        world.together()
        start = time.perf_counter()
        out, lse = kernel.forward(q, k, v, how)
        world.synchronize()
        middle = time.perf_counter()
        kernel.backward(Queries(q, dout, out.to(q.dtype), lse), k, v, how)
        world.synchronize()
        return middle - start, time.perf_counter() - middle


def _kernel_finding(rates: Rates, world: World, start: float) -> Finding:
    usual, slowest = median(rates.by_rank), min(rates.by_rank)
    shown = ", ".join(
        f"{rate.rows} rows {rate.forward_flops_per_s / 1e12:.3g}/{rate.backward_flops_per_s / 1e12:.3g}"
        for rate in rates.by_rows
    )
    figures = {"by_rows": [vars(rate) for rate in rates.by_rows], "by_rank_flops_per_s": list(rates.by_rank)}
    text, verdict = f"TFLOP/s forward/backward: {shown}", OK
    if world.device.type == "cuda" and slowest < 0.8 * usual:  # ranks on CPUs compete for processors
        rank = rates.by_rank.index(slowest)
        text, verdict = f"{world.name(rank)} is slow: {slowest / usual:.0%} of the median rate; {text}", FAILED
    return Finding(PERFORMANCE, verdict, f"kernel {rates.kernel}", text, figures, time.perf_counter() - start)


class _RingTimes(NamedTuple):
    """Seconds of both passes of the slowest rank, and the bytes of the rank that sends most, by link."""

    ring_s: float
    silent_s: float
    sent_bytes: dict[Link, int]


def _ring_finding(world: World, settings: Settings, links: dict[Link, MeasuredLink]) -> Finding:
    """Return how much of the transfers hides behind the computing."""
    start = time.perf_counter()
    times = _time_ring(world, settings)
    kernel_s = _kernel_seconds(world, settings)
    transfer_s = max((n / links[link].rate.bytes_per_s for link, n in times.sent_bytes.items() if n), default=0.0)
    exposed_s = times.ring_s - times.silent_s
    less = min(times.silent_s, transfer_s)
    hidden = 1 - (times.ring_s - max(times.silent_s, transfer_s)) / less if less > 0 else 1.0
    overlap = min(1.0, max(0.0, hidden))
    text = (
        f"both passes {shown_time(times.ring_s)}, without transfers {shown_time(times.silent_s)}; by the rates above "
        f"the kernel alone takes {shown_time(kernel_s)} ({kernel_s / times.ring_s:.0%} of the ring), transfers alone "
        f"{shown_time(transfer_s)}: {overlap:.0%} of the shorter is hidden, {shown_time(max(0.0, exposed_s))} exposed"
    )
    if world.device.type == "cpu":
        text += "; on CPUs messages take processor time, so that this says little"
    figures = {"ring_s": times.ring_s, "without_transfers_s": times.silent_s, "transfers_s": transfer_s}
    figures |= {"overlap": overlap, "kernel_s": kernel_s}
    return Finding(PERFORMANCE, OK, "ring", text, figures, time.perf_counter() - start)


def _kernel_seconds(world: World, settings: Settings) -> float:
    """Return the seconds of a rank of the timed ring at the kernel's rate; its mask allows half of all pairs."""
    tokens, heads = settings.sizes(world.device).tokens, _timed_heads(settings, world.device)[0]
    rate = rate_at(rates_of(world, settings).by_rows, tokens)
    flops = 4.0 * tokens * (tokens * world.size) / 2 * heads * settings.model.head_dim
    return flops / rate.forward_flops_per_s + 2.5 * flops / rate.backward_flops_per_s


def thread_blocks_finding(world: World, settings: Settings) -> Finding:
    """Time the ring under several limits on NCCL's thread blocks, and return a finding on the times; collective.

    The limits are values of the option `max_ctas` of `Strategy`.
    """
    start = time.perf_counter()
    times = {ctas: _time_ring(world, settings, max_ctas=ctas).ring_s for ctas in _CTAS}
    best = min(times, key=times.__getitem__)
    shown = ", ".join(f"{ctas or 'no limit'} {shown_time(took_s)}" for ctas, took_s in times.items())
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    text = (
        f"both passes by max_ctas: {shown}; the fastest is max_ctas={best}, the default {Strategy().max_ctas}; "
        f"CUDA_DEVICE_MAX_CONNECTIONS is {connections}: run this again with 1, and without, to compare"
    )
    figures = {"ring_s": {str(ctas): took_s for ctas, took_s in times.items()}, "connections": connections}
    return Finding(PERFORMANCE, OK, "thread blocks of NCCL", text, figures, time.perf_counter() - start)


def _time_ring(world: World, settings: Settings, **options: Any) -> _RingTimes:
    """Time the ring with and without transfers, interleaved."""
    sizes, device = settings.sizes(world.device), world.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, dim = _timed_heads(settings, device), settings.model.head_dim
    cp = world.ring(kernel=load_kernel(settings.kernel), **options)
    local = Problem.draw((sizes.tokens, sizes.tokens), heads, (dim, dim), dtype, device)
    q, k, v = (x.requires_grad_() for x in local[:3])

    def step() -> None:
        torch.autograd.grad(burst_attention(q, k, v, cp), (q, k, v), local.dout)

    for _ in range(2):  # to make buffers, plans and connections
        step()
    cp.reset_traffic()
    step()
    sent = [sum(cp.traffic()[link.value].values()) for link in Link]
    rounds: list[tuple[float, float]] = []
    for _ in range(sizes.rounds):
        ring_s = world.timed(step)
        with _without_transfers(cp.rank_state):
            rounds.append((ring_s, world.timed(step)))
    rounds_by_rank, sent_by_rank = zip(*world.exchange("ring timed", [rounds, sent]), strict=True)
    cp.close()
    slowest = []  # of all ranks in a round: seconds with transfers, and without
    for ranks_in_round in zip(*rounds_by_rank, strict=True):
        slowest.append([max(seconds) for seconds in zip(*ranks_in_round, strict=True)])
    ring_s, silent_s = map(median, zip(*slowest, strict=True))
    most_sent = {link: max(counts) for link, counts in zip(Link, zip(*sent_by_rank, strict=True), strict=True)}
    return _RingTimes(ring_s, silent_s, most_sent)


@contextmanager
def _without_transfers(state: RankState) -> Iterator[None]:
    transports = state.transport, state.ulysses_transport
    state.transport = state.ulysses_transport = NullTransport()
    try:
        yield
    finally:
        state.transport, state.ulysses_transport = transports


def _host_finding(world: World) -> Finding:
    """Return the finding on the host's time per ring step: both passes of small blocks, all ranks in one process."""
    start = time.perf_counter()
    ranks, rounds = 4, 5
    step_s = 0.0
    if world.rank == 0:
        network = CopyNetwork(ranks, world.device)
        ring = VirtualRing(Topology(1, ranks), Strategy(kernel=StubKernel()), network=network)
        q, k, v = (torch.ones(1, 16 * ranks, 2, 8, device=world.device, requires_grad=True) for _ in range(3))
        dout, durations = torch.ones_like(q), []
        for _ in range(rounds + 1):
            world.synchronize()
            begin = time.perf_counter()
            torch.autograd.grad(ring.attention(q, k, v)[0], (q, k, v), dout)
            durations.append(time.perf_counter() - begin)
        step_s = median(durations[1:]) / (2 * ranks * ranks)
    step_s = world.exchange("host timed", step_s)[0]
    text = f"{1e6 * step_s:.0f} us per rank and ring step, without kernels and network (mean of both passes)"
    return Finding(PERFORMANCE, OK, "host", text, {"per_step_s": step_s}, time.perf_counter() - start)


class StubKernel:
    """A kernel that computes nothing: it returns the same tensors, made once per shape, whatever its arguments."""

    name = "stub"
    features = frozenset({"windows"})

    def refuse(self, case: Case) -> str | None:
        """Return None: it takes every case."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return ones for out, [B, Sq, H, D], and zeros for lse, [B, H, Sq]; at least in float32."""
        return _constants(q.shape, k.shape, q.dtype, q.device)[:2]

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return ones for dq, dk and dv, at least in float32."""
        return _constants(queries.q.shape, k.shape, k.dtype, k.device)[2]


@cache
def _constants(
    q: torch.Size, k: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Grads]:
    wide = torch.promote_types(dtype, torch.float32)
    grads = Grads(*(torch.ones(shape, dtype=wide, device=device) for shape in (q, k, k)))
    out, lse = torch.ones(q, dtype=wide, device=device), torch.zeros(q[0], q[2], q[1], dtype=wide, device=device)
    return out, lse, grads
