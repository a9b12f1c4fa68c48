"""Contenders, judged by the float64 reference: a benchmark of wrong results is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.contenders import CONTENDERS, PACKED, Case, Contender, Slept
from benchmarks.contenders.ring_flash_attn import RingFlashAttn
from benchmarks.contenders.torch_context_parallel import TorchContextParallel
from burst_plugin.types import DIRECTIONS
from tests.support.emulated_gpu import EmulatedDevice
from tests.support.ranks import RankError, run_ranks
from tests.support.reference import Problem, Result, errors, reference
from tests.support.speed import slowness

T = TypeVar("T")
SEQ, DIM = 16, 16
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
HEADS = ((4, 4), (8, 2), (4, 1), (6, 6))
SLEPT = Slept(forward_s=0.030, backward_s=0.075)
SLEPT_LONG = Slept(forward_s=0.060, backward_s=0.150)  # a tenth is well above the Python of the slowest peer


def _case(ranks: int, heads: tuple[int, int], dtype: torch.dtype, causal: bool) -> Case:
    nodes = ranks // 2
    return Case(nodes, ranks // nodes, SEQ, *heads, DIM, dtype, causal, batch=2)


def _configurations(ranks: int) -> list[Contender]:
    case = _case(ranks, HEADS[0], torch.bfloat16, True)
    return [one for contender in CONTENDERS for one in contender.configurations(case)]


@cache
def _absent(contender: Contender) -> str | None:
    return contender.absent()


def _here(contender: Contender) -> Contender:
    reason = _absent(contender)
    if reason is not None:
        pytest.skip(reason)
    return contender


TRIED = [(one, ranks) for ranks in (2, 4) for one in _configurations(ranks)]
NAMES = [f"{one.name}-{ranks}" for one, ranks in TRIED]


def _problem(case: Case) -> Problem:
    drawn = Problem.draw(case.ranks * case.seq, (case.q_heads, case.kv_heads), case.head_dim, case.dtype)
    return Problem(*(x[: case.batch] for x in drawn[:4]))


def _wrong(case: Case, result: Result) -> dict[str, float]:
    """The errors that are out of bounds."""
    found = errors(result, reference(_problem(case), case.mask))
    return {name: error for name, error in found.items() if not error < BOUNDS[case.dtype]}


def _results(rank: int, contender: Contender, cases: list[Case], slept: Slept | None = None) -> list[Result]:
    """Of all cases, by sessions that take turns; `slept` is for others that are prepared and do nothing."""
    sessions = [contender.prepare(case, None) for case in cases]
    if slept is not None:
        contender.prepare(cases[0], slept)
    outs, inputs = [], []
    for case, session in zip(cases, sessions, strict=True):
        q, k, v = (session.shard(x).requires_grad_() for x in _problem(case)[:3])
        outs.append(session.attend(q, k, v))
        inputs.append((q, k, v))
    found = []
    for case, session, out, (q, k, v) in zip(cases, sessions, outs, inputs, strict=True):
        assert (out.dtype, out.shape) == (case.dtype, q.shape)
        out.backward(session.shard(_problem(case).dout))
        grads = (x.grad for x in (q, k, v))
        found.append(Result(*(session.unshard(x) for x in (out, *grads))))
    return found


def _of_all_ranks(contender: Contender, ranks: int, cases: list[Case]) -> list[list[Result]]:
    """Once more if a rank of PyTorch's was killed: its ring now and then corrupts the heap over gloo (2.13)."""
    try:
        return run_ranks(_results, ranks, contender, cases, SLEPT)
    except RankError as error:
        if not isinstance(contender, TorchContextParallel) or "killed by signal" not in str(error):
            raise
        return run_ranks(_results, ranks, contender, cases, SLEPT)


@pytest.mark.parametrize(("contender", "ranks"), TRIED, ids=NAMES)
def test_a_contender_is_right_wherever_it_does_not_refuse(contender: Contender, ranks: int) -> None:
    every = [_case(ranks, *rest) for rest in product(HEADS, BOUNDS, (True, False))]
    cases = [case for case in every if _here(contender).refuse(case) is None]
    assert {case.causal for case in cases} == {True, False}
    for results in _of_all_ranks(contender, ranks, cases):
        for case, result in zip(cases, results, strict=True):
            assert not _wrong(case, result), case


def _packed_cases(ranks: int) -> list[Case]:
    """Documents as zigzag wants them, and of any lengths, the first of which spans ranks."""
    even, length = 2 * ranks, ranks * SEQ
    lengths = [(even, length - 3 * even, 2 * even), (length,), (length - 9, 2, 7)]
    return [
        replace(_case(ranks, heads, torch.bfloat16, True), documents=documents, batch=batch)
        for heads, documents, batch in product(HEADS, lengths, (1, 2))
    ]


TRIED_PACKED = [
    (one, ranks)
    for ranks in (2, 4)
    for contender in PACKED
    for one in contender.configurations(_packed_cases(ranks)[0])
]


PACKED_NAMES = [f"{one.name}-{ranks}" for one, ranks in TRIED_PACKED]


