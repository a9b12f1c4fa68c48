"""Passes in which both sides move, each in half of the visits (DistFlashAttn's schedule), against float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from burst_plugin import Causal, Documents, Full, Mask, SlidingWindow, Strategy, Topology, VirtualRing
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.sequence.layout import Tokens
from burst_plugin.types import SIDES, Side
from tests.support.reference import Problem, Result, errors, reference

BALANCED = {"layout": "contiguous", "schedule": "direct", "forward": "both", "backward": "both"}


def run(ring: VirtualRing, problem: Problem, mask: Mask) -> Result:
    """Return out, dq, dk, dv; check that every rank sent what its schedules count."""
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = ring.attention(q, k, v, mask=mask)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    for rank in range(ring.network.ranks):
        assert ring.traffic(rank) == ring.expected_traffic(rank)
    return Result(out.detach(), *grads)


@pytest.mark.parametrize(
    ("topology", "mask", "options"),
    [
        (Topology(1, 2), Causal(), {}),
        (Topology(1, 4), Causal(), {}),
        (Topology(1, 5), Causal(), {"parts": 2}),
        (Topology(1, 8), Causal(), {}),
        (Topology(2, 4), Causal(), {}),
        (Topology(4, 2), Causal(), {"schedule": "two_level_ring"}),
        (Topology(1, 6), Full(), {"schedule": "flat_ring"}),
        (Topology(3, 2), Full(), {}),
        (Topology(1, 5), SlidingWindow(9), {"layout": "striped"}),
        (Topology(2, 3), Causal() & Documents((0, 7, 30, 48)), {"layout": "zigzag", "schedule": "auto"}),
        (Topology(1, 4), Causal(), {"forward": "kv"}),
        (Topology(1, 4), Causal(), {"backward": "q", "schedule": "tasp", "parts": 2}),
        (Topology(1, 8), Causal(), {"ulysses_degree": 2}),
    ],
    ids=str,
)
def test_it_is_exact(topology: Topology, mask: Mask, options: dict[str, Any]) -> None:
    problem = Problem.draw(48, (4, 2), dtype=torch.float64)
    ring = VirtualRing(topology, Strategy(**{**BALANCED, **options}))
    found = errors(run(ring, problem, mask), reference(problem, mask))
    assert max(found.values()) < 1e-13, found
