"""What one pass takes on described links: its schedule, simulated, and what groups of ranks send before and after it.

    links = Links(intra_bytes_per_s=450e9, inter_bytes_per_s=50e9)
    load = Load(gather_bytes=16 << 20, reduce_bytes=16 << 20, work_s=0.002)
    price(two_level_ring(Topology(4, 8)), load, links)      # Price(time_s=..., compute_s=..., link_s=...)

How ranks and messages move is in `planning.simulator`, all plans on a cluster in `planning.planner`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from burst_plugin.compute.shapes import Shapes, hop_bytes, hop_bytes_by_traffic
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.simulator import Load, seconds_by_link, simulate
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.schedule.rings import sample
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import SlidingWindow
from burst_plugin.strategy import Strategy
from burst_plugin.strategy.validation import PLACEMENTS
from burst_plugin.topology import Link, Topology
from burst_plugin.types import BOTH, DIRECTIONS, OTHER_SIDE, Direction, Side

_SMALLEST = 8  # nodes of a cluster that stands for a larger one: enough for two in a row to do the same
FEW_RANKS = 32  # whose schedule under a window is drawn in a moment; it takes time in proportion to their square
_MOST_RANKS = 160  # for which it is drawn, which takes about a second


@dataclass(frozen=True, order=True)
class Price:
    """The price of a pass: seconds until the last rank is done, and seconds of work of the busiest rank.

    link_s: for each kind of link the seconds that its busiest NIC spends on sending.
    """

    time_s: float
    compute_s: float
    link_s: dict[Link, float] = field(default_factory=dict, compare=False)

    @property
    def bound_s(self) -> float:
        """Return a lower bound on the seconds, which no order of the work and the messages beats."""
        return max(self.compute_s, *self.link_s.values())


def price(schedule: Schedule, load: Load, links: Links) -> Price:
    """Return the price of one pass by `schedule` on `links`, where blocks have the bytes and the work of `load`."""
    return _price_of_run(schedule, load, links, simulate(schedule, load, links).time_s)


def _price_of_run(schedule: Schedule, load: Load, links: Links, time_s: float) -> Price:
    most = max(sum(load.work(schedule, rank)) for rank in range(len(schedule.visits)))
    return Price(time_s, most * load.work_s, seconds_by_link(schedule, load, links))


def price_by_name(name: str, topology: Topology, parts: int, load: Load, links: Links) -> Price:
    """Return the price of one pass by the schedule with this name, where every rank requires every block.

    It is within 1e-9 of `price`. Ranks with equal work are simulated once, and of large clusters only a part: once
    ranks of a smaller one, with nodes of the same size, repeat a period (`simulator.Period`), each further period
    adds the same time.

    name: "flat_ring", "two_level_ring", "direct" or "tasp".
    topology: of the ring.
    parts: into how many parts the heads are cut.
    load: bytes and work of a whole block.
    """

    def drawn(nodes: int) -> Schedule:
        return _sample(name, Topology(nodes, topology.ranks_per_node), load.reduce_bytes > 0, parts)

    nodes = _SMALLEST
    while nodes < topology.nodes:
        time_s, period = simulate(drawn(nodes), load, links)
        if period is None:
            nodes *= 2
            continue
        remainder = (topology.nodes - nodes) % period.nodes
        if remainder:  # so that whole periods are left to add
            nodes += remainder
            time_s = simulate(drawn(nodes), load, links).time_s
        before = _price_of_run(drawn(nodes), load, links, time_s)
        after = _price_of_run(drawn(nodes + period.nodes), load, links, time_s + period.seconds)
        return _continued(before, after, (topology.nodes - nodes) // period.nodes)
    return price(drawn(topology.nodes), load, links)


@lru_cache(maxsize=32)
def _sample(name: str, topology: Topology, reduces: bool, parts: int) -> Schedule:
    return sample(name, topology, reduces).in_parts(parts)


def _continued(before: Price, after: Price, times: int) -> Price:
    """Return the price `times` steps after `before`, each like the step from `before` to `after`."""

    def value(first: float, second: float) -> float:
        return first + times * (second - first)

    return Price(
        value(before.time_s, after.time_s),
        value(before.compute_s, after.compute_s),
        {link: value(before.link_s[link], after.link_s[link]) for link in Link},
    )


def has_price(strategy: Strategy) -> bool:
    """Return whether passes by a strategy can be priced: if one side moves, not both, and groups are neighbours."""
    return BOTH not in (strategy.forward, strategy.backward) and strategy.ulysses_placement == PLACEMENTS[0]


def pass_price(
    strategy: Strategy,
    direction: Direction,
    topology: Topology,
    shapes: Shapes,
    work_s: float,
    links: Links,
    *,
    window: int | None = None,
) -> Price:
    """Return the price of one pass of attention by `strategy`, its groups' messages included.

    Args:
        strategy: the options of the ring.
        direction: "forward" or "backward".
        topology: of all ranks.
        shapes: of one rank's block, before heads are exchanged.
        work_s: the seconds of work on one such block of queries with one block of keys; with a `window`, for all
            pairs of their tokens.
        links: of the cluster.
        window: the most keys that a token attends to, itself included; None without a window.

    An exchange of heads makes blocks longer, with fewer heads. With a `mesh_degree` a ring step works on the gathered
    side of a whole group. The time of a group's messages, which nothing hides, is added: of operands before the ring
    and results after it, each with the latency of one message.

    Raises ValueError for a strategy without a price (`has_price`).
    """
    if strategy.ulysses_placement != PLACEMENTS[0]:
        raise ValueError(
            f"ulysses_placement={strategy.ulysses_placement!r} cannot be planned: it has no price. Use "
            f"{PLACEMENTS[0]!r}; or run it without a plan, as Strategy(ulysses_degree=..., ...)"
        )
    size, ring = strategy.group_size, shapes_in_ring(shapes, strategy.degree)
    groups, parts = topology.of_ulysses_groups(size), strategy.parts_of(direction)
    moving = choose_moving_side(strategy, direction, ring, groups.ranks)
    load, ring_links = Load.of(ring, direction, moving, size * work_s), links.of_ring(topology, size)
    if window is None:
        ring_price = price_by_name(strategy.schedule_for(groups), groups, parts, load, ring_links)
    else:
        load = replace(load, rows=ring.q_len)
        ring_price = _windowed_price(strategy.schedule, groups, parts, load, ring_links, moving, window)
    exchange_s = _exchange_seconds(size, topology, exchanged_bytes(shapes, strategy, direction, moving), links)
    busy_s = {link: ring_price.link_s[link] + exchange_s[link] for link in Link}
    exposed_s = max(exchange_s[link] + 2 * links.latency_s(link) if exchange_s[link] else 0.0 for link in Link)
    return replace(ring_price, time_s=ring_price.time_s + exposed_s, link_s=busy_s)


def work_seconds(shapes: Shapes, flops_per_s: float, causal: bool) -> tuple[float, float]:
    """Return the seconds of attention on one block of queries with one block of keys, (forward, backward).

    2 FLOPs for each of query x key x head dim, in q @ k and in p @ v; a causal mask leaves half of that for every
    ring step of a zigzag layout; backward there are five products, three of them with the dim of queries and keys,
    2.5 times as much where dims are alike (FlashAttention-2, arXiv 2307.08691, section 4.1).

    shapes: of one rank's block. flops_per_s: FLOP per second of the kernel. causal: whether the mask is causal.
    """
    pairs = shapes.batch * shapes.q_len * shapes.kv_len * shapes.q_heads * (0.5 if causal else 1.0)
    qk_s, v_s = (2 * pairs * dim / flops_per_s for dim in (shapes.qk_dim, shapes.v_dim))
    return qk_s + v_s, 3 * qk_s + 2 * v_s


def pairs_in_window(tokens: int, window: int) -> int:
    """Return the number of (query, key) pairs if each of `tokens` attends to itself and `window` - 1 before it."""
    reach = min(tokens, window)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


def _windowed_price(
    schedule: str, topology: Topology, parts: int, load: Load, links: Links, moving: Side, window: int
) -> Price:
    """Return the price of a pass in which each token attends to at most `window` keys, itself included.

    The schedule that the ring draws for that mask is simulated, with the rows that it sends and the pairs that it
    computes. `load` describes blocks of `load.rows` rows without a mask; `schedule` is an option of `Strategy`.
    Ranks many nodes apart neither send to each other nor differ, so that only a part of a large cluster is simulated,
    four times as long as the window. Where this part has too many ranks, whole blocks going to all ranks are priced.
    """
    strategy, width = Strategy(schedule=schedule, ranks_per_node=topology.ranks_per_node), topology.ranks_per_node
    nodes = max(2, FEW_RANKS // width, math.ceil(4 * window / (load.rows * width)))
    part = replace(topology, nodes=min(nodes, topology.nodes))
    if part.ranks > _MOST_RANKS:
        tokens = load.rows * topology.ranks
        evenly = replace(load, work_s=load.work_s * pairs_in_window(tokens, window) / tokens**2)
        return price_by_name(strategy.schedule_for(topology), topology, parts, evenly, links)
    drawn, work_shares = _drawn_for_window(strategy, part, load.rows, window, moving, load.reduce_bytes > 0, parts)
    return price(drawn, replace(load, work_shares=work_shares), links)


@lru_cache(maxsize=256)
def _drawn_for_window(
    strategy: Strategy, topology: Topology, rows: int, window: int, moving: Side, reduces: bool, parts: int
) -> tuple[Schedule, Mapping[tuple[int, int], float]]:
    """Return a schedule, and the work of its steps as shares of a whole block's pairs, by rank and owner."""
    tokens = Tokens(rows * topology.ranks)
    attending = Attending(tokens, tokens, SlidingWindow(window - 1, 0))
    table = RouteTable(topology, strategy)
    schedule, pairs = table.schedule(PassKey(attending, moving, reduces, parts)), table.pairs(attending)
    work_shares = {
        (rank, owner): sum(tile.work for tile in pairs.of_visit(moving, owner, rank)) / rows**2
        for rank, visits in enumerate(schedule.visits)
        for owner in {schedule.owner(block) for block in visits if block is not None}
    }
    return schedule, work_shares


