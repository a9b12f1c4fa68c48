"""Small promises that no other test would miss: each was broken once on purpose, and found unguarded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin import (
    Causal,
    ContextParallel,
    Full,
    Link,
    Mask,
    Schedule,
    ScheduleError,
    Scores,
    Strategy,
    Topology,
    Traffic,
    Transfer,
    VirtualRing,
    burst_attention,
    context,
    flat_ring,
)
from burst_plugin.comm.torch_distributed import _reason
from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.kernels import TorchCpuKernel
from burst_plugin.ring import choices
from burst_plugin.sequence.regions import Region
from burst_plugin.strategy import choose_moving_side
from tests.support.ranks import last_lines, run_ranks
from tests.support.reference import Problem, reference, relative


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: replace(s, gather=(s.gather[0]._replace(dst=0), *s.gather[1:])), "impossible transfer"),
        (lambda s: replace(s, gather=(), reduce=(*s.gather, *s.reduce)), "impossible transfer"),
        (
            lambda s: replace(s, reduce=(*s.reduce, Transfer(Traffic.REDUCE, 0, 0, 1, Link.INTRA, 5, 6))),
            "ends incomplete at rank 1",
        ),
    ],
)
def test_validate_checks_ends_of_transfers(damage: Callable[[Schedule], Schedule], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        damage(flat_ring(Topology(2, 2))).validate()


def test_softmax_scale_reaches_the_backward_pass() -> None:
    cp = ContextParallel()
    q, k, v = (x[:1, :6, :, :3].clone().requires_grad_() for x in Problem.draw(6, (2, 1), dtype=torch.float64)[:3])
    assert torch.autograd.gradcheck(lambda *qkv: burst_attention(*qkv, cp, scores=Scores(scale=0.9)), (q, k, v))


def test_calls_with_other_masks_are_not_mixed_up() -> None:
    cp, problem = ContextParallel(), Problem.draw(8, (2, 2))
    for mask in (Causal(), Full(), Causal()):
        assert relative(burst_attention(*problem[:3], cp, mask=mask), reference(problem, mask).out) < 1e-6


def test_kernels_get_dense_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a sum is one number expanded."""
    seen, original = [], TorchCpuKernel.backward

    def backward(self: TorchCpuKernel, queries: Any, *rest: Any) -> Any:
        seen.append(queries.dout.stride())
        return original(self, queries, *rest)

    monkeypatch.setattr(TorchCpuKernel, "backward", backward)
    q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2))[:3])
    burst_attention(q, k, v, ContextParallel()).sum().backward()
    assert {strides[-1] for strides in seen} == {1}


def test_kernels_get_dense_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this rank, as those that arrive from others are: q, k, v here have their last dim outermost in memory."""
    seen = []
    for name in ("forward", "backward"):
        original = getattr(TorchCpuKernel, name)

        def noted(self: TorchCpuKernel, queries: Any, k: Any, v: Any, how: Any, original: Any = original) -> Any:
            q = queries if isinstance(queries, torch.Tensor) else queries.q
            seen.extend(x.stride(-1) for x in (q, k, v))
            return original(self, queries, k, v, how)

        monkeypatch.setattr(TorchCpuKernel, name, noted)
    problem = Problem.draw(8, (2, 2))
    q, k, v = (x.movedim(-1, 0).contiguous().movedim(0, -1).requires_grad_() for x in problem[:3])
    assert {x.stride(-1) for x in (q, k, v)} != {1}
    burst_attention(q, k, v, ContextParallel()).backward(problem.dout)
    assert seen == [1] * 6
    truth = reference(problem, Causal())
    assert max(relative(x.grad, y) for x, y in zip((q, k, v), truth[1:4], strict=True)) < 2e-6


def test_a_kernel_is_chosen_anew_where_pytorchs_switches_have_changed() -> None:
    cp, x = ContextParallel(), Problem.draw(8, (2, 2)).q
    with mock.patch.object(choices, "choose_kernel", wraps=choices.choose_kernel) as chosen:
        for library in (None, None, "FA3", None):
            with mock.patch.object(choices, "switches", return_value=(library, True)):
                burst_attention(x, x, x, cp)
    assert chosen.call_count == 2


def _mask_differs(rank: int) -> None:
    x = torch.zeros(1, 16, 4, 8)
    burst_attention(x, x, x, ContextParallel(dist.group.WORLD, ranks_per_node=2), mask=Full() if rank else Causal())


def test_ranks_that_pass_other_masks_are_told() -> None:
    assert all("rank 0: mask=Causal(); rank 1: mask=Full()" in line for line in last_lines(_mask_differs, 2))


def _hierarchy(rank: int) -> Topology:
    return ContextParallel(dist.group.WORLD, hierarchy=[3, 2]).topology


def test_hierarchy_is_innermost_first() -> None:
    assert run_ranks(_hierarchy, 6) == [Topology(2, 3)] * 6


def _detected(rank: int, nodes: str) -> tuple[Topology, list[str]]:
    context.node_id = lambda: nodes[rank]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cp = ContextParallel(dist.group.WORLD)
    return cp.topology, [str(w.message) for w in told if "not spread evenly" in str(w.message)]


def test_nodes_are_detected_and_uneven_ones_told_of() -> None:
    assert run_ranks(_detected, 4, "aabb") == [(Topology(2, 2), [])] * 4
    outcomes = run_ranks(_detected, 4, "abab")
    assert [topology for topology, _ in outcomes] == [Topology(1, 4)] * 4
    assert [len(told) for _, told in outcomes] == [1, 0, 0, 0]


def _reset(rank: int) -> tuple[Any, Any]:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    x = torch.zeros(1, 16, 4, 8)
    burst_attention(x, x, x, cp)
    assert cp.traffic()["intra"]["gather"] > 0
    cp.reset_traffic()
    return cp.traffic(), cp.expected_traffic()


def test_reset_traffic_resets_both_counts() -> None:
    nothing = {link: {"gather": 0, "reduce": 0} for link in ("intra", "inter")}
    assert run_ranks(_reset, 2) == [(nothing, nothing)] * 2


@dataclass(frozen=True)
class Nothing(Mask):
    """Nothing attends to anything."""

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        return ()


@pytest.mark.parametrize("forward", ["q", "kv"])
def test_what_attends_to_nothing_is_zero(forward: str) -> None:
    ring = VirtualRing(Topology(2, 2), Strategy(forward=forward, kernel="reference"))
    q, k, v = Problem.draw(16, (2, 2))[:3]
    out, lse = ring.attention(q, k, v, mask=Nothing())
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())


def test_a_backends_error_is_cut_to_what_happened() -> None:
    said = "[../pair.cc:553] Connection closed by peer. This is typically a crash\nat line 3"
    assert _reason(RuntimeError(said)) == "Connection closed by peer"


def test_keys_and_values_travel_if_bytes_are_equal() -> None:
    tie = Shapes(1, 2, 3, 1, 1, 1, 1, torch.float32)
    assert hop_bytes(tie, "forward", "q") == hop_bytes(tie, "forward", "kv")
    assert choose_moving_side(Strategy(forward="auto"), "forward", tie) == "kv"


def test_what_attends_to_nothing_is_zero_on_one_rank() -> None:
    ring = VirtualRing(Topology(1, 1), Strategy(forward="q", kernel="reference"))
    out, lse = ring.attention(*Problem.draw(16, (2, 2))[:3], mask=Nothing())
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())
