"""The emulated cluster: its links have the rate, and carry the bytes, that measurements rely on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support import delay_bridge, netns
from tests.support.netns import EmulatedCluster, interface_bytes
from tests.support.ranks import RankError, run_ranks

pytestmark = [
    pytest.mark.netns,
    pytest.mark.alone,
    pytest.mark.skipif(
        EmulatedCluster.unavailable() is not None, reason=f"no namespaces: {EmulatedCluster.unavailable()}"
    ),
]

MESSAGE_BYTES = 4 << 20
RATE_MBIT = 200.0
EXPECTED_S = MESSAGE_BYTES * 8 / (RATE_MBIT * 1e6)


def transfer(rank: int, *pairs: tuple[int, int]) -> tuple[float, int, int]:
    """Send a message from the first to the second of each pair, thrice.

    Returns the least time, and the bytes that this rank's nic received and sent once.
    """
    took_s = []
    for size_bytes in (1, *[MESSAGE_BYTES] * 3):  # the first only opens the way
        dist.barrier()
        before = interface_bytes()
        dist.barrier()
        start = time.perf_counter()
        buffers, works = [], []
        for source, target in pairs:
            if rank in (source, target):
                buffers.append(torch.full((size_bytes,), rank, dtype=torch.uint8))
                post, peer = (dist.isend, target) if rank == source else (dist.irecv, source)
                works.append(post(buffers[-1], peer))
        for work in works:
            assert work is not None
            work.wait()
        took_s.append(time.perf_counter() - start)
        dist.barrier()
        after = interface_bytes()
        sources = [source for source, target in pairs if rank in (source, target)]
        assert [(int(buffer.min()), int(buffer.max())) for buffer in buffers] == [(s, s) for s in sources]
    return min(took_s[1:]), after[0] - before[0], after[1] - before[1]


def carried(moved: int) -> bool:
    return MESSAGE_BYTES <= moved <= 1.05 * MESSAGE_BYTES + 65536


def idle(moved: int) -> bool:
    return moved <= 65536  # the barriers


def assert_soon(check: Callable[[], float], expected: float, tolerance: float) -> None:
    """A busy machine is sometimes late: six tries, of which one has to be within the bound."""
    tried = []
    for _ in range(6):
        tried.append(check())
        if abs(tried[-1] / expected - 1) <= tolerance:
            return
    pytest.fail(f"measured {tried}; expected one within {tolerance:.0%} of {expected}")


def test_a_nic_has_its_rate_and_carries_what_is_sent() -> None:
    with EmulatedCluster(2, 2, rate_mbit=RATE_MBIT) as cluster:

        def seconds() -> float:
            ranks = cluster.run(transfer, (0, 2))
            assert carried(ranks[0][2])
            assert carried(ranks[2][1])
            assert idle(ranks[0][1])
            assert idle(ranks[2][2])
            assert all(idle(moved) for rank in (1, 3) for moved in ranks[rank][1:])
            return float(ranks[2][0])

        assert_soon(seconds, EXPECTED_S, 0.10)


@pytest.mark.parametrize(
    ("nic", "pairs", "messages_in_a_row"),
    [
        ("rank", [(0, 2), (1, 3)], 1),
        ("node", [(0, 2), (1, 3)], 2),
        ("rank", [(0, 2), (0, 3)], 2),
        ("rank", [(0, 2), (1, 2)], 2),
    ],
    ids=["two nics", "one nic", "one sender", "one receiver"],
)
def test_messages_share_a_nic_in_each_direction(
    nic: str, pairs: list[tuple[int, int]], messages_in_a_row: int
) -> None:
    with EmulatedCluster(2, 2, rate_mbit=RATE_MBIT, nic=nic) as cluster:

        def seconds() -> float:
            return max(float(took_s) for took_s, _, _ in cluster.run(transfer, *pairs))

        assert_soon(seconds, messages_in_a_row * EXPECTED_S, 0.10)


def congestion_control(rank: int) -> set[str]:
    """Of all connections of this process, once every rank has heard from every other one."""
    dist.all_to_all_single(torch.empty(dist.get_world_size()), torch.zeros(dist.get_world_size()))
    found = set()
    for connection in psutil.Process().net_connections("tcp4"):
        if connection.status == psutil.CONN_ESTABLISHED:
            with socket.fromfd(connection.fd, socket.AF_INET, socket.SOCK_STREAM) as own:
                name = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                found.add(name.rstrip(b"\0").decode())
    return found


@pytest.mark.parametrize("nic", ["rank", "node"])
def test_no_connection_probes_for_a_rate_as_the_host_has_it(nic: str) -> None:
    with EmulatedCluster(2, 2, nic=nic) as cluster:
        assert cluster.run(congestion_control) == [{"reno"}] * 4


@pytest.mark.parametrize("nic", ["rank", "node"])
def test_within_a_node_no_nic_is_used(nic: str) -> None:
    with EmulatedCluster(2, 2, rate_mbit=RATE_MBIT, nic=nic) as cluster:
        ranks = cluster.run(transfer, (2, 3))
        assert all(idle(moved) for rank in ranks for moved in rank[1:])
        assert ranks[3][0] < EXPECTED_S / 2


def test_a_link_inside_a_node_has_the_rate_that_is_asked_for() -> None:
    with EmulatedCluster(1, 2, intra_mbit=RATE_MBIT) as cluster:
        assert_soon(lambda: float(cluster.run(transfer, (0, 1))[1][0]), EXPECTED_S, 0.10)


def test_a_shared_nic_carries_what_leaves_its_node() -> None:
    with EmulatedCluster(2, 2, nic="node") as cluster:

        def only_once() -> bool:
            ranks = cluster.run(transfer, (1, 2))
            assert all(idle(moved) for moved in (ranks[0][1], ranks[2][2]))
            moved = [ranks[0][2], ranks[1][2], ranks[2][1], ranks[3][1]]
            assert min(moved) >= MESSAGE_BYTES
            return all(carried(bytes_moved) for bytes_moved in moved)

        assert any(only_once() for _ in range(3)), "TCP may send a segment again, but not each time"


LATENCY_MS = 10.0
needs_latency = pytest.mark.skipif(
    EmulatedCluster.unavailable(1.0) is not None, reason=f"no latency: {EmulatedCluster.unavailable(1.0)}"
)


def there_and_back(rank: int, peer: int) -> float:
    """The least time of a byte from rank 0 to another one and of its answer, ms."""
    took_s = []
    for _ in range(10):
        dist.barrier()
        begin_s, byte = time.perf_counter(), torch.zeros(1, dtype=torch.uint8)
        if rank == 0:
            dist.send(byte, peer)
            dist.recv(byte, peer)
        elif rank == peer:
            dist.recv(byte, 0)
            dist.send(byte, 0)
        took_s.append(time.perf_counter() - begin_s)
    return 1e3 * min(took_s)


@needs_latency
@pytest.mark.parametrize("nic", ["rank", "node"])
def test_other_nodes_are_as_far_away_as_asked(nic: str) -> None:
    with EmulatedCluster(2, 2, RATE_MBIT, nic, LATENCY_MS) as cluster:
        took_ms = [cluster.run(there_and_back, 2)[0] for _ in range(3)]
        assert min(took_ms) >= 2 * LATENCY_MS
        assert min(took_ms) < 3 * LATENCY_MS
        assert min(cluster.run(there_and_back, 1)[0] for _ in range(3)) < LATENCY_MS

        def seconds() -> float:
            ranks = cluster.run(transfer, (0, 2))
            assert carried(ranks[0][2])
            assert carried(ranks[2][1])
            return float(ranks[2][0])

        way_s = EXPECTED_S + 1e-3 * LATENCY_MS
        assert_soon(seconds, way_s, 0.25)  # gloo asks before it sends, and TCP begins slowly


@needs_latency
def test_the_process_that_holds_messages_ends_with_its_cluster() -> None:
    program = """if True:
        import time
        from tests.support.netns import EmulatedCluster
        with EmulatedCluster(2, 1, latency_ms=1.0) as cluster:
            print(cluster._bridge, flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        holder = psutil.Process(int(user.stdout.readline()))
        assert holder.ppid() == user.pid
        user.kill()
    holder.wait(10)


def test_without_tun_devices_there_is_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_bridge, "DEVICE", "/dev/net/none")
    assert EmulatedCluster.unavailable() is None
    said = "/dev/net/none cannot be opened, for latency: No such file or directory"
    assert EmulatedCluster.unavailable(1.0) == said
    with pytest.raises(RuntimeError, match="cannot be opened"), EmulatedCluster(2, 1, latency_ms=1.0):
        pass


