"""`bench cluster`: a tiny cluster measured whole, the figures made of what is measured, and what is refused."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import RefusedError, cluster
from benchmarks.cluster import case_of, lines, rows_of, verdicts
from benchmarks.contenders import Case, Slept
from benchmarks.contenders.burst import BURST, PRESETS, ZIGZAG_BY_DOCUMENT, Burst
from benchmarks.contenders.ring_flash_attn import RingFlashAttn
from benchmarks.documents import least_nic_bytes
from benchmarks.report import files
from benchmarks.report.files import load
from burst_plugin import Strategy
from burst_plugin.planning.cluster import Links
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.sequence.layout import Tokens
from burst_plugin.topology import Topology
from burst_plugin.types import DIRECTIONS
from tests.support.netns import EmulatedCluster

SLEPT = Slept(0.030, 0.075)
LINKS = Links(1e12, 12e6)
BASE = {"nodes": 2, "ranks_per_node": 4, "rate_mbit": 100.0, "nic": "rank", "latency_ms": 0.0, "contender": "burst"}
BASE |= {"q_heads": 16, "kv_heads": 16, "seq": 256, "causal": False, "compute": "slept"}


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_block_of_keys_and_values_is_1_mib() -> None:
    for heads in ("16/16", "16/4"):
        case = case_of("2x4", heads, None, options())
        assert 2 * case.seq * case.kv_heads * case.head_dim * case.dtype.itemsize == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topologies", "2"), "--topologies 2 is not valid; write nodes x ranks per node"),
        (("--topologies", "2x0"), "2x0 is not valid"),
        (("--heads", "16"), "--heads 16 is not valid; write query heads / key and value heads"),
        (("--heads", "6/4"), "--heads 6/4 is not valid"),
        (("--documents", "64", "--seq", "63"), "an even number of tokens per rank, not --seq 63"),
        (("--documents", "0"), r"--documents 0 is too short"),
        (("--documents", "15"), r"--documents 15 is too short to cut into 2 \* 8 ranks; use 16 or more"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], message: str) -> None:
    asked = options(*arguments)
    with pytest.raises(RefusedError, match=message):
        [case_of(topology, heads, 1.0, asked) for topology in asked.topologies for heads in asked.heads]


def drawn(ranks: int, seq: int, mean: int, sigma: float = 1.0) -> tuple[int, ...]:
    asked = options("--seq", str(seq), "--documents", str(mean))
    return case_of(f"1x{ranks}", "16/4", sigma, asked).documents


@pytest.mark.parametrize(("ranks", "seq", "mean"), [(8, 2048, 2048), (16, 512, 700), (8, 64, 16), (8, 64, 10**6)])
def test_documents_fill_the_sequence_and_can_be_cut_by_all(ranks: int, seq: int, mean: int) -> None:
    lengths = drawn(ranks, seq, mean)
    assert sum(lengths) == ranks * seq
    assert not any(length % (2 * ranks) for length in lengths)
    assert all(lengths)
    assert lengths == drawn(ranks, seq, mean)


def test_documents_are_of_the_length_that_is_asked_for_and_long_tailed() -> None:
    for sigma, shorter in ((0.5, 0.599), (1.0, 0.691), (1.5, 0.773)):  # than the mean, if log-normal
        lengths = drawn(8, 1 << 20, 2048, sigma)
        assert sum(lengths) / len(lengths) == pytest.approx(2048, rel=0.05)
        assert sum(length < 2048 for length in lengths) / len(lengths) == pytest.approx(shorter, abs=0.03)
    assert max(lengths) > 8 * 2048


PACKED = Case(2, 2, 4, 16, 4, 64, torch.bfloat16, causal=True, documents=(8, 8), sigma=1.0)
KV_ROW, GRADS_ROW = 2 * 4 * 64 * 2, 2 * 4 * 64 * 4  # bytes of keys and values in bfloat16, of gradients in float32


@dataclass(frozen=True)
class Assigned(Burst):
    """One that has been told which rank holds each of the sequence's chunks."""

    holders: tuple[int, ...] = ()

    def tokens(self, case: Case, table: RouteTable) -> Tokens:
        return Tokens(case.ranks * case.seq, holders=self.holders)


