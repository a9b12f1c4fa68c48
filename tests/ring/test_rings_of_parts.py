"""Attention whose parts go around different rings (`tasp`), in one process, against float64."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import Causal, Documents, Full, Mask, SlidingWindow, Strategy, Topology, VirtualRing
from tests.support.reference import Problem, Result, errors, reference


def run(topology: Topology, strategy: Strategy, problem: Problem, mask: Mask) -> tuple[Result, int]:
    """Return out, dq, dk, dv, and the bytes that all ranks sent, which are those of the schedule."""
    ring = VirtualRing(topology, strategy)
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = ring.attention(q, k, v, mask=mask)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    sent = 0
    for rank in range(topology.ranks):
        traffic = ring.traffic(rank)
        assert traffic == ring.expected_traffic(rank)
        sent += sum(sum(kinds.values()) for kinds in traffic.values())
    return Result(out.detach(), *grads), sent


@pytest.mark.parametrize(
    ("topology", "parts", "layout", "mask", "moving"),
    [
        (Topology(1, 8), 7, "zigzag", Causal(), "q"),
        (Topology(1, 4), 7, "striped", Causal(), "kv"),
        (Topology(1, 5), (1, 7), "contiguous", Full(), "kv"),
        (Topology(2, 4), 7, "zigzag", Causal(), "kv"),
        (Topology(1, 7), 7, "contiguous", SlidingWindow(5), "q"),
        (Topology(2, 4), 7, "contiguous", Causal() & Documents((0, 9, 30, 48)), "q"),
        (Topology(3, 3), 7, "contiguous", Causal(), "kv"),
    ],
    ids=str,
)
def test_it_is_exact(topology: Topology, parts: int | tuple[int, int], layout: str, mask: Mask, moving: str) -> None:
    problem = Problem.draw(48, (14, 7), dtype=torch.float64)
    strategy = Strategy(schedule="tasp", parts=parts, layout=layout, forward=moving, backward=moving)
    found, _ = run(topology, strategy, problem, mask)
    worst = errors(found, reference(problem, mask))
    assert max(worst.values()) < 1e-13, worst


def test_it_sends_as_many_bytes_as_a_flat_ring() -> None:
    problem, topology = Problem.draw(24, (3, 3), dtype=torch.float64), Topology(1, 4)
    sent = [run(topology, Strategy(schedule=name, parts=3), problem, Full())[1] for name in ("tasp", "flat_ring")]
    assert sent[0] == sent[1]


def test_with_ulysses_groups_rings_are_those_of_the_groups() -> None:
    problem = Problem.draw(48, (12, 6), dtype=torch.float64)
    strategy = Strategy(schedule="tasp", parts=3, ulysses_degree=2)
    found, _ = run(Topology(1, 10), strategy, problem, Causal())
    assert max(errors(found, reference(problem, Causal())).values()) < 1e-13
