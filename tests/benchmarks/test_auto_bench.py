"""`bench auto`: clusters drawn from a seed, all configurations priced, and a run that goes on where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import auto
from benchmarks.report.files import load
from burst_plugin import Topology
from burst_plugin.planning.planner import plans
from burst_plugin.profiling.cluster_profile import ClusterProfile, LinkRate, Model, device_name
from tests.support.drawn_clusters import CHOSEN, HEADS, MOST_MBIT, SIZES, DrawnCluster, Trial, best_pairs
from tests.support.netns import EmulatedCluster


def profile_of(drawn: DrawnCluster) -> ClusterProfile:
    """What links of the drawn rates would be measured to be."""
    intra, inter = (LinkRate(mbit * 1e6 / 8, 1e-3) for mbit in (drawn.intra_mbit, drawn.inter_mbit))
    return ClusterProfile(
        nodes=drawn.nodes,
        ranks_per_node=drawn.ranks_per_node,
        device=device_name(),
        backend="gloo",
        intra=intra,
        inter=inter if drawn.nodes > 1 else None,
        nic="rank",
        kernel="sleeping",
        dtype="bfloat16",
        rates=(),
        model=Model(8, 8, 64, 1024, "full"),
        strategy={},
        why="",
        runner_up="",
    )


def test_clusters_are_drawn_from_a_seed_and_fit_two_cores() -> None:
    drawn = [DrawnCluster.draw(7, number) for number in range(100)]
    assert drawn == [DrawnCluster.draw(7, number) for number in range(100)]
    assert len(set(drawn)) == 100
    assert {each[:2] for each in drawn} == set(SIZES)
    assert {(each.q_heads, each.kv_heads) for each in drawn} == set(HEADS)
    for each in drawn:
        assert 200 <= each.intra_mbit <= 2000
        assert 50 <= each.inter_mbit <= 800
        assert 0 <= each.latency_ms <= 2
        assert each.topology.ranks * (each.inter_mbit if each.nodes > 1 else each.intra_mbit) <= MOST_MBIT


@pytest.mark.parametrize("number", range(4))
def test_no_configuration_has_a_lower_price_than_the_choice(number: int) -> None:
    drawn = DrawnCluster.draw(7, number)
    trial = Trial.of(drawn, profile_of(drawn), 1.0)
    links_s = plans(drawn.topology, trial.shapes, (1e-9, 1e-9), trial.links)[0].step_s
    assert links_s == pytest.approx(1.0, abs=0.1), "blocks are as long as that takes, but for latency"
    work_s = drawn.topology.ranks * sum(trial.visit_s.values())
    assert work_s == pytest.approx(drawn.computing)
    pairs = best_pairs(trial.prices)
    best = plans(drawn.topology, trial.shapes, tuple(trial.visit_s.values()), trial.links)[0]  # type: ignore[arg-type]
    assert trial.chosen.schedule == best.strategy.schedule
    assert best.step_s <= 1.01 * min(pairs.values()), "which knows of no more than two parts"
    tried, others = trial.tried(1.5, 2)
    assert tried[CHOSEN] == trial.chosen
    assert len([name for name in tried if name.startswith("control: ")]) == min(2, others)
    assert len(tried) + others == 1 + len(trial.prices) + min(2, others)


def test_a_pair_is_the_fastest_of_either_pass() -> None:
    trial = Trial.of(DrawnCluster(2, 2, 300, 100, 1.0, 8, 2, 0.5), profile_of(DrawnCluster.draw(7, 0)), 1.0)
    rings = [each for each in trial.prices if (each.schedule, each.ulysses_degree) == ("flat_ring", 1)]
    seconds = {each: {"forward": 1.0 + n, "backward": 9.0 - n} for n, each in enumerate(rings)}
    found = best_pairs(seconds)  # type: ignore[arg-type]
    last = len(rings) - 1
    assert last > 1
    assert set(found.values()) == {1.0 + 9.0 - last, *(1.0 + min(n, last - n) + 9.0 - last for n in range(last))}


def test_it_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[DrawnCluster] = []

    def measure(drawn: DrawnCluster, rounds: int) -> list[dict[str, Any]]:
        if len(measured) == 2:
            measured.append(drawn)
            raise KeyboardInterrupt
        measured.append(drawn)
        return [{"ratio": 1.0 + len(measured) / 50, "fastest": "", "chosen": ""}]

    monkeypatch.setattr(auto, "measure", measure)
    parser = argparse.ArgumentParser()
    auto.add_arguments(parser)
    out = tmp_path / "auto.json"
    asked = parser.parse_args(["--clusters", "4", "--seed", "3", "--add", "--out", str(out)])
    asked.add = False
    with pytest.raises(KeyboardInterrupt):
        auto.run(asked)
    asked.add = True
    assert auto.run(asked) == 0
    expected = [DrawnCluster.draw(3, number) for number in (0, 1, 2, 2, 3)]
    assert measured == expected, "the third again"
    assert len(load(out).rows) == 4
    assert auto.run(asked) == 0
    assert measured == expected, "nothing is left to do"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.netns
@pytest.mark.skipif(EmulatedCluster.unavailable() is not None, reason=f"{EmulatedCluster.unavailable()}")
def test_a_tiny_cluster_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "STEP_S", 0.02)
    monkeypatch.setattr(auto, "HOPELESS", 1.01)
    (row,) = auto.measure(DrawnCluster(2, 1, 400, 400, 0.0, 4, 2, 0.5), 1)
    assert row["ratio"] == row["time_s"] / row["fastest_s"] >= 1.0
    assert row["times_s"].keys() >= {CHOSEN}
    assert row["time_s"] >= 0.01, "what is slept"
    assert row["links"]["inter_bytes_per_s"] == pytest.approx(400e6 / 8, rel=0.3)
    assert row["chosen"].startswith("planned for 4/2 heads of 64 and ")
    assert str(Topology(2, 1)) in row["chosen"]
