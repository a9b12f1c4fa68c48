"""A whole ring in one process, each message a plain copy: on a GPU on side streams, beside the kernels.

Copies that sleep show on a GPU what does not wait for them. Which accesses have an order at all is in test_races.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from burst_plugin import Causal, Strategy, Topology, VirtualRing
from burst_plugin.comm.copies import CopyNetwork
from tests.support.late_copies import LateNetwork
from tests.support.reference import Problem, Result, errors, reference

BOUND = 2e-2  # of bfloat16, whose products of probabilities GPUs round
TURNS = 20  # what is read too early may be there by chance
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
ON = [pytest.param("cpu"), pytest.param("cuda", marks=GPU)]


def attend(ring: VirtualRing, problem: Problem) -> Result:
    leaves = [x.detach().requires_grad_() for x in problem[:3]]
    out, _ = ring.attention(*leaves)
    return Result(out.detach(), *torch.autograd.grad(out, leaves, problem.dout))


def turns(
    device: str, network: type[CopyNetwork], topology: Topology, strategy: Strategy
) -> Iterator[dict[str, float]]:
    """Yield the errors of both passes, turn after turn on the same ring."""
    on_cpu = Problem.draw(512, (4, 2), 64, torch.bfloat16)
    truth = reference(on_cpu, Causal())
    problem = Problem(*(x.to(device) for x in on_cpu[:4]))
    ring = VirtualRing(topology, strategy, network=network(topology.ranks, problem.q.device))
    for _ in range(1 if device == "cpu" else TURNS):
        yield errors(Result(*(x.cpu() for x in attend(ring, problem)[:4])), truth)


@pytest.mark.parametrize("moving", ["q", "kv"])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 2), Topology(1, 8)], ids=str)
@pytest.mark.parametrize("network", [CopyNetwork, LateNetwork])
@pytest.mark.parametrize("device", ON)
def test_copies_beside_the_work_arrive_in_time(
    device: str, network: type[CopyNetwork], topology: Topology, moving: str
) -> None:
    for found in turns(device, network, topology, Strategy(backward=moving)):
        for what, error in found.items():
            assert error < BOUND, what


@pytest.mark.parametrize("options", [{"parts": 2}, {"ulysses_degree": 2}, {"schedule": "direct"}], ids=str)
@pytest.mark.parametrize("device", ON)
def test_late_copies_arrive_in_time_whatever_is_sent(device: str, options: dict[str, Any]) -> None:
    for found in turns(device, LateNetwork, Topology(2, 2), Strategy(**options)):
        for what, error in found.items():
            assert error < BOUND, what


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_late_copies_that_are_not_waited_for_show(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyNetwork, "collect", lambda network, parcels: None)
    found = turns(device, LateNetwork, Topology(1, 4), Strategy(backward="kv"))
    assert not all(error < BOUND for each in found for error in each.values())


@pytest.mark.parametrize("device", ON)
def test_copies_give_the_bits_that_the_hostile_network_gives(device: str) -> None:
    topology, strategy = Topology(2, 2), Strategy(deterministic=True)
    problem = Problem(*(x.to(device) for x in Problem.draw(512, (4, 2), 64, torch.bfloat16)[:4]))
    plain = VirtualRing(topology, strategy, network=CopyNetwork(topology.ranks, problem.q.device))
    hostile = VirtualRing(topology, strategy)
    for got, expected in zip(attend(plain, problem)[:4], attend(hostile, problem)[:4], strict=True):
        assert torch.equal(got, expected)