def shapes_in_ring(shapes: Shapes, degree: int) -> Shapes:
    """Return the shapes of blocks in the ring, after `degree` ranks have exchanged heads: more tokens, fewer heads.

    `shapes` are one rank's block before.
    """
    return shapes.of_ulysses_group(degree)._replace(q_len=degree * shapes.q_len, kv_len=degree * shapes.kv_len)


def _exchange_seconds(group_size: int, topology: Topology, nbytes: int, links: Links) -> dict[Link, float]:
    """Return how long each link is busy with messages inside groups: `nbytes` for each other rank of the group."""
    inside = min(group_size, topology.ranks_per_node)
    ranks_per_nic = topology.ranks_per_node if links.nic == "node" else 1
    return {
        Link.INTRA: nbytes * (inside - 1) / links.intra_bytes_per_s,
        Link.INTER: nbytes * (group_size - inside) / links.inter_bytes_per_s * ranks_per_nic,
    }


def exchanged_bytes(shapes: Shapes, strategy: Strategy, direction: Direction, moving: Side) -> int:
    """Return the bytes that a rank sends to each other rank of its group, before and after the ring together.

    In a mesh, its block of the side that stays, and partial results of the other's block. In an exchange of heads,
    its part of q, k, v and out, or of their gradients, in the type of the inputs; gradients of key/value heads that
    several ranks share are wide.

    shapes: of one rank's block, before any exchange. moving: the side that moves in the ring.
    """
    if strategy.mesh_degree > 1:
        return hop_bytes(shapes, direction, OTHER_SIDE[moving])
    degree = strategy.degree
    share = shapes.of_ulysses_group(degree)
    dims = share.batch * (share.qk_dim + share.v_dim)
    q_numel, kv_numel = dims * share.q_len * share.q_heads, dims * share.kv_len * share.kv_heads
    is_wide = direction == "backward" and degree > shapes.kv_heads
    kv_dtype = share.sum_dtype if is_wide else share.dtype
    return q_numel * share.dtype.itemsize + kv_numel * kv_dtype.itemsize


def exchange_buffer_bytes(shapes: Shapes, strategy: Strategy, moving_sides: Sequence[Side]) -> int:
    """Return the bytes of a rank's buffers for exchanges within its mesh group: two per peer, to send and to receive.

    0 without a mesh. moving_sides: of the forward and of the backward pass.
    """
    messages = [
        nbytes
        for direction, moving in zip(DIRECTIONS, moving_sides, strict=True)
        for nbytes in hop_bytes_by_traffic(shapes, direction, OTHER_SIDE[moving])
    ]
    return 2 * (strategy.mesh_degree - 1) * max(messages)
