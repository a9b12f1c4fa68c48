"""Ranks that are no longer at the same place in the training are told so, with both places, before a wrong number."""

from __future__ import annotations

import functools
import logging
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import ContextParallel, RingError, burst_attention
from burst_plugin.comm import failure_watch as watch
from tests.support.ranks import as_on_gpus, run_ranks, run_ranks_outcomes

STEPS, LAYERS, AT_FAULT = 4, 3, 3
FAULTS = ("step", "call", "doubled call", "backward")


def _x(step: int, layer: int) -> Tensor:
    return torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(10 * step + layer)).requires_grad_()


def _steps(cp: ContextParallel, done: dict[tuple[int, int], Tensor], fault: str, at: int) -> None:
    """Train; this rank has a fault in step `at`. What attention gave is noted in `done`."""
    for step in range(STEPS):
        here = fault if step == at else ""
        if here == "step":
            continue
        cp.step(step)
        outs = []
        for layer in range(LAYERS):
            if here == "call" and layer == 1:
                continue
            for _ in range(2 if here == "doubled call" and layer == 1 else 1):
                x = _x(step, layer)
                outs.append(burst_attention(x, x, x, cp, tag=("layer", layer)))
                done[step, layer] = outs[-1].detach()
        if here != "backward":
            torch.stack(outs).sum().backward()


def _out_of_step(rank: int) -> list[tuple[str, float, bool]]:
    """Of every fault in every step: what is said, after how many seconds, and whether all outputs were right."""
    truth: dict[tuple[int, int], Tensor] = {}
    _steps(ContextParallel(dist.group.WORLD), truth, "", 0)
    found = []
    for fault in FAULTS:
        for at in range(STEPS - 1):
            done: dict[tuple[int, int], Tensor] = {}
            cp, start, said = ContextParallel(dist.group.WORLD), time.monotonic(), "nothing"
            try:
                _steps(cp, done, fault if rank == AT_FAULT else "", at)
            except ValueError as error:
                said = str(error)
            right = all(torch.equal(out, truth[key]) for key, out in done.items())
            found.append((said, time.monotonic() - start, right))
    return found


def test_a_rank_that_is_out_of_step_is_named_with_both_places_before_a_wrong_number() -> None:
    expected = [
        *((f"step {n + 1}, layer, 0", f"step {n}, layer, 0", "forward", "forward") for n in range(3)),
        *((f"step {n}, layer, 2", f"step {n}, layer, 1", "forward", "forward") for n in range(3)),
        *((f"step {n}, layer, 1", f"step {n}, layer, 2", "forward", "forward") for n in range(3)),
        *((f"step {n + 1}, layer, 0", f"step {n}, layer, 2", "forward", "backward") for n in range(3)),
    ]
    for of_rank in run_ranks(_out_of_step, 4):
        for (said, seconds, right), (its, theirs, its_pass, their_pass) in zip(of_rank, expected, strict=True):
            assert said.startswith(f"ranks are at different places: rank 3: before the {its_pass} pass of call "), (
                said
            )
            there, elsewhere = said.split("; rank 0, 1, 2: ")
            assert f"({its})" in there, said
            assert elsewhere.startswith(f"before the {their_pass} pass of call "), said
            assert f"({theirs})" in elsewhere, said
            assert seconds < 5.0
            assert right, "a wrong number left attention"


def _rings_in_another_order(rank: int, kind: str) -> list[str]:
    """Rank 3 takes the second ring first in one step.

    The rings are of one group, or each of its own; they are made in advance, or when they are first used; or the
    second is not used before that step.
    """
    said = []
    for at in range(3):
        groups = [dist.group.WORLD if kind == "one group" else dist.new_group([0, 1, 2, 3]) for _ in range(2)]
        ring = functools.cache(lambda number, groups=groups: ContextParallel(groups[number]))
        if kind != "made when used":
            ring(0), ring(1)
        try:
            for step in range(5):
                used = range(1 if kind == "used later" and step < at else 2)
                for number in reversed(used) if (rank, step) == (AT_FAULT, at) else used:
                    ring(number).step(step)
                    x = _x(step, 0)
                    burst_attention(x, x, x, ring(number)).sum().backward()
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind", ["one group", "several groups", "used later", "made when used"])
def test_rings_in_another_order_are_told_apart_even_on_groups_of_their_own(kind: str) -> None:
    start = time.monotonic()
    for said in run_ranks(_rings_in_another_order, 4, kind, timeout_s=50.0):
        assert len(said) == 3, said
        for at, text in enumerate(said):
            unmade = kind == "made when used" and at == 0
            before = "looking for nodes" if unmade else "the forward pass of call "
            assert text.startswith(f"ranks are at different places: rank 3: before {before}"), text
            assert " of the ring " in text
    assert time.monotonic() - start < 25.0, "not at the time-out"