@pytest.mark.parametrize(
    ("holders", "forward", "backward"),
    [
        ((0, 1, 2, 3), 0, 0),  # a node for each document
        ((0, 2, 1, 3), 4, 4),  # ranks 0 and 1 lend 4 rows each, since what they hold comes first
        ((2, 0, 1, 3), 4, 4),  # ranks 1 and 2 do
        ((0, 2, 0, 3, 1, 3, 1, 2), 4, 5),  # 2 and 3 lend 2 rows each, and return sums of 4 each
    ],
)
def test_rows_have_to_cross_that_come_before_the_last_that_a_node_holds(
    holders: tuple[int, ...], forward: int, backward: int
) -> None:
    """And their gradients have to come back; what a node receives its NICs share, what a rank owns they do not."""
    ours = Assigned("burst", holders=holders)
    assert least_nic_bytes(PACKED, ours, "forward") == forward * KV_ROW
    assert least_nic_bytes(PACKED, ours, "backward") == backward * GRADS_ROW


def test_queries_have_to_cross_that_come_after_the_first_that_a_node_holds() -> None:
    ours = Assigned("burst", Strategy(backward="q"), holders=(0, 2, 1, 3))
    row = 2 * 16 * 64 * 2 + 2 * 16 * 4  # queries and gradients of the output, and two numbers of every head
    assert least_nic_bytes(PACKED, ours, "backward") == 4 * row
    assert least_nic_bytes(PACKED, ours, "forward") == 4 * KV_ROW


@pytest.mark.parametrize("ours", [BURST[0], ZIGZAG_BY_DOCUMENT], ids=lambda ours: ours.name)
@pytest.mark.parametrize("topology", ["2x4", "4x2"])
def test_no_schedule_sends_less_than_has_to_cross(topology: str, ours: Burst) -> None:
    case = case_of(topology, "16/4", 1.0, options("--documents", "256", "--seq", "256"))
    table = RouteTable(Topology(case.nodes, case.ranks_per_node), ours.strategy)
    tokens = ours.tokens(case, table)
    sent, _ = table.most_rows_moved(Attending(tokens, tokens, case.mask))
    assert 0 < least_nic_bytes(case, ours, "forward") <= sent * KV_ROW


@pytest.mark.parametrize(("bytes_per_s", "crossing"), [(1e12, False), (1e3, True)])
def test_packed_documents_are_bounded_by_even_work_or_what_has_to_cross(bytes_per_s: float, crossing: bool) -> None:
    """And have no price, since planning does not know them."""
    case = case_of("2x4", "16/4", 1.0, options("--documents", "512"))
    assert (case.causal, sum(case.documents)) == (True, 8 * 1024)
    found = (BURST[0], {"forward": [0.02], "backward": [0.05]}, dict.fromkeys(DIRECTIONS, 1))
    forward, backward, both = rows = rows_of(BASE | {"sigma": 1.0}, case, SLEPT, Links(1e12, bytes_per_s), found)
    pairs = sum(length**2 / 2 for length in case.documents)
    for row, visit_s in ((forward, 0.030), (backward, 0.075)):
        assert row["compute_s"] == pytest.approx(visit_s * pairs / 1024**2 / 8)
        link_s = (least_nic_bytes(case, BURST[0], row["direction"]) - (128 << 10)) / bytes_per_s
        assert row["bound_s"] == (link_s if crossing else row["compute_s"])
        assert row["over_bound"] == row["time_s"] / row["bound_s"]
    assert both["bound_s"] == pytest.approx(forward["bound_s"] + backward["bound_s"])
    assert "model_s" not in both
    over, where = both["time_s"] / both["bound_s"], "2x4, 100 mbit, heads 16/16, sigma 1"
    assert list(verdicts(rows)) == [f"time / bound: {over:.3f}, at most {over:.3f}, {where}"]


def test_verdicts_of_packed_documents_are_of_both_passes_and_all_others() -> None:
    def packed(contender: str, sigma: float, *both_s: float) -> list[dict[str, Any]]:
        passes = zip(("forward", "backward", "both"), (*both_s, sum(both_s)), strict=True)
        return [BASE | {"contender": contender, "sigma": sigma, "direction": d, "time_s": s} for d, s in passes]

    rows = [row | {"bound_s": 0.1} for sigma in (0.5, 1.0, 1.5) for row in packed("burst", sigma, sigma / 10, 0.1)]
    rows += packed("zigzag by document", 0.5, 0.05, 0.3) + packed("Ulysses", 1.0, 0.1, 0.4)
    assert list(verdicts(rows)) == [
        "time / bound: 2.000, at most 2.500, 2x4, 100 mbit, heads 16/16, sigma 1.5",
        "time of others / burst: at least 2.333, zigzag by document, 2x4, 100 mbit, heads 16/16, sigma 0.5",
    ]


