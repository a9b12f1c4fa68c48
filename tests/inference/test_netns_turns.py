"""Turns on an emulated cluster: prefill near its bound, decoding beside gathering, and which side had better move."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from burst_plugin import ContextParallel, Strategy
from burst_plugin.inference import KVCache, pass_q_share
from tests.support.emulated_gpu import SleepingKernel
from tests.support.netns import EmulatedCluster
from tests.support.ranks import as_on_gpus

pytestmark = [
    pytest.mark.netns,
    pytest.mark.alone,
    pytest.mark.skipif(
        EmulatedCluster.unavailable() is not None, reason=f"no namespaces: {EmulatedCluster.unavailable()}"
    ),
]

RATE_MBIT = 100.0
PREFILL_S = 0.6  # of work per rank, on 2x4
TREES = 5


def _timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _turns(cache: KVCache, cached: int, new: int, heads: tuple[int, int], times: int) -> list[float]:
    """Seconds that a turn's attention takes, some times over."""
    took = []
    for _ in range(times):
        turn = cache.begin([new], replicated=new == 1)
        q, kv = (torch.zeros(1, turn.size, count, 64) for count in heads)
        took.append(_timed(lambda q=q, kv=kv: cache.attend(0, q, kv, kv)))
        cache.truncate([cached])
    return took


def _cached(cp: ContextParallel, tokens: int, heads: int, **options: Any) -> KVCache:
    """Return a cache of zeros that were appended without the ring."""
    cache = KVCache(cp, 1, reserve=2 * tokens, **options)
    if tokens:
        cache.begin([tokens], replicated=True)
        kv = torch.zeros(1, tokens, heads, 64)
        cache.attend(0, torch.zeros(1, tokens, heads, 64), kv, kv)
    return cache


def _prefill(rank: int, tokens: int) -> list[float]:
    kernel = SleepingKernel(4 * tokens * tokens // 8, 2 * PREFILL_S, 0.0)  # pairs of a rank without a mask
    cp = as_on_gpus(ContextParallel(dist.group.WORLD, strategy=Strategy(kernel=kernel, ranks_per_node=4)))
    return _turns(_cached(cp, 0, 4), 0, tokens, (4, 4), 7)[4:]


def test_a_prompt_takes_hardly_longer_than_its_work() -> None:
    """A block of 2 MiB takes 168 ms on the wire, one of which crosses for each rank; others move inside the node."""
    with EmulatedCluster(2, 4, rate_mbit=RATE_MBIT) as cluster:
        tried: list[float] = []
        while not tried or (tried[-1] > 1.1 and len(tried) < 8):  # a busy machine is late, and never early
            measured = cluster.run(_prefill, 8192)
            tried.append(min(max(times) for times in zip(*measured, strict=True)) / PREFILL_S)
    print(f"time over the bound: {tried}")
    assert tried[-1] <= 1.1


def _decoded_and_gathered(rank: int, tokens: int) -> tuple[float, float]:
    """Seconds per token with 8 heads of queries and 2 of keys, and if keys and values are gathered for it."""
    cp = as_on_gpus(ContextParallel(dist.group.WORLD, strategy=Strategy(ranks_per_node=2)))
    decoded = _turns(_cached(cp, tokens, 2), tokens, 1, (8, 2), TREES)
    kv, q = torch.zeros(2, tokens // 4, 2, 64), torch.zeros(1, 8, 1, 64)
    everywhere = torch.zeros(4 * 2, *kv.shape[1:])

    def gathered() -> None:
        dist.all_gather_into_tensor(everywhere, kv)
        k, v = everywhere.unflatten(0, (4, 2)).transpose(0, 1).reshape(2, 1, tokens, 2, 64).transpose(2, 3)
        scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return min(decoded[1:]), min(_timed(gathered) for _ in range(2))


def test_decoding_is_five_times_as_fast_as_gathering() -> None:
    with EmulatedCluster(2, 2, rate_mbit=RATE_MBIT) as cluster:
        measured = cluster.run(_decoded_and_gathered, 32768)
    decoded, gathered = (max(times) for times in zip(*measured, strict=True))
    print(f"{decoded * 1e3:.1f} ms per token, {gathered * 1e3:.1f} ms with keys and values gathered")
    assert gathered >= 5 * decoded


def _of_each_side(rank: int, total: int, new: int) -> dict[str, float]:
    """Seconds of a turn with either side moving, and with the one chosen by bytes; nothing is computed."""
    kernel = SleepingKernel(1, 0.0, 0.0)
    cp = as_on_gpus(ContextParallel(dist.group.WORLD, strategy=Strategy(kernel=kernel, ranks_per_node=2)))
    caches = {forward: _cached(cp, total - new, 1, forward=forward) for forward in ("q", "kv", "auto")}
    took: dict[str, list[float]] = {forward: [] for forward in caches}
    for _ in range(7):
        for forward, cache in caches.items():
            took[forward] += _turns(cache, total - new, new, (8, 1), 1)
    return {forward: min(times[3:]) for forward, times in took.items()}


@pytest.mark.parametrize(("side", "of_switch"), [("q", 0.75), ("kv", 1.35)])
def test_the_side_that_sends_less_is_faster_on_both_sides_of_the_switch(side: str, of_switch: float) -> None:
    """With 8 query heads and one of keys, of 64: at 12 % of new tokens among all."""
    total = 8192
    new = int(of_switch * pass_q_share(8, 1, 64, 64, torch.float32) * total) // 4 * 4
    with EmulatedCluster(2, 2, rate_mbit=RATE_MBIT) as cluster:
        for _ in range(4):  # a busy machine is late
            measured = cluster.run(_of_each_side, total, new)
            took = {forward: max(rank[forward] for rank in measured) for forward in ("q", "kv", "auto")}
            print(f"{new} new tokens: " + ", ".join(f"{name} {1e3 * each:.0f} ms" for name, each in took.items()))
            if took["auto"] <= 1.05 * min(took.values()):
                break
    assert took["auto"] <= 1.05 * min(took.values())
    assert min(("q", "kv"), key=took.__getitem__) == side
