"""Masks, uneven lengths and by-need schedules over real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Mask,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    burst_attention,
    key_padding,
)
from tests.support.exactness import DOCUMENTS, LENGTH, MASKS, masked_errors
from tests.support.ranks import run_ranks, run_ranks_outcomes
from tests.support.reference import Problem, Result, reference


def _masked(rank: int, *case: Any) -> tuple[dict[str, float], bool, str]:
    return masked_errors(*case)


@pytest.mark.parametrize(("mask", "tokens", "schedule"), MASKS, ids=str)
def test_exact_over_processes(mask: Mask, tokens: Tokens | None, schedule: str) -> None:
    strategy = Strategy(ranks_per_node=2, layout="auto" if tokens is None else "zigzag")
    problem = Problem.draw(LENGTH, (4, 2)).with_sink()
    for found, is_counted, ran in run_ranks(_masked, 4, strategy, mask, tokens, problem, reference(problem, mask)):
        assert max(found.values()) < 2e-6, found
        assert is_counted
        assert ran == schedule


def _few_tokens(rank: int, length: int) -> float:
    """Fewer tokens than ranks."""
    problem, tokens = Problem.draw(length, (2, 1)), Tokens(length)
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    q, k, v = (cp.shard(x, tokens=tokens).requires_grad_() for x in problem[:3])
    out = burst_attention(q, k, v, cp, tokens=tokens)
    grads = torch.autograd.grad(out, (q, k, v), cp.shard(problem.dout, tokens=tokens))
    whole = Result(*(cp.unshard(x.detach(), tokens=tokens) for x in (out, *grads)))
    truth = reference(problem, Causal())
    return max(float((x - y).abs().max()) for x, y in zip(whole[:4], truth[:4], strict=True))


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_token_per_rank_and_none(length: int) -> None:
    assert max(run_ranks(_few_tokens, 4, length)) < 1e-6


def _wrong(rank: int, kind: str) -> None:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=1)
    x = torch.zeros(2, 8, 2, 4)
    calls: dict[str, dict[str, Any]] = {
        "cu_seqlens": {"mask": Causal() & Documents((0, 5, 12))},
        "rows": {"mask": key_padding(torch.ones(3, 16, dtype=torch.bool))},
        "tokens": {"tokens": Tokens(17)},
        "kernel": {"scores": Scores(softcap=3.0)},
        "slopes": {"scores": Scores(alibi_slopes=(1.0,))},
        "sink": {"sink": torch.zeros(3)},
        "bias": {"bias": torch.zeros(1, 1, 8, 8)},
        "bias moving": {"bias": torch.zeros(1, 1, 8, 16)},
        "another mask": {"mask": SlidingWindow(4 + rank)},
        "only one has a sink": {"sink": torch.zeros(2) if rank else None},
    }
    if kind == "kernel":
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=1, kernel="torch_cpu")
    if kind == "bias moving":
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=1, backward="q")
    burst_attention(x, x, x, cp, **calls[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cu_seqlens", "ends at 12, but the sequence has 16 tokens over all ranks; cu_seqlens are global"),
        ("rows", "the mask is for 3 batch rows, but q, k, v have 2"),
        ("tokens", "cut tensors with ContextParallel.shard, and pass the same tokens= to it and here"),
        ("kernel", "kernel='torch_cpu' cannot do this attention (it lacks: softcap); these can: ['reference']"),
        ("slopes", "got 1 alibi_slopes for 2 query heads"),
        ("sink", "sink must be floating point [2], one logit per query head, got torch.float32 [3]"),
        ("bias", "here [2, 2, 8, 16], got torch.float32 [1, 1, 8, 8]"),
        ("bias moving", "backward='q' cannot be combined with a bias"),
        ("another mask", "rank 0: mask=SlidingWindow(left=4, right=0); rank 1: mask=SlidingWindow(left=5, right=0)"),
        ("only one has a sink", "rank 0: with=(); rank 1: with=('sink',)"),
    ],
)
def test_what_does_not_fit_is_one_error_on_every_rank(kind: str, message: str) -> None:
    for outcome in run_ranks_outcomes(_wrong, 2, kind):
        assert outcome.error is not None
        assert message in outcome.error.replace("\n", " ")


def _max_logits(rank: int, forward: str) -> torch.Tensor:
    problem = Problem.draw(16, (4, 2))
    cp = ContextParallel(dist.group.WORLD, strategy=Strategy(forward=forward, ranks_per_node=2))
    q, k, v = (cp.shard(x) for x in problem[:3])
    found = burst_attention(
        q.requires_grad_(), k, v, cp, scores=Scores(scale=0.5), return_lse=True, return_max_logits=True
    )
    assert isinstance(found, tuple)
    out, _, largest = found
    assert out.requires_grad
    assert not largest.requires_grad
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


@pytest.mark.parametrize("forward", ["q", "kv", "both"])
def test_the_largest_score_of_every_head(forward: str) -> None:
    q, k = Problem.draw(16, (4, 2))[:2]
    scores = torch.einsum("bihd,bjhd->hbij", q, k.repeat_interleave(2, 2)) * 0.5
    expected = scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -torch.inf).amax((1, 2, 3))
    for largest in run_ranks(_max_logits, 4, forward):
        torch.testing.assert_close(largest, expected)


def _twice(rank: int) -> bool:
    """Two training steps with the same inputs."""
    problem, mask = Problem.draw(LENGTH, (4, 2)), Causal() & Documents(DOCUMENTS)
    cp = ContextParallel(dist.group.WORLD, strategy=Strategy(deterministic=True, ranks_per_node=2))
    tokens, results = Tokens(LENGTH), []
    for _ in range(2):
        q, k, v = (cp.shard(x, tokens=tokens).requires_grad_() for x in problem[:3])
        out = burst_attention(q, k, v, cp, mask=mask, tokens=tokens)
        results.append((out, *torch.autograd.grad(out, (q, k, v), cp.shard(problem.dout, tokens=tokens))))
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_two_runs_give_the_same_bits() -> None:
    assert run_ranks(_twice, 4) == [True] * 4
