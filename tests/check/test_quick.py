"""`burst check --quick` as it is run: on four ranks that it spawns, under a launcher, and on an emulated cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from burst_plugin import Strategy, Topology
from burst_plugin.check.findings import FAILED, NOT_SHOWN, SECTIONS, Finding, failed, shown_time, table
from burst_plugin.check.run import ONLY_GPUS, run_sections
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import joined
from burst_plugin.planning.measured import planned
from burst_plugin.profiling.cluster_profile import ClusterProfile
from burst_plugin.schedule.rings import SCHEDULES
from tests.support.launched import launched
from tests.support.netns import EmulatedCluster

ROOT = Path(__file__).parents[2]
PAYLOAD = 1448 / 1514  # of a packet of 1500 bytes in an Ethernet frame


def _check(launcher: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "burst_plugin.cli", "check", "--quick", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.alone
def test_quick_on_four_ranks(tmp_path: Path) -> None:
    profile, report = tmp_path / "profile.json", tmp_path / "report.json"
    words = ["--ranks", "4", "--ranks-per-node", "2", "--profile", str(profile), "--json", str(report)]
    done = _check([], *words, "--heads", "16/4", "--head-dim", "64", "--seq", "8192")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "no bar where there is no terminal"
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.split("\n\n")[1].splitlines() if line.strip()}
    assert {name: rows[name] for name in SECTIONS} == dict.fromkeys(SECTIONS, "ok")
    assert "4 ranks run on CPUs" not in done.stdout
    found = json.loads(report.read_text())
    assert found["passed"]
    names = [each["what"] for each in found["findings"] if each["verdict"] == "ok"]
    hidden = [each["what"] for each in found["findings"] if each["verdict"] == "not shown"]
    for name in (*ONLY_GPUS, "20 steps"):
        assert name in hidden
    for name in (
        *("kernel torch_cpu", "kernel reference", "ring 1x4, moves kv, q", "ring 2x2, moves q, kv", "uneven lengths"),
        *("heads exchanged by 2", "heads exchanged by 4", "recomputation", "two rings in turn", "close"),
        *("direct by documents", "a rank that raises", "a rank that is killed", "a rank that stops"),
        *("layers with a state", "kernels of layers with a state"),
        *("transfers inside nodes", "transfers between nodes", "ring", "host", "strategy"),
    ):
        assert name in names
    measured = ClusterProfile.read(profile)
    assert measured.topology == Topology(2, 2)
    assert (measured.model.q_heads, measured.model.kv_heads, measured.model.seq) == (16, 4, 8192)
    strategy, said = planned(Strategy.from_profile(profile, topology=Topology(2, 2)), Topology(2, 2))
    assert strategy.schedule in SCHEDULES
    assert measured.strategy["schedule"] == strategy.schedule, "of the same sizes burst check says the same"
    assert measured.why in said
    assert strategy.ranks_per_node == "auto", "a smaller group may have fewer ranks on a node"


@pytest.mark.slow
def test_quick_under_a_launcher(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = _check(launcher, "--sections", "right", "safe", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nsection ") == 1, "one rank prints"
    found = json.loads((tmp_path / "report.json").read_text())
    assert {each["section"] for each in found["findings"]} == {"right", "safe"}
    words = ["check", "--quick", "--sections", "right", "--kernel", "tests.support.planted:WrongSign"]
    wrong = launched(["-m", "burst_plugin.cli", *words], ranks=2)
    assert wrong.returncode == 1
    assert "culprit: kernel wrong_sign: " in wrong.stdout


def test_what_ends_the_first_rank_before_it_measures_ends_all(tmp_path: Path) -> None:
    """The others would wait for it until the time-out, if nothing but the ranks themselves ends them."""
    words = ["check", "--quick", "--sections", "right", "--json", str(tmp_path)]
    done = launched(["-m", "burst_plugin.cli", *words], ranks=2, timeout_s=60.0)
    assert done.returncode == 1
    assert done.stderr.count(f"burst check: --json {tmp_path} cannot be written: {tmp_path} is a folder") == 2


def _links(rank: int, profile: str, slow_rank: int | None) -> list[Finding]:
    if rank == slow_rank:
        shape = "tc qdisc replace dev nic root tbf rate 25mbit burst 128kb limit 64mb"
        subprocess.run(shape, shell=True, check=True)
    with joined((rank, 8, rank % 4), 60.0, ranks_per_node=4) as world:
        settings = Settings(quick=True, sections=("fast", "tuned"), profile=profile)
        return list(run_sections(world, settings))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.netns
@pytest.mark.skipif(EmulatedCluster.unavailable() is not None, reason="no namespaces")
def test_a_profile_has_the_rates_that_links_were_shaped_to(tmp_path: Path) -> None:
    path, shaped = tmp_path / "profile.json", 100e6 / 8 * PAYLOAD
    with EmulatedCluster(2, 4, rate_mbit=100) as cluster:
        found = cluster.run(_links, str(path), None, timeout_s=240.0)
        with_slow = cluster.run(_links, "", 5, timeout_s=240.0)[0]
    assert all([each.text for each in other] == [each.text for each in found[0]] for other in found)
    measured = ClusterProfile.read(path)
    assert measured.inter is not None
    assert measured.inter.bytes_per_s == pytest.approx(shaped, rel=0.1)
    assert measured.nic == "rank"
    (between,) = (each for each in found[0] if each.what == "transfers between nodes")
    assert between.verdict == "ok", between.text
    (between,) = (each for each in with_slow if each.what == "transfers between nodes")
    assert between.verdict == FAILED
    assert between.text.startswith("slow: rank 5 -> rank 1 0.003"), between.text
    assert not between.figures["is_shared"], "one link is slow, not the NIC of all"


def test_the_table_names_culprits_and_what_is_not_shown() -> None:
    findings = [
        Finding("right", "ok", "kernel a", "fine", seconds=1.0),
        Finding("right", FAILED, "kernel b", "dk is off", seconds=1.5),
        Finding("safe", NOT_SHOWN, "a rank that fails", "one rank"),
    ]
    rows = list(table(findings))
    assert rows[1].split() == ["right", "FAILED", "2", "1", "0", "2.5", "s"]
    assert rows[2].strip() == "culprit: kernel b: dk is off"
    assert rows[3].split()[:3] == ["safe", "not", "shown"]
    assert failed(findings)
    assert not failed(findings[:1])
    assert [shown_time(x) for x in (5400.0, 1.5, 0.0123, 4e-6)] == ["5400 s", "1.5 s", "12.3 ms", "4 us"]
