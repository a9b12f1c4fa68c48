"""A whole ring in one process, each message a plain copy: on a GPU on side streams, beside the kernels."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import Causal, Strategy, Topology, VirtualRing
from burst_plugin.comm.copies import CopyNetwork
from tests.support.reference import Problem, Result, errors, reference

BOUND = 2e-2  # of bfloat16, whose products of probabilities GPUs round
TURNS = 20  # what is read too early may be there by chance
ON = [
    pytest.param("cpu"),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]


def attend(ring: VirtualRing, problem: Problem) -> Result:
    leaves = [x.detach().requires_grad_() for x in problem[:3]]
    out, _ = ring.attention(*leaves)
    return Result(out.detach(), *torch.autograd.grad(out, leaves, problem.dout))


@pytest.mark.parametrize("moving", ["q", "kv"])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 2), Topology(1, 8)], ids=str)
@pytest.mark.parametrize("device", ON)
def test_copies_beside_the_work_arrive_in_time(device: str, topology: Topology, moving: str) -> None:
    on_cpu = Problem.draw(512, (4, 2), 64, torch.bfloat16)
    truth = reference(on_cpu, Causal())
    problem = Problem(*(x.to(device) for x in on_cpu[:4]))
    network = CopyNetwork(topology.ranks, problem.q.device)
    ring = VirtualRing(topology, Strategy(backward=moving), network=network)
    for _ in range(1 if device == "cpu" else TURNS):
        found = Result(*(x.cpu() for x in attend(ring, problem)[:4]))
        for what, error in errors(found, truth).items():
            assert error < BOUND, what


@pytest.mark.parametrize("device", ON)
def test_copies_give_the_bits_that_the_hostile_network_gives(device: str) -> None:
    topology, strategy = Topology(2, 2), Strategy(deterministic=True)
    problem = Problem(*(x.to(device) for x in Problem.draw(512, (4, 2), 64, torch.bfloat16)[:4]))
    plain = VirtualRing(topology, strategy, network=CopyNetwork(topology.ranks, problem.q.device))
    hostile = VirtualRing(topology, strategy)
    for got, expected in zip(attend(plain, problem)[:4], attend(hostile, problem)[:4], strict=True):
        assert torch.equal(got, expected)
