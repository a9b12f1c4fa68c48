"""Schedules as data: what is drawn, what is counted, and that `validate` sees every kind of damage."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from burst_plugin import Link, Schedule, ScheduleError, Topology, Traffic, Transfer, direct, flat_ring, two_level_ring
from burst_plugin.schedule.direct import sent_early
from burst_plugin.schedule.rings import SCHEDULES

TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2), (2, 4), (3, 2), (4, 4), (5, 3), (16, 8), (64, 8)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), TOPOLOGIES)
def test_every_schedule_is_exact_on_every_topology(name: str, nodes: int, ranks_per_node: int) -> None:
    for reduces in (True, False):
        schedule = SCHEDULES[name](Topology(nodes, ranks_per_node), reduces).validate()
        assert schedule.reduces == reduces
        assert len(schedule.reduce) == (len(schedule.gather) if reduces else 0)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), TOPOLOGIES[:-2])
def test_every_schedule_is_exact_in_parts(name: str, nodes: int, ranks_per_node: int, parts: int) -> None:
    for reduces in (True, False):
        whole = SCHEDULES[name](Topology(nodes, ranks_per_node), reduces)
        cut = whole.in_parts(parts).validate()
        hops = [[each.hops(rank) for rank in range(whole.ranks)] for each in (whole, cut)]
        if name == "tasp":  # whose parts go around different rings
            hops = [[_total(of_ranks)] for of_ranks in hops]
        for of_whole, of_cut in zip(*hops, strict=True):
            for link, sent in of_whole.items():
                assert of_cut[link] == {traffic: parts * count for traffic, count in sent.items()}


def _total(hops: list[dict[Link, dict[Traffic, int]]]) -> dict[Link, dict[Traffic, int]]:
    return {link: {kind: sum(of_rank[link][kind] for of_rank in hops) for kind in Traffic} for link in Link}


def test_parts_follow_each_other_in_every_phase() -> None:
    assert flat_ring(Topology(1, 2)).in_parts(2).visits == ((0, 2, 1, 3), (1, 3, 0, 2))
    found = two_level_ring(Topology(2, 2)).in_parts(2)
    assert found.visits[0] == (0, 4, 2, 3, 6, 7, 1, 0, 5, 4)
    assert [t[2:] for t in found.gather if t.block == 4 and t.link is Link.INTER] == [(0, 2, Link.INTER, 1, 4, None)]
    assert [t[2:] for t in found.reduce if t.block == 4 and t.link is Link.INTER] == [(3, 1, Link.INTER, 6, 9, None)]


def test_64_nodes_of_8_take_less_than_10_seconds() -> None:
    start = time.process_time()
    two_level_ring(Topology(nodes=64, ranks_per_node=8)).validate()
    assert time.process_time() - start < 10


@pytest.mark.parametrize(("nodes", "ranks_per_node"), TOPOLOGIES[:-1])
def test_two_level_hops(nodes: int, ranks_per_node: int) -> None:
    schedule = two_level_ring(Topology(nodes, ranks_per_node))
    sent = Counter((t.src, t.link, t.traffic) for t in schedule.transfers)
    for rank in range(schedule.ranks):
        for kind in Traffic:
            assert sent[rank, Link.INTRA, kind] == nodes * (ranks_per_node - 1)
            assert sent[rank, Link.INTER, kind] == nodes - 1
        assert schedule.hops(rank)[Link.INTER][Traffic.GATHER] == nodes - 1


def test_flat_ring_crosses_nodes_at_node_edges_only() -> None:
    schedule = flat_ring(Topology(2, 4))
    hops = [schedule.hops(rank) for rank in range(8)]
    assert [h[Link.INTER][Traffic.GATHER] for h in hops] == [0, 0, 0, 7, 0, 0, 0, 7]
    assert [h[Link.INTRA][Traffic.REDUCE] for h in hops] == [7, 7, 7, 0, 7, 7, 7, 0]


def test_the_rings_of_the_docstring() -> None:
    assert flat_ring(Topology(1, 4)).visits == ((0, 3, 2, 1), (1, 0, 3, 2), (2, 1, 0, 3), (3, 2, 1, 0))
    both = ((0, 2, 3, 1, 0), (1, 3, 2, 0, 1), (2, 0, 1, 3, 2), (3, 1, 0, 2, 3))
    assert two_level_ring(Topology(2, 2)).visits == both
    gather_only = two_level_ring(Topology(2, 2), reduces=False)
    assert gather_only.visits == ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0))


def test_transfers_of_one_block_around_two_nodes_of_two() -> None:
    schedule = two_level_ring(Topology(2, 2))
    assert [t for t in schedule.gather if t.block == 0] == [
        Transfer(Traffic.GATHER, block=0, src=0, dst=1, link=Link.INTRA, issue=2, due=3),
        Transfer(Traffic.GATHER, block=0, src=0, dst=2, link=Link.INTER, issue=0, due=1),
        Transfer(Traffic.GATHER, block=0, src=2, dst=3, link=Link.INTRA, issue=1, due=2),
    ]
    assert [t for t in schedule.reduce if t.block == 0] == [
        Transfer(Traffic.REDUCE, block=0, src=2, dst=3, link=Link.INTRA, issue=2, due=3),
        Transfer(Traffic.REDUCE, block=0, src=3, dst=1, link=Link.INTER, issue=3, due=4),
        Transfer(Traffic.REDUCE, block=0, src=1, dst=0, link=Link.INTRA, issue=4, due=5),
    ]


def test_inter_node_transfers_have_an_inner_ring_or_half_of_one_to_hide_behind() -> None:
    nodes, width = 4, 8

    def steps_in_flight(schedule: Schedule, traffic: Traffic) -> Counter[int]:
        return Counter(t.due - t.issue for t in schedule.transfers if (t.traffic, t.link) == (traffic, Link.INTER))

    forward, backward = (two_level_ring(Topology(nodes, width), reduces) for reduces in (False, True))
    assert steps_in_flight(forward, Traffic.GATHER) == {width: 3 * 32}
    assert steps_in_flight(backward, Traffic.GATHER) == {width // 2: 32, width: 2 * 32}
    assert steps_in_flight(backward, Traffic.REDUCE) == {width: 2 * 32, width // 2: 32}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(4, 8), Topology(3, 5), Topology(8, 1)], ids=str)
def test_the_final_reduce_hop_overlaps_with_the_tail(name: str, topology: Topology, parts: int) -> None:
    schedule = SCHEDULES[name](topology).in_parts(parts)
    last = len(schedule.visits[0]) - 1
    late = [t for t in schedule.reduce if t.due > last]
    together = name == "tasp"  # all parts leave when the first tail begins
    crossing = [t for t in late if name == "direct" and schedule.by_link and t.link is Link.INTER]  # since before
    assert {t.issue for t in late if t not in crossing} == {last - (parts - 1) * together}
    assert [t.dst for t in late] == [t.block % topology.ranks for t in late]
    slow = name != "two_level_ring" or topology.ranks_per_node == 1
    for rank in range(topology.ranks):
        tails, work = schedule.tail_visits(rank), schedule.work(rank)
        assert schedule.visits[rank][last] == rank + (parts - 1) * topology.ranks
        assert (tails[0], tails[last]) == (False, True)
        assert work[last] == (0.5 if slow else 0.25) / parts
        assert sum(work) == topology.ranks


@pytest.mark.parametrize("topology", [Topology(2, 4), Topology(4, 2), Topology(1, 6), Topology(6, 1)], ids=str)
@pytest.mark.parametrize("density", [0.3, 0.6, 1.0])
def test_direct_sends_to_another_node_once_what_is_needed_there(topology: Topology, density: float) -> None:
    drawn, everyone = random.Random(1), range(topology.ranks)
    some = [{o: ((r % 3, 4 + o),) for o in everyone if r == o or drawn.random() < density} for r in everyone]
    schedule = direct(topology, required=some).validate(some)
    for owner in everyone:
        for node in range(topology.nodes):
            needing = [rank for rank in topology.node_peers(node * topology.ranks_per_node) if owner in some[rank]]
            crossing = [
                t
                for t in schedule.gather
                if t.block == owner and t.link is Link.INTER and topology.node(t.dst) == node
            ]
            back = [
                t
                for t in schedule.reduce
                if t.block == owner and t.link is Link.INTER and topology.node(t.src) == node
            ]
            if not needing or node == topology.node(owner):
                assert crossing == back == []
                continue
            (there,), (home,) = crossing, back
            hub = topology.rank(node, owner)
            assert (there.src, there.dst, home.src, home.dst) == (owner, hub, hub, owner)
            assert there.rows == home.rows == ((min(rank % 3 for rank in needing), 4 + owner),)


def test_by_link_only_counterparts_have_a_communicator_between_nodes() -> None:
    """A flat ring crosses from the last rank of a node to the first of the next."""
    with pytest.raises(ScheduleError, match=r"flat_ring: no communicator for Transfer.* only counterparts have one"):
        replace(flat_ring(Topology(2, 2)), by_link=True).validate()


def test_direct_goes_straight_to_ranks_that_share_nothing() -> None:
    """Each needs the block before its own: as many transfers as seams, on one communicator."""
    some = [{rank: None, **({rank - 1: ((6, 8),)} if rank else {})} for rank in range(8)]
    schedule = direct(Topology(2, 4), required=some).validate(some)
    assert [(t.src, t.dst) for t in sorted(schedule.gather, key=lambda t: t.src)] == [(r, r + 1) for r in range(7)]
    assert not schedule.by_link
    assert {(t.issue, t.due) for t in schedule.gather} == {(0, 1)}, "behind the work on its own block"
    assert {(t.issue, t.due) for t in schedule.reduce} == {(2, 3)}, "behind the tail"
    assert direct(Topology(2, 4), required=[*some[:7], {**some[7], 3: None}]).by_link, "4 and 7 need block 3"


def test_direct_crosses_behind_the_work_on_another_node() -> None:
    """4x2: a block leaves while that of the node before is worked on, and its sums while that of the one after is."""
    schedule = direct(Topology(4, 2))
    assert {t.due - t.issue for t in schedule.gather if t.link is Link.INTER} == {1, 2}
    first = [t for t in schedule.gather if t.link is Link.INTER and t.due == 1]
    assert len(first) == 8, "only what comes first has nothing but a part of the home node's work to hide behind"
    assert sorted({(t.issue, t.due) for t in schedule.reduce if t.link is Link.INTER}) == [(4, 6), (6, 8), (8, 9)]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 4), Topology(3, 2)])
def test_few_rows_are_sent_at_once_and_awaited_at_last(topology: Topology, parts: int) -> None:
    """Every rank requires 10 rows of every block; what counterparts send on follows when they have it."""
    required = [dict.fromkeys(range(topology.ranks), ((0, 10),)) for _ in range(topology.ranks)]
    schedule = direct(topology, required=required).in_parts(parts)
    most = sum(schedule.most_rows_moved([1000] * topology.ranks))
    early = sent_early(schedule, [1000] * topology.ranks).validate(required)
    last = max(t.due for t in schedule.reduce)
    own = [t for t in early.gather if t.link is Link.INTRA and t.src == early.owner(t.block)]
    assert {(t.issue, t.due) for t in own} == {(0, min(t.due for t in own))}, "one batch"
    assert set(early.gather) - set(own) <= set(schedule.gather)
    for t in early.reduce:
        assert t.due == last or t.dst != early.owner(t.block)
    assert early != schedule
    assert early.hops(0) == schedule.hops(0)
    assert sent_early(schedule, [most - 1] * topology.ranks) is schedule, "more than a block"


def test_there_is_no_tail_inside_one_node_or_where_nothing_is_reduced() -> None:
    for name in SCHEDULES:
        for schedule in (SCHEDULES[name](Topology(1, 4)), SCHEDULES[name](Topology(2, 2), reduces=False)):
            assert schedule.tail_share == 0
            assert [len(visits) for visits in schedule.visits] == [4] * 4


def test_at_most_one_block_per_step_leaves_through_each_link() -> None:
    sent = Counter((t.traffic, t.src, t.link, t.issue) for t in two_level_ring(Topology(3, 4)).transfers)
    assert set(sent.values()) == {1}


def test_ranks_have_each_transfer_at_both_ends_and_nothing_else() -> None:
    schedule = two_level_ring(Topology(3, 2))
    issued = Counter(t for rank in range(6) for step in schedule.of_rank(rank).steps for t in step.issue)
    assert set(issued) == set(schedule.transfers)
    assert set(issued.values()) == {2}
    for rank in range(6):
        steps = schedule.of_rank(rank).steps
        assert tuple(s.visit for s in steps if s.visit is not None) == schedule.visits[rank]
        assert all(t.issue == number for number, s in enumerate(steps) for t in s.issue)
        assert all(t.due == number for number, s in enumerate(steps) for t in s.due)


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(4, 2), Topology(3, 3)], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("reduces", [True, False])
def test_every_rank_launches_in_the_same_order(topology: Topology, reduces: bool, parts: int) -> None:
    schedule = two_level_ring(topology, reduces).in_parts(parts)
    orders = []
    for rank in range(schedule.ranks):
        steps = schedule.of_rank(rank).steps
        orders.append([list(dict.fromkeys((t.due, t.traffic, t.link) for t in step.issue)) for step in steps])
    assert all(order == orders[0] for order in orders)
    for posted in orders[0]:
        assert [due for due, *_ in posted] == sorted(due for due, *_ in posted), "what is needed first goes first"


def test_most_rows_counts_the_rows_of_the_blocks_that_are_sent() -> None:
    """In a flat ring a rank sends all blocks but that of the rank after it."""
    assert flat_ring(Topology(1, 4)).most_rows_moved([1, 2, 3, 4]) == (0, 9)
    assert flat_ring(Topology(4, 1)).most_rows_moved([1, 2, 3, 4]) == (9, 0)


def test_rows_count_where_they_are_sent_and_where_they_are_received() -> None:
    """Rank 0 needs all other blocks, which nobody sends more than once; or all others need its block."""
    alone = {0: ((0, 8),)}
    gathering = [dict.fromkeys(range(4), ((0, 8),)), *({rank: ((0, 8),)} for rank in (1, 2, 3))]
    giving = [alone, *({0: ((0, 8),), rank: ((0, 8),)} for rank in (1, 2, 3))]
    for required in (gathering, giving):
        assert direct(Topology(1, 4), False, required).most_rows_moved([8] * 4) == (0, 24)


def test_links_need_own_communicators_only_with_two_levels() -> None:
    assert two_level_ring(Topology(2, 2)).by_link
    assert not flat_ring(Topology(2, 2)).by_link
    assert not two_level_ring(Topology(4, 1)).by_link


def test_grid() -> None:
    assert two_level_ring(Topology(2, 2)).format().splitlines() == [
        "two_level_ring, 2x2 (nodes x ranks per node)",
        "           step   0   1   2   3   4",
        "node 0   rank 0  0/ |*2   3 | 1  /0",
        "         rank 1  1/ |*3   2 | 0  /1",
        "node 1   rank 2  2/ |*0   1 | 3  /2",
        "         rank 3  3/ |*1   0 | 2  /3",
        "gather: a rank sends at most 2 blocks intra-node, 1 inter-node",
        "reduce: a rank sends at most 2 blocks intra-node, 1 inter-node",
    ]


def _swap_first_visits(s: Schedule) -> Schedule:
    first = (s.visits[0][1], s.visits[0][0], *s.visits[0][2:])
    return replace(s, visits=(first, *s.visits[1:]))


def _visit_twice(s: Schedule) -> Schedule:
    return replace(s, visits=((*s.visits[0][:2], *s.visits[0][1:-1]), *s.visits[1:]))


def _forget_the_tail(s: Schedule) -> Schedule:
    return replace(s, visits=((*s.visits[0][:-1], None), *s.visits[1:]))


def _gather_as_reduce(s: Schedule) -> Schedule:
    return replace(s, gather=(), reduce=(*s.gather, *s.reduce))


def _reduce_once_more(s: Schedule) -> Schedule:
    return replace(s, reduce=(*s.reduce, Transfer(Traffic.REDUCE, 0, 0, 1, Link.INTRA, 5, 6)))


def _edit(kind: str, index: int, **changes: int | Link) -> Callable[[Schedule], Schedule]:
    def damage(s: Schedule) -> Schedule:
        transfers = list(getattr(s, kind))
        transfers[index] = transfers[index]._replace(**changes)
        return replace(s, **{kind: tuple(transfers)})

    return damage


def _drop(kind: str, index: int) -> Callable[[Schedule], Schedule]:
    return lambda s: replace(s, **{kind: getattr(s, kind)[:index] + getattr(s, kind)[index + 1 :]})


def _repeat(kind: str, index: int) -> Callable[[Schedule], Schedule]:
    return lambda s: replace(s, **{kind: (*getattr(s, kind), getattr(s, kind)[index])})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_swap_first_visits, "rank 0 visits block 3 at step 0 without it"),
        (_visit_twice, "does not visit every block exactly once"),
        (_forget_the_tail, "does not visit every block exactly once"),
        (_drop("gather", 0), "without it|before it has it"),
        (_repeat("gather", 0), "sent block 0 twice"),
        (_edit("gather", 0, link=Link.INTER), "impossible transfer"),
        (_edit("gather", 0, due=0), "impossible transfer"),
        (_edit("gather", 0, dst=0), "impossible transfer"),
        (_gather_as_reduce, "impossible transfer"),
        (_reduce_once_more, "ends incomplete at rank 1"),
        (_edit("gather", 0, due=2), "rank 1 sends block 0 before it has it"),
        (_edit("gather", 2, due=4), "rank 3 visits block 0 at step 3 without it"),
        (_edit("gather", 2, issue=0), "before it has it"),
        (_drop("reduce", 0), "ends incomplete"),
        (_repeat("reduce", 0), "has no partial result to send"),
        (_edit("reduce", 0, issue=0), "has no partial result to send"),
        (_edit("reduce", 2, dst=1), "ends incomplete at rank 0"),
        (_edit("reduce", 1, issue=2, due=3), "ends incomplete|has no partial result"),
    ],
)
def test_validate_sees_damage(damage: Callable[[Schedule], Schedule], message: str) -> None:
    schedule = flat_ring(Topology(2, 2)).validate()
    with pytest.raises(ScheduleError, match=message):
        damage(schedule).validate()