@pytest.mark.parametrize("option", [("--documents", "1024"), ("--core-per-rank",)], ids=lambda option: option[0])
def test_what_is_for_slept_kernels_is_not_computed(monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]) -> None:
    monkeypatch.setattr(EmulatedCluster, "unavailable", lambda latency_ms: None)
    with pytest.raises(RefusedError, match=f"{option[0]} takes --compute slept"):
        cluster.run(options(*option, "--compute", "real"))


def test_what_takes_no_time_has_no_ratio() -> None:
    rows = measured({"forward": [0.3], "backward": [0.7]})
    (line,) = lines([{**row, "bound_s": 0.0} for row in rows])
    assert "x the bound" not in line


def test_where_no_cluster_can_be_emulated_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EmulatedCluster, "unavailable", lambda latency_ms: "the kernel lacks it")
    assert cluster.run(options()) == 0
    assert "skipped" in capsys.readouterr().out


def measured(times: dict[str, list[float]], contender: str = "burst", **strategy: Any) -> list[dict[str, Any]]:
    case = Case(2, 4, 256, 16, 16, 64, torch.bfloat16, causal=False)
    of_ours = Burst(contender, Strategy(**strategy))
    configuration = of_ours if contender.startswith("burst") else RingFlashAttn(contender)
    found = (configuration, times, {"forward": 1 << 20, "backward": 2 << 20})
    return rows_of(BASE | {"contender": contender}, case, SLEPT, LINKS, found)


def test_rows_have_medians_bounds_and_the_price_of_the_schedule() -> None:
    forward, backward, both = measured({"forward": [0.2, 0.1, 0.15], "backward": [0.5, 0.6, 0.4]})
    assert [forward["time_s"], forward["time_s_min"], forward["time_s_max"]] == [0.15, 0.1, 0.2]
    assert both["time_s"] == pytest.approx(0.7)
    assert both["nic_bytes"] == 3 << 20
    assert forward["bound_s"] == pytest.approx(8 * 0.030), "8 visits; one hop of 1 MiB takes 87 ms"
    assert backward["bound_s"] == pytest.approx(8 * 0.075)
    assert both["model_s"] == pytest.approx(forward["model_s"] + backward["model_s"])
    assert forward["model_s"] == pytest.approx(8 * 0.030, rel=1e-3)


def test_the_price_is_that_of_the_strategy() -> None:
    case = Case(4, 2, 256, 16, 16, 64, torch.bfloat16, causal=False)
    hop_s = (1 << 20) / 12e6

    def model_s(strategy: Strategy) -> float:
        return cluster.bounds_of(case, SLEPT, LINKS, Burst("burst", strategy))["model_s"]["forward"]

    for parts in (1, 4):
        assert model_s(Strategy(parts=parts)) == pytest.approx(3 * hop_s + 2 * 0.030 / parts, rel=1e-3)
    assert model_s(Strategy(schedule="flat_ring")) == pytest.approx(7 * hop_s + 0.030, rel=1e-3)
    without = [PRESETS["dist_flash"], PRESETS["loongtrain_context_first"], RingFlashAttn()]
    assert [cluster.bounds_of(case, SLEPT, LINKS, each) for each in without] == [{}] * 3


def test_parts_are_those_that_the_planner_says() -> None:
    """At 100 mbit on 4x2 links are busier than compute, so that several parts are faster; other strategies stay."""
    case = case_of("4x2", "16/16", None, options())
    found = {
        each.name: each
        for each in cluster.planned(Burst("burst", several=True).configurations(case), case, SLEPT, LINKS)
    }
    assert set(found) == {
        "burst",
        "burst, kv back",
        "burst, Ulysses of 2",
        "burst, Ulysses of 4",
        "burst, Ulysses of 8",
    }
    assert found["burst"].strategy.parts_of("forward") > 1
    assert found["burst, Ulysses of 2"].strategy.ulysses_degree == 2
    flat = (Burst("burst flat ring", Strategy(schedule="flat_ring")),)
    assert cluster.planned(flat, case, SLEPT, LINKS) == flat


def test_verdicts_are_the_worst_figures() -> None:
    good = measured({"forward": [0.250], "backward": [0.66]})
    flat = measured({"forward": [0.1], "backward": [0.1]}, "burst flat ring", schedule="flat_ring")
    peer = measured({"forward": [0.66], "backward": [1.5]}, "ring-flash-attn")
    faster = measured({"forward": [0.2], "backward": [1.5]}, "USP")
    assert list(verdicts([*good, *flat, *peer, *faster])) == [
        "time / bound: 1.071, at most 1.100, 2x4, 100 mbit, heads 16/16, backward",
        "time / model: 1.071, at most 1.100, 2x4, 100 mbit, heads 16/16, backward",
        "time of others / burst: at least 0.800, USP, 2x4, 100 mbit, heads 16/16, forward",
    ]
    far = [{**row, "latency_ms": 1.0} for row in good]
    assert list(verdicts([*far, *flat])) == [], "neither bound nor model knows of latency"


