"""The section "fast": the kernel alone, transfers alone, the ring with and without its transfers, and the host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch

from burst_plugin.attention import burst_attention
from burst_plugin.check.findings import FAILED, NOT_SHOWN, OK, Finding, shown_time
from burst_plugin.check.links import SLOW, Measured, measure_links, slow_edges
from burst_plugin.check.problem import Problem
from burst_plugin.check.rates import Rates, measure_rates, timed_heads
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.stub_kernel import StubKernel
from burst_plugin.check.world import World
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.comm.null_transport import NullTransport
from burst_plugin.planning.measured import rate_at
from burst_plugin.ring.rank_state import RankState
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology
from burst_plugin.virtual import VirtualRing

__all__ = ["fast", "links_of", "of_thread_blocks", "rates_of"]

_CTAS = (0, 4, 8, 16, 32)
_WHERE = {Link.INTRA: "inside nodes", Link.INTER: "between nodes"}


def links_of(world: World, settings: Settings) -> tuple[Topology, dict[Link, Measured]]:
    """Return the topology and what its links carry, measured once; collective."""
    if "links" not in world.measured:
        cp = world.ring()
        found = measure_links(world, cp, settings.sizes(world.device)) if world.size > 1 else {}
        world.measured["links"] = cp.topology, found
        cp.close()
    topology, links = world.measured["links"]
    return topology, links


def rates_of(world: World, settings: Settings) -> Rates:
    """Return the kernel's rates, measured once; collective."""
    if "rates" not in world.measured:
        world.measured["rates"] = measure_rates(world, settings)
    rates: Rates = world.measured["rates"]
    return rates