def _late(rank: int) -> bool:
    """Rank 1 comes to the first calls of two rings after the others, in a thread where they use one, too."""
    right = []
    for in_thread in (False, True):
        cp = ContextParallel(dist.new_group([0, 1, 2, 3]))
        time.sleep(3.0 if rank == 1 else 0.0)
        x, outs = _x(0, 0), []
        call = functools.partial(lambda cp, x, outs: outs.append(burst_attention(x, x, x, cp)), cp, x, outs)
        if in_thread:
            worker = threading.Thread(target=call)
            worker.start()
            worker.join()
        else:
            call()
        right.append(bool(outs[0].isfinite().all()))
    return all(right)


@pytest.mark.alone
def test_ranks_that_are_late_for_the_first_call_of_a_ring_are_waited_for() -> None:
    assert run_ranks(_late, 4) == [True] * 4


def _without_tags(rank: int) -> str:
    """A call is skipped where nothing names calls: the backward pass, at the latest, tells."""
    cp = ContextParallel(dist.group.WORLD)
    try:
        for step in range(3):
            outs = []
            for layer in range(2 if (rank, step) == (1, 1) else LAYERS):
                x = _x(step, layer)
                outs.append(burst_attention(x, x, x, cp))
            torch.stack(outs).sum().backward()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_skipped_call_without_a_name_is_found_within_its_step() -> None:
    for said in run_ranks(_without_tags, 2):
        assert "rank 0: before the forward pass of call 6" in said
        assert "rank 1: before the backward pass of call 5" in said


def _logged_lines() -> list[str]:
    """Return a list that gets every line of this process's log from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("burst_plugin").addHandler(handler)
    return lines


def _waits(rank: int) -> str:
    """Rank 1 leaves out the backward pass of call 5, which is not compared on GPUs, and waits elsewhere."""
    mock.patch.multiple(watch, SHORT_S=0.3, PERIOD_S=0.2).start()  # until the process ends
    lines = _logged_lines()
    cp = as_on_gpus(ContextParallel(dist.new_group([0, 1], timeout=timedelta(seconds=2)), late_after=1.0))
    for step in range(5):
        cp.step(step)
        x = _x(step, 0)
        out = burst_attention(x, x, x, cp)
    try:
        if rank == 0:
            out.sum().backward()
        time.sleep(3.5)
    except RingError as error:
        return "\n".join([*lines, str(error)])
    return "nothing"


@pytest.mark.alone
def test_who_is_waited_for_is_logged_and_the_error_says_where_each_rank_is() -> None:
    said = run_ranks(_waits, 2, timeout_s=40.0)[0].splitlines()
    here, there = "in the backward pass of call 5 (step 4), ring step ", "after the forward pass of call 5 (step 4)"
    assert said[0].startswith("rank 0 (global rank 0 on "), said
    assert "has waited 1 s for rank 1 (global rank 1 on " in said[0]
    assert here in said[0]
    assert said[0].endswith(f"that one is {there}")
    assert said[-1].startswith(f"ranks are at different places: rank 0: {here}")
    assert f"rank 1: {there}; rank 1 of the context-parallel group (global rank 1 on " in said[-1]


def _closes_after_a_rank_has_gone(rank: int) -> None:
    cp = ContextParallel(dist.group.WORLD)
    x = _x(0, 0)
    burst_attention(x, x, x, cp)
    if rank == 0:
        cp.close()


@pytest.mark.alone
def test_closing_after_a_rank_has_gone_says_so() -> None:
    first = run_ranks_outcomes(_closes_after_a_rank_has_gone, 2, timeout_s=30.0)[0]
    assert (
        "RingError: a rank of the context-parallel group ended, or did not come, before all had closed" in first.error
    )


def _dropped(rank: int) -> list[str]:
    lines, x = _logged_lines(), _x(0, 0)
    for closed in (True, False, False, False):
        cp = ContextParallel(dist.group.WORLD)
        burst_attention(x, x, x, cp)
        if closed:
            cp.close()
        del cp
    return lines


def test_a_ring_that_is_dropped_without_close_is_told_of_once() -> None:
    for lines in run_ranks(_dropped, 2):
        assert len(lines) == 1
        assert lines[0].startswith(
            "a ContextParallel was dropped without close(), and another one is made: the process groups that it"
        )


def _sparse(rank: int) -> str:
    with pytest.raises(ValueError, match="check='sparse' is for GPUs") as raised:
        ContextParallel(dist.group.WORLD, check="sparse")
    return str(raised.value)


def test_gloo_is_not_left_to_calls_that_nobody_compared() -> None:
    """It would end processes, innocent ones too, that are sent more bytes than they expect."""
    for said in run_ranks(_sparse, 2):
        assert "gloo, which moves what CPUs hold, ends a process that gets more bytes than it expects" in said
