"""What schedules cost: against formulas worked out by hand, and one rank standing for all against all ranks."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from statistics import median
from unittest import mock

import pytest
import torch

from burst_plugin import Full, Link, Topology, VirtualRing, flat_ring, two_level_ring
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.planner import buffer_bytes, least_seconds, left_out, plans
from burst_plugin.planning.price import Price, pass_price, price, price_by_name, work_seconds
from burst_plugin.planning.simulator import Load, SimulatedRun, simulate
from burst_plugin.schedule.rings import SCHEDULES, sample
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.strategy import Strategy
from burst_plugin.types import DIRECTIONS, Direction
from tests.support.reference import Problem

FAST = 1e12


@pytest.mark.parametrize(("nodes", "width"), [(2, 2), (2, 4), (4, 2), (4, 4), (3, 5)])
@pytest.mark.parametrize("block_s", [0.01, 0.03, 0.1, 0.3])
def test_forward_passes_take_what_the_formulas_say(nodes: int, width: int, block_s: float) -> None:
    topology, visit_s = Topology(nodes, width), 0.03
    load, links = Load(1e6, 0, visit_s), Links(FAST, 1e6 / block_s)
    flat = price(flat_ring(topology, reduces=False), load, links)
    assert flat.time_s == pytest.approx((nodes * width - 1) * max(visit_s, block_s) + visit_s, rel=1e-3)
    two = price(two_level_ring(topology, reduces=False), load, links)
    assert two.time_s == pytest.approx((nodes - 1) * max(width * visit_s, block_s) + width * visit_s, rel=1e-3)
    assert two.compute_s == pytest.approx(nodes * width * visit_s)
    assert two.link_s[Link.INTER] == pytest.approx((nodes - 1) * block_s)
    per_node = price(two_level_ring(topology, reduces=False), load, Links(FAST, 1e6 / block_s, nic="node"))
    outer_s = width * max(visit_s, block_s)
    assert per_node.time_s == pytest.approx((nodes - 1) * outer_s + width * visit_s, rel=1e-3)
    assert per_node.link_s[Link.INTER] == pytest.approx((nodes - 1) * width * block_s)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_hop_takes_its_latency_besides_and_parts_under_way_overlap(parts: int) -> None:
    """4 nodes of 1 with nothing to compute: of a block all parts but the last are under way behind each other."""
    block_s, latency_s = 0.1, 0.06
    links = Links(FAST, 1e6 / block_s, inter_latency_s=latency_s)
    found = price(flat_ring(Topology(4, 1), reduces=False).in_parts(parts), Load(1e6, 0, 0), links)
    until_passed_on_s = max(block_s, block_s / parts + latency_s)  # the first part is, while the others come
    assert found.time_s == pytest.approx(2 * until_passed_on_s + block_s + latency_s, rel=1e-3)
    assert found.bound_s == pytest.approx(3 * block_s), "no link is busy meanwhile"


def test_latency_is_that_of_the_link() -> None:
    schedule, load = two_level_ring(Topology(2, 3), reduces=False), Load(1.0, 0, 0)
    within, between = (price(schedule, load, Links(FAST, FAST, "rank", *each)) for each in ((0.01, 0), (0, 0.01)))
    assert within.time_s == pytest.approx(0.04, rel=1e-3), "2 of 3 hops inside the node, twice"
    assert between.time_s == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_an_exchange_of_heads_waits_for_one_message_there_and_one_back(degree: int) -> None:
    shapes, strategy = Shapes(1, 64, 64, 8, 8, 64, 64, torch.bfloat16), Strategy(ulysses_degree=degree)
    of = (strategy, "forward", Topology(2, 4), shapes, 1.0)
    without = pass_price(*of, Links(FAST, FAST)).time_s  # type: ignore[arg-type]
    far = pass_price(*of, Links(FAST, FAST, "rank", 0.0, 0.1)).time_s  # type: ignore[arg-type]
    near = pass_price(*of, Links(FAST, FAST, "rank", 0.1, 0.0)).time_s  # type: ignore[arg-type]
    assert far - without == pytest.approx(0.2 if degree == 8 else 0.0, abs=1e-6), "the ring hides its own"
    assert near - without == pytest.approx(0.2, abs=1e-6)


def test_gather_and_reduce_share_a_nic() -> None:
    """2 ranks: dq of the other's block leaves when its work is done, and takes longer than the work that was kept."""
    load, links = Load(1e6, 2e6, 0.5), Links(FAST, 1e6)
    assert price(flat_ring(Topology(2, 1)), load, links).time_s == pytest.approx(1 + 0.5 + 2, rel=1e-3)


