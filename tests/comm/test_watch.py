"""The thread that says why a ring waits."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from burst_plugin.comm.call_identity import Progress
from burst_plugin.comm.failure_watch import FIRST_FAILURE, Board, FailureWatch


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "burst_plugin watch"]


def _wait_for_the_end() -> None:
    for thread in _threads():
        thread.join(20.0)
    assert _threads() == []


def _board(store: dist.Store, rank: int) -> Board:
    return Board(store, rank, ["first", "second", "third"], Progress())


@pytest.fixture
def store() -> dist.Store:
    return dist.PrefixStore("ring", dist.HashStore())


def test_a_rank_that_waits_is_told_who_gave_up_and_why(store: dist.Store, caplog: pytest.LogCaptureFixture) -> None:
    watches = [FailureWatch(_board(store, rank), period_s=0.05) for rank in range(3)]
    with caplog.at_level(logging.ERROR):
        time.sleep(0.2)
        assert caplog.records == []
        store.set(FIRST_FAILURE, "rank 1 gave up: OutOfMemoryError: no room")
        _wait_for_the_end()
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 2, "rank 1 raises the error itself"
    assert said[0].startswith("rank 0 of a ring waits for nothing")
    assert said[0].endswith("rank 1 gave up: OutOfMemoryError: no room")
    del watches


@pytest.mark.alone
def test_where_nccl_waits_in_vain_all_ranks_end_and_hear_where_each_has_come_to(store: dist.Store) -> None:
    ended: dict[int, str] = {}

    def watch(rank: int, where: str, fault: str) -> FailureWatch:
        board = _board(store, rank)
        board.progress.where = (where,)
        return FailureWatch(board, 0.6, lambda text: ended.update({rank: text}), lambda: fault)

    watches = [watch(0, "after the backward pass of call 5", ""), watch(1, "in the forward pass of call 5", "")]
    time.sleep(0.9)
    assert ended == {}, "nothing has been found"
    watches[0].close()
    watches[0] = watch(0, "after the backward pass of call 5", "time-out")  # and of the third nobody hears
    _wait_for_the_end()
    said = "NCCL waits in vain on rank 0 (first) (time-out), where ranks have come to: rank 1 (second): in the "
    said += "forward pass of call 5; rank 2 (third): it does not say where it is; rank 0 (first): after the backward "
    assert ended.keys() == {0, 1}
    for rank, text in ended.items():
        assert text.startswith(said)
        assert f"; rank {rank} has aborted the ring" in text


def test_a_fault_of_a_moment_ends_nothing(store: dist.Store) -> None:
    faults = iter(["time-out", "", "time-out", ""])
    watch = FailureWatch(_board(store, 0), 0.05, lambda text: None, lambda: next(faults, ""))
    time.sleep(0.5)
    assert next(faults, None) is None
    assert not watch.some_gave_up()
    watch.close()
    _wait_for_the_end()


def test_it_ends_with_its_ring(store: dist.Store) -> None:
    closed, collected = (FailureWatch(_board(store, rank), period_s=0.05) for rank in range(2))
    assert len(_threads()) == 2
    closed.close()
    del collected
    gc.collect()
    _wait_for_the_end()


ENDS = """
import contextlib, time
from datetime import timedelta
import torch.distributed as dist
from burst_plugin.comm import failure_watch
from burst_plugin.comm.call_identity import Progress

def fault():
    with contextlib.suppress(RuntimeError):
        dist.HashStore().wait(["what does not come"], timedelta(milliseconds=20))
    return ""

failure_watch._LEAST_PERIOD_S = 1e-6
board = failure_watch.Board(dist.HashStore(), 0, ["alone"], Progress())
watch = failure_watch.FailureWatch(board, period_s=1e-6, fault=fault)
time.sleep(0.5)
"""


def test_a_process_that_ends_while_a_watch_looks_is_not_aborted() -> None:
    """A thread that the interpreter ends inside PyTorch would abort the process: exit status -6."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
