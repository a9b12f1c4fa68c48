"""A slow link and a slow rank: the section "fast" names them. And what a clean run says."""

from __future__ import annotations

import time
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from burst_plugin import Topology
from burst_plugin.check.findings import FAILED, OK, Finding
from burst_plugin.check.links import Edge, node_rates, slow_edges
from burst_plugin.check.performance import check_performance, thread_blocks_finding
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import World, joined, launcher_environment
from burst_plugin.comm.torch_distributed import DistributedTransport
from tests.support.drawn_clusters import profile_in_rank
from tests.support.netns import EmulatedCluster
from tests.support.ranks import run_ranks

QUICK = Settings(quick=True)
_start = DistributedTransport.start


def _late(transport: DistributedTransport, sends: Any, recvs: Any) -> Any:
    if any(message.data.numel() >= 1 << 20 for message in sends):
        time.sleep(0.05)
    return _start(transport, sends, recvs)


def _with_a_slow_link(rank: int) -> list[Finding]:
    """Three ranks, of which the second takes its time to send large messages."""
    assert dist.is_initialized()
    with joined((rank, 3, rank), 20.0) as world:
        if rank != 1:
            return list(check_performance(world, QUICK))
        with mock.patch.object(DistributedTransport, "start", _late):
            return list(check_performance(world, QUICK))


def test_a_slow_link_is_named_by_its_ends() -> None:
    first, second, _ = run_ranks(_with_a_slow_link, 3)
    assert [x.text for x in first] == [x.text for x in second], "ranks say the same"
    (link,) = (each for each in first if each.what == "transfers inside nodes")
    assert link.verdict == FAILED
    assert link.text.startswith("slow: rank 1 -> rank 2 ")
    (ring,) = (each for each in first if each.what == "ring")
    assert ring.verdict == OK
    figures = ring.figures
    assert 0 <= figures["overlap"] <= 1
    assert figures["ring_s"] > 0
    assert figures["transfers_s"] > 0


def _damaged(transport: DistributedTransport, sends: Any, recvs: Any) -> Any:
    """Large messages leave with one byte changed."""
    changed = [message._replace(data=message.data.clone()) for message in sends]
    for message in changed:
        if message.data.numel() >= 1 << 20:
            message.data[-1] += 1
    return _start(transport, changed, recvs)


def _with_a_damaging_link(rank: int) -> list[Finding]:
    with joined((rank, 2, rank), 20.0) as world:
        if rank == 0:
            return list(check_performance(world, QUICK))
        with mock.patch.object(DistributedTransport, "start", _damaged):
            return list(check_performance(world, QUICK))


def test_a_link_that_damages_large_messages_is_named_by_its_ends() -> None:
    for findings in run_ranks(_with_a_damaging_link, 2):
        (link,) = (each for each in findings if each.what == "transfers inside nodes")
        assert link.verdict == FAILED
        assert link.text.startswith("damaged: rank 1 -> rank 0 1 of 1 MiB, rank 1 -> rank 0 1 of ")
        assert "rank 0 -> rank 1" not in link.text.split(" came with ")[0]


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_know_nothing_of_each_other_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    assert launcher_environment() is None
    monkeypatch.setenv(name, "8")
    with pytest.raises(ValueError, match=f"{name}=8 processes were started without RANK and WORLD_SIZE"):
        launcher_environment()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launcher_environment() == (3, 8, 3)


def test_links_are_slow_by_the_median_of_their_kind() -> None:
    edges = [Edge(0, 1, 10.0), Edge(1, 2, 4.0), Edge(2, 3, 9.0), Edge(3, 0, 4.9), Edge(0, 2, 11.0)]
    assert slow_edges(edges) == [Edge(1, 2, 4.0)]
    assert slow_edges([Edge(0, 1, 1.0), Edge(1, 0, 10.0)]) == [Edge(0, 1, 1.0)]


def test_a_nic_has_the_rate_of_its_faster_link() -> None:
    """Node 1 of 3 has slow NICs, of which that of rank 3 is slower: links of either way are."""
    rates = {0: 10.0, 1: 9.0, 2: 4.0, 3: 2.0, 4: 11.0, 5: 12.0}
    edges = [Edge(src, (src + 2) % 6, min(rates[src], rates[(src + 2) % 6])) for src in range(6)]
    assert node_rates(Topology(3, 2), edges) == (9.0, 2.0, 9.0)


@pytest.mark.netns
@pytest.mark.alone
@pytest.mark.skipif(
    EmulatedCluster.unavailable() is not None, reason=f"no namespaces: {EmulatedCluster.unavailable()}"
)
def test_a_profile_shows_the_node_with_slow_nics() -> None:
    with EmulatedCluster(3, 2, rate_mbit=200.0, node_mbit={1: 100.0}) as cluster:
        for _ in range(3):  # a busy machine is late, and never early
            rates = cluster.run(profile_in_rank, Topology(3, 2), timeout_s=120.0)[0].node_rates
            slow = [node for node, rate in enumerate(rates) if rate < 0.8 * median(rates)]
            if slow == [1]:
                return
    raise AssertionError(rates)


def _thread_blocks(rank: int) -> tuple[Finding, list[int]]:
    made: list[int] = []

    def ring(**options: Any) -> Any:
        made.append(options["max_ctas"])
        return World.ring(world, **options)

    with joined((rank, 2, rank), 20.0) as world, mock.patch.object(world, "ring", ring):
        return thread_blocks_finding(world, QUICK), made


def test_thread_blocks_are_compared_ring_by_ring() -> None:
    (first, made), (second, _) = run_ranks(_thread_blocks, 2)
    assert first.text == second.text, "ranks say the same"
    assert made == [0, 4, 8, 16, 32]
    times = first.figures["ring_s"]
    assert f"the fastest is max_ctas={min(times, key=times.get)}, the default 8" in first.text
    assert "no limit" in first.text
