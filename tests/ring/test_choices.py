"""Kernels: what one is asked for, when another is chosen, and the memory layout of what it is handed."""

from __future__ import annotations

import warnings
from copy import copy
from typing import Any
from unittest import mock

import pytest
import torch

from burst_plugin import (
    Causal,
    ContextParallel,
    Full,
    Scores,
    SlidingWindow,
    Strategy,
    Topology,
    VirtualRing,
    burst_attention,
)
from burst_plugin.compute.shapes import Shapes
from burst_plugin.kernels import FEATURES, KERNELS, Case, Kernel, TorchCpuKernel
from burst_plugin.ring import choices
from burst_plugin.ring.choices import features_of
from burst_plugin.ring.plan import Extras
from tests.support.reference import Problem, Result, errors, reference, relative

SHAPES = Shapes(2, 16, 16, 4, 2, 8, 8, torch.float32)
SLOPES = (0.5, 0.25, 0.1, 0.0)


def test_lengths_that_vary_bring_tiles_of_new_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For which a kernel that plans ahead would make plan after plan."""
    asked: list[bool] = []

    def choose(name: str, case: Case) -> Kernel:
        asked.append(case.new_tiles)
        return KERNELS["reference"]

    monkeypatch.setattr("burst_plugin.ring.choices.choose_kernel", choose)
    ring = VirtualRing(Topology(1, 1))
    for length in [*range(1, 9), *range(1, 12)]:
        ring.attention(*(torch.zeros(1, length, 1, 4) for _ in range(3)))
    assert asked == [False] * 8 + [True] * 3
    ring.attention(*(torch.zeros(1, 12, 1, 4) for _ in range(3)))
    assert asked[-1]


def test_everything_that_a_kernel_may_lack_is_asked_of_it() -> None:
    everything = Scores(softcap=1.0, alibi_slopes=SLOPES, dropout=0.1, seed=0)
    extras = Extras(bias=True, selection=True)
    found = features_of(SHAPES._replace(v_dim=4), everything, True, extras)
    assert found == set(FEATURES) - {"windows", "varlen"}
    assert features_of(SHAPES, Scores(), False, Extras(sink=True)) == frozenset()


def test_asking_for_determinism_later_is_heard(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    x = Problem.draw(8, (2, 2)).q
    kernel = replace_features(KERNELS["torch_cpu"], KERNELS["torch_cpu"].features - {"deterministic"})
    cp = ContextParallel(kernel=kernel)
    burst_attention(x, x, x, cp)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(ValueError, match="deterministic"):
        burst_attention(x, x, x, cp)


@pytest.mark.parametrize(
    "scores", [Scores(alibi_slopes=SLOPES), Scores(dropout=0.3, seed=4)], ids=["alibi", "dropout"]
)
def test_kernels_without_windows_get_pieces_whose_positions_they_know(scores: Scores) -> None:
    problem, mask = Problem.draw(32, (4, 2)), SlidingWindow(2)
    kernel = replace_features(KERNELS["reference"], KERNELS["reference"].features - {"windows"})
    inputs = [x.clone().requires_grad_() for x in problem[:3]]
    out, _ = VirtualRing(Topology(2, 2), Strategy(kernel=kernel)).attention(*inputs, mask=mask, scores=scores)
    grads = torch.autograd.grad(out, inputs, problem.dout)
    found = errors(Result(out.detach(), *grads), reference(problem, mask, scores))
    assert max(found.values()) < 2e-6, found


def replace_features(kernel: Kernel, features: frozenset[str]) -> Kernel:
    """A kernel that is said to have these features only."""
    found = copy(kernel)
    found.features, found.name = features, "less"
    return found


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


def test_tensors_with_heads_first_warn() -> None:
    q, k = torch.zeros(1, 4, 256, 8), torch.zeros(1, 2, 256, 8)
    ring = VirtualRing(Topology(nodes=1, ranks_per_node=2))
    with pytest.warns(
        UserWarning, match=r"q has 256 heads of 2 tokens, expected \[B, S_local, H, D\]: if heads come"
    ):
        ring.attention(q, k, k, mask=Full())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = q.transpose(1, 2)
        ring.attention(x, x, x, mask=Full())
