"""Gloo's groups of a rank share a device, as they do in all tests here that do not run alone."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

THREADS = Path("/proc/self/task")


def _groups(rank: int) -> tuple[int, timedelta, float]:
    """Return how many threads wait for messages, the time-out of a group and a sum over it."""
    groups = [dist.new_group(timeout=timedelta(seconds=seconds)) for seconds in (20, 21, 22)]
    total = torch.ones(1)
    dist.all_reduce(total, group=groups[1])
    waiting = sum((thread / "comm").read_text() == "gloo_tcp_loop\n" for thread in THREADS.iterdir())
    return waiting, groups[1]._get_backend(torch.device("cpu")).options._timeout, float(total)


@pytest.mark.skipif(not THREADS.exists(), reason="threads are counted on Linux")
def test_groups_share_a_device_and_have_their_own_time_outs() -> None:
    assert run_ranks(_groups, 2) == [(1, timedelta(seconds=21), 2.0)] * 2
