"""What a schedule takes on a described cluster: the same schedule that is executed, with times added to it.

    links = Links(intra_bytes_per_s=450e9, inter_bytes_per_s=50e9)
    load = Load(gather_bytes=16 << 20, reduce_bytes=16 << 20, visit_s=0.002)
    price(two_level_ring(Topology(4, 8)), load, links)      # Price(time_s=..., compute_s=..., link_s=...)

How ranks and messages move is in `burst_plugin.simulation`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from burst_plugin.buffer_count import most_held
from burst_plugin.schedule import SCHEDULES, default_schedule_name
from burst_plugin.shapes import Shapes
from burst_plugin.sides import DIRECTIONS, SIDES, Direction, Side
from burst_plugin.simulation import Links, Load, nic_of, simulate
from burst_plugin.strategy import Strategy, choose_traveller
from burst_plugin.topology import Link, Topology
from burst_plugin.transfers import Schedule

__all__ = ["Links", "Load", "Plan", "Price", "buffer_bytes", "pass_price", "plans", "price", "visit_seconds"]

_PARTS = (1, 2, 4)
_ALIKE = 1.01  # what a plan may cost more than the cheapest and be taken all the same, if it is the simpler one


@dataclass(frozen=True, order=True)
class Price:
    """Seconds until the last rank is done; the most work of any rank; by link, the longest that any NIC is busy."""

    time_s: float
    compute_s: float
    link_s: dict[Link, float] = field(default_factory=dict, compare=False)

    @property
    def bound_s(self) -> float:
        """No order of the same work and messages is faster than this."""
        return max(self.compute_s, *self.link_s.values())


def price(schedule: Schedule, load: Load, links: Links) -> Price:
    """The time that `schedule` takes for this load on these links. Transfers of a few rows count as whole blocks."""
    sent: dict[tuple[Link, Hashable], float] = defaultdict(float)
    for t in schedule.transfers:
        sent[t.link, nic_of(schedule.topology, links, t.link, t.src)] += load.bytes_of(t.traffic) / schedule.parts
    busy_s = {link: max((n for (of, _), n in sent.items() if of is link), default=0.0) for link in Link}
    most = max(sum(schedule.work(rank)) for rank in range(schedule.ranks))
    return Price(
        time_s=simulate(schedule, load, links),
        compute_s=most * load.visit_s,
        link_s={link: nbytes / links.bytes_per_s(link) for link, nbytes in busy_s.items()},
    )


class Plan(NamedTuple):
    """One way to run attention, and what its passes cost; `step_s` is both."""

    strategy: Strategy
    forward: Price
    backward: Price
    travellers: tuple[Side, Side]
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
    traveller = choose_traveller(strategy, direction, ring)
    load = Load.of(ring, direction, traveller, degree * visit_s)
    teams = topology.of_teams(degree)
    schedule = SCHEDULES[strategy.schedule_for(teams)](teams, load.reduce_bytes > 0, None)
    ring_price = price(schedule.in_parts(strategy.parts_of(direction)), load, links)
    exchange_s = _exchange_seconds(degree, topology, _exchanged_bytes(shapes, degree, direction), links)
    busy_s = {link: ring_price.link_s[link] + exchange_s[link] for link in Link}
    return replace(ring_price, time_s=ring_price.time_s + max(exchange_s.values()), link_s=busy_s)


def _in_ring(shapes: Shapes, degree: int) -> Shapes:
    """What goes around, once the ranks of a team have exchanged heads: blocks of all of its tokens."""
    return shapes.of_team(degree)._replace(q_len=degree * shapes.q_len, kv_len=degree * shapes.kv_len)


def _exchange_seconds(degree: int, topology: Topology, nbytes: int, links: Links) -> dict[Link, float]:
    """How long each link is busy while ranks exchange heads: every other member of a team gets `nbytes`."""
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
    share = shapes.of_team(degree)
    q_numel, kv_numel = (
        share.batch * length * heads * (share.qk_dim + share.v_dim)
        for length, heads in ((share.q_len, share.q_heads), (share.kv_len, share.kv_heads))
    )
    wide = direction == "backward" and degree > shapes.kv_heads
    return q_numel * share.dtype.itemsize + kv_numel * (share.sum_dtype if wide else share.dtype).itemsize


def plans(topology: Topology, shapes: Shapes, visit_s: tuple[float, float], links: Links) -> list[Plan]:
    """Every schedule x degree of the exchange of heads x numbers of parts, with the travellers that suit; best first.

    The best is the cheapest; of those that are alike to 1 %, the one with the lowest degree, the fewest parts and the
    schedule that is the default. So are the travellers, unless the other side is cheaper by more than that.
    `visit_s` is the seconds of work on a whole block, forward and backward.
    """
    candidates = []
    for name, degree in product(SCHEDULES, (n for n in topology.team_sizes if n in shapes.team_degrees)):
        several = [n for n in _PARTS if shapes.of_team(degree).kv_heads % n == 0]
        plain = Strategy(schedule=name, ulysses_degree=degree, ranks_per_node=topology.ranks_per_node)
        best = {
            (direction, parts): _best_traveller(
                replace(plain, parts=parts), direction, topology, shapes, each_s, links
            )
            for direction, each_s in zip(DIRECTIONS, visit_s, strict=True)
            for parts in several
        }
        for parts in product(several, several):
            forward, backward = (best[each] for each in zip(DIRECTIONS, parts, strict=True))
            strategy = replace(plain, parts=parts, forward=forward.option, backward=backward.option)
            travellers = forward.traveller, backward.traveller
            candidates.append(Plan(strategy, forward.price, backward.price, travellers))
    best_s = min(each.step_s for each in candidates)

    def order(plan: Plan) -> tuple[float, int, int, bool, float]:
        degree = plan.strategy.ulysses_degree
        is_unusual = plan.strategy.schedule != default_schedule_name(topology.of_teams(degree))
        return max(plan.step_s, _ALIKE * best_s), degree, plan.parts, is_unusual, plan.step_s

    return sorted(candidates, key=order)


class _Choice(NamedTuple):
    """The price of a pass, the side that travels then, and the option that has it travel."""

    price: Price
    traveller: Side
    option: str


def _best_traveller(
    strategy: Strategy, direction: Direction, topology: Topology, shapes: Shapes, visit_s: float, links: Links
) -> _Choice:
    """The side to send around in one pass: that of `strategy`, unless the other one saves time."""
    options: dict[Side, dict[str, Any]] = {side: {direction: side} for side in SIDES}
    prices = {
        side: pass_price(replace(strategy, **option), direction, topology, shapes, visit_s, links)
        for side, option in options.items()
    }
    usual_side = choose_traveller(strategy, direction, _in_ring(shapes, strategy.ulysses_degree))
    best = min(prices, key=lambda side: prices[side].time_s)
    if prices[usual_side].time_s <= _ALIKE * prices[best].time_s:
        return _Choice(prices[usual_side], usual_side, getattr(strategy, direction))
    return _Choice(prices[best], best, best)


def buffer_bytes(plan: Plan, topology: Topology, shapes: Shapes) -> float:
    """About how many bytes the ring's communication buffers take where most are needed, for all layers together.

    Buffers of one size serve either pass. An exchange of heads has what it sends and what it receives besides.
    """
    degree = plan.strategy.ulysses_degree
    teams, ring = topology.of_teams(degree), _in_ring(shapes, degree)
    counts: Counter[float] = Counter()  # by size
    for direction, traveller in zip(DIRECTIONS, plan.travellers, strict=True):
        load, parts = Load.of(ring, direction, traveller, 0.0), plan.strategy.parts_of(direction)
        schedule = SCHEDULES[plan.strategy.schedule_for(teams)](teams, load.reduce_bytes > 0, None)
        held = most_held(schedule.in_parts(parts))
        in_pass = Counter({load.gather_bytes / parts: held.operands})
        in_pass[load.reduce_bytes / parts] += held.sums
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