def test_absent_and_refused_contenders_are_listed_as_such() -> None:
    rows = measured({"forward": [0.1], "backward": [0.2]})
    rows += [BASE | {"contender": "USP", "absent": "yunchang is not installed"}]
    rows += [BASE | {"contender": "Ulysses", "refused": "too few heads"}]
    ours, absent, refused = lines(rows)
    assert ours.startswith("2x4, 100 mbit, heads 16/16  burst")
    assert "100 + 200 ms, 1.00 x burst" in ours
    assert absent.endswith("absent: yunchang is not installed")
    assert refused.endswith("refused: too few heads")
    assert not any("USP" in line for line in verdicts(rows))


def test_an_interrupted_run_keeps_what_it_has_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And leaves the last whole result alone."""
    rates: list[float] = []

    def measure(case: Case, rate_mbit: float, *_: object) -> list[dict[str, Any]]:
        rates.append(rate_mbit)
        if len(rates) == 2:
            raise KeyboardInterrupt
        return [{**row, "rate_mbit": rate_mbit} for row in measured({"forward": [0.3], "backward": [0.7]})]

    out = tmp_path / "cluster.json"
    asked = options("--topologies", "2x4", "--heads", "16/16", "--rates", "100", "200", "--out", str(out))
    monkeypatch.setattr(EmulatedCluster, "unavailable", lambda latency_ms: None)
    monkeypatch.setattr(cluster, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(asked)
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.json.so-far"}
    assert len(load(tmp_path / "cluster.json.so-far").rows) == 3
    assert cluster.run(asked) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.json"}
    assert [row["rate_mbit"] for row in load(out).rows] == [100.0] * 3 + [200.0] * 3


def test_presets_run_beside_the_automatic_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(EmulatedCluster, "unavailable", lambda latency_ms: None)
    seen: list[str] = []
    monkeypatch.setattr(
        cluster, "measure", lambda case, rate, chosen, asked: seen.extend(c.name for c in chosen) or []
    )
    asked = ("--topologies", "2x4", "--heads", "6/6", "--rates", "100", "--contenders", "burst")
    for names, expected in ((("usp", "ring"), ["ring", "usp"]), (("all",), list(PRESETS))):
        seen.clear()
        assert cluster.run(options(*asked, "--out", str(tmp_path / "out.json"), "--presets", *names)) == 0
        assert seen == ["burst", *(f"preset {name}" for name in expected)]
    six = case_of("2x4", "6/6", None, options())
    refused = {name for name, each in PRESETS.items() if each.reason(six)}
    assert refused == {"ulysses", "usp", "tasp"}
    assert "no groups of 4 ranks can share 6 query" in PRESETS["usp"].reason(six)["refused"]
    assert "does not divide 2x3" in PRESETS["loongtrain"].reason(replace(six, ranks_per_node=3))["refused"]
    (usp,) = PRESETS["usp"].configurations(replace(six, q_heads=16, kv_heads=16))
    assert isinstance(usp, Burst)
    assert usp.strategy == Strategy.preset("usp", ulysses_degree=4)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "not behind"),
        ({"time_s": 2.0, "nic_bytes": 12e6}, "behind by bytes, 502 ms"),
        ({"time_s": 2.0, "nic_bytes": 7e6, "imbalance": 1.5}, "behind by balance, 500 ms"),
        ({"time_s": 2.0, "nic_bytes": 12e6, "imbalance": 1.5}, "behind by bytes, 502 ms"),
        ({"time_s": 2.0, "nic_bytes": 6.1e6, "imbalance": 1.02}, "behind by steps"),
    ],
)
def test_it_is_said_what_a_preset_loses_by(more: dict[str, float], said: str) -> None:
    usual = BASE | {"direction": "both", "time_s": 1.0, "nic_bytes": 6e6, "imbalance": 1.0, "compute_s": 1.0}
    passes = [usual | {"contender": "preset ring", "direction": direction} for direction in DIRECTIONS]
    of_ours = [usual | {"direction": direction} for direction in DIRECTIONS]
    first, line = lines([*of_ours, usual, *passes, usual | {"contender": "preset ring"} | more])
    assert line.endswith(f", {said}")
    assert "behind" not in first


def test_contiguous_tokens_leave_ranks_unequal_work_on_one_document() -> None:
    case = case_of("2x2", "16/4", 1.0, options("--documents", "1000000", "--seq", "64"))
    found = {name: PRESETS[name].imbalance(case) for name in ("ring", "zigzag_ring", "striped")}
    assert found["ring"] == pytest.approx(7 / 4, rel=0.01)
    assert found["zigzag_ring"] == pytest.approx(1.0)
    assert found["striped"] == pytest.approx(1.0, rel=0.02)


class Loads:
    """Instead of `Watch`: other machines take these shares, one after the other."""

    stolen: list[float]

    def __enter__(self) -> Loads:
        self.load = files.Load(stolen=Loads.stolen.pop(0))
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_rows_have_the_load_of_their_own_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(EmulatedCluster, "unavailable", lambda latency_ms: None)
    monkeypatch.setattr(files, "Watch", Loads)
    monkeypatch.setattr(cluster, "measure", lambda *_: measured({"forward": [0.3], "backward": [0.7]}))
    out = tmp_path / "cluster.json"
    asked = ["--topologies", "2x4", "--heads", "16/16", "--rates", "100", "200", "--out", str(out)]
    Loads.stolen = [0.01, 0.1]
    assert cluster.run(options(*asked)) == 0
    found = load(out)
    assert [row["load"]["stolen"] for row in found.rows] == [0.01] * 3 + [0.1] * 3
    assert (found.busy, found.load["stolen"]) == (True, 0.1), "the heaviest"


@pytest.mark.alone
@pytest.mark.netns
@pytest.mark.skipif(EmulatedCluster.unavailable() is not None, reason=f"{EmulatedCluster.unavailable()}")
@pytest.mark.parametrize("documents", [(), ("--documents", "32", "--sigmas", "1")], ids=["whole", "packed"])
def test_a_tiny_cluster_is_measured_whole(tmp_path: Path, documents: tuple[str, ...]) -> None:
    out = tmp_path / "cluster.json"
    latency_ms = "6" if EmulatedCluster.unavailable(6.0) is None else "0"  # longer than the 4 visits forward
    sizes = ("--topologies", "2x2", "--rates", "400", "--heads", "4/4", "--seq", "64", "--visit-ms", "1", "2")
    names = ("burst", "zigzag by document" if documents else "burst flat ring")
    others = ("--latency-ms", latency_ms, "--contenders", *names, "--rounds", "2", "--out", str(out))
    assert cluster.run(options(*sizes, *documents, *others)) == 0
    result = load(out)
    assert result.benchmark == "cluster"
    assert {(row["contender"], row["direction"]) for row in result.rows} == {
        (name, direction) for name in names for direction in ("forward", "backward", "both")
    }
    for row in result.rows:
        assert row["repeats"] == 2
        assert row["time_s"] >= row["bound_s"], "4 visits slept"
        assert row["time_s"] >= row["latency_ms"] / 1e3, "blocks come from another node"
        assert row["nic_bytes"] > 0


def test_with_a_core_per_rank_all_else_is_slower_and_times_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Eight ranks on two cores: links and kernels are 4 times slower, and what takes 4 seconds took one."""
    asked: list[Any] = []

    class Cluster:
        def __init__(self, *sizes: int, **links: float) -> None:
            asked.append(links)

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *exception: object) -> None: ...

        def run(self, work: Any, case: Case, able: Any, slept: Slept, *rest: Any, **others: Any) -> list[Any]:
            asked.append(slept)
            (burst,) = able["burst"][:1]
            return [
                {"burst": (burst, {"forward": [4.0, 8.0, 4.0], "backward": [6.0] * 3}, dict.fromkeys(DIRECTIONS, 1))}
            ]

    Cluster.unavailable = staticmethod(lambda latency_ms: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(cluster, "EmulatedCluster", Cluster)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    out = tmp_path / "cluster.json"
    what = ("--topologies", "2x4", "--rates", "100", "--heads", "16/4", "--contenders", "burst", "--latency-ms", "1")
    assert cluster.run(options(*what, "--core-per-rank", "--out", str(out))) == 0
    assert asked == [{"rate_mbit": 25.0, "latency_ms": 4.0}, Slept(0.120, 0.300)]
    rows = load(out).rows
    assert [(row["direction"], row["time_s"]) for row in rows] == [("forward", 1.0), ("backward", 1.5), ("both", 2.5)]
    for row in rows:
        assert (row["dilation"], row["rate_mbit"], row["latency_ms"]) == (4.0, 100.0, 1.0), "those of the cluster"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    assert cluster.dilation(8) == 1.0, "with cores enough nothing is slowed down"