def test_the_final_reduce_hop_overlaps_with_the_tail() -> None:
    """4 nodes of 1 that compute all the time: of the last hop, 0.2 s, all is hidden behind half a visit of 0.4."""
    load, links = Load(1e6, 2e6, 0.4), Links(FAST, 1e7)
    schedule = flat_ring(Topology(4, 1))
    assert price(schedule, load, links).time_s == pytest.approx(4 * 0.4, rel=1e-3)
    at_once = replace(schedule, visits=tuple(visits[:-1] for visits in schedule.visits), tail_share=0.0).validate()
    assert price(at_once, load, links).time_s == pytest.approx(4 * 0.4 + 0.2, rel=1e-3)
    assert price(schedule, load, links).compute_s == price(at_once, load, links).compute_s == pytest.approx(1.6)


def test_parts_hide_what_comes_last() -> None:
    """4 nodes of 2 whose links are busy all the time: the last block is worked on in 1 / parts of 2 visits."""
    load, links = Load(1e6, 0, 0.030), Links(FAST, 1e6 / 0.088)
    schedule = two_level_ring(Topology(4, 2), reduces=False)
    for parts in (1, 2, 4, 8):
        found = price(schedule.in_parts(parts), load, links)
        assert found.time_s == pytest.approx(3 * 0.088 + 2 * 0.030 / parts, rel=1e-3)
        assert found.bound_s == pytest.approx(3 * 0.088)


def assert_same(found: Price, expected: Price) -> None:
    assert found.time_s == pytest.approx(expected.time_s, rel=1e-9)
    assert found.compute_s == pytest.approx(expected.compute_s, rel=1e-9)
    assert found.link_s == pytest.approx(expected.link_s, rel=1e-9)


