"""`bench groups`: a step is timed on one ring and on groups, which compute every document once."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from random import Random

import pytest

from benchmarks.__main__ import main
from benchmarks.cluster import case_of
from benchmarks.documents import drawn_documents
from benchmarks.groups import computing_s, schedule
from benchmarks.groups_ranks import GROUPS, RING
from benchmarks.report.files import load
from tests.support.netns import EmulatedCluster

pytest.importorskip("megatron.core")


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_groups_compute_every_document_once(sigma: float) -> None:
    case = case_of("2x4", "16/4", sigma, argparse.Namespace(seq=2048, documents=2048))
    lengths = [length for seed in range(4) for length in drawn_documents(case, 2048, Random(seed))]
    rounds = schedule(case, lengths)
    parts = [part for of_ranks in rounds for part in chain(*of_ranks)]
    assert all(part.length / part.ranks <= case.seq for part in parts)
    assert len(rounds) > 1
    for length in set(lengths):
        shares = [1 / part.ranks for part in parts if part.length == length]
        assert sum(shares) == pytest.approx(lengths.count(length)), length
    even_s, groups_s = computing_s(case, rounds, visit_s=1.0, rest_s=0.0)
    assert even_s == pytest.approx(sum(length**2 for length in lengths) / 2 / case.seq**2 / case.ranks)
    assert even_s < groups_s < 1.5 * even_s


@pytest.mark.netns
@pytest.mark.alone
@pytest.mark.skipif(EmulatedCluster.unavailable() is not None, reason="no cluster can be emulated here")
def test_both_ways_are_timed_by_turns(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = "--topologies 2x2 --rates 1000 --seq 256 --documents 256 --sigmas 1 --rests 0 --microbatches 2 --rounds 2"
    assert main(["groups", *small.split(), "--out", str(out)]) == 0
    rows = {row["contender"]: row for row in load(out).rows}
    assert rows.keys() == {RING, GROUPS}
    assert all(row["repeats"] == 2 for row in rows.values())
    assert rows[RING]["over_ring_min"] == rows[RING]["over_ring_max"] == 1
    assert rows[GROUPS]["over_ring_min"] <= rows[GROUPS]["over_ring"] <= rows[GROUPS]["over_ring_max"]