def fast(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield how fast the parts and the whole are, the same on every rank; collective."""
    start = time.perf_counter()
    yield _of_kernel(rates_of(world, settings), world, start)
    start = time.perf_counter()
    topology, links = links_of(world, settings)
    for link in Link:
        if link in links:
            yield _of_link(world, links[link], time.perf_counter() - start)
            start = time.perf_counter()
        else:
            reason = f"{topology} has no links {_WHERE[link]}"
            yield Finding("fast", NOT_SHOWN, f"transfers {_WHERE[link]}", reason)
    if world.size == 1:
        yield Finding("fast", NOT_SHOWN, "ring", "there is one rank, which has no ring; start 2 or more")
    else:
        yield _of_ring(world, settings, links)
        if world.device.type == "cuda":
            yield of_thread_blocks(world, settings)
    yield _of_host(world)


def _of_kernel(rates: Rates, world: World, start: float) -> Finding:
    usual, slowest = median(rates.by_rank), min(rates.by_rank)
    shown = ", ".join(
        f"{each.rows} rows {each.forward_flops_per_s / 1e12:.3g}/{each.backward_flops_per_s / 1e12:.3g}"
        for each in rates.by_rows
    )
    figures: dict[str, Any] = {"by_rows": [vars(each) for each in rates.by_rows]}
    figures["by_rank_flops_per_s"] = list(rates.by_rank)
    text, verdict = f"TFLOP/s forward/backward: {shown}", OK
    if world.device.type == "cuda" and slowest < 0.8 * usual:  # ranks on CPUs compete for processors
        rank = rates.by_rank.index(slowest)
        text, verdict = f"{world.name(rank)} is slow: {slowest / usual:.0%} of the median rate; {text}", FAILED
    return Finding("fast", verdict, f"kernel {rates.kernel}", text, figures, time.perf_counter() - start)


def _of_link(world: World, found: Measured, seconds: float) -> Finding:
    sizes = ", ".join(f"{_bytes(nbytes)} {shown_time(took_s)}" for nbytes, took_s in found.by_size)
    shared = "; the ranks of a node share a NIC" if found.is_shared else ""
    text = (
        f"{found.rate.bytes_per_s / 1e9:.4g} GB/s with all ranks at once{shared}, latency "
        f"{shown_time(found.rate.latency_s)}; {sizes}"
    )
    figures = {
        "bytes_per_s": found.rate.bytes_per_s,
        "latency_s": found.rate.latency_s,
        "is_shared": found.is_shared,
        "by_size": [list(each) for each in found.by_size],
        "links": [list(each) for each in found.edges],
    }
    slow, usual = slow_edges(found.edges), median(edge.bytes_per_s for edge in found.edges)
    if slow:
        ends = [(world.name(edge.src), world.name(edge.dst), edge.bytes_per_s / 1e9) for edge in slow[:4]]
        named = ", ".join(f"{src} -> {dst} {rate:.4g} GB/s" for src, dst, rate in ends)
        text = f"slow: {named}; the median is {usual / 1e9:.4g} (slow is under {SLOW:.0%} of it); {text}"
    what = f"transfers {_WHERE[found.link]}"
    return Finding("fast", FAILED if slow else OK, what, text, figures, seconds)


class _Times(NamedTuple):
    """Seconds of both passes of the slowest rank, and the bytes of the rank that sends most, by link."""

    ring_s: float
    silent_s: float
    sent_bytes: dict[Link, int]


def _of_ring(world: World, settings: Settings, links: dict[Link, Measured]) -> Finding:
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
        text += "; on CPUs messages take the time of processors, so that this says little"
    figures = {"ring_s": times.ring_s, "without_transfers_s": times.silent_s, "transfers_s": transfer_s}
    figures |= {"overlap": overlap, "kernel_s": kernel_s}
    return Finding("fast", OK, "ring", text, figures, time.perf_counter() - start)


def _kernel_seconds(world: World, settings: Settings) -> float:
    """Return what a rank of the timed ring computes, at the rate of the kernel: half of the pairs, under its mask."""
    tokens, heads = settings.sizes(world.device).tokens, timed_heads(settings, world.device)[0]
    rate = rate_at(rates_of(world, settings).by_rows, tokens)
    flops = 4.0 * tokens * (tokens * world.size) / 2 * heads * settings.model.head_dim
    return flops / rate.forward_flops_per_s + 2.5 * flops / rate.backward_flops_per_s


def of_thread_blocks(world: World, settings: Settings) -> Finding:
    """Return the time of the ring by how many thread blocks NCCL may take, and with them of multiprocessors."""
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
    return Finding("fast", OK, "thread blocks of NCCL", text, figures, time.perf_counter() - start)


def _time_ring(world: World, settings: Settings, **options: Any) -> _Times:
    """Time the ring with and without transfers, interleaved."""
    sizes, device = settings.sizes(world.device), world.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, dim = timed_heads(settings, device), settings.model.head_dim
    cp = world.ring(kernel=load_kernel(settings.kernel), **options)
    local = Problem.draw((sizes.tokens, sizes.tokens), heads, (dim, dim), dtype, device)
    q, k, v = (x.requires_grad_() for x in local[:3])

    def step() -> None:
        torch.autograd.grad(burst_attention(q, k, v, cp), (q, k, v), local.dout)

    for _ in range(2):  # buffers, plans and connections
        step()
    cp.reset_traffic()
    step()
    sent = {link: sum(cp.traffic()[link.value].values()) for link in Link}
    mine: list[tuple[float, float]] = []
    for _ in range(sizes.rounds):
        ring_s = world.timed(step)
        with _without_transfers(cp.rank_state):
            mine.append((ring_s, world.timed(step)))
    every = world.exchange("ring timed", [mine, [sent[link] for link in Link]])
    slowest = [[max(each) for each in zip(*turn, strict=True)] for turn in zip(*(e[0] for e in every), strict=True)]
    ring_s, silent_s = (median(each) for each in zip(*slowest, strict=True))
    most = {link: max(each[1][number] for each in every) for number, link in enumerate(Link)}
    cp.close()
    return _Times(ring_s, silent_s, most)


@contextmanager
def _without_transfers(state: RankState) -> Iterator[None]:
    kept = state.transport, state.ulysses_transport
    state.transport = state.ulysses_transport = NullTransport()
    try:
        yield
    finally:
        state.transport, state.ulysses_transport = kept


def _of_host(world: World) -> Finding:
    """Return what the host takes per step of the ring: both passes of small blocks, all ranks in one process."""
    start = time.perf_counter()
    ranks, rounds = 4, 5
    mine = 0.0
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
        mine = median(durations[1:]) / (2 * ranks * ranks)
    per_step_s: float = world.exchange("host timed", mine)[0]
    text = f"{1e6 * per_step_s:.0f} us per rank and ring step, without kernels and network (mean of both passes)"
    return Finding("fast", OK, "host", text, {"per_step_s": per_step_s}, time.perf_counter() - start)


def _bytes(count: float) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
