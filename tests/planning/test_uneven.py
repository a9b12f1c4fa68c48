"""Clusters of unlike nodes and ranks: prices against a recurrence written out, rings beside each other, the bound."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel, Full, Link, Topology, burst_attention, two_level_ring
from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.bound import least_seconds
from burst_plugin.planning.links import Links, Load
from burst_plugin.planning.measured import measured_links, only_slow_ones
from burst_plugin.planning.planner import MOST_UNEVEN, pass_price, plans
from burst_plugin.planning.price import price, price_by_name
from burst_plugin.planning.uneven import uneven_in_words
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.strategy import Strategy
from burst_plugin.types import DIRECTIONS
from tests.support.drawn_clusters import profile_in_rank
from tests.support.emulated_gpu import SleepingKernel
from tests.support.netns import EmulatedCluster
from tests.support.ranks import as_on_gpus

FAST = 1e12
PAYLOAD = 1448 / 1514  # of what a link carries, the rest being headers
SHAPES = Shapes(1, 1024, 1024, 8, 4, 64, 64, torch.bfloat16)


def recurrence(rates: list[float], speeds: list[float], block: float, visit_s: float) -> float:
    """Seconds of a forward pass of a flat ring over nodes of one rank; a message needs both of its ends."""
    ranks = range(len(rates))
    begins, ends = [0.0 for _ in ranks], [0.0 for _ in ranks]  # of the step; of the last message from each rank
    for step in ranks:
        done = [begins[rank] + visit_s / speeds[rank] for rank in ranks]
        if step == ranks[-1]:
            return max(done)
        for src in ranks:
            dst = (src + 1) % len(rates)
            ends[src] = max(begins[src], begins[dst], ends[src]) + block / min(rates[src], rates[dst])
        begins = [max(done[rank], ends[rank], ends[rank - 1]) for rank in ranks]
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_a_flat_ring_of_unlike_ranks_takes_what_the_recurrence_says(seed: int) -> None:
    random = Random(seed)
    count = random.randint(2, 7)
    rates, speeds = ([random.uniform(0.2, 1.0) for _ in range(count)] for _ in range(2))
    visit_s, unlike = random.uniform(0.2, 3.0), random.sample(range(count), random.randint(1, count))
    rates, speeds = ([x if n in unlike else 1.0 for n, x in enumerate(of)] for of in (rates, speeds))
    links = Links(
        FAST, 1e6, node_bytes_per_s={n: 1e6 * rates[n] for n in unlike}, rank_speed={n: speeds[n] for n in unlike}
    )
    found = price_by_name("flat_ring", Topology(count, 1), 1, Load(1e6, 0, visit_s), links)
    assert found.time_s == pytest.approx(recurrence(rates, speeds, 1.0, visit_s), rel=1e-6)
    assert found.compute_s == pytest.approx(count * visit_s / min(speeds))
    assert found.link_s[Link.INTER] == pytest.approx((count - 1) / min(rates))


@pytest.mark.parametrize("nic", ["rank", "node"])
def test_what_crosses_a_slow_node_is_late_in_every_round(nic: str) -> None:
    """4 nodes of 2: in each of 3 rounds one block of every rank leaves the node, and one comes."""
    links = Links(FAST, 1e8, nic, node_bytes_per_s={2: 1e7})
    found = price(two_level_ring(Topology(4, 2), reduces=False), Load(1e6, 0, 0.01), links)
    block_s = 0.1 if nic == "rank" else 0.2
    assert found.time_s == pytest.approx(3 * block_s + 2 * 0.01, rel=1e-3)
    assert found.link_s[Link.INTER] == pytest.approx(3 * block_s)


def test_a_slow_rank_holds_up_all_where_nothing_else_does() -> None:
    """It visits as many blocks as the others do, and each takes it 1 / 0.8 of the time."""
    for name, size in itertools.product(SCHEDULES, [(1, 4), (2, 4)]):
        links = Links(FAST, FAST, rank_speed={1: 0.8})
        found = price_by_name(name, Topology(*size), 1, Load(1.0, 1.0, 0.01), links)
        ranks = size[0] * size[1]
        assert found.compute_s == pytest.approx(ranks * 0.01 / 0.8)
        assert found.time_s == pytest.approx(ranks * 0.01 / 0.8, rel=1e-3)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("nic", ["rank", "node"])
def test_all_ranks_at_the_usual_rates_take_what_one_for_all_does(name: str, nic: str) -> None:
    """The same prices from a simulation of everything, for rings that exchange heads too."""
    even = Links(1e9, 1e8, nic, 1e-4, 3e-4)
    for size, degree, side in itertools.product([(1, 4), (2, 2), (3, 2)], (1, 2, 4), ("q", "kv")):
        topology, visit_s = Topology(*size), 0.004
        if degree not in topology.ulysses_degrees:
            continue
        named = replace(even, node_bytes_per_s={0: 1e8}, rank_speed={topology.ranks - 1: 1.0})
        strategy = Strategy(schedule=name, ulysses_degree=degree, forward=side, backward=side, parts=(1, 2))
        for direction in DIRECTIONS:
            expected = pass_price(strategy, direction, topology, SHAPES, visit_s, even)
            found = pass_price(strategy, direction, topology, SHAPES, visit_s, named)
            assert found.time_s == pytest.approx(expected.time_s, rel=1e-9)
            assert found.compute_s == pytest.approx(expected.compute_s, rel=1e-9)
            assert found.link_s == pytest.approx(expected.link_s, rel=1e-9)


def test_rings_beside_each_other_have_their_own_ranks() -> None:
    """Ranks 0, 2, 4, 6 are a ring of pairs that exchange heads, 1, 3, 5, 7 the other one."""
    links = Links(1e9, 8e8, "node", node_bytes_per_s={1: 2e8}, rank_speed={5: 0.5, 2: 0.8})
    of_pairs = links.of_rings(Topology(2, 4), 2)
    assert [each.rank_speed for each in of_pairs] == [{1: 0.8}, {2: 0.5}]
    assert all(each.node_bytes_per_s == {1: 1e8} and each.inter_bytes_per_s == 4e8 for each in of_pairs)
    of_nodes = links.of_rings(Topology(4, 2), 4)  # groups of nodes 0, 1 and 2, 3; node 1 has the members 2 and 3
    assert [each.node_bytes_per_s for each in of_nodes] == [{}, {}, {0: 1e8}, {0: 1e8}]
    assert [each.rank_speed for each in of_nodes] == [{}, {1: 0.5}, {0: 0.8}, {}]
    assert links.of_rings(Topology(2, 4), 8)[0].node_bytes_per_s == {}, "nothing goes around"
    assert len(links.even.of_rings(Topology(2, 4), 2)) == 1


def test_the_last_ring_and_the_slowest_node_of_an_exchange_are_waited_for() -> None:
    strategy, topology = Strategy(ulysses_degree=2), Topology(1, 4)
    slow = [
        pass_price(strategy, "forward", topology, SHAPES, 0.01, Links(FAST, FAST, rank_speed=speeds)).time_s
        for speeds in ({0: 0.5}, {3: 0.5}, {0: 0.5, 3: 0.8})
    ]
    assert slow == pytest.approx([0.08, 0.08, 0.08], rel=1e-3)
    whole = Strategy(ulysses_degree=4)
    usual, late = (
        pass_price(whole, "forward", Topology(2, 2), SHAPES, 0.0, Links(FAST, 1e8, node_bytes_per_s=rates)).time_s
        for rates in ({}, {1: 2.5e7})
    )
    assert late == pytest.approx(4 * usual, rel=1e-3)


@pytest.mark.parametrize("nic", ["rank", "node"])
@pytest.mark.parametrize("size", [(3, 1), (2, 2)])
def test_no_plan_on_an_uneven_cluster_is_faster_than_its_bound(nic: str, size: tuple[int, int]) -> None:
    topology = Topology(*size)
    for visit_s, (rates, speeds), kv_heads in itertools.product(
        ((1e-9, 2e-9), (0.001, 0.002)), (({0: 1e7}, {}), ({0: 2e8}, {1: 0.5})), (1, 8)
    ):
        shapes = SHAPES._replace(kv_heads=kv_heads)
        links = Links(1e9, 1e8, nic, node_bytes_per_s=rates, rank_speed=speeds)
        least_s = least_seconds(topology, shapes, visit_s, links)
        assert min(plan.step_s for plan in plans(topology, shapes, visit_s, links)) >= least_s * (1 - 1e-9)


def test_what_it_costs_is_said_and_what_suits_it() -> None:
    topology, visit_s = Topology(2, 2), (0.01, 0.025)

    def said(**uneven: dict[int, float]) -> str:
        links = Links(FAST, 1e12, **uneven)
        return uneven_in_words(plans(topology, SHAPES, visit_s, links), topology, SHAPES, visit_s, links)

    slow = said(rank_speed={3: 0.8})
    assert "Uneven: 25 % slower than if all were alike, 175 ms for both passes instead of 140; rank 3 has" in slow
    assert (
        "rank 3 has 80% of the speed. What suits an even cluster, Strategy(schedule='two_level_ring'), suits" in slow
    )
    assert "no slower than if all were alike" in said(node_bytes_per_s={0: 9e11})
    late = said(node_bytes_per_s={0: 2e7})
    assert "node 0 has NICs of 0.02 GB/s. What suits an even cluster, Strategy(" in late
    assert late.endswith(" more.")
    many = said(rank_speed={0: 0.9, 1: 0.9, 2: 0.9, 3: 0.9}, node_bytes_per_s={0: 1e12})
    assert "node 0 has NICs of 1000 GB/s, rank 0 has 90% of the speed, rank 1 " in many


def test_nodes_and_ranks_that_there_are_not_and_large_clusters_are_refused() -> None:
    for uneven, message in (
        ({"node_bytes_per_s": {2: 1e8}}, "node 2 is not one of 2x2 .* from 0 to 1"),
        ({"rank_speed": {4: 0.5}}, "rank 4 is not one of 2x2 .* from 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            plans(Topology(2, 2), SHAPES, (1.0, 1.0), Links(1e9, 1e8, **uneven))
    with pytest.raises(ValueError, match=f"the 192 ranks of an uneven cluster .* at most {MOST_UNEVEN} are"):
        plans(Topology(24, 8), SHAPES, (1.0, 1.0), Links(1e9, 1e8, rank_speed={4: 0.5}))
    for name, values in (
        ("node_bytes_per_s", {0: 0.0}),
        ("rank_speed", {-1: 1.0}),
        ("rank_speed", {1: float("nan")}),
    ):
        with pytest.raises(ValueError, match=rf"Links\({name}=.* positive, finite"):
            Links(1e9, 1e8, **{name: values})


def _measured(rank: int, visit_s: tuple[float, float], speeds: dict[int, float]) -> list[float]:
    """Seconds of both passes, some times over, where a kernel sleeps."""
    kernel = SleepingKernel(4 * 1024**2, *(seconds / speeds.get(rank, 1.0) for seconds in visit_s))
    cp = as_on_gpus(ContextParallel(dist.group.WORLD, strategy=Strategy(ranks_per_node=2, kernel=kernel)))
    q, k, v = (torch.zeros(1, 1024, 4, 64, requires_grad=True) for _ in range(3))
    took_s = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        out = burst_attention(q, k, v, cp, mask=Full())
        out.backward(torch.zeros_like(out))
        took_s.append(time.perf_counter() - start)
    return took_s[1:]


def _slow_nodes(cluster: EmulatedCluster) -> list[int]:
    profile = cluster.run(profile_in_rank, Topology(3, 2), timeout_s=120.0)[0]
    return [*only_slow_ones(profile, (1.0, 1.0), measured_links(profile))[1].node_bytes_per_s]


@pytest.mark.netns
@pytest.mark.alone
@pytest.mark.skipif(
    EmulatedCluster.unavailable() is not None, reason=f"no namespaces: {EmulatedCluster.unavailable()}"
)
def test_a_slow_node_and_a_slow_rank_cost_what_was_forecast() -> None:
    """3 nodes of 2 at 200 mbit, a block of 2 MiB, which takes 84 ms there."""
    node_mbit, speeds = {1: 100.0}, {4: 0.8}
    visit_s, shapes = (0.06, 0.15), Shapes(1, 1024, 1024, 4, 4, 64, 64, torch.float32)
    rates = {node: mbit * 1e6 / 8 * PAYLOAD for node, mbit in node_mbit.items()}
    links = Links(FAST, 200e6 / 8 * PAYLOAD, node_bytes_per_s=rates, rank_speed=speeds)
    forecast_s, even_s = (
        sum(pass_price(Strategy(), way, Topology(3, 2), shapes, each_s, of).time_s for way, each_s in pairs)
        for of, pairs in ((each, tuple(zip(DIRECTIONS, visit_s, strict=True))) for each in (links, links.even))
    )
    assert forecast_s > 1.2 * even_s
    ratios = []
    with EmulatedCluster(3, 2, rate_mbit=200.0, node_mbit=node_mbit) as cluster:
        assert any(_slow_nodes(cluster) == [1] for _ in range(3)), "which burst check finds out"
        for _ in range(5):  # a busy machine is late, and never early
            measured = cluster.run(_measured, visit_s, speeds)
            ratios.append(min(max(times) for times in zip(*measured, strict=True)) / forecast_s)
            if ratios[-1] <= 1.1:
                break
    assert 0.95 <= min(ratios) <= 1.1, (ratios, forecast_s, even_s)
