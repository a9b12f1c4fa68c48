"""What autograd and autocast expect of an operation, most of it on one rank without torch.distributed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from burst_plugin import (
    Causal,
    ContextParallel,
    Scores,
    Strategy,
    Topology,
    VirtualRing,
    burst_attention,
)
from tests.support.ranks import run_ranks
from tests.support.reference import Problem, reference, relative


@pytest.fixture
def cp() -> ContextParallel:
    return ContextParallel()


def test_gradients_pass_gradcheck(cp: ContextParallel) -> None:
    q, k, v = (x[:1, :6, :, :3].clone().requires_grad_() for x in Problem.draw(6, (2, 1), dtype=torch.float64)[:3])
    assert torch.autograd.gradcheck(lambda *qkv: burst_attention(*qkv, cp), (q, k, v))


def test_softmax_scale_reaches_the_backward_pass() -> None:
    cp = ContextParallel()
    q, k, v = (x[:1, :6, :, :3].clone().requires_grad_() for x in Problem.draw(6, (2, 1), dtype=torch.float64)[:3])
    assert torch.autograd.gradcheck(lambda *qkv: burst_attention(*qkv, cp, scores=Scores(scale=0.9)), (q, k, v))


def test_only_wanted_gradients_are_given(cp: ContextParallel) -> None:
    q, k, v = Problem.draw(8, (2, 2))[:3]
    k.requires_grad_()
    burst_attention(q, k, v, cp).sum().backward()
    assert k.grad is not None
    assert q.grad is None
    assert v.grad is None


def test_no_grad_saves_nothing_and_largest_scores_have_no_gradient(cp: ContextParallel) -> None:
    q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2))[:3])
    with torch.no_grad():
        assert not burst_attention(q, k, v, cp).requires_grad
    _, lse, largest = burst_attention(q, k, v, cp, return_lse=True, return_max_logits=True)
    assert lse.requires_grad
    assert not largest.requires_grad


def test_second_derivatives_are_refused(cp: ContextParallel) -> None:
    """Also where nothing would ask for them: a penalty on a gradient would be dropped without a word."""
    q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2))[:3])
    for loss in (burst_attention(q, k, v, cp).square().sum(), (burst_attention(q, k, v, cp) * 2.0).sum()):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(loss, q, create_graph=True)


def _batched(rank: int) -> list[torch.Tensor]:
    """Return gradients of calls on a ring before and after batches of gradients, which are refused."""
    cp, found = ContextParallel(dist.group.WORLD), []
    q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2), seed=rank)[:3])
    upstream = torch.ones(2, *q.shape)

    def vmapped(out: torch.Tensor) -> None:
        torch.func.vmap(lambda grad: torch.autograd.grad(out, q, grad, retain_graph=True)[0])(upstream)

    for ask in (
        lambda out: torch.autograd.grad(out, q, upstream, is_grads_batched=True, retain_graph=True),
        vmapped,
    ):
        out = burst_attention(q, k, v, cp)
        with pytest.raises(RuntimeError, match="burst attention computes one gradient at a time; leave out is_grads"):
            ask(out)
        found += [torch.autograd.grad(out, q, upstream[0])[0]]
    out = burst_attention(q, k, v, cp)
    return [*found, torch.autograd.grad(out, q, upstream[0])[0]]


def test_batches_of_gradients_are_refused_and_the_ring_stays_usable() -> None:
    for after_one, after_other, truth in run_ranks(_batched, 2):
        assert torch.equal(after_one, truth)
        assert torch.equal(after_other, truth)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(cp: ContextParallel, reentrant: bool) -> None:
    grads = []
    for recompute in (False, True):
        q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2))[:3])

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return burst_attention(*qkv, cp).square()

        out = checkpoint(attend, q, k, v, use_reentrant=reentrant) if recompute else attend(q, k, v)
        out.sum().backward()
        grads.append((q.grad, k.grad, v.grad))
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


def test_many_microbatches_may_await_their_backward_pass(cp: ContextParallel) -> None:
    problems = [Problem.draw(8, (2, 2), seed=seed) for seed in range(3)]
    outs = []
    for problem in problems:
        q, k, v = (x.requires_grad_() for x in problem[:3])
        outs.append(burst_attention(q, k, v, cp))
    for out, problem in reversed(list(zip(outs, problems, strict=True))):
        out.backward(problem.dout)
        truth = reference(problem, Causal())
        for x, grad in zip(problem[:3], truth[1:4], strict=True):
            assert relative(x.grad, grad) < 2e-6


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("kernel", ["torch_cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_does_not_reach_into_the_sums(dtype: torch.dtype, kernel: str, backward: str) -> None:
    problem = Problem.draw(64, (4, 2), dtype=dtype)
    results = []
    for enabled in (False, True):
        ring = VirtualRing(Topology(2, 2), Strategy(kernel=kernel, backward=backward))
        q, k, v = (x.clone().requires_grad_() for x in problem[:3])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, _ = ring.attention(q, k, v)
            results.append((out, *torch.autograd.grad(out, (q, k, v), problem.dout)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_unlike_types_under_autocast_are_told_what_to_write(cp: ContextParallel) -> None:
    q, k, v = Problem.draw(8, (2, 2))[:3]
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"q\.to\(v\.dtype\), also under"),
    ):
        burst_attention(q, k, v.bfloat16(), cp)


@pytest.mark.parametrize("forward", ["q", "kv"])
def test_the_output_owns_its_memory(forward: str) -> None:
    q, k, v = (x.requires_grad_() for x in Problem.draw(16, (2, 2))[:3])
    out = burst_attention(q, k, v, ContextParallel(strategy=Strategy(forward=forward)), return_lse=True)
    for tensor in out:
        assert tensor._base is None
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def _saved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """What a call keeps for its backward pass."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        burst_attention(q, k, v, ContextParallel())
    return saved


@pytest.mark.parametrize("rotated", [True, False])
def test_views_of_one_projection_do_not_keep_what_is_not_needed(rotated: bool) -> None:
    """Rotary embedding makes new queries and keys; the values are a view of all three still."""
    mixed = torch.randn(1, 16, 8, 24, requires_grad=True) * 2
    q, k, v = mixed.split(8, dim=3)
    q, k = (q * 2, k * 2) if rotated else (q, k)
    saved = _saved(q, k, v)
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    assert sum(held.values()) == sum(x.nbytes for x in saved)
    assert (mixed.untyped_storage().data_ptr() in held) != rotated, "nothing is copied that is needed whole"
