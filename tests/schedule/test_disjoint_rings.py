"""Rings that share no link, and the schedule `tasp`, whose parts go around them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from burst_plugin import Link, Topology, Traffic, flat_ring, tasp
from burst_plugin.schedule.disjoint_rings import disjoint_ring, ring_count
from burst_plugin.schedule.rings import sample, sample_ranks
from burst_plugin.schedule.schedule import Schedule


def links(topology: Topology) -> list[tuple[int, int]]:
    """The links of all rings, each from a rank to the next."""
    found = []
    for number in range(ring_count(topology)):
        ring = disjoint_ring(topology, number)
        assert sorted(ring) == list(range(topology.ranks))
        assert number or list(ring) == sorted(ring), "the first is that of a flat ring"
        assert ring[0] == 0 or topology.nodes > 1
        found += [(ring[place - 1], ring[place]) for place in range(topology.ranks) if topology.ranks > 1]
    return found


@pytest.mark.parametrize("ranks", [*range(1, 33), 64, 126])
def test_rings_of_a_node_are_all_of_its_links(ranks: int) -> None:
    """Each once, but for 4 and 6 ranks, for which that is impossible: two links of each rank are left."""
    found = links(Topology(1, ranks))
    assert len(set(found)) == len(found)
    assert len(found) == ranks * (ranks - (2 if ranks in (4, 6) else 1))


def test_rings_of_512_ranks() -> None:
    topology = Topology(1, 512)
    some = [disjoint_ring(topology, number) for number in (0, 1, 77, 255, 256, 509, 510)]
    found = [link for ring in some for link in zip(ring, [*ring[1:], ring[0]], strict=True)]
    assert ring_count(topology) == 511
    assert len(set(found)) == len(found) == 7 * 512


@pytest.mark.parametrize(("nodes", "width"), [(2, 1), *product((2, 3), (2, 3, 4, 5, 6, 8, 9))])
def test_rings_over_nodes_share_no_link_and_no_nic(nodes: int, width: int) -> None:
    topology = Topology(nodes, width)
    found = links(topology)
    assert len(set(found)) == len(found)
    crossing = [(src, dst) for src, dst in found if topology.link(src, dst) is Link.INTER]
    assert ring_count(topology) == max(1, width - width % 2)
    assert len(crossing) == nodes * ring_count(topology), "each goes through all ranks of a node at once"
    for end in zip(*crossing, strict=True):
        assert set(Counter(end).values()) == {1}


def test_the_rings_of_the_docstrings() -> None:
    drawn = [" ".join(map(str, disjoint_ring(Topology(1, 5), number))) for number in range(4)]
    assert drawn == ["0 1 2 3 4", "0 2 4 1 3", "0 4 3 2 1", "0 3 1 4 2"]
    over_nodes = [disjoint_ring(Topology(2, 4), number) for number in range(4)]
    assert [list(ring[:4]) for ring in over_nodes] == [[0, 1, 2, 3], [1, 3, 0, 2], [3, 2, 1, 0], [2, 0, 3, 1]]
    assert all(list(ring[4:]) == [rank + 4 for rank in ring[:4]] for ring in over_nodes)
    grid = tasp(Topology(1, 3)).in_parts(2)
    assert grid.visits == ((0, 3, 2, 4, 1, 5), (1, 4, 0, 5, 2, 3), (2, 5, 1, 3, 0, 4))
    to_rank_0 = [t for t in grid.gather if t.dst == 0 and t.issue == 0]
    assert [(t.block, t.src, t.due) for t in to_rank_0] == [(2, 2, 2), (4, 1, 2)]


def test_in_one_part_it_is_a_flat_ring() -> None:
    for topology, reduces in product((Topology(1, 5), Topology(2, 4)), (True, False)):
        one, flat = tasp(topology, reduces).in_parts(1), flat_ring(topology, reduces)
        assert (one.visits, one.gather, one.reduce) == (flat.visits, flat.gather, flat.reduce)


@pytest.mark.parametrize("traffic", Traffic)
def test_all_links_are_busy_all_the_time(traffic: Traffic) -> None:
    """8 ranks, 7 parts: at each step of whole blocks, every rank sends one part to every other one, at once."""
    schedule = tasp(Topology(1, 8)).in_parts(7).validate()
    sent = Counter((t.issue, t.src, t.dst) for t in schedule.transfers if t.traffic is traffic)
    first = 0 if traffic is Traffic.GATHER else 2
    steps = [7 * step for step in range(first, first + 7)]
    assert sent == {(step, src, dst): 1 for step in steps for src in range(8) for dst in range(8) if src != dst}
    assert {t.due - t.issue for t in schedule.transfers if t.due <= 8 * 7} == {7}


def test_every_nic_sends_for_one_part() -> None:
    schedule = tasp(Topology(3, 4)).in_parts(4).validate()
    assert all(schedule.hops(rank)[Link.INTER] == dict.fromkeys(Traffic, 11) for rank in range(12))


def test_parts_beyond_the_rings_take_them_again() -> None:
    schedule = tasp(Topology(1, 4)).in_parts(4).validate()
    at_first = Counter((t.src, t.dst) for t in schedule.gather if t.issue == 0)
    assert set(at_first.values()) == {2}
    assert len(at_first) == 8, "2 rings of 4 ranks"


@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(1, 7), Topology(2, 4), Topology(3, 3)], ids=str)
@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("density", [0.2, 0.7])
def test_every_ring_is_pruned_for_itself(topology: Topology, parts: int, density: float) -> None:
    drawn, everyone = random.Random(3), range(topology.ranks)
    some = [{o: None for o in everyone if r == o or drawn.random() < density} for r in everyone]
    for reduces in (True, False):
        whole = tasp(topology, reduces)
        schedule = whole.in_parts(parts).pruned(some).validate(some)
        assert len(schedule.gather) < parts * len(whole.gather)
        assert_nothing_is_sent_in_vain(schedule)
        early = whole.pruned(some).in_parts(parts).validate(some)
        assert len({(t.src, t.dst) for t in early.gather}) <= topology.ranks, "of what is left parts go one way"


def assert_nothing_is_sent_in_vain(schedule: Schedule) -> None:
    worked_on = {(rank, block) for rank, visits in enumerate(schedule.visits) for block in visits}
    passed_on = {(t.src, t.block) for t in schedule.gather}
    assert all((t.dst, t.block) in worked_on | passed_on for t in schedule.gather)
    arrived = {(t.dst, t.block) for t in schedule.reduce}
    assert all((t.src, t.block) in worked_on | arrived for t in schedule.reduce)


@pytest.mark.parametrize("topology", [Topology(1, 8), Topology(2, 4), Topology(4, 1)], ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_sample_is_a_part_of_the_whole(topology: Topology, parts: int) -> None:
    drawn, whole = sample("tasp", topology, True).in_parts(parts), tasp(topology).in_parts(parts)
    ranks = sample_ranks("tasp", topology)
    assert drawn.visits == whole.visits[:ranks]
    assert {*drawn.transfers} == {t for t in whole.transfers if whole.owner(t.block) < ranks}
