"""Passes without their messages: the same tiles as in a call, nothing sent or noted, and whatever fails early."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import Tensor

from burst_plugin import Causal, ContextParallel, Strategy, Topology, VirtualRing, attention, burst_attention
from burst_plugin.kernels import Grads, How, Queries
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from burst_plugin.kernels.torch_flash import TorchFlashKernel
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.ring.warm_up import warm_up
from tests.support.fake_gpu import GPU
from tests.support.pretended_gpu import pretended_gpus
from tests.support.ranks import run_ranks, run_ranks_outcomes
from tests.support.reference import Problem, Result, errors, reference


class Noting(TorchCpuKernel):
    """Notes every tile, and whether it is worked on in a backward pass of autograd's."""

    def __init__(self) -> None:
        self.tiles: set[tuple[Any, ...]] = set()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        self._note("forward", q, k, how)
        return super().forward(q, k, v, how)

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        self._note("backward", queries.q, k, how)
        return super().backward(queries, k, v, how)

    def _note(self, direction: str, q: Tensor, k: Tensor, how: How) -> None:
        self.tiles.add((direction, torch._C._current_graph_task_id() >= 0, q.shape, k.shape, how.band))


@pytest.mark.parametrize(
    "options",
    [
        {"backward": "q"},
        {"backward": "kv", "parts": 2},
        {"forward": "q", "ulysses_degree": 2},
        {"mesh_degree": 2},
        {"schedule": "direct", "layout": "contiguous"},  # in which ranks receive that never send
    ],
    ids=str,
)
def test_every_tile_of_a_call_is_worked_on_and_nothing_else_happens(options: dict[str, Any]) -> None:
    kernel = Noting()
    ring = VirtualRing(Topology(2, 2), Strategy(kernel=kernel, **options))
    problem = Problem.draw(33, (4, 2))
    q, k, v = (x.requires_grad_() for x in problem[:3])
    shards = ring._sharded(Inputs(q, k, v), *[attention.Tokens(33)] * 2)
    for state, mine, plans in zip(ring.rank_states, shards, ring._known, strict=True):
        plan = make_plan(state, mine, Request(tokens=(attention.Tokens(33),) * 2, lse=True), plans)
        with torch.no_grad():
            warm_up(plan, mine)
        assert {which for which, _ in state.warmed_up} == {plan.forward}
        warm_up(plan, mine)
        assert {which for which, _ in state.warmed_up} == {plan.forward, plan.backward}
        for transport in (state.transport, state.ulysses_transport):
            assert not transport.sent_bytes
            assert not transport.pool.leased
        assert not state.expected_bytes
        assert (state.passes_digest, str(state.progress), state.is_broken) == (0, "before the first call", False)
        assert state.transport.pool.allocated_bytes > 0
    warmed_up, kernel.tiles = kernel.tiles, set()
    again = {(each[0], True, *each[2:]) for each in warmed_up}  # forward too, as where a layer is computed again
    assert again <= warmed_up
    out, _ = ring.attention(q, k, v)
    found = Result(out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout))
    assert kernel.tiles <= warmed_up
    assert max(errors(found, reference(problem, Causal())).values()) < 1e-5


def _warmed_up(rank: int, problem: Problem, options: dict[str, Any]) -> tuple[Result, list[Any], list[Any]]:
    """Return results of a call after a warm-up, and what was made by then, and by the end."""
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, **options)
    q, k, v = (cp.shard(x).requires_grad_() for x in problem[:3])
    cp.warm_up(*(torch.empty_like(x, requires_grad=True) for x in (q, k, v)))
    assert not any(sum(sent.values()) for sent in cp.traffic().values())
    there = [cp.created_groups, cp.allocated_bytes(), list(cp.plans.values())]
    made = [len(there[0]), there[1], len(there[2])]
    out = burst_attention(q, k, v, cp)
    grads = torch.autograd.grad(out, (q, k, v), cp.shard(problem.dout))
    assert cp.traffic() == cp.expected_traffic()
    assert list(cp.plans.values()) == there[2]
    found = Result(*(cp.unshard(x) for x in (out.detach(), *grads)))
    return found, made, [len(cp.created_groups), cp.allocated_bytes(), len(cp.plans)]


@pytest.mark.parametrize("options", [{"backward": "q"}, {"ulysses_degree": 2}, {"mesh_degree": 2}], ids=str)
def test_the_first_call_finds_communicators_buffers_and_its_plan(options: dict[str, Any]) -> None:
    problem = Problem.draw(32, (4, 2))
    for found, before, after in run_ranks(_warmed_up, 4, problem, options):
        assert before == after
        assert max(errors(found, reference(problem, Causal())).values()) < 1e-5


def _fails_on_one(rank: int) -> Tensor:
    cp = ContextParallel(dist.group.WORLD)
    x = torch.ones(1, 4, 2, 8)
    failing = mock.patch.object(TorchCpuKernel, "forward", side_effect=torch.OutOfMemoryError("no room"))
    with failing if rank == 1 else nullcontext(), pytest.raises(ValueError, match=r"rank 1: .*no room"):
        cp.warm_up(x, x, x)
    return burst_attention(x, x, x, cp)


def test_what_fails_on_one_rank_is_an_error_on_all_and_the_ring_goes_on() -> None:
    for outcome in run_ranks_outcomes(_fails_on_one, 2):
        assert outcome.error is None
        assert torch.equal(outcome.value, torch.ones(1, 4, 2, 8))


def _kinds_warmed_up_on_gpus(rank: int) -> list[int]:
    """Return how often this rank works on a tile, by pass of each call."""
    torch._dynamo.config.fake_tensor_cache_enabled = False  # which looks at devices as C++ sees them
    counts, noting, kernel = [], mock.Mock(side_effect=TorchFlashKernel.forward), TorchFlashKernel
    backward = mock.Mock(side_effect=TorchFlashKernel.backward)
    with pretended_gpus(Topology(1, 4)):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=4, kernel="torch_flash", layout="striped")
        x = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        y = torch.empty(1, 512, 2, 64, dtype=torch.bfloat16, device=GPU)
        with (
            mock.patch.object(kernel, "forward", lambda *args: noting(*args)),
            mock.patch.object(kernel, "backward", lambda *args: backward(*args)),
        ):
            for each in (x, x, y, y):
                noting.reset_mock()
                backward.reset_mock()
                out = burst_attention(each, each, each, cp)
                if each is x:
                    out.sum().backward()
                counts += [noting.call_count, backward.call_count]
    return counts


def test_the_first_passes_of_a_kind_on_gpus_are_warmed_up() -> None:
    (counts,) = run_ranks(_kinds_warmed_up_on_gpus, 1, init=False)
    assert counts == [8, 8, 4, 4, 8, 0, 4, 0]
