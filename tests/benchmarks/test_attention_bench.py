"""`bench attention`, tiny: what rows say, what is refused, and that it can fail."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("psutil", reason="psutil is not installed")

from benchmarks import attention, attention_ranks
from benchmarks.__main__ import main
from benchmarks.attention import attention_flops, row_of, verdicts
from benchmarks.attention_ranks import (
    KERNEL,
    KERNEL_ALONE,
    Entry,
    Gradients,
    Measured,
    Times,
    World,
    largest_error,
    rounds,
)
from benchmarks.contenders import Case, Contender, Session, Slept
from benchmarks.contenders.burst import Burst
from benchmarks.contenders.protocol import TRIALS, best_of
from benchmarks.memory import PeakMemory
from benchmarks.report.files import load
from burst_plugin.activations.host_memory import HostMemory
from burst_plugin.comm.copies import CopyNetwork, NullTransport

CPU = torch.device("cpu")
CASE = Case(1, 2, 32, 4, 2, 8, torch.float32, causal=True)
TIMES = {f"{name}_s{end}" for name in ("forward", "backward", "both") for end in ("", "_min", "_max")}
NAMES = {"ranks", "seq", "q_heads", "kv_heads", "head_dim", "dtype", "causal", "contender"}
SHARES = {"kernel_share", "kernel_s", "kernel_alone_s", "kernel", "flops_per_s", "peak_bytes", "error"}


@dataclass(frozen=True)
class Unable(Contender):
    """A contender that cannot: its package is not there, or the case is not for it."""

    missing: str | None = None

    def absent(self) -> str | None:
        return self.missing

    def refuse(self, case: Case) -> str | None:
        return f"{case.q_heads} heads are not for it"

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        raise AssertionError("it said that it cannot")


def bench(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "result.json"
    tiny = ("--seq", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--rounds", "2", "--out", str(out))
    assert main(["attention", *tiny, *arguments]) == 0
    json.loads(out.read_text())
    return load(out).rows


# ------------------------------------------------------------------------------------------------------- attention


def test_processes_are_measured_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = (Burst("burst"), Unable("unable"), Unable("missing", "missing is not installed"))
    monkeypatch.setattr(attention, "CONTENDERS", contenders)
    row, unable, missing = bench(tmp_path, "--contenders", "all")
    assert set(row) >= NAMES | TIMES | SHARES
    assert (row["contender"], row["ranks"], row["seq"], row["virtual"]) == ("burst", 2, 64, False)
    assert row["both_s_min"] <= row["both_s"] <= row["both_s_max"]
    assert 0 < row["error"] < 2e-6
    assert unable["refused"] == "4 heads are not for it"
    assert missing["absent"] == "missing is not installed"
    assert not set(unable) & TIMES
    assert not set(missing) & TIMES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_virtual_ring_is_measured_in_this_process(tmp_path: Path, dtype: str) -> None:
    ring = ("--on", "virtual", "--ranks", "4", "--ranks-per-node", "2", "--dtype", dtype)
    rows = bench(tmp_path, *ring, "--contenders", "burst", "burst, q travels", "ring-flash-attn")
    for row in rows[:2]:
        assert row["virtual"]
        assert set(row) >= NAMES | TIMES | SHARES
        assert 0 < row["error"] < (2e-6 if dtype == "float32" else 2e-2)
    assert "refused" in rows[2] or "absent" in rows[2]


class Forking(Unable):
    """One that would look for its package in a process forked from here."""

    def absent(self) -> str | None:
        raise AssertionError("a GPU may be in use here")


@pytest.mark.parametrize("on", ["virtual", "torchrun"])
def test_peers_are_not_looked_for_where_gpus_are_in_use(monkeypatch: pytest.MonkeyPatch, on: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case = Case(1, 2, 64, 4, 2, 8, torch.bfloat16, True)
    assert "refused" in attention._reason(Forking("peer"), case, on)


@pytest.mark.parametrize("option", ["--contenders", "--dtype"])
def test_unknown_names_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["attention", option, "brust"])
    assert f"argument {option}: invalid choice: 'brust'" in capsys.readouterr().err


def test_a_wrong_result_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a transport that carries nothing."""
    monkeypatch.setattr(CopyNetwork, "transports", lambda network: [NullTransport() for _ in range(network.ranks)])
    found = attention_ranks.measure(World(CPU), CASE, {"burst": [Burst("burst")]}, 1, virtual=True)
    assert found.errors["burst"] > 0.1


