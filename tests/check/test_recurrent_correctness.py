"""Planted faults in layers with a state on the ring: the section "right" names function, result and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import burst_plugin.recurrent as public
from burst_plugin.check.findings import FAILED, NOT_SHOWN, OK, Finding
from burst_plugin.check.recurrent_correctness import WHAT, check_recurrent, recurrent_cases
from burst_plugin.check.world import World, joined
from burst_plugin.recurrent import layers
from burst_plugin.recurrent.heads import HeadPlan
from burst_plugin.recurrent.scan import Scan
from tests.support.ranks import run_ranks


def test_every_function_has_a_case() -> None:
    functions = {name for name, each in vars(public).items() if getattr(each, "__module__", "") == layers.__name__}
    assert {case.function.__name__ for case in recurrent_cases(4)} == functions


def test_one_rank_sends_no_states() -> None:
    (finding,) = check_recurrent(World(0, 1, torch.device("cpu"), dist.HashStore(), 10.0))
    assert (finding.verdict, finding.what) == (NOT_SHOWN, WHAT)


@contextmanager
def _lost_states() -> Iterator[None]:
    right = Scan._entries
    with mock.patch.object(Scan, "_entries", lambda self: torch.zeros_like(right(self))):
        yield


@contextmanager
def _lost_gradients() -> Iterator[None]:
    right = Scan.backward

    def wrong(self: Scan, *arguments: Any) -> Any:
        transitions, biases = yield from right(self, *arguments)
        return transitions, torch.zeros_like(biases)

    with mock.patch.object(Scan, "backward", wrong):
        yield


@contextmanager
def _other_heads() -> Iterator[None]:
    right = HeadPlan.to_tokens

    def wrong(self: HeadPlan, *arguments: Any) -> Any:
        return [x.flip(2) for x in (yield from right(self, *arguments))]

    with mock.patch.object(HeadPlan, "to_tokens", wrong):
        yield


def _found(rank: int, fault: Callable[[], Any] | None) -> list[Finding]:
    """What two ranks find, the second of which has a fault."""
    with joined((rank, 2, rank), 20.0) as world, fault() if rank and fault is not None else nullcontext():
        return list(check_recurrent(world))


def test_functions_compute_what_one_rank_would() -> None:
    ((finding,), _) = run_ranks(_found, 2, None)
    assert finding.verdict == OK, finding.text
    assert finding.text.startswith("9 functions as on one rank")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_lost_states, "out of gated_delta_rule, by state is off by"),
        (_lost_gradients, "dk of gated_delta_rule, by state is off by"),
        (_other_heads, "out of gated_delta_rule, by heads is off by"),
    ],
)
def test_a_fault_is_named_with_function_result_and_rank(fault: Callable[[], Any], said: str) -> None:
    ((finding,), _) = run_ranks(_found, 2, fault)
    assert finding.verdict == FAILED
    assert finding.text.startswith(said), finding.text
    assert "on rank 1" in finding.text
