"""The kernel alone: its rate on full tiles by their length, with all ranks at work at once."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from burst_plugin.check.problem import Problem
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.world import World
from burst_plugin.kernels import Case, How, Kernel, Queries, choose_kernel
from burst_plugin.profiling.cluster_profile import KernelRate
from burst_plugin.scores import Scores
from burst_plugin.types import FULL

__all__ = ["Rates", "measure_rates", "timed_heads"]

_MOST_HEADS_ON_CPU = 4


class Rates(NamedTuple):
    """A kernel's rates, those of the slowest rank; and of the longest tile the FLOP per second forward, by rank."""

    kernel: str
    by_rows: tuple[KernelRate, ...]
    by_rank: tuple[float, ...]


def timed_heads(settings: Settings, device: torch.device) -> tuple[int, int]:
    """Return the heads that kernels are timed with: the model's; on CPUs fewer, at the same ratio."""
    q_heads, kv_heads = settings.model.q_heads, settings.model.kv_heads
    if device.type == "cpu" and q_heads > _MOST_HEADS_ON_CPU:
        group = min(q_heads // kv_heads, _MOST_HEADS_ON_CPU)
        kv_heads = _MOST_HEADS_ON_CPU // group
        q_heads = kv_heads * group
    return q_heads, kv_heads


def measure_rates(world: World, settings: Settings) -> Rates:
    """Time the kernel on tiles of all lengths; the same on every rank; collective."""
    sizes, device = settings.sizes(world.device), world.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, dim = timed_heads(settings, device), settings.model.head_dim
    kernel = choose_kernel(load_kernel(settings.kernel), Case(device.type, dtype, *heads, dim, dim))
    by_rows = []
    for rows in sizes.rows:
        problem = Problem.draw((rows, rows), heads, (dim, dim), dtype, device)
        seconds = [_passes(world, kernel, problem) for _ in range(sizes.rounds + 1)][1:]  # the first one warms up
        mine = [min(each) for each in zip(*seconds, strict=True)]  # a busy machine is late, and never early
        every = world.exchange(f"kernel {kernel.name} timed", mine)
        flops = 4.0 * rows * rows * heads[0] * dim
        forward_s, backward_s = map(max, zip(*every, strict=True))
        by_rows.append(KernelRate(rows, flops / forward_s, 2.5 * flops / backward_s))
        by_rank = tuple(flops / each[0] for each in every)
    return Rates(kernel.name, tuple(by_rows), by_rank)


def _passes(world: World, kernel: Kernel, problem: Problem) -> tuple[float, float]:
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