def test_flops_are_those_of_the_pairs_that_attend() -> None:
    tokens = 64
    pairs = sum(1 for i in range(tokens) for j in range(tokens) if j <= i)
    products = 2 * 2 * 4 * 8  # two matrix products of 2 operations per multiplication, 4 heads of 8
    assert attention_flops(CASE) == products * pairs
    assert attention_flops(replace(CASE, causal=False)) == products * tokens * tokens
    assert attention_flops(replace(CASE, batch=3)) == 3 * products * pairs


def test_the_slowest_rank_counts_and_the_first_round_does_not() -> None:
    class Other(World):
        def most(self, number: float) -> float:
            return max(number, 1.0)

    calls: list[str] = []
    entries = [Entry(name, lambda n=name: calls.append(n), lambda saved: None) for name in "ab"]
    found = rounds(entries, Other(CPU), 3)
    turns = ["".join(calls[start : start + 2]) for start in range(0, 8, 2)]
    assert all(sorted(turn) == ["a", "b"] for turn in turns), "interleaved"
    assert len(set(turns)) == 2, "in one order and in another"
    assert found["a"].both_s == [1.0] * 3
    slow = Entry("slow", lambda: time.sleep(0.02), lambda saved: time.sleep(0.04))
    own = rounds([slow], World(CPU), 1)["slow"]
    assert own.forward_s[0] >= 0.02
    assert own.backward_s[0] >= 0.04
    assert own.both_s[0] >= 0.06


