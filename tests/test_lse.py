"""The gradient of lse: of losses that depend on it, and of attention merged from parts.

That every option has it is drawn in `test_drawn_calls`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin import Causal, ContextParallel, Full, Strategy, Tokens, Topology, VirtualRing, burst_attention
from burst_plugin.compute import online_softmax
from burst_plugin.sequence.layout import LAYOUTS, positions
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import run_ranks
from tests.support.reference import Problem, reference, relative

LENGTH = 24
OTHERS = Problem.draw(LENGTH, (4, 2), dtype=torch.float64, seed=1)  # keys and values that queries attend to, too


def _problem() -> Problem:
    return Problem.draw(LENGTH, (4, 2), dtype=torch.float64)


def _merged(rank: int, degree: int) -> list[Tensor]:
    """Return the gradients of queries and of two sets of keys and values, whose attentions are merged by lse."""
    cp = ContextParallel(dist.group.WORLD, ulysses_degree=degree)
    problem = _problem()
    q, *rest, dout = (cp.shard(x) for x in (*problem[:3], *OTHERS[1:3], problem.dout) if x is not None)
    q, k, v, k2, v2 = (x.requires_grad_() for x in (q, *rest))
    out, lse = burst_attention(q, k, v, cp, mask=Full(), return_lse=True)
    other, other_lse = burst_attention(q, k2, v2, cp, mask=Full(), return_lse=True)
    share = torch.sigmoid(other_lse - lse).transpose(1, 2).unsqueeze(-1)
    grads = torch.autograd.grad(torch.lerp(out, other, share), (q, k, v, k2, v2), dout)
    return [cp.unshard(grad) for grad in grads]


@pytest.mark.parametrize("degree", [1, 2])
def test_two_attentions_merged_by_their_lse_have_the_gradients_of_one(degree: int) -> None:
    problem = _problem()
    k, v = (torch.cat(pair, 1) for pair in zip(problem[1:3], OTHERS[1:3], strict=True))
    truth = reference(problem._replace(k=k, v=v), Full())
    (dk, dk2), (dv, dv2) = truth.dk.chunk(2, 1), truth.dv.chunk(2, 1)
    for grads in run_ranks(_merged, 4, degree):
        for found, expected in zip(grads, (truth.dq, dk, dv, dk2, dv2), strict=True):
            assert relative(found, expected) < 1e-12


def _of_one_rank(rank: int, degree: int, keeps: bool) -> Tensor | None:
    """Return the gradient of the keys for a loss in which the lse of rank 0 counts, and the output of rank 1."""
    cp = ContextParallel(dist.group.WORLD, ulysses_degree=degree, keep_attention="all" if keeps else "none")
    problem = _problem()
    q, k, v = (cp.shard(x).requires_grad_() for x in problem[:3])

    def attend(*qkv: Tensor) -> tuple[Tensor, ...]:
        found = burst_attention(*qkv, cp, return_lse=True)
        assert isinstance(found, tuple)
        return found

    out, lse = checkpoint(attend, q, k, v, use_reentrant=False) if keeps else attend(q, k, v)
    (lse.sum() if rank == 0 else out.sum()).backward()
    assert k.grad is not None
    return cp.unshard(k.grad)


@pytest.mark.parametrize(("degree", "keeps"), [(1, False), (2, False), (1, True)])
def test_a_rank_may_use_only_one_of_out_and_lse(degree: int, keeps: bool) -> None:
    problem = _problem()
    of_rank_0 = torch.zeros(LENGTH, dtype=torch.bool)
    of_rank_0[positions(LAYOUTS["zigzag"].runs(0, 2, Tokens(LENGTH)))] = True
    dlse = of_rank_0.double().expand(2, 4, LENGTH)
    dout = (~of_rank_0).double().view(1, -1, 1, 1).expand_as(problem.q)
    truth = reference(problem._replace(dout=dout, dlse=dlse), Causal())
    for found in run_ranks(_of_one_rank, 2, degree, keeps):
        assert relative(found, truth.dk) < 1e-12


def test_an_lse_of_latents_has_a_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    q, c, shared, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((1, 16, 4, 6), (1, 16, 1, 8), (1, 16, 1, 2), (4 * 9, 8))
    )
    ring = VirtualRing(Topology(2, 2), Strategy(latents="send"))

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return out.sin().sum() + lse.sin().sum()

    found = torch.autograd.grad(loss(*ring.latent_attention(q, c, shared, weight=weight)), (q, c, shared, weight))
    up = (c.squeeze(2) @ weight.t()).unflatten(-1, (4, -1))
    k = torch.cat((up[..., :4], shared.expand(-1, -1, 4, -1)), -1)
    expected = torch.autograd.grad(loss(*ring.attention(q, k, up[..., 4:])), (q, c, shared, weight))
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-12


def test_float16_says_that_its_lse_has_no_gradient() -> None:
    q, k, v = (x.half().requires_grad_() for x in _problem()[:3])
    out, lse = VirtualRing(Topology(1, 2)).attention(q, k, v)
    with pytest.raises(ValueError, match=r"lse has no gradient in float16, .*bfloat16"):
        (out.sum() + lse.sum()).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_gradients_of_lse_stay_finite_and_leave_values_alone(dtype: torch.dtype) -> None:
    """As where attentions are merged of which one is next to nothing; with lse alone values have no gradient."""
    q, k, v = (x.to(dtype).requires_grad_() for x in _problem()[:3])
    ring = VirtualRing(Topology(1, 2))
    for factor in (1.0, 1e-10, 1e-20, 1e-30, 1e-38):
        _, lse = ring.attention(q, k, v)
        dq, dk, dv = torch.autograd.grad((lse * factor).sum(), (q, k, v))
        size = float(dq.float().norm())
        assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))
        assert size == pytest.approx(factor * 5.0, rel=1.0) or factor < 1e-30
        assert float(dv.float().abs().max()) <= 1e-9 * factor**0.5
    other = dq.new_zeros(()).float()
    for gap in (0.0, 40.0, 80.0):
        (one, lse), (two, lse2) = ring.attention(q, k, v), ring.attention(q, k + 1.0, v)
        share = torch.sigmoid(lse2 - lse - gap).transpose(1, 2).unsqueeze(-1)
        merged = torch.lerp(one.float(), two.float(), share)
        grads = torch.autograd.grad((merged * 1e-6).sum(), (q, k, v))
        assert all(bool(x.isfinite().all()) for x in grads)
        other = other + grads[0].float().norm()
    assert float(other) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_takes_hardly_more_memory_than_what_kernels_are_given(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Rows without a gradient of out, or of lse, are among others; what is worked on at once changes no number."""
    out, dout = torch.randn(2, 2, 512, 4, 16, dtype=torch.float64).to(dtype)
    lse, dlse = torch.randn(2, 2, 4, 512, dtype=torch.promote_types(dtype, torch.float32))
    dout[:, ::5] = 0
    dlse[..., ::3] = 0
    expected = online_softmax.with_lse_grad(out, dout, lse, dlse)
    monkeypatch.setattr(online_softmax, "NUMBERS_AT_ONCE", out.numel() // 64)
    with LiveBytes() as live:
        found = online_softmax.with_lse_grad(out, dout, lse, dlse)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0.0)
    returned = sum(x.nbytes for x in found)
    assert returned <= live.peak < 1.2 * returned


def test_rows_without_keys_pass_on_no_gradient() -> None:
    problem = _problem()
    q, k, v = (x.requires_grad_() for x in problem[:3])
    _, lse = VirtualRing(Topology(1, 2)).attention(q, k, v, selection=torch.full((2, LENGTH, 1), -1))
    grads: Any = torch.autograd.grad(lse.exp().sum(), (q, k, v), materialize_grads=True)
    assert all(bool((grad == 0).all()) for grad in grads)