# Compute is what all wait for, either link is, or none is by far; gather and reduce are unlike.
LOADS = [
    (Load(3e6, 2e6, 0.1), Links(1e9, 5e7)),
    (Load(3e6, 2e6, 0.02), Links(1e9, 3.1e7)),
    (Load(2e6, 5e6, 0.003), Links(4.7e8, 1.3e9)),
    (Load(2e6, 4e6, 0.011), Links(9e8, 1.9e8)),
]
SMALL = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 4), (7, 2)]
MIDDLE = [(13, 3), (24, 2), (30, 1)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("nic", ["rank", "node"])
def test_a_price_by_name_is_that_of_all_ranks(name: str, parts: int, nic: str) -> None:
    for size, reduces in itertools.product(SMALL, (True, False)):
        topology = Topology(*size)
        schedule = SCHEDULES[name](topology, reduces).in_parts(parts)
        for load, links in LOADS:
            load, links = replace(load, reduce_bytes=reduces * load.reduce_bytes), replace(links, nic=nic)
            expected = price(schedule, load, links)
            assert_same(price_by_name(name, topology, parts, load, links), expected)
            assert expected.time_s >= expected.bound_s * (1 - 1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", MIDDLE)
def test_larger_clusters_are_priced_by_a_smaller_one(name: str, size: tuple[int, int]) -> None:
    """To the same price, and most of them without a simulation of all nodes."""
    topology, sizes = Topology(*size), []

    def noted(schedule: Schedule, load: Load, links: Links) -> SimulatedRun:
        sizes.append(schedule.topology.nodes)
        return simulate(schedule, load, links)

    for parts, reduces, nic in [(1, True, "rank"), (2, True, "rank"), (2, True, "node"), (4, False, "rank")]:
        schedule = SCHEDULES[name](topology, reduces).in_parts(parts)
        for load, links in LOADS:
            load, links = replace(load, reduce_bytes=reduces * load.reduce_bytes), replace(links, nic=nic)
            with mock.patch("burst_plugin.planning.price.simulate", noted):
                found = price_by_name(name, topology, parts, load, links)
            assert_same(found, price(schedule, load, links))
    assert sizes.count(topology.nodes) < 8, "of 16, most are worked out from fewer nodes"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", [(13, 1), (22, 2)])
def test_states_that_repeat_have_the_same_messages_in_flight(name: str, size: tuple[int, int]) -> None:
    """Ahead of a message whose last byte has left there may be more or less of the way."""
    topology, load = Topology(*size), Load(1e6, 2e6, 0.001)
    for parts, rate, latency_s in itertools.product((1, 2, 4), (1e7, 3e7, 1e8), (0.02, 0.1, 0.5)):
        links = Links(1e8, rate, "rank", 0.003, latency_s)
        found = price_by_name(name, topology, parts, load, links)
        assert_same(found, price(sample(name, topology, True).in_parts(parts), load, links))


def step_by_step(schedule: Schedule) -> list[object]:
    """What the ranks of a sample do at each step of visits, in words that do not depend on the number of nodes."""
    topology, drawn = schedule.topology, len(schedule.visits)
    before: dict[object, int] = {}
    steps: list[list[object]] = [[] for _ in range(schedule.parts * topology.ranks + 10 * drawn)]
    for t in sorted(schedule.transfers, key=lambda t: (t.issue, t.due, t.traffic, t.src % drawn, t.dst % drawn)):
        src, dst = t.src % drawn, t.dst % drawn
        nodes_on = (topology.node(t.dst) - topology.node(t.src)) % topology.nodes
        stream = t.traffic, src, dst, nodes_on, (t.dst - t.src) % topology.ranks_per_node
        since = t.issue - before.get(stream, t.issue)  # the one that it queues behind
        before[stream] = t.issue
        steps[t.issue].append((t.traffic, src, dst, t.link, t.due - t.issue, since))
    work = list(zip(*map(schedule.work, range(drawn)), strict=True))
    return [(now, *does) for now, does in zip(work, steps, strict=False)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_one_node_more_is_one_more_of_the_same_in_the_middle(
    name: str, reduces: bool, parts: int, width: int
) -> None:
    """Beyond the first and the last three nodes: what `simulator._PeriodSearch` and `price_by_name` rely on."""
    period = width * parts
    shorter, longer = (step_by_step(sample(name, Topology(n, width), reduces).in_parts(parts)) for n in (9, 10))
    stop = len(shorter) - 3 * period
    for start in range(4 * period, stop + 1):
        assert longer == [*shorter[:start], *shorter[start - period :]]


def test_ranks_that_are_not_alike_are_all_looked_at() -> None:
    """In a flat ring over nodes only the ranks at the edges use a NIC; everybody waits for them."""
    found = price(flat_ring(Topology(2, 4), reduces=False), Load(1e6, 0, 0.01), Links(FAST, 1e7))
    assert found.time_s == pytest.approx(7 * 0.1 + 0.01, rel=1e-3)


def test_parts_are_had_where_they_help_and_nowhere_else() -> None:
    """Forward, the links of 2 nodes of 4 are idle most of the time; backward, 16/4 heads bring 3 times the bytes."""
    shapes = Shapes(1, 1024, 1024, 16, 4, 64, 64, torch.bfloat16)
    best = plans(Topology(2, 4), shapes, (0.030, 0.075), Links(1e9, 11.95e6))[0]
    assert best.strategy.parts == (1, 2)
    assert best.forward.time_s == pytest.approx(best.forward.compute_s)


def test_plans_put_the_cheapest_first_and_of_equals_the_simplest() -> None:
    shapes = Shapes(1, 8192, 8192, 32, 8, 128, 128, torch.bfloat16)
    topology = Topology(4, 4)
    busy = plans(topology, shapes, (0.001, 0.002), Links(450e9, 5e9))
    assert busy[0].strategy.schedule == "two_level_ring"
    assert busy[0].moving_sides == ("kv", "kv"), "8 of 32 heads travel cheaper than 32"
    assert min(map(busy[0].strategy.parts_of, DIRECTIONS)) > 1
    idle = plans(topology, shapes, (0.05, 0.1), Links(450e9, 50e9))
    assert idle[0].strategy.parts == 1
    times = [each.step_s for each in busy]
    assert min(times) * 1.01 >= times[0]
    many = plans(topology, shapes._replace(kv_heads=32), (0.001, 0.002), Links(450e9, 5e9))
    ring = next(each for each in many if each.strategy.ulysses_degree == 1)
    assert ring.moving_sides == ("kv", "q"), "dq of 32 heads is half of dk and dv of 32"
    assert many[0].strategy.ulysses_degree == 16, "links are slow, and an exchange of heads takes less than 15 hops"


@pytest.mark.parametrize("kv_heads", [2, 8, 32])
@pytest.mark.parametrize("gb_s", [1e9, 50e9])
def test_a_strategy_runs_as_it_was_priced(kv_heads: int, gb_s: float) -> None:
    """Options that were left at "auto" among them."""
    shapes = Shapes(1, 8192, 8192, 32, kv_heads, 128, 128, torch.bfloat16)
    topology, links, visit_s = Topology(2, 4), Links(FAST, gb_s), (0.001, 0.002)
    for plan in plans(topology, shapes, visit_s, links):
        for direction, side, each_s in zip(DIRECTIONS, plan.moving_sides, visit_s, strict=True):
            again = pass_price(plan.strategy, direction, topology, shapes, each_s, links)
            assert again == getattr(plan, direction)
            forced = replace(plan.strategy, **{direction: side})
            assert pass_price(forced, direction, topology, shapes, each_s, links) == again


def test_of_schedules_that_are_alike_the_default_is_taken() -> None:
    shapes = Shapes(1, 8192, 8192, 32, 8, 128, 128, torch.bfloat16)
    idle = plans(Topology(4, 8), shapes, (1.0, 2.0), Links(450e9, 50e9))
    assert idle[0].strategy == Strategy(schedule="two_level_ring", ranks_per_node=8)
    assert plans(Topology(1, 8), shapes, (1.0, 2.0), Links(450e9, 50e9))[0].strategy.schedule == "flat_ring"


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 2), Topology(2, 4)], ids=str)
def test_buffers_take_what_was_said(topology: Topology, kv_heads: int) -> None:
    """With each ring that `plans` has; less where what a kernel gave waits for the sums to arrive.

    Blocks are whole. A little more where a smaller buffer took the memory of a larger one, which then had to be made
    again.
    """
    shapes, length = Shapes(2, 64, 64, 4, kv_heads, 32, 32, torch.float32), 64 * topology.ranks
    problem = Problem.draw(length, (4, kv_heads), 32)
    shares = []
    for plan in plans(topology, shapes, (0.001, 0.002), Links(1e9, 1e8)):
        if plan.strategy.ulysses_degree > 1:
            continue
        ring = VirtualRing(topology, plan.strategy, network=CopyNetwork(topology.ranks, torch.device("cpu")))
        q, k, v = (x.clone().requires_grad_() for x in problem[:3])
        for _ in range(2):
            ring.attention(q, k, v, mask=Full())[0].backward(problem.dout)
        most = max(member.transport.pool.allocated_bytes for member in ring.rank_states)
        shares.append(most / buffer_bytes(plan, topology, shapes))
    assert sorted(shares)[-2] <= 1.02, "labels and alignment come on top"
    assert max(shares) <= 1.15
    assert median(shares) >= 0.5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_exchange_of_heads_is_added_to_a_ring_of_fewer_ranks(direction: str) -> None:
    """q, k, v, out of 1,024 tokens, 4 heads of 64, in bfloat16; lse goes back only for who asks for it."""
    shapes = Shapes(1, 1024, 1024, 4, 4, 64, 64, torch.bfloat16)
    nbytes = 4 * 1024 * 4 * 64 * 2

    def time_s(topology: Topology, links: Links) -> float:
        return pass_price(Strategy(ulysses_degree=4), direction, topology, shapes, 0.01, links).time_s

    assert time_s(Topology(1, 4), Links(1e9, 1e8)) == pytest.approx(0.04 + nbytes * 3 / 4 / 1e9)
    assert time_s(Topology(2, 2), Links(FAST, 1e8)) == pytest.approx(0.04 + nbytes / 2 / 1e8, rel=1e-3)
    assert time_s(Topology(2, 2), Links(FAST, 1e8, "node")) == pytest.approx(0.04 + nbytes / 1e8, rel=1e-3)


