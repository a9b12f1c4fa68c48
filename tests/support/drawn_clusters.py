"""Clusters drawn at random, their profiles as `burst check` measures them, and every way to run attention on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from random import Random
from typing import NamedTuple

import torch

from burst_plugin import Strategy, Topology
from burst_plugin.check.performance import Rates
from burst_plugin.check.recommendation import measured_profile
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import joined
from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.measured import measured_links, planned
from burst_plugin.planning.planner import plans
from burst_plugin.planning.price import pass_price
from burst_plugin.profiling.cluster_profile import ClusterProfile, KernelRate
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.strategy import PLANNED
from burst_plugin.types import DIRECTIONS, SIDES, Direction
from tests.support.netns import EmulatedCluster

SIZES = ((1, 4), (2, 2), (2, 3), (4, 2), (2, 4))
HEADS = ((16, 16), (16, 4), (8, 2))
MOST_MBIT = 6000  # of all ranks and links together, which two cores can move

CHOSEN = "chosen"
_LONG = 1 << 20  # tokens whose messages take so long that latency is nothing
Prices = dict[Strategy, dict[Direction, float]]


class DrawnCluster(NamedTuple):
    """A cluster to emulate, heads, and how long all computing takes in proportion to the time of the links."""

    nodes: int
    ranks_per_node: int
    intra_mbit: int
    inter_mbit: int
    latency_ms: float
    q_heads: int
    kv_heads: int
    computing: float

    @classmethod
    def draw(cls, seed: int, number: int) -> DrawnCluster:
        """Return cluster `number` of a seed, which does not depend on the others."""
        random = Random(f"{seed}/{number}")
        while True:
            size, heads = random.choice(SIZES), random.choice(HEADS)
            intra, inter = (round(math.exp(random.uniform(*map(math.log, of)))) for of in ((200, 2000), (50, 800)))
            latency_ms, computing = round(random.uniform(0, 2), 1), round(random.uniform(0.2, 0.8), 2)
            drawn = cls(*size, intra, inter, latency_ms, *heads, computing)
            if drawn.topology.ranks * ((size[1] > 1) * intra + (size[0] > 1) * inter) <= MOST_MBIT:
                return drawn

    @property
    def topology(self) -> Topology:
        """Nodes and ranks per node."""
        return Topology(self.nodes, self.ranks_per_node)

    def emulated(self) -> EmulatedCluster:
        """Return the cluster, not yet built."""
        of_links = {"latency_ms": self.latency_ms, "intra_mbit": self.intra_mbit}
        return EmulatedCluster(self.nodes, self.ranks_per_node, self.inter_mbit, **of_links)  # type: ignore[arg-type]


def profile_in_rank(rank: int, topology: Topology) -> ClusterProfile:
    """Return what `burst check` measures of the links, and a kernel of any rate; in every rank of a cluster."""
    width = topology.ranks_per_node
    with joined((rank, topology.ranks, rank % width), 60.0, ranks_per_node=width) as world:
        world.measured["rates"] = Rates("sleeping", (KernelRate(1, 1.0, 1.0),), ())
        return replace(measured_profile(world, Settings(quick=True)), dtype="bfloat16")


class Trial(NamedTuple):
    """What is to be measured on a cluster: blocks, work, what the planner chooses and why, and all prices."""

    shapes: Shapes
    visit_s: dict[Direction, float]
    links: Links
    chosen: Strategy
    said: str
    prices: Prices

    @classmethod
    def of(cls, drawn: DrawnCluster, profile: ClusterProfile, links_s: float) -> Trial:
        """Return the trial on a measured cluster, with so long blocks that the links alone take about `links_s`."""
        topology, links = drawn.topology, measured_links(profile)
        shapes = Shapes(1, _LONG, _LONG, drawn.q_heads, drawn.kv_heads, 64, 64, torch.bfloat16)
        rows = 2 * max(1, round(_LONG / 2 * links_s / plans(topology, shapes, (1e-9, 1e-9), links)[0].step_s))
        shapes = shapes._replace(q_len=rows, kv_len=rows)
        share_s = drawn.computing * links_s / topology.ranks / 3.5
        visit_s: dict[Direction, float] = {"forward": share_s, "backward": 2.5 * share_s}
        rate = (
            4 * rows * rows * drawn.q_heads * 64 / share_s
        )  # of full attention, where backward is 2.5 times as much
        known = replace(profile, rates=(KernelRate(rows, rate, rate),))
        sizes = {"q_heads": drawn.q_heads, "kv_heads": drawn.kv_heads, "head_dim": 64}
        model = {**sizes, "seq": rows * topology.ranks, "mask": "full"}
        chosen = planned(Strategy.from_profile(known.as_dict(), model=model), topology)
        return cls(shapes, visit_s, links, *chosen, every_price(topology, shapes, visit_s, links))

    def tried(self, hopeless: float, controls: int) -> tuple[dict[str, Strategy], int]:
        """Return by name what is measured, and how many of the others there are.

        That is the choice, strategies priced up to `hopeless` times the best, and, as a control, some of the others.
        """
        pairs = best_pairs(self.prices)
        kept = [each for each in pairs if pairs[each] <= hopeless * min(pairs.values())]
        others = [each for each in pairs if each not in kept]
        drawn = Random(self.shapes.q_len).sample(others, min(controls, len(others)))
        named = {f"control: {in_words(each)}": each for each in drawn} | {in_words(each): each for each in kept}
        return {CHOSEN: self.chosen, **named}, len(others)


def every_price(topology: Topology, shapes: Shapes, visit_s: Mapping[Direction, float], links: Links) -> Prices:
    """Return the prices of schedules x degrees x moving sides x 1 or 2 parts, each kind of plan once.

    A moving side, and the parts, are those of both passes: passes are priced, and measured, one by one.
    """
    found, known = Prices(), set()
    for name, degree in product(SCHEDULES, sorted({*topology.ulysses_degrees} & {*shapes.ulysses_degrees})):
        groups, kv_heads = topology.of_ulysses_groups(degree), shapes.of_ulysses_group(degree).kv_heads
        for side, parts in product(SIDES, (1, 2)):
            schedule = SCHEDULES[name](groups, True, None)
            kind = (degree, groups.ranks > 1 and (side, parts), schedule.visits, schedule.transfers)
            if kv_heads % parts == 0 and kind not in known:
                known.add(kind)
                strategy = Strategy(schedule=name, ulysses_degree=degree, forward=side, backward=side, parts=parts)
                found[strategy] = {
                    each: pass_price(strategy, each, topology, shapes, visit_s[each], links).time_s
                    for each in DIRECTIONS
                }
    return found


def best_pairs(seconds: Mapping[Strategy, Mapping[Direction, float]]) -> dict[Strategy, float]:
    """Return the seconds of both passes of the best plan that each strategy takes part in.

    One pass is by the strategy, the other one by any of the same schedule and degree.
    """
    least: dict[tuple[str, int, Direction], float] = {}
    for strategy, direction in product(seconds, DIRECTIONS):
        key = strategy.schedule, strategy.ulysses_degree, direction
        least[key] = min(seconds[strategy][direction], least.get(key, math.inf))
    return {
        strategy: min(
            of[one] + least[strategy.schedule, strategy.ulysses_degree, other]
            for one, other in (DIRECTIONS, DIRECTIONS[::-1])
        )
        for strategy, of in seconds.items()
    }


def in_words(strategy: Strategy) -> str:
    """Return the options that configurations differ in."""
    return ", ".join(f"{name}={getattr(strategy, name)}" for name in PLANNED)