class Sleeper:
    """A configuration that takes these seconds, one turn after the other, the last ones again and again."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.turns, self.closed = seconds, 0, False

    def take_turn(self) -> None:
        self.turns += 1

    def close(self) -> None:
        self.closed = True

    @property
    def typical_s(self) -> float:
        return median(self.seconds[min(turn, len(self.seconds) - 1)] for turn in range(self.turns))


def test_of_a_contenders_configurations_the_fastest_in_trials_is_timed() -> None:
    slower, fastest, hopeless = Sleeper(0.18), Sleeper(0.2, 0.15), Sleeper(0.3)  # one is slow the first time
    assert best_of([slower, fastest, hopeless], Sleeper.take_turn) is fastest
    assert [each.turns for each in (slower, fastest, hopeless)] == [TRIALS, TRIALS, 1]
    assert [each.closed for each in (slower, fastest, hopeless)] == [True, False, True]
    alone = Sleeper(1.0)
    assert best_of([alone], Sleeper.take_turn) is alone
    assert alone.turns == 1


@pytest.mark.parametrize(("virtual", "share"), [(False, 0.75), (True, 1.5)])
def test_shares_are_those_of_each_round(virtual: bool, share: float) -> None:
    def times(*both_s: float) -> Times:
        return Times([s / 4 for s in both_s], [s * 3 / 4 for s in both_s], list(both_s))

    found = {KERNEL: times(6.0, 3.0, 3.0), KERNEL_ALONE: times(2.0, 1.0, 1.0), "ring": times(4.0, 2.0, 3.0)}
    every = [
        Measured("it", found, {"ring": peak, "slower": 1}, {"ring": error}) for peak, error in ((5, 0.01), (7, 0.0))
    ]
    row = row_of(CASE, every, virtual, "contender", ["slower", "ring"])
    assert row["configuration"] == "ring", "the only one that was kept"
    assert (row["kernel_share"], row["kernel_share_max"]) == (share, share)
    assert row["kernel_share_min"] == pytest.approx(share * 2 / 3)
    assert (row["both_s"], row["forward_s"], row["backward_s"]) == (3.0, 0.75, 2.25)
    assert (row["kernel_s"], row["kernel_alone_s"]) == (3.0, 1.0)
    assert row["flops_per_s"] == 3.5 * attention_flops(CASE) / 3.0
    assert (row["peak_bytes"], row["error"]) == (7, 0.01)
    assert row["rounds_s"] == [4.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("peer_s", "start"),
    [
        ([2.0] * 5, "ok   USP / burst = 2.000, burst behind in 0 of 5 rounds (by chance: 100%)"),
        ([0.9] * 4 + [2.0], "ok   USP / burst = 0.900, burst behind in 4 of 5 rounds (by chance: 19%)"),
        ([0.99] * 5, "FAIL USP / burst = 0.990, burst behind in 5 of 5 rounds (by chance: 3%)"),
    ],
)
def test_a_peer_is_faster_if_it_is_so_in_more_rounds_than_by_chance(peer_s: list[float], start: str) -> None:
    case = {"ranks": 2, "seq": 64, "dtype": "float32", "causal": True, "q_heads": 2, "kv_heads": 2, "virtual": False}
    ours = {**case, "contender": "burst", "kernel_share": 0.96, "rounds_s": [1.0] * 5}
    own, compared = verdicts(
        [
            {**case, "contender": "Ulysses", "refused": "no"},
            {**case, "contender": "burst flat ring", "rounds_s": [0.1] * 5},
            {**case, "seq": 32, "contender": "Ulysses", "rounds_s": [0.1] * 5},
            {**case, "contender": "USP", "rounds_s": peer_s},
            ours,
        ]
    )
    assert own.startswith("ok   time / (one rank's kernel / ranks) = 1.042, 2 ranks, 64 tokens, float32, causal")
    assert compared.startswith(start)
    assert next(verdicts([{**ours, "kernel_share": 0.95}])).startswith("FAIL")


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_times_of_wrong_results_are_no_times(error: float) -> None:
    one = Times([1.0], [1.0], [2.0])
    every = [Measured("it", {"ring": one, KERNEL: one}, {"ring": 1}, {"ring": each}) for each in (0.0, error, 0.0)]
    row = row_of(CASE, every, False, "contender", ["ring"])
    assert row["refused"] == f"what it computed is wrong: relative error {error:.1e}"
    assert "both_s" not in row
    assert json.loads(json.dumps(row, allow_nan=False)) == row, "it can be saved"


def test_a_nan_counts_whatever_is_beside_it() -> None:
    right, wrong = torch.ones(2), torch.tensor([1.0, float("nan")])
    for place in range(4):
        found = [wrong if n == place else right for n in range(4)]
        assert isnan(largest_error(Gradients(*found), Gradients(*[right] * 4)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kv-heads", "3"), "--heads 4 is not a multiple of --kv-heads 3"),
        (("--seq", "63"), "--seq 63 does not divide over 2 ranks; use 64"),
        (("--ranks", "4", "--ranks-per-node", "3"), "--ranks-per-node 3 does not divide 4 ranks"),
        (("--rounds", "0"), "have to be 1 or more"),
    ],
    ids=str,
)
def test_bad_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    tiny = ("--seq", "64", "--heads", "4", "--head-dim", "8", "--out", str(tmp_path / "none"))
    assert main(["attention", *tiny, *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_memory_allows_are_refused_with_the_number_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=2 * 10**9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert main(["attention", "--ranks", "8", "--seq", "64"]) == 2
    assert "8 processes do not fit into memory, at most 4 do" in capsys.readouterr().err


def test_peak_memory_is_what_was_held_at_once() -> None:
    with PeakMemory(torch.device("cpu")) as peak:
        for _ in range(3):
            x = torch.ones(1 << 20)
            del x
    assert peak.nbytes == 4 << 20


def test_peak_memory_leaves_out_what_waits_on_the_host() -> None:
    memory = HostMemory(torch.device("cpu"))
    with PeakMemory(torch.device("cpu")) as peak:
        parked = [memory.park(torch.ones(1 << 20)) for _ in range(3)]
    assert peak.nbytes == 4 << 20
    with PeakMemory(torch.device("cpu")) as peak:
        back = [memory.fetch(x) for x in parked]
    assert peak.nbytes == sum(x.nbytes for x in back) == 12 << 20