@pytest.mark.parametrize(("direction", "itemsize"), [("forward", 2), ("backward", 4)])
def test_shares_of_one_key_value_head_are_priced_whole(direction: str, itemsize: int) -> None:
    """All 4 ranks get the whole k and v, and send whole gradients of them back, in float32."""
    shapes = Shapes(1, 1024, 1024, 4, 1, 64, 64, torch.bfloat16)
    found = pass_price(Strategy(ulysses_degree=4), direction, Topology(1, 4), shapes, 0.01, Links(1e9, 1e8))
    assert found.time_s == pytest.approx(0.04 + 3 * 1024 * 2 * 64 * (2 + itemsize) / 1e9)
    degrees = {plan.strategy.ulysses_degree for plan in plans(Topology(1, 4), shapes, (0.01, 0.02), Links(1e9, 1e8))}
    assert degrees == {1, 2, 4}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_rings_of_a_group_share_the_nic_of_their_node(direction: Direction) -> None:
    """2 nodes of 2 ranks, groups of 2: each rank's half of the heads of 2 blocks goes once over the one NIC."""
    shapes = Shapes(1, 1024, 1024, 4, 4, 64, 64, torch.bfloat16)
    block = hop_bytes(shapes, direction, "kv")  # twice the tokens of half the heads
    strategy = Strategy(schedule="flat_ring", ulysses_degree=2, forward="kv", backward="kv")
    found = pass_price(strategy, direction, Topology(2, 2), shapes, 1e-6, Links(FAST, 1e8, "node"))
    assert found.link_s[Link.INTER] == pytest.approx(2 * block / 1e8)
    assert found.time_s >= found.link_s[Link.INTER]


