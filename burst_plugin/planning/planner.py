"""All plans for attention on a described cluster, ordered by time; the least time possible; the buffers of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.planning.buffer_count import as_many_buffers, most_held
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.price import Price, exchange_buffer_bytes, exchanged_bytes, pass_price, shapes_in_ring
from burst_plugin.planning.simulator import Load
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.schedule.rings import SCHEDULES, default_schedule_name, sample_ranks
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology
from burst_plugin.types import DIRECTIONS, OTHER_SIDE, SIDES, Direction, Side

_PARTS = (1, 2, 4)
MOST_SIMULATED = 72  # ranks of a node that are simulated separately; more of them take minutes
_NEGLIGIBLE = 1.01  # the default moving side may cost so many times as much as the other side


class PricedPlan(NamedTuple):
    """A way to run attention, `strategy`, with the prices of its forward and backward passes, in one layer."""

    strategy: Strategy
    forward: Price
    backward: Price
    moving_sides: tuple[Side, Side]
    """The moving side of the forward and of the backward pass."""

    @property
    def step_s(self) -> float:
        """Return the seconds of a forward and a backward pass together, in one layer."""
        return self.forward.time_s + self.backward.time_s

    @property
    def parts(self) -> int:
        """Return the number of parts of the heads, forward plus backward: 2 if heads are not cut in either pass."""
        return sum(map(self.strategy.parts_of, DIRECTIONS))


class _PricedPass(NamedTuple):
    """The price of a pass, its parts, its moving side, and the option by which that side moves."""

    price: Price
    parts: int
    moving: Side
    option: str


def plans(
    topology: Topology,
    shapes: Shapes,
    work_s: tuple[float, float],
    links: Links,
    progress: Callable[[int, int], None] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> list[PricedPlan]:
    """Return a plan for each schedule, degree of the exchange of heads, and numbers of parts; the fastest first.

    Plans with the same multiple of `least_seconds`, to two digits after the point, are ordered by degree, then by
    parts, then with the default schedule first. The default side moves, unless the other one is cheaper by more than
    1 %. Schedules that are `left_out` are missing.

    Args:
        topology: of all ranks.
        shapes: of one rank's block.
        work_s: (forward, backward) seconds of work on ONE block: one rank's queries with one rank's keys, not a whole
            pass.
        links: of the cluster.
        progress: called with how many passes have been priced, and how many there are; None for nothing.
        fixed: options of `Strategy`, by name, that every plan has; None for none. Only with a `mesh_degree` among
            them are blocks gathered in groups, and no heads are exchanged then.

    Raises:
        ValueError: if no plan can have the `fixed` options.
    """
    fixed = fixed or {}
    candidates = _candidates(topology, shapes, fixed)
    total = sum(len(forward) + len(backward) for _, (forward, backward) in candidates)
    priced, done = [], 0
    for candidate, parts_by_pass in candidates:
        passes: list[list[_PricedPass]] = []  # of each direction, one for each number of parts
        for direction, pass_work_s, numbers in zip(DIRECTIONS, work_s, parts_by_pass, strict=True):
            passes.append([])
            for parts in numbers:
                strategy, is_fixed = replace(candidate, parts=parts), direction in fixed
                passes[-1].append(
                    _price_with_best_side(
                        strategy, direction, topology, shapes, pass_work_s, links, is_fixed=is_fixed
                    )
                )
                done += 1
                if progress is not None:
                    progress(done, total)
        for forward, backward in product(*passes):
            strategy = replace(
                candidate,
                parts=(forward.parts, backward.parts),
                forward=forward.option,
                backward=backward.option,
            )
            priced.append(PricedPlan(strategy, forward.price, backward.price, (forward.moving, backward.moving)))
    least_s = least_seconds(topology, shapes, work_s, links, fixed.get("mesh_degree", 1))

    def order(plan: PricedPlan) -> tuple[float, int, int, bool, float]:
        groups = topology.of_ulysses_groups(plan.strategy.group_size)
        degree, is_unusual = plan.strategy.degree, plan.strategy.schedule != default_schedule_name(groups)
        return round(plan.step_s / least_s, 2), degree, plan.parts, is_unusual, plan.step_s

    return sorted(priced, key=order)


def _candidates(
    topology: Topology, shapes: Shapes, fixed: Mapping[str, Any]
) -> list[tuple[Strategy, Sequence[Sequence[int]]]]:
    """Return every schedule x degree as a strategy, with the numbers of parts of a forward and of a backward pass.

    Raises ValueError if there is none with the `fixed` options.
    """
    candidates: list[tuple[Strategy, Sequence[Sequence[int]]]] = []
    kept = {name: fixed[name] for name in (*DIRECTIONS, "ulysses_placement") if name in fixed}
    for name, grouped in product(SCHEDULES, groupings(topology, shapes, fixed.get("mesh_degree", 1))):
        degree = grouped.degree
        if fixed.get("schedule", name) != name or fixed.get("ulysses_degree", degree) != degree:
            continue
        if name in left_out(topology.of_ulysses_groups(grouped.group_size)):
            continue
        kv_heads = shapes.of_ulysses_group(degree).kv_heads
        parts_by_pass: list[Sequence[int]] = [_PARTS, _PARTS]
        if "parts" in fixed:
            parts_by_pass = [[Strategy(parts=fixed["parts"]).parts_of(direction)] for direction in DIRECTIONS]
        parts_by_pass = [[parts for parts in numbers if kv_heads % parts == 0] for numbers in parts_by_pass]
        if all(parts_by_pass):
            per_node = topology.ranks_per_node
            candidates.append((replace(grouped, schedule=name, ranks_per_node=per_node, **kept), parts_by_pass))
    if not candidates:
        raise ValueError(
            f"no plan for {shapes.q_heads} query and {shapes.kv_heads} key/value heads on {topology} has "
            f"{', '.join(f'{name}={value!r}' for name, value in fixed.items())}; leave one of these options out"
        )
    return candidates


def left_out(topology: Topology) -> list[str]:
    """Return the schedules that `plans` leaves out because simulating them would take too many ranks.

    `topology` is the ring's, in which groups that exchange heads are one rank.
    """
    return [name for name in SCHEDULES if sample_ranks(name, topology) > MOST_SIMULATED]


def _price_with_best_side(
    strategy: Strategy,
    direction: Direction,
    topology: Topology,
    shapes: Shapes,
    work_s: float,
    links: Links,
    *,
    is_fixed: bool,
) -> _PricedPass:
    """Return one pass with the moving side of `strategy`, unless that is not fixed and the other side saves time."""
    ring_ranks = topology.ranks // strategy.group_size
    default_side = choose_moving_side(strategy, direction, shapes_in_ring(shapes, strategy.degree), ring_ranks)
    other_side, parts = OTHER_SIDE[default_side], strategy.parts_of(direction)

    def price_of(side: Side) -> Price:
        forced = replace(strategy, forward=side) if direction == "forward" else replace(strategy, backward=side)
        return pass_price(forced, direction, topology, shapes, work_s, links)

    default = price_of(default_side)
    if not is_fixed and default.time_s > _NEGLIGIBLE * default.compute_s:  # else there is nothing to save
        alternative = price_of(other_side)
        if default.time_s > _NEGLIGIBLE * alternative.time_s:
            return _PricedPass(alternative, parts, other_side, other_side)
    return _PricedPass(default, parts, default_side, getattr(strategy, direction))


def groupings(topology: Topology, shapes: Shapes, mesh_degree: int = 1) -> list[Strategy]:
    """Return a strategy for each way to group ranks: for each degree of the exchange of heads, 1 included.

    With a `mesh_degree` above 1 groups of that size are the only way; [] if they neither lie inside nodes nor are
    whole nodes. `shapes` are one rank's block, whose heads a degree has to divide.
    """
    sizes = topology.ulysses_degrees
    if mesh_degree > 1:
        return [Strategy(mesh_degree=mesh_degree)] if mesh_degree in sizes else []
    possible = set(shapes.ulysses_degrees)
    return [Strategy(ulysses_degree=degree) for degree in sizes if degree in possible]


def least_seconds(
    topology: Topology, shapes: Shapes, work_s: tuple[float, float], links: Links, mesh_degree: int = 1
) -> float:
    """Return the bound: seconds of a forward and a backward pass together that no plan beats.

    For one pass, a degree of the exchange of heads, or a `mesh_degree`, and a moving side it is the longest of

    - computing, spread evenly over all ranks;
    - sending between nodes, over all NICs evenly: each block of the ring, and its partial results, once per node;
    - sending from one rank: every block but its own, and its partial results, once, over both of its links together.

    The last two include what groups send. The bound is, for either pass, the shortest over all degrees and sides.

    work_s: (forward, backward) seconds of a rank's work on ONE block, its queries with one rank's keys, not of a
        pass, in which it works on `topology.ranks` blocks.
    shapes: of one rank's block.
    mesh_degree: ranks that gather each other's blocks; 1 for the degrees in which heads can be exchanged.
    """
    width = topology.ranks_per_node
    inter_bytes_per_s = links.inter_bytes_per_s / (width if links.nic == "node" else 1)  # for each rank
    bytes_per_s = links.intra_bytes_per_s + (inter_bytes_per_s if topology.nodes > 1 else 0)

    def sending_seconds(grouped: Strategy, direction: Direction, moving: Side) -> float:
        size, groups = grouped.group_size, topology.of_ulysses_groups(grouped.group_size)
        block_bytes = hop_bytes(shapes_in_ring(shapes, grouped.degree), direction, moving)
        exchanged = exchanged_bytes(shapes, grouped, direction, moving)
        between_nodes = block_bytes * (groups.nodes - 1) + exchanged * max(0, size - width)
        of_one_rank = block_bytes * (groups.ranks - 1) + exchanged * (size - 1)
        return max(between_nodes / inter_bytes_per_s, of_one_rank / bytes_per_s)

    ways = list(product(groupings(topology, shapes, mesh_degree), SIDES))
    return sum(
        max(topology.ranks * pass_work_s, min(sending_seconds(grouped, direction, side) for grouped, side in ways))
        for direction, pass_work_s in zip(DIRECTIONS, work_s, strict=True)
    )


def buffer_bytes(plan: PricedPlan, topology: Topology, shapes: Shapes) -> float:
    """Return about how many bytes the ring's communication buffers take at most on a rank, for all layers together.

    `shapes` are one rank's block, on `topology` with all ranks. Buffers of one size serve both passes. A mesh has
    buffers to gather and to reduce besides, which are counted; an exchange of heads has some to send and to receive,
    which are not.
    """
    groups, ring = topology.of_ulysses_groups(plan.strategy.group_size), shapes_in_ring(shapes, plan.strategy.degree)
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


def reason(plan: PricedPlan) -> str:
    """Return the bottleneck of a plan in words: computing, or the links between or inside nodes."""
    compute_s = plan.forward.compute_s + plan.backward.compute_s
    if plan.step_s <= 1.02 * compute_s:
        return "computing hides all communication"
    busy_s = {link: plan.forward.link_s[link] + plan.backward.link_s[link] for link in Link}
    link = max(Link, key=busy_s.__getitem__)
    where = "between nodes" if link is Link.INTER else "inside nodes"
    return f"ranks wait for the links {where}, {100 * (1 - compute_s / plan.step_s):.0f} % of the time"
