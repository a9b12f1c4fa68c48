"""What a schedule takes on a described cluster: the same schedule that is executed, with times added to it.

    links = Links(intra_bytes_per_s=450e9, inter_bytes_per_s=50e9)
    load = Load(gather_bytes=16 << 20, reduce_bytes=16 << 20, visit_s=0.002)
    price(two_level_ring(Topology(4, 8)), load, links)      # Price(time_s=..., compute_s=..., link_s=...)

The price of one schedule is in `planning.price`, how ranks and messages move in `planning.simulator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.planning.buffer_count import as_many_buffers, most_held
from burst_plugin.planning.price import Price, price, price_by_name
from burst_plugin.planning.simulator import Links, Load
from burst_plugin.schedule.rings import SCHEDULES, default_schedule_name, sample_ranks
from burst_plugin.strategy import Strategy, choose_moving_side
from burst_plugin.topology import Link, Topology
from burst_plugin.types import DIRECTIONS, SIDES, Direction, Side

__all__ = [
    "MOST_SIMULATED",
    "Links",
    "Load",
    "Plan",
    "Price",
    "buffer_bytes",
    "least_seconds",
    "left_out",
    "pass_price",
    "plans",
    "price",
    "visit_seconds",
]

_PARTS = (1, 2, 4)
MOST_SIMULATED = 72  # ranks of a node that are simulated one by one; for more of them it takes minutes
_ALIKE = 1.01  # what the usual side may cost more than the other one and travel all the same


class Plan(NamedTuple):
    """One way to run attention, and what its passes cost; `step_s` is both."""

    strategy: Strategy
    forward: Price
    backward: Price
    moving_sides: tuple[Side, Side]
    """The side that travels forward, and that which travels backward."""

    @property
    def step_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.forward.time_s + self.backward.time_s

    @property
    def parts(self) -> int:
        """Parts of a forward and a backward pass together."""
        return sum(map(self.strategy.parts_of, DIRECTIONS))


def pass_price(
    strategy: Strategy, direction: Direction, topology: Topology, shapes: Shapes, visit_s: float, links: Links
) -> Price:
    """The price of one pass by `strategy`; `visit_s`: seconds of work on a whole block where no heads are exchanged.

    With such an exchange a visit is that of a longer block with fewer heads, and the exchange, which nothing hides,
    is added: all operands on their way to their heads, all results on their way back.
    """
    degree = strategy.ulysses_degree
    ring = _in_ring(shapes, degree)
    moving = choose_moving_side(strategy, direction, ring)
    load = Load.of(ring, direction, moving, degree * visit_s)
    groups = topology.of_ulysses_groups(degree)
    parts = strategy.parts_of(direction)
    ring_price = price_by_name(
        strategy.schedule_for(groups), groups, parts, load, _links_of_ring(degree, topology, links)
    )
    exchange_s = _exchange_seconds(degree, topology, _exchanged_bytes(shapes, degree, direction), links)
    busy_s = {link: ring_price.link_s[link] + exchange_s[link] for link in Link}
    return replace(ring_price, time_s=ring_price.time_s + max(exchange_s.values()), link_s=busy_s)


def _links_of_ring(degree: int, topology: Topology, links: Links) -> Links:
    """The links of one of the rings that the members of a group have, each its own: they share the NIC of a node."""
    if links.nic == "rank":
        return links
    return replace(links, inter_bytes_per_s=links.inter_bytes_per_s / min(degree, topology.ranks_per_node))


def _in_ring(shapes: Shapes, degree: int) -> Shapes:
    """What goes around, once the ranks of a group have exchanged heads: blocks of all of its tokens."""
    return shapes.of_ulysses_group(degree)._replace(q_len=degree * shapes.q_len, kv_len=degree * shapes.kv_len)


def _exchange_seconds(degree: int, topology: Topology, nbytes: int, links: Links) -> dict[Link, float]:
    """How long each link is busy while ranks exchange heads: every other member of a group gets `nbytes`."""
    inside = min(degree, topology.ranks_per_node)
    ranks_per_nic = topology.ranks_per_node if links.nic == "node" else 1
    return {
        Link.INTRA: nbytes * (inside - 1) / links.intra_bytes_per_s,
        Link.INTER: nbytes * (degree - inside) / links.inter_bytes_per_s * ranks_per_nic,
    }


def _exchanged_bytes(shapes: Shapes, degree: int, direction: Direction) -> int:
    """Bytes of one member's share of a rank's q, k, v and out, or of their gradients.

    They are exchanged in the type of the inputs, but for gradients of key/value heads that members share.
    """
    share = shapes.of_ulysses_group(degree)
    q_numel, kv_numel = (
        share.batch * length * heads * (share.qk_dim + share.v_dim)
        for length, heads in ((share.q_len, share.q_heads), (share.kv_len, share.kv_heads))
    )
    wide = direction == "backward" and degree > shapes.kv_heads
    return q_numel * share.dtype.itemsize + kv_numel * (share.sum_dtype if wide else share.dtype).itemsize


def plans(
    topology: Topology,
    shapes: Shapes,
    visit_s: tuple[float, float],
    links: Links,
    progress: Callable[[int, int], None] | None = None,
) -> list[Plan]:
    """Return every schedule x degree of the exchange of heads x numbers of parts; the best first.

    The best is the one whose time is the shortest. Plans of which that is the same multiple of `least_seconds`, to
    two digits after the point, are alike: first comes the one with the lowest degree, then that with the fewest
    parts, then that with the default schedule. The usual side travels, unless the other one is cheaper by more than
    1 %. Schedules that are `left_out` are missing. `visit_s` is the seconds of work on a whole block, forward and
    backward; `progress` is called with how many of how many passes have been priced.
    """
    settings = []
    for name, degree in product(SCHEDULES, _degrees(topology, shapes)):
        if name not in left_out(topology.of_ulysses_groups(degree)):
            several = [n for n in _PARTS if shapes.of_ulysses_group(degree).kv_heads % n == 0]
            plain = Strategy(schedule=name, ulysses_degree=degree, ranks_per_node=topology.ranks_per_node)
            settings.append((plain, several))
    total = sum(len(DIRECTIONS) * len(several) for _, several in settings)
    done, candidates = 0, []
    for plain, several in settings:
        best = {}
        for (direction, each_s), n in product(zip(DIRECTIONS, visit_s, strict=True), several):
            best[direction, n] = _best_moving_side(
                replace(plain, parts=n), direction, topology, shapes, each_s, links
            )
            done += 1
            if progress is not None:
                progress(done, total)
        for parts in product(several, several):
            forward, backward = (best[each] for each in zip(DIRECTIONS, parts, strict=True))
            strategy = replace(plain, parts=parts, forward=forward.option, backward=backward.option)
            moving_sides = forward.moving, backward.moving
            candidates.append(Plan(strategy, forward.price, backward.price, moving_sides))
    least_s = least_seconds(topology, shapes, visit_s, links)

    def order(plan: Plan) -> tuple[float, int, int, bool, float]:
        degree = plan.strategy.ulysses_degree
        is_unusual = plan.strategy.schedule != default_schedule_name(topology.of_ulysses_groups(degree))
        return round(plan.step_s / least_s, 2), degree, plan.parts, is_unusual, plan.step_s

    return sorted(candidates, key=order)


def left_out(topology: Topology) -> list[str]:
    """Return the schedules that `plans` does not price: those of which too many ranks would have to be simulated."""
    return [name for name in SCHEDULES if sample_ranks(name, topology) > MOST_SIMULATED]


def _degrees(topology: Topology, shapes: Shapes) -> list[int]:
    """Between how many ranks heads can be exchanged; 1 is no exchange."""
    possible = set(shapes.ulysses_degrees)
    return [degree for degree in topology.ulysses_degrees if degree in possible]


def least_seconds(topology: Topology, shapes: Shapes, visit_s: tuple[float, float], links: Links) -> float:
    """Return the bound: seconds of a forward and a backward pass together that no plan beats.

    Of a pass in which so many ranks exchange heads and one side travels it is the longest of

    - computing, spread evenly over all ranks;
    - all that has to cross between nodes, over all NICs evenly: each block of the ring, and its sums, once per node;
    - all that a rank has to send: every block but its own, and its sums, once, over both of its links together.

    The last two have the messages of the exchange as well. The bound has, for either pass, the exchange and the side
    for which this is the shortest.
    """
    return sum(
        min(
            _least_seconds_of_pass(topology, degree, each_s, links, _sent_bytes(shapes, degree, direction, side))
            for degree, side in product(_degrees(topology, shapes), SIDES)
        )
        for direction, each_s in zip(DIRECTIONS, visit_s, strict=True)
    )


def _sent_bytes(shapes: Shapes, degree: int, direction: Direction, moving: Side) -> tuple[int, int]:
    """Bytes of a block in the ring with its sums, and of what a rank sends to each other one of its group."""
    block_bytes = hop_bytes(_in_ring(shapes, degree), direction, moving)
    return block_bytes, _exchanged_bytes(shapes, degree, direction)


def _least_seconds_of_pass(
    topology: Topology, degree: int, visit_s: float, links: Links, sent_bytes: tuple[int, int]
) -> float:
    """The bound of one pass with such messages; see `least_seconds`."""
    groups, width = topology.of_ulysses_groups(degree), topology.ranks_per_node
    block_bytes, exchanged_bytes = sent_bytes
    inter_bytes_per_s = links.inter_bytes_per_s / (width if links.nic == "node" else 1)  # for each rank
    inter_bytes = block_bytes * (groups.nodes - 1) + exchanged_bytes * max(0, degree - width)
    all_bytes = block_bytes * (groups.ranks - 1) + exchanged_bytes * (degree - 1)
    all_bytes_per_s = links.intra_bytes_per_s + (inter_bytes_per_s if topology.nodes > 1 else 0)
    return max(topology.ranks * visit_s, inter_bytes / inter_bytes_per_s, all_bytes / all_bytes_per_s)


class _Choice(NamedTuple):
    """The price of a pass, the side that travels then, and the option that has it travel."""

    price: Price
    moving: Side
    option: str


def _best_moving_side(
    strategy: Strategy, direction: Direction, topology: Topology, shapes: Shapes, visit_s: float, links: Links
) -> _Choice:
    """The side to send around in one pass: that of `strategy`, unless the other one saves time."""
    usual_side = choose_moving_side(strategy, direction, _in_ring(shapes, strategy.ulysses_degree))
    other_side = next(side for side in SIDES if side != usual_side)

    def price_of(side: Side) -> Price:
        forced = replace(strategy, forward=side) if direction == "forward" else replace(strategy, backward=side)
        return pass_price(forced, direction, topology, shapes, visit_s, links)

    usual = price_of(usual_side)
    if usual.time_s > _ALIKE * usual.compute_s:  # else there is nothing to save
        other = price_of(other_side)
        if usual.time_s > _ALIKE * other.time_s:
            return _Choice(other, other_side, other_side)
    return _Choice(usual, usual_side, getattr(strategy, direction))


def buffer_bytes(plan: Plan, topology: Topology, shapes: Shapes) -> float:
    """About how many bytes the ring's communication buffers take where most are needed, for all layers together.

    Buffers of one size serve either pass. An exchange of heads has what it sends and what it receives besides.
    """
    degree = plan.strategy.ulysses_degree
    groups, ring = topology.of_ulysses_groups(degree), _in_ring(shapes, degree)
    counts: Counter[float] = Counter()  # by size
    for direction, moving in zip(DIRECTIONS, plan.moving_sides, strict=True):
        load, parts = Load.of(ring, direction, moving, 0.0), plan.strategy.parts_of(direction)
        schedule = SCHEDULES[plan.strategy.schedule_for(groups)](as_many_buffers(groups), load.reduce_bytes > 0)
        held = most_held(schedule.in_parts(parts))
        in_pass = Counter({load.gather_bytes / parts: held.operands})
        in_pass[load.reduce_bytes / parts] += held.results
        counts |= in_pass
    return sum(size * count for size, count in counts.items())


def visit_seconds(shapes: Shapes, flops_per_s: float, causal: bool) -> tuple[float, float]:
    """Seconds of work on a whole block, forward and backward, at the rate of the kernel.

    2 FLOPs for each of query x key x head dim, in q @ k and in p @ v; a causal mask leaves half of that to every
    visit of a zigzag layout; backward is 2.5 times as much (FlashAttention-2, arXiv 2307.08691, section 4.1).
    """
    pairs = shapes.batch * shapes.q_len * shapes.kv_len * shapes.q_heads * (0.5 if causal else 1.0)
    forward = 2 * pairs * (shapes.qk_dim + shapes.v_dim) / flops_per_s
    return forward, 2.5 * forward