@pytest.mark.parametrize("nic", ["rank", "node"])
@pytest.mark.parametrize("size", [(1, 4), (4, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_no_plan_is_faster_than_the_bound(nic: str, size: tuple[int, int], kv_heads: int) -> None:
    shapes, topology = Shapes(1, 1024, 1024, 8, kv_heads, 64, 64, torch.bfloat16), Topology(*size)
    for visit_s, links in itertools.product(
        ((1e-9, 2e-9), (0.001, 0.002), (1.0, 2.0)), (Links(1e9, 1e8, nic), Links(1e8, 1e9, nic))
    ):
        least_s = least_seconds(topology, shapes, visit_s, links)
        found = plans(topology, shapes, visit_s, links)
        ratios = [round(plan.step_s / least_s, 2) for plan in found]
        assert ratios == sorted(ratios), "the best first"
        assert min(plan.step_s for plan in found) >= least_s * (1 - 1e-9)


def test_the_bound_is_what_was_worked_out_by_hand() -> None:
    """2 nodes of 2, one head, so no exchange; k and v are half of what q sends: 1024 tokens x 128 x 2 bytes."""
    shapes, block = Shapes(1, 1024, 1024, 1, 1, 64, 64, torch.bfloat16), 1024 * 128 * 2
    topology, sums = Topology(2, 2), 2 * block

    def bound(visit_s: float, links: Links) -> float:
        return least_seconds(topology, shapes, (visit_s, 0.0), links) - least_seconds(topology, shapes, (0, 0), links)

    assert bound(1.0, Links(FAST, FAST)) == pytest.approx(4.0, rel=1e-3), "computing"
    forward_q, backward_q = (hop_bytes(shapes, direction, "q") for direction in DIRECTIONS)
    least = min(block, forward_q) + min(block + sums, backward_q)
    across = least_seconds(topology, shapes, (0, 0), Links(FAST, 1e6))
    assert across == pytest.approx(least / 1e6, rel=1e-3), "one block per rank crosses"
    shared = least_seconds(topology, shapes, (0, 0), Links(FAST, 1e6, "node"))
    assert shared == pytest.approx(2 * least / 1e6, rel=1e-3), "two per NIC"
    inside = least_seconds(topology, shapes, (0, 0), Links(1e6, 2e6))
    assert inside == pytest.approx(3 * least / 3e6), "three blocks over both links"


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    shapes = Shapes(1, 64, 64, 4, 2, 64, 64, torch.bfloat16)
    plans(Topology(2, 2), shapes, (0.001, 0.002), Links(1e9, 1e8), lambda *each: seen.append(each))
    assert seen == [(n, len(seen)) for n in range(1, len(seen) + 1)]


def test_4096_ranks_are_planned_in_seconds() -> None:
    shapes, start = Shapes(1, 1024, 1024, 32, 8, 128, 128, torch.bfloat16), time.process_time()
    found = plans(Topology(512, 8), shapes, work_seconds(shapes, 500e12, causal=True), Links(400e9, 40e9))
    assert {each.strategy.schedule for each in found} == {*SCHEDULES}
    assert buffer_bytes(found[0], Topology(512, 8), shapes) > 0
    assert time.process_time() - start < 20


def test_a_schedule_is_left_out_where_too_many_ranks_are_unlike() -> None:
    assert left_out(Topology(2, 80)) == ["flat_ring", "tasp"]
    assert left_out(Topology(2, 72)) == left_out(Topology(1, 80)) == []
    shapes = Shapes(1, 64, 64, 2, 1, 64, 64, torch.bfloat16)
    found = {
        (each.strategy.schedule, each.strategy.ulysses_degree)
        for each in plans(Topology(2, 80), shapes, (1.0, 1.0), Links(1e9, 1e8))
    }
    assert ("flat_ring", 1) not in found
    assert ("flat_ring", 2) in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0, 1), r"Links\(intra_bytes_per_s=0\)"),
        ((1, -1), "inter_bytes_per_s=-1"),
        ((math.inf, 1), "intra_bytes_per_s=inf.* positive, finite rate"),
        ((1, math.nan), "inter_bytes_per_s=nan"),
        ((1, 1, "gpu"), "nic='gpu'"),
    ],
)
def test_links_that_cannot_be_are_refused(options: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Links(*options)
