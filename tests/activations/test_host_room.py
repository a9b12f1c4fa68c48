"""Room on the host: what the kernel and cgroups say, and what is refused before it is taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from burst_plugin.activations import pages
from burst_plugin.activations.host_memory import HostMemory
from burst_plugin.activations.pages import available_bytes, check_room, ranks_here

GIB = 2**30
MEMINFO = {"proc/meminfo": f"MemTotal: {900 * 2**20} kB\nMemAvailable:   {800 * 2**20} kB\n"}
UNLIMITED = str(2**63 - 4096)


def v1(folder: str, limit: str, usage: int, cached: int = 0) -> dict[str, str]:
    top = f"sys/fs/cgroup/memory/{folder}/memory."
    stat = f"cache 7\ninactive_file 1\ntotal_inactive_file {cached}\ntotal_active_file 0\n"
    return {f"{top}limit_in_bytes": limit + "\n", f"{top}usage_in_bytes": f"{usage}\n", f"{top}stat": stat}


def v2(folder: str, limit: str, usage: int, cached: int = 0) -> dict[str, str]:
    top = f"sys/fs/cgroup/{folder}/memory."
    return {f"{top}max": limit + "\n", f"{top}current": f"{usage}\n", f"{top}stat": f"active_file {cached}\nfile 9\n"}


OWN_V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/job/step\n0::/\n"}
OWN_V2 = {"proc/self/cgroup": "0::/job/step\n"}
HOSTS = {
    "no cgroup": (MEMINFO, 800),
    "nothing to read": ({}, None),
    "v2, no limit": (MEMINFO | OWN_V2 | v2("job/step", "max", 5 * GIB), 800),
    "v2": (MEMINFO | OWN_V2 | v2("job/step", f"{100 * GIB}", 30 * GIB), 70),
    "v2, of which files": (MEMINFO | OWN_V2 | v2("job/step", f"{100 * GIB}", 30 * GIB, 20 * GIB), 90),
    "v2, around it": (MEMINFO | OWN_V2 | v2("job/step", "max", GIB) | v2("job", f"{50 * GIB}", 10 * GIB), 40),
    "v2, in a container": (MEMINFO | {"proc/self/cgroup": "0::/\n"} | v2("", f"{64 * GIB}", 4 * GIB), 60),
    "v2, more than there is": (MEMINFO | OWN_V2 | v2("job/step", f"{5000 * GIB}", 30 * GIB), 800),
    "v2, used up": (MEMINFO | OWN_V2 | v2("job/step", f"{5 * GIB}", 6 * GIB), 0),
    "v1": (MEMINFO | OWN_V1 | v1("job/step", f"{100 * GIB}", 30 * GIB, 5 * GIB), 75),
    "v1, no limit": (MEMINFO | OWN_V1 | v1("job/step", UNLIMITED, 30 * GIB), 800),
    "v1, in a container": (MEMINFO | OWN_V1 | v1("", f"{64 * GIB}", 4 * GIB), 60),
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_available(name: str, tmp_path: Path) -> None:
    files, expected = HOSTS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = available_bytes(tmp_path)
    assert (found and found / GIB) == expected


def test_this_machine_has_some() -> None:
    assert available_bytes() != 0


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "eight"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "6"}, 6),
    ],
)
def test_ranks_that_a_launcher_has_started(
    variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_others = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", *of_others):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_here() == ranks


def test_the_error_says_what_is_needed_and_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "available_bytes", lambda: 200 * GIB)
    check_room(25 * GIB, 0, ranks=8)
    check_room(64.5 * GIB, 39.5 * GIB, ranks=8)
    expected = (
        "offload needs at least 516.0 GiB on this host, 64.5 GiB for each of 8 ranks, which have 8.0 GiB of it, but "
        "only 200.0 GiB are available: use a shorter sequence"
    )
    with pytest.raises(MemoryError, match=re.escape(expected)):
        check_room(64.5 * GIB, GIB, ranks=8)


def test_a_step_is_checked_once_and_again_when_it_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take their memory meanwhile, so that later less is available."""
    monkeypatch.setattr(pages, "PAGE_BYTES", 1)
    memory, left = HostMemory(torch.device("cpu")), [1000]
    monkeypatch.setattr(pages, "available_bytes", lambda: left[0])
    memory.expect([30, 20], times=10, ranks=2)
    left[0] = 10
    memory.expect([30, 20], times=10, ranks=2)
    memory.expect([30, 10], times=10, ranks=2)
    with pytest.raises(MemoryError):
        memory.expect([30, 21], times=10, ranks=2)
    left[0] = 2000
    memory.expect([30, 21], times=10, ranks=2)
    memory.expect([30, 70], times=10, ranks=2)
    with pytest.raises(MemoryError):
        memory.expect([30, 71], times=10, ranks=2)
