"""The test support itself: every way that a rank can end has to be seen."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.imports import repeat_imports
from tests.support.processes import LINGER_S
from tests.support.ranks import RankError, run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever happened to the ranks, no process and no directory may stay behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def gather_ranks(rank: int, factor: int) -> tuple[int, torch.Tensor]:
    got = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(got, torch.tensor([float(rank * factor)]))
    assert torch.get_num_threads() == 1
    return rank, torch.cat(got)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_come_in_rank_order(world_size: int) -> None:
    results = run_ranks(gather_ranks, world_size, 10)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, gathered in results:
        assert gathered.tolist() == [10.0 * rank for rank in range(world_size)]


def test_closures_large_values_and_no_group() -> None:
    big = torch.arange(300_000)

    def shifted(rank: int) -> torch.Tensor:
        assert not dist.is_initialized()
        return big + rank

    for rank, value in enumerate(run_ranks(shifted, 2, init=False)):
        assert torch.equal(value, big + rank)


def test_what_ranks_import_is_imported_once_where_they_are_forked() -> None:
    name, elsewhere = "torch.utils.model_dump", "torch.no_such_module"
    assert name not in sys.modules

    def import_both(rank: int) -> bool:
        was_there = name in sys.modules
        importlib.import_module(name)
        sys.modules[elsewhere] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(elsewhere, None))
        return was_there

    for _ in range(2):
        assert run_ranks(import_both, 2, init=False) == [False, False]
    repeat_imports()
    assert elsewhere not in sys.modules
    assert run_ranks(import_both, 2, init=False) == [True, True]


def test_backward_works_in_ranks_after_backward_in_the_parent() -> None:
    def gradient(rank: int = 0) -> float:
        x = torch.ones(64, 64, requires_grad=True)
        (x @ x).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return float(x.grad.sum())

    expected = gradient()
    assert run_ranks(gradient, 2, init=False) == [expected, expected]


def test_no_rank_begins_before_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    init = dist.init_process_group

    def slow_init(*args: Any, **options: Any) -> None:
        init(*args, **options)
        time.sleep(0.3 * options["rank"])

    monkeypatch.setattr(dist, "init_process_group", slow_init)
    begun_s = run_ranks(lambda rank: time.monotonic(), 2)
    assert abs(begun_s[1] - begun_s[0]) < 0.2


def test_a_rank_that_is_done_keeps_its_connections_until_all_are() -> None:
    def is_first_alive(rank: int) -> bool:
        pid = torch.tensor([os.getpid()])
        dist.broadcast(pid, 0)
        time.sleep(0.5 * rank)
        os.kill(int(pid), 0)
        return True

    start = time.monotonic()
    assert run_ranks(is_first_alive, 2) == [True, True]
    assert time.monotonic() - start < LINGER_S


def test_tracebacks_of_all_failing_ranks_are_raised() -> None:
    def fail_if_odd(rank: int) -> int:
        if rank % 2:
            raise ValueError(f"odd one out: {rank}")
        return rank

    with pytest.raises(RankError, match=r"2 of 4 ranks failed: \[1, 3\]") as caught:
        run_ranks(fail_if_odd, 4, init=False)
    assert sorted(caught.value.errors) == [1, 3]
    for rank in (1, 3):
        assert f"ValueError: odd one out: {rank}" in caught.value.errors[rank]
        assert "in fail_if_odd" in caught.value.errors[rank]
        assert caught.value.errors[rank] in str(caught.value) + "\n"


def test_a_value_that_cannot_be_carried_is_an_error() -> None:
    outcomes = run_ranks_outcomes(lambda rank: (lambda: rank) if rank else "fine", 2, init=False)
    assert outcomes[0].value == "fine"
    assert "ickle" in (outcomes[1].error or "")


def test_a_rank_that_overruns_is_killed_and_tells_where_it_was() -> None:
    def overrun(rank: int) -> int:
        if rank == 1:
            time.sleep(60)
        return rank

    start = time.monotonic()
    outcomes = run_ranks_outcomes(overrun, 2, timeout_s=0.5, init=False)
    assert time.monotonic() - start < 5
    assert (outcomes[0].value, outcomes[0].error, outcomes[0].exitcode) == (0, None, 0)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for said in ("not done after 0.5 s", "in overrun"):
        assert said in (outcomes[1].error or "")


def test_a_rank_that_waits_in_gloo_past_the_limit_tells_where_it_was() -> None:
    def receive_what_nobody_sends(rank: int) -> None:
        group = dist.new_group(timeout=None)
        dist.recv(torch.empty(1), src=1 - rank, group=group)

    with pytest.raises(RankError) as caught:
        run_ranks(receive_what_nobody_sends, 2, timeout_s=2.0)
    assert sorted(caught.value.errors) == [0, 1]
    assert all("receive_what_nobody_sends" in error for error in caught.value.errors.values())


@pytest.mark.parametrize(
    ("die", "said", "exitcode"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9 (SIGKILL)", -signal.SIGKILL),
        (lambda: os._exit(3), "left with exit code 3 without", 3),
        (lambda: os._exit(0), "left with exit code 0 without", 0),
    ],
    ids=["SIGKILL", "exit 3", "exit 0"],
)
def test_a_dead_rank_is_reported_and_its_peers_are_heard(die: Callable[[], None], said: str, exitcode: int) -> None:
    def die_or_receive(rank: int) -> str:
        if rank == 1:
            die()
        try:
            dist.recv(torch.empty(1), src=1)
        except RuntimeError as error:
            return str(error)
        return "received"

    outcomes = run_ranks_outcomes(die_or_receive, 3)
    assert said in (outcomes[1].error or "")
    assert outcomes[1].exitcode == exitcode
    for rank in (0, 2):
        # reset, if the dead rank had not yet read that its peer is ready to receive
        assert re.search("[Cc]onnection (closed|reset) by peer", outcomes[rank].value)


def test_an_expected_death_has_to_happen() -> None:
    def die_if_one(rank: int) -> int:
        if rank == 1:
            os._exit(5)
        return rank

    assert run_ranks(die_if_one, 3, init=False, expect_dead=(1,)) == [0, None, 2]
    with pytest.raises(RankError, match="expected to die without a report, but it returned") as caught:
        run_ranks(lambda rank: rank, 2, init=False, expect_dead=(1,))
    assert sorted(caught.value.errors) == [1]


@pytest.mark.parametrize("threads", [0, 4])  # the system may give the signal to any of them
def test_an_interrupted_parent_leaves_no_ranks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, over = os.fork, threading.Event()
    for _ in range(threads):
        threading.Thread(target=over.wait, daemon=True).start()

    def interrupted_fork() -> int:
        pid = fork()
        if pid:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return pid

    monkeypatch.setattr(os, "fork", interrupted_fork)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs deaf to it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(lambda rank: time.sleep(60), 2, init=False)
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()


def test_workers_that_a_rank_started_end_with_it() -> None:
    def start_worker(rank: int) -> int:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        assert worker.pid is not None
        return worker.pid

    (worker,) = run_ranks(start_worker, 1, init=False)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}/stat").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)


def test_a_killed_parent_leaves_no_ranks(tmp_path: Path) -> None:
    def launch_and_die(rank: int, pipe: int) -> None:
        def tell_and_kill_parent(rank: int) -> None:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

        run_ranks(tell_and_kill_parent, 1, init=False)

    start = time.monotonic()
    ours, theirs = os.pipe()
    assert run_ranks(launch_and_die, 1, theirs, init=False, expect_dead=(0,)) == [None]
    os.close(theirs)
    with open(ours) as pipe:
        assert pipe.read() == ""  # ends as soon as no process holds the other side
    assert time.monotonic() - start < 30
    for directory in tmp_path.iterdir():
        shutil.rmtree(directory)  # the one thing that a killed process cannot do


@pytest.mark.parametrize(
    ("world_size", "timeout_s", "said"), [(0, 1.0, "world_size is 0"), (1, 0.0, "timeout_s is 0")]
)
def test_senseless_sizes_are_refused(world_size: int, timeout_s: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_ranks(lambda rank: rank, world_size, timeout_s=timeout_s, init=False)
