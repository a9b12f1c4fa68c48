"""The ring on an emulated cluster: bytes at the network interface, and communication hidden behind compute."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import ContextParallel, Strategy, burst_attention
from tests.support.emulated_gpu import SleepingKernel
from tests.support.netns import EmulatedCluster, interface_bytes
from tests.support.ranks import as_on_gpus

pytestmark = [
    pytest.mark.netns,
    pytest.mark.alone,
    pytest.mark.skipif(
        EmulatedCluster.unavailable() is not None, reason=f"no namespaces: {EmulatedCluster.unavailable()}"
    ),
]

RATE_MBIT = 200.0
TOKENS = 1024
BLOCK_BYTES = 2 << 20  # keys and values of 1024 tokens, 4 heads of 64, float32
FORWARD_S, BACKWARD_S = 0.080, 0.200  # per visit, half of one without a mask


def _inputs(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.zeros(1, tokens, 4, 64, requires_grad=True) for _ in range(3))
    return q, k, v


def _interface(rank: int, strategy: Strategy) -> tuple[int, int]:
    """(bytes at the nic, bytes that `traffic` says) of one training step."""
    cp = ContextParallel(dist.group.WORLD, strategy=strategy)
    q, k, v = _inputs()
    burst_attention(q, k, v, cp).sum().backward()  # opens all connections
    cp.reset_traffic()
    dist.barrier()
    _, before = interface_bytes()
    dist.barrier()
    burst_attention(q, k, v, cp).sum().backward()
    dist.barrier()
    _, after = interface_bytes()
    inter = cp.traffic()["inter"]
    return after - before, inter["gather"] + inter["reduce"]


@pytest.mark.parametrize("backward", ["q", "kv"])
def test_bytes_at_the_interface_are_those_of_the_schedule(backward: str) -> None:
    blocks = {"kv": 3 * BLOCK_BYTES, "q": BLOCK_BYTES + TOKENS * 4 * (2 * 64 + 2) * 4 + TOKENS * 4 * 64 * 4}[backward]
    blocks += 3 * 16  # labels
    with EmulatedCluster(2, 2) as cluster:

        def carried() -> bool:
            measured = cluster.run(_interface, Strategy(ranks_per_node=2, backward=backward))
            assert all(counted == blocks <= at_interface for at_interface, counted in measured)
            return all(at_interface <= 1.05 * blocks + 65536 for at_interface, _ in measured)

        assert any(carried() for _ in range(3)), "TCP may send a segment again, but not each time"


def _durations(rank: int, backward: bool) -> list[float]:
    """Seconds of a pass, some times over."""
    kernel = SleepingKernel(4 * TOKENS**2, 2 * FORWARD_S, 2 * BACKWARD_S)  # pairs of a visit without a mask
    cp = as_on_gpus(ContextParallel(dist.group.WORLD, strategy=Strategy(ranks_per_node=2, kernel=kernel)))
    took_s = []
    for tokens in (*[TOKENS // 16] * 4, *[TOKENS] * 3):  # ranks compare some of the first four, which are short
        q, k, v = _inputs(tokens)
        dist.barrier()
        start = time.perf_counter()
        out = burst_attention(q, k, v, cp)
        if backward:
            out.backward(torch.zeros_like(out))
        took_s.append(time.perf_counter() - start)
    return took_s[4:]


def _within(bound: float, ratio: Callable[[], float]) -> None:
    """A busy machine is late, and never early: of eight tries one has to be within the bound."""
    tried: list[float] = []
    while len(tried) < 8:
        tried.append(ratio())
        if tried[-1] <= bound:
            return
    pytest.fail(f"time over max(compute, communication) was {tried}, expected one of at most {bound}")


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("what", ["forward", "forward and backward"])
def test_communication_hides_behind_compute(nodes: int, what: str) -> None:
    """Two levels, 2 ranks per node: a block takes 84 ms on the wire, an inner ring has 160 or 400 ms of work."""
    backward = "backward" in what
    compute_s = 2 * nodes * (FORWARD_S + BACKWARD_S * backward)
    blocks = (nodes - 1) * (2.52 if backward else 1.0)  # queries travel back: 1.02 blocks out, 0.5 home
    communication_s = blocks * BLOCK_BYTES * 8 / (RATE_MBIT * 1e6)
    assert communication_s < compute_s
    with EmulatedCluster(nodes, 2, rate_mbit=RATE_MBIT) as cluster:

        def ratio() -> float:
            measured = cluster.run(_durations, backward)
            took_s = min(max(times) for times in zip(*measured, strict=True))  # the slowest rank, at its best
            return took_s / max(compute_s, communication_s)

        _within(1.15, ratio)
