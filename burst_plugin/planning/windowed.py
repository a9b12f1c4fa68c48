"""The price of a pass in which every token attends to itself and some tokens before it: a causal window.

The window leaves most blocks without work. Simulated is the schedule that the ring draws for that mask, with the rows
that it sends and the pairs that it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from burst_plugin.planning.links import Links, Load
from burst_plugin.planning.price import Price, price, price_by_name
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import SlidingWindow
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology
from burst_plugin.types import Side

__all__ = ["pairs_in_window", "windowed_price"]

_FEW_RANKS = 32  # whose schedule is drawn in a moment; that takes time in proportion to their square
_MOST_RANKS = 160  # which takes about a second


@dataclass(frozen=True)
class Drawn:
    """A schedule for a window, with the work of its visits as shares of a whole block's pairs, by rank and owner."""

    schedule: Schedule
    work_shares: Mapping[tuple[int, int], float]


def pairs_in_window(tokens: int, window: int) -> int:
    """Return how many (query, key) pairs there are where each of `tokens` attends to at most `window` keys."""
    reach = min(tokens, window)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


def windowed_price(
    schedule: str, topology: Topology, parts: int, load: Load, links: Links, *, moving: Side, window: int
) -> Price:
    """Return the price of a pass in which each token attends to at most `window` keys, itself included.

    `load` is that of blocks without a mask, of `load.rows` rows; `schedule` is an option of `Strategy`. Ranks many
    nodes apart neither send to each other nor differ, so that of a large cluster a part is simulated that is longer
    than the window. Where this part has too many ranks, the price is that of all blocks going to all ranks.
    """
    part = _part_with_window(topology, load.rows, window)
    strategy = Strategy(schedule=schedule, ranks_per_node=topology.ranks_per_node)
    if part is None:
        tokens = load.rows * topology.ranks
        evenly = replace(load, visit_s=load.visit_s * pairs_in_window(tokens, window) / tokens**2)
        return price_by_name(strategy.schedule_for(topology), topology, parts, evenly, links)
    drawn = _drawn(strategy, part, load.rows, window, moving, load.reduce_bytes > 0, parts)
    return price(drawn.schedule, replace(load, work_shares=drawn.work_shares), links)


def _part_with_window(topology: Topology, rows: int, window: int) -> Topology | None:
    """Return a cluster with fewer nodes in which windows end before the ranks do; None if it has too many ranks."""
    nodes = min(topology.nodes, max(2, _FEW_RANKS // topology.ranks_per_node))
    while nodes < topology.nodes and nodes * topology.ranks_per_node * rows < 4 * window:
        nodes = min(2 * nodes, topology.nodes)
    part = replace(topology, nodes=nodes)
    return part if part.ranks <= _MOST_RANKS else None


@lru_cache(maxsize=256)
def _drawn(
    strategy: Strategy, topology: Topology, rows: int, window: int, moving: Side, reduces: bool, parts: int
) -> Drawn:
    tokens = Tokens(rows * topology.ranks)
    attending = Attending(tokens, tokens, SlidingWindow(window - 1, 0))
    table = RouteTable(topology, strategy)
    schedule, pairs = table.schedule(attending, moving, reduces, parts), table.pairs(attending)
    work_shares = {
        (rank, owner): sum(tile.work for tile in pairs.of_visit(moving, owner, rank)) / rows**2
        for rank, visits in enumerate(schedule.visits)
        for owner in {schedule.owner(block) for block in visits if block is not None}
    }
    return Drawn(schedule, work_shares)
