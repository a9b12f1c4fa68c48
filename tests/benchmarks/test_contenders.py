"""Contenders, judged by the float64 reference: a benchmark of wrong results is none."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from benchmarks.contenders import CONTENDERS, Case, Contender
from burst_plugin import Causal, Full
from tests.support.ranks import run_ranks
from tests.support.reference import Problem, Result, errors, reference

SEQ, DIM = 16, 16
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
HEADS = ((4, 4), (8, 2), (4, 1))
LARGEST = Case(2, 2, SEQ, 4, 4, DIM, torch.bfloat16, causal=True)
BY_NAME = {one.name: one for contender in CONTENDERS for one in contender.configurations(LARGEST)}


def _case(ranks: int, heads: tuple[int, int], dtype: torch.dtype, causal: bool) -> Case:
    nodes = ranks // 2
    return Case(nodes, ranks // nodes, SEQ, *heads, DIM, dtype, causal, batch=2)


def _cases(ranks: int) -> list[Case]:
    return [_case(ranks, *rest) for rest in product(HEADS, BOUNDS, (True, False))]


def _problem(case: Case) -> Problem:
    return Problem.draw(case.ranks * case.seq, (case.q_heads, case.kv_heads), case.head_dim, case.dtype)


def _results(rank: int, contender: Contender, cases: list[Case]) -> list[Result]:
    """Of all cases, by sessions that are all prepared first."""
    sessions = [contender.prepare(case, None) for case in cases]
    outs, inputs = [], []
    for case, session in zip(cases, sessions, strict=True):
        problem = _problem(case)
        q, k, v = (session.shard(x).requires_grad_() for x in problem[:3])
        outs.append(session.attend(q, k, v))
        inputs.append((q, k, v))
    found = []
    for case, session, out, (q, k, v) in zip(cases, sessions, outs, inputs, strict=True):
        assert out.dtype is case.dtype
        out.backward(session.shard(_problem(case).dout))
        grads = (x.grad for x in (q, k, v))
        found.append(Result(*(session.unshard(x) for x in (out, *grads))))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_contender_is_right_wherever_it_does_not_refuse(name: str, ranks: int) -> None:
    contender = BY_NAME[name]
    if contender.absent():
        pytest.skip(contender.absent())
    cases = [case for case in _cases(ranks) if contender.refuse(case) is None]
    if not cases:
        pytest.skip(contender.refuse(_case(ranks, HEADS[0], torch.bfloat16, True)))
    for results in run_ranks(_results, ranks, contender, cases):
        for case, result in zip(cases, results, strict=True):
            truth = reference(_problem(case), Causal() if case.causal else Full())
            wrong = {n: e for n, e in errors(result, truth).items() if not e < BOUNDS[case.dtype]}
            assert not wrong, (case, wrong)
