"""What the ranks of `bench cluster` do to their threads and process groups."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import cluster_ranks
from benchmarks.contenders import Case, Slept
from benchmarks.contenders.burst import Burst
from tests.support.ranks import run_ranks


def test_threads_that_move_data_give_way_to_what_ranks_do() -> None:
    script = """if True:
        import os, threading
        from benchmarks.cluster_ranks import defer_transfers
        done = threading.Event()
        mover = threading.Thread(target=done.wait)
        mover.start()
        defer_transfers()
        print(*map(os.sched_getscheduler, (threading.get_native_id(), mover.native_id)))
        done.set()
    """
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    ranks, movers = map(int, found.stdout.split())
    assert (ranks, movers) == (os.sched_getscheduler(0), os.SCHED_IDLE)


def turns_in_rank(_: int) -> tuple[list[tuple[int, int]], int, int]:
    """Groups of each turn: all there are, and those of the contender whose turn it is; in the end; their threads."""
    turns = []
    take_turn = cluster_ranks.take_turn

    def recorded(entry: cluster_ranks.Entry, *arguments: Any, **named: Any) -> None:
        turns.append((len(cluster_ranks._groups()), len(entry.groups)))
        take_turn(entry, *arguments, **named)

    case = Case(1, 2, 8, 2, 2, 8, torch.float32, causal=False)
    able = {"burst": Burst("burst", several=True).configurations(case)}
    with patch.multiple(cluster_ranks, take_turn=recorded, interface_bytes=lambda: (0, 0), LEAD_S=0.01):
        cluster_ranks.measure_in_rank(0, case, able, Slept(0.001, 0.001), rounds=1)
    gc.collect()
    return turns, len(cluster_ranks._groups()), sum("gloo_tcp_loop" in name for name in thread_names())


def thread_names() -> list[str]:
    return [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]


def test_process_groups_are_destroyed_with_their_contender() -> None:
    for turns, groups, threads in run_ranks(turns_in_rank, 2):
        assert turns[0] == (1, 0), "it begins with the group of all ranks"
        all_groups, own = turns[-1]
        assert max(turns)[0] > all_groups == 1 + own, "several were tried, one was left"
        assert (groups, threads) == (1, 1)


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def said_in_rank(_: int) -> list[str]:
    """What the package logs while two contenders are measured."""
    case, heard = Case(1, 2, 8, 2, 2, 8, torch.float32, causal=False), Heard()
    able = {name: Burst(name, several=True).configurations(case) for name in ("one", "another")}
    logging.getLogger("burst_plugin").addHandler(heard)
    with patch.multiple(cluster_ranks, interface_bytes=lambda: (0, 0), LEAD_S=0.01):
        cluster_ranks.measure_in_rank(0, case, able, Slept(0.001, 0.001), rounds=1)
    return heard.said


def test_contexts_that_are_not_taken_are_closed() -> None:
    assert run_ranks(said_in_rank, 2) == [[], []]
