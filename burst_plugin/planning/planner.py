"""All plans on a described cluster, by price: the schedules that are executed, with times added to them.

    links = Links(intra_bytes_per_s=450e9, inter_bytes_per_s=50e9)
    load = Load(gather_bytes=16 << 20, reduce_bytes=16 << 20, visit_s=0.002)
    price(two_level_ring(Topology(4, 8)), load, links)      # Price(time_s=..., compute_s=..., link_s=...)

The price of one schedule is in `planning.price`, how ranks and messages move in `planning.simulator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.bound import least_seconds
from burst_plugin.planning.buffer_count import as_many_buffers, most_held
from burst_plugin.planning.exchange import (
    exchange_buffer_bytes,
    exchange_seconds,
    exchanged_bytes,
    groupings,
    in_ring,
)
from burst_plugin.planning.links import Links, Load
from burst_plugin.planning.price import Price, price, price_by_name
from burst_plugin.planning.windowed import windowed_price
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.schedule.rings import SCHEDULES, default_schedule_name, sample_ranks
from burst_plugin.strategy import Strategy
from burst_plugin.strategy.validation import PLACEMENTS
from burst_plugin.topology import Link, Topology
from burst_plugin.types import BOTH, DIRECTIONS, OTHER_SIDE, Direction, Side

__all__ = [
    "MOST_SIMULATED",
    "Links",
    "Load",
    "Plan",
    "Price",
    "buffer_bytes",
    "has_price",
    "least_seconds",
    "left_out",
    "pass_price",
    "plans",
    "price",
    "reason",
    "visit_seconds",
]

_PARTS = (1, 2, 4)
MOST_SIMULATED = 72  # ranks of a node that are simulated separately; more of them take minutes
_NEGLIGIBLE = 1.01  # how many times as much as the other side the default moving side may cost


class Plan(NamedTuple):
    """One way to run attention, and the price of its passes."""

    strategy: Strategy
    forward: Price
    backward: Price
    moving_sides: tuple[Side, Side]
    """The moving side of the forward and of the backward pass."""

    @property
    def step_s(self) -> float:
        """Return the seconds of a forward and a backward pass."""
        return self.forward.time_s + self.backward.time_s

    @property
    def parts(self) -> int:
        """Return how many parts a forward and a backward pass have together."""
        return sum(map(self.strategy.parts_of, DIRECTIONS))


def has_price(strategy: Strategy) -> bool:
    """Return whether passes by a strategy can be priced: one side moves, and neighbours are groups."""
    return BOTH not in (strategy.forward, strategy.backward) and strategy.ulysses_placement == PLACEMENTS[0]


def pass_price(
    strategy: Strategy,
    direction: Direction,
    topology: Topology,
    shapes: Shapes,
    visit_s: float,
    links: Links,
    *,
    window: int | None = None,
) -> Price:
    """Return the price of one pass by `strategy`.

    `visit_s` is the seconds of work on a whole block where no heads are exchanged. With an exchange of heads blocks
    are longer and have fewer heads, with a `mesh_degree` a visit is with the other side of a whole group. The time of
    what groups send, which nothing hides, is added: for all operands before the ring, and all results after it, each
    with the latency of one message. With a `window`, the most keys that a token attends to, itself included,
    `visit_s` is the work on all pairs of a block's tokens. Raises ValueError for what has no price (`has_price`).
    """
    if strategy.ulysses_placement != PLACEMENTS[0]:
        raise ValueError(
            f"ulysses_placement={strategy.ulysses_placement!r} cannot be planned: it has no price. Use "
            f"{PLACEMENTS[0]!r}; or run it without a plan, as Strategy(ulysses_degree=..., ...)"
        )
    size, ring = strategy.group_size, in_ring(shapes, strategy.degree)
    groups, parts = topology.of_ulysses_groups(size), strategy.parts_of(direction)
    moving = choose_moving_side(strategy, direction, ring, groups.ranks)
    load = Load.of(ring, direction, moving, size * visit_s)
    of_ring = links.of_ring(topology, size)
    if window is None:
        ring_price = price_by_name(strategy.schedule_for(groups), groups, parts, load, of_ring)
    else:
        load = replace(load, rows=ring.q_len)
        ring_price = windowed_price(strategy.schedule, groups, parts, load, of_ring, moving=moving, window=window)
    exchange_s = exchange_seconds(size, topology, exchanged_bytes(shapes, strategy, direction, moving), links)
    busy_s = {link: ring_price.link_s[link] + exchange_s[link] for link in Link}
    exposed_s = max(exchange_s[link] + 2 * links.latency_s(link) if exchange_s[link] else 0.0 for link in Link)
    return replace(ring_price, time_s=ring_price.time_s + exposed_s, link_s=busy_s)


def plans(
    topology: Topology,
    shapes: Shapes,
    visit_s: tuple[float, float],
    links: Links,
    progress: Callable[[int, int], None] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> list[Plan]:
    """Return every schedule x degree of the exchange of heads x numbers of parts; the best first.

    The best is the one with the shortest time. Plans with the same multiple of `least_seconds`, to two digits after
    the point, are ordered by degree, then by parts, then with the default schedule first. The default side moves,
    unless the other one is cheaper by more than 1 %. Schedules that are `left_out` are missing. `visit_s` is the
    seconds of work on a whole block, forward and backward; `progress` is called with how many passes have been priced
    and how many there are. `fixed` are options that every plan has; only with a `mesh_degree` among them are blocks
    gathered in groups, and no heads are exchanged then.

    Raises ValueError if no plan can have what is `fixed`.
    """
    fixed = fixed or {}
    settings = _settings(topology, shapes, fixed)
    total = sum(len(set(of_pass)) for _, pairs in settings for of_pass in zip(*pairs, strict=True))
    done, candidates = 0, []
    for plain, pairs in settings:
        best = {}
        for direction, each_s, of_pass in zip(DIRECTIONS, visit_s, zip(*pairs, strict=True), strict=True):
            for n in dict.fromkeys(of_pass):
                best[direction, n] = _best_moving_side(
                    replace(plain, parts=n), direction, topology, shapes, each_s, links, direction in fixed
                )
                done += 1
                if progress is not None:
                    progress(done, total)
        for parts in pairs:
            forward, backward = (best[each] for each in zip(DIRECTIONS, parts, strict=True))
            strategy = replace(plain, parts=parts, forward=forward.option, backward=backward.option)
            moving_sides = forward.moving, backward.moving
            candidates.append(Plan(strategy, forward.price, backward.price, moving_sides))
    least_s = least_seconds(topology, shapes, visit_s, links, fixed.get("mesh_degree", 1))

    def order(plan: Plan) -> tuple[float, int, int, bool, float]:
        groups = topology.of_ulysses_groups(plan.strategy.group_size)
        degree, is_unusual = plan.strategy.degree, plan.strategy.schedule != default_schedule_name(groups)
        return round(plan.step_s / least_s, 2), degree, plan.parts, is_unusual, plan.step_s

    return sorted(candidates, key=order)


_Settings = list[tuple[Strategy, list[tuple[int, int]]]]


def _settings(topology: Topology, shapes: Shapes, fixed: Mapping[str, Any]) -> _Settings:
    """Return every schedule x degree as a strategy, with its pairs of parts. Raise ValueError if there is none."""
    found = []
    plain = Strategy(ranks_per_node=topology.ranks_per_node)
    plain = replace(plain, **{name: fixed[name] for name in (*DIRECTIONS, "ulysses_placement") if name in fixed})
    for name, grouped in product(SCHEDULES, groupings(topology, shapes, fixed.get("mesh_degree", 1))):
        degree = grouped.degree
        kv_heads = shapes.of_ulysses_group(degree).kv_heads
        several = [n for n in _PARTS if kv_heads % n == 0]
        pairs = list(product(several, several))
        if "parts" in fixed:
            forward, backward = map(Strategy(parts=fixed["parts"]).parts_of, DIRECTIONS)
            pairs = [] if kv_heads % forward or kv_heads % backward else [(forward, backward)]
        is_asked = fixed.get("schedule", name) == name and fixed.get("ulysses_degree", degree) == degree
        if is_asked and pairs and name not in left_out(topology.of_ulysses_groups(grouped.group_size)):
            found.append(
                (replace(plain, schedule=name, ulysses_degree=degree, mesh_degree=grouped.mesh_degree), pairs)
            )
    if not found:
        raise ValueError(
            f"no plan for {shapes.q_heads} query and {shapes.kv_heads} key/value heads on {topology} has "
            f"{', '.join(f'{name}={value!r}' for name, value in fixed.items())}; leave one of these options out"
        )
    return found


def left_out(topology: Topology) -> list[str]:
    """Return the schedules that `plans` leaves out, since too many of their ranks would have to be simulated."""
    return [name for name in SCHEDULES if sample_ranks(name, topology) > MOST_SIMULATED]


class _Choice(NamedTuple):
    """The price of a pass, its moving side, and the option by which that side moves."""

    price: Price
    moving: Side
    option: str


def _best_moving_side(
    strategy: Strategy,
    direction: Direction,
    topology: Topology,
    shapes: Shapes,
    visit_s: float,
    links: Links,
    is_fixed: bool,
) -> _Choice:
    """Return the moving side of one pass: that of `strategy`, unless it is not fixed and the other one saves time."""
    ring_ranks = topology.ranks // strategy.group_size
    default_side = choose_moving_side(strategy, direction, in_ring(shapes, strategy.degree), ring_ranks)
    other_side = OTHER_SIDE[default_side]

    def price_of(side: Side) -> Price:
        forced = replace(strategy, forward=side) if direction == "forward" else replace(strategy, backward=side)
        return pass_price(forced, direction, topology, shapes, visit_s, links)

    default = price_of(default_side)
    if not is_fixed and default.time_s > _NEGLIGIBLE * default.compute_s:  # else there is nothing to save
        other = price_of(other_side)
        if default.time_s > _NEGLIGIBLE * other.time_s:
            return _Choice(other, other_side, other_side)
    return _Choice(default, default_side, getattr(strategy, direction))


def buffer_bytes(plan: Plan, topology: Topology, shapes: Shapes) -> float:
    """Return about how many bytes the ring's communication buffers take at most, for all layers together.

    Buffers of one size serve both passes. A mesh has buffers to gather and to reduce besides, which are counted; an
    exchange of heads has some to send and to receive, which are not.
    """
    groups, ring = topology.of_ulysses_groups(plan.strategy.group_size), in_ring(shapes, plan.strategy.degree)
    counts: Counter[float] = Counter()  # by size
    for direction, moving in zip(DIRECTIONS, plan.moving_sides, strict=True):
        load, parts = Load.of(ring, direction, moving, 0.0), plan.strategy.parts_of(direction)
        schedule = SCHEDULES[plan.strategy.schedule_for(groups)](as_many_buffers(groups), load.reduce_bytes > 0)
        held = most_held(schedule.in_parts(parts))
        in_pass = Counter({load.gather_bytes / parts: held.operands})
        in_pass[load.reduce_bytes / parts] += held.results
        counts |= in_pass
    gathered = exchange_buffer_bytes(shapes, plan.strategy, plan.moving_sides)
    return gathered + sum(size * count for size, count in counts.items())


def visit_seconds(shapes: Shapes, flops_per_s: float, causal: bool) -> tuple[float, float]:
    """Return the seconds of work on a whole block, forward and backward, at the rate of the kernel.

    2 FLOPs for each of query x key x head dim, in q @ k and in p @ v; a causal mask leaves half of that for every
    visit of a zigzag layout; backward is 2.5 times as much (FlashAttention-2, arXiv 2307.08691, section 4.1).
    """
    pairs = shapes.batch * shapes.q_len * shapes.kv_len * shapes.q_heads * (0.5 if causal else 1.0)
    forward = 2 * pairs * (shapes.qk_dim + shapes.v_dim) / flops_per_s
    return forward, 2.5 * forward


def reason(plan: Plan) -> str:
    """Return what takes the time of a plan: computing, or which links."""
    compute_s = plan.forward.compute_s + plan.backward.compute_s
    if plan.step_s <= 1.02 * compute_s:
        return "computing hides all communication"
    busy_s = {link: plan.forward.link_s[link] + plan.backward.link_s[link] for link in Link}
    link = max(Link, key=busy_s.__getitem__)
    where = "between nodes" if link is Link.INTER else "inside nodes"
    return f"ranks wait for the links {where}, {100 * (1 - compute_s / plan.step_s):.0f} % of the time"