@pytest.mark.parametrize(("contender", "ranks"), TRIED_PACKED, ids=PACKED_NAMES)
def test_a_contender_keeps_packed_documents_apart(contender: Contender, ranks: int) -> None:
    cases = [case for case in _packed_cases(ranks) if _here(contender).refuse(case) is None]
    for results in _of_all_ranks(contender, ranks, cases):
        for case, result in zip(cases, results, strict=True):
            assert not _wrong(case, result), case


def test_peers_that_know_no_packed_documents_refuse_them() -> None:
    case = _packed_cases(2)[0]
    refused = {one.name for one in PACKED if "packed documents" in (one.refuse(case) or "")}
    assert refused == {"USP", "PyTorch context_parallel"}


def test_functions_for_packed_documents_are_for_nothing_else() -> None:
    packed, whole = _packed_cases(2)[0], _case(2, HEADS[0], torch.bfloat16, True)
    for one in {*CONTENDERS, *PACKED} - {*CONTENDERS} & {*PACKED}:
        if isinstance(one, RingFlashAttn):
            assert [one.refuse(case) is None for case in (packed, whole)] == [bool(one.packed), not one.packed]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["ring-flash-attn", "USP, Ulysses of 1"])
def test_rings_are_refused_in_float32_because_their_gradients_are_wrong(name: str, causal: bool) -> None:
    contender = _here(next(one for one in _configurations(2) if one.name == name))
    case = _case(2, HEADS[0], torch.float32, causal)
    assert "gradients are wrong in float32" in (contender.refuse(case) or "")
    wrong = _wrong(case, run_ranks(_results, 2, contender, [case])[0][0])
    assert "dq" in wrong  # dk and dv are overwritten while they are sent: whether they are wrong depends on the time
    assert "out" not in wrong


@pytest.mark.parametrize(
    ("name", "heads", "why"),
    [
        ("Ulysses", (6, 2), "not divisible"),
        ("Ulysses", (12, 3), "not divisible"),
        ("USP, Ulysses of 4", (8, 2), "shape"),
    ],
)
def test_ulysses_is_refused_for_heads_that_do_not_divide_because_it_fails(
    name: str, heads: tuple[int, int], why: str
) -> None:
    contender = _here(next(one for one in _configurations(4) if one.name == name))
    case = _case(4, heads, torch.bfloat16, True)
    assert "divide" in (contender.refuse(case) or "")
    with pytest.raises(RankError, match=rf"Error: .*{why}"):
        run_ranks(_results, 4, contender, [case])


class _Pass(NamedTuple):
    """Seconds of one pass: by the clock, in kernels, and of the processor."""

    took_s: float
    kernels_s: float
    own_s: float


def _passes(rank: int, contender: Contender, case: Case) -> dict[str, list[_Pass]]:
    """Some of either direction."""
    session, kernels_s = contender.prepare(case, SLEPT_LONG), 0.0
    finish = EmulatedDevice.finish

    def noted(device: EmulatedDevice, seconds: float) -> None:
        nonlocal kernels_s
        kernels_s += seconds
        finish(device, seconds)

    def timed(work: Callable[[], T]) -> tuple[_Pass, T]:
        nonlocal kernels_s
        kernels_s = 0.0
        time.sleep(1e-4)  # a wait, after which no kernel is early by what the pass before was late
        start_s, before_s = time.perf_counter(), time.thread_time()
        result = work()
        return _Pass(time.perf_counter() - start_s, kernels_s, time.thread_time() - before_s), result

    q, k, v = (session.shard(x).requires_grad_() for x in _problem(case)[:3])
    found: dict[str, list[_Pass]] = {direction: [] for direction in DIRECTIONS}
    with mock.patch.object(EmulatedDevice, "finish", noted):
        for _ in range(6):
            dist.barrier()
            forward, out = timed(partial(session.attend, q, k, v))
            dist.barrier()
            backward, _ = timed(partial(out.backward, torch.zeros_like(out)))
            for direction, one in zip(DIRECTIONS, (forward, backward), strict=True):
                found[direction].append(one)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))
    return {direction: passes[2:] for direction, passes in found.items()}  # what comes first connects, and compiles


@pytest.mark.parametrize("contender", _configurations(2), ids=lambda one: one.name)
def test_a_slept_session_takes_the_time_of_its_visits(contender: Contender) -> None:
    """Its kernels sleep for just that long, and what it does besides takes a tenth of it at most.

    The clock only says that nothing is early: how late a process wakes up and is heard is the machine's affair, as is
    how fast it runs Python.
    """
    case, least_s = _case(2, HEADS[0], torch.bfloat16, True), dict.fromkeys(DIRECTIONS, float("inf"))
    visits = case.ranks / 2  # a causal one is half a full one
    due_s = {"forward": visits * SLEPT_LONG.forward_s, "backward": visits * SLEPT_LONG.backward_s}
    for _ in range(8):
        for passes in run_ranks(_passes, 2, _here(contender), case):
            for direction, each in passes.items():
                assert all(one.took_s >= due_s[direction] for one in each)
                assert all(one.kernels_s == pytest.approx(due_s[direction]) for one in each)
                least_s[direction] = min(least_s[direction], *(one.own_s for one in each))
        if all(least_s[direction] <= 0.1 * due_s[direction] * min(slowness(), 4) for direction in DIRECTIONS):
            return
    pytest.fail(f"it took {least_s} s of the processor beside {due_s} s of sleep")