def test_ranks_know_their_place() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    with EmulatedCluster(2, 3) as cluster:
        places = cluster.run(lambda rank: [int(os.environ[name]) for name in names])
    assert places == [[rank, 6, rank % 3, 3, rank // 3] for rank in range(6)]


@pytest.mark.parametrize("latency_ms", [0.0, pytest.param(1.0, marks=needs_latency)])
def test_failures_are_raised_and_nothing_stays_behind(latency_ms: float) -> None:
    def fail(rank: int) -> None:
        raise ValueError(f"rank {rank}, {interface_bytes('eth0')}")

    own = os.stat("/proc/self/ns/net").st_ino
    files = sorted(os.listdir("/proc/self/fd"))
    said = r"there is no device 'eth0' here; expected one of .*'nic', 'nvl'"
    with pytest.raises(RankError, match=said), EmulatedCluster(1, 2, latency_ms=latency_ms) as cluster:
        cluster.run(fail)
    with pytest.raises(KeyboardInterrupt), EmulatedCluster(1, 2, latency_ms=latency_ms):
        raise KeyboardInterrupt
    assert sorted(os.listdir("/proc/self/fd")) == files
    assert os.stat("/proc/self/ns/net").st_ino == own
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    with pytest.raises(RuntimeError, match="not built"):
        cluster.run(fail)


@pytest.mark.skipif(os.getuid() != 0, reason="is about giving up root")
def test_it_works_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_nobody(rank: int) -> list[tuple[float, int, int]] | str:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 0)
        for probe in (netns._unavailable, netns._unshare_flags):
            probe.cache_clear()
        try:
            reason = EmulatedCluster.unavailable()
            if reason is not None:
                return reason
            latency_ms = 1.0 if EmulatedCluster.unavailable(1.0) is None else 0.0
            with EmulatedCluster(2, 1, RATE_MBIT, latency_ms=latency_ms) as cluster:
                return cluster.run(transfer, (0, 1))
        finally:
            os.setresuid(0, 0, 0)  # only to report

    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    (ranks,) = run_ranks(as_nobody, 1, init=False)
    if isinstance(ranks, str):
        pytest.skip(ranks)
    assert carried(ranks[0][2])
    assert ranks[1][0] > EXPECTED_S / 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"ranks_per_node": 251}, "ranks_per_node is 251"),
        ({"rate_mbit": 0}, "rate_mbit is 0"),
        ({"intra_mbit": 0}, "intra_mbit is 0"),
        ({"intra_mbit": 100, "nic": "node"}, 'intra_mbit is 100 with nic "node"'),
        ({"nic": "pod"}, "nic is 'pod'"),
        ({"latency_ms": -1.0}, "latency_ms is -1.0; expected 0 or more"),
        ({"latency_ms": float("inf")}, "latency_ms is inf"),
    ],
)
def test_impossible_clusters_are_refused(wrong: dict[str, int | float | str], said: str) -> None:
    sizes: dict[str, int | float | str] = {"nodes": 2, "ranks_per_node": 2}
    with pytest.raises(ValueError, match=said):
        EmulatedCluster(**(sizes | wrong))  # type: ignore[arg-type]
