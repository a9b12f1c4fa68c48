"""What a schedule takes on a described cluster: the same schedule that is executed, with times added to it.

    links = Links(intra_bytes_per_s=450e9, inter_bytes_per_s=50e9)
    load = Load(gather_bytes=16 << 20, reduce_bytes=16 << 20, visit_s=0.002)
    price(two_level_ring(Topology(4, 8)), load, links)      # Price(time_s=..., compute_s=..., link_s=...)

Every rank works through its steps: waits for what is due, posts what is issued, computes. Messages between the same
two ranks on one communicator go one after another; messages that share a NIC share its rate evenly. Nothing else is
modelled: no latency, no launch times, no memory traffic.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from burst_plugin.schedule import SCHEDULES
from burst_plugin.strategy import (
    DIRECTIONS,
    TRAVELLERS,
    Shapes,
    Strategy,
    choose_traveller,
    hop_bytes_by_traffic,
)
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.transfers import Schedule, Transfer

__all__ = ["Links", "Load", "Plan", "Price", "pass_price", "plans", "price", "visit_seconds"]

_PARTS = (1, 2, 4)
_NEVER = float("inf")
_DONE_BYTES = 1e-3  # less than that is left over by rounding


@dataclass(frozen=True)
class Links:
    """Rates per direction: of every rank inside its node, and between nodes, where `nic` says whose a NIC is.

    Raises ValueError for rates that are not positive, or a `nic` other than "rank" and "node".
    """

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    nic: str = "rank"

    def __post_init__(self) -> None:
        for name in ("intra_bytes_per_s", "inter_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Links({name}={getattr(self, name)}) is not valid; use a positive rate")
        if self.nic not in ("rank", "node"):
            raise ValueError(f'Links(nic={self.nic!r}) is not valid; use "rank" or "node"')

    def bytes_per_s(self, link: Link) -> float:
        """The rate of a link."""
        return self.intra_bytes_per_s if link is Link.INTRA else self.inter_bytes_per_s


@dataclass(frozen=True)
class Load:
    """What one pass has to do: bytes per block and hop, and seconds of work per visit of a whole block."""

    gather_bytes: float
    reduce_bytes: float
    visit_s: float

    @classmethod
    def of(cls, shapes: Shapes, direction: str, traveller: str, visit_s: float) -> Load:
        """That of a "forward" or "backward" pass in which side `traveller`, "q" or "kv", travels."""
        return cls(*hop_bytes_by_traffic(shapes, direction, traveller), visit_s)

    def bytes_of(self, traffic: Traffic) -> float:
        """Bytes of a hop."""
        return self.gather_bytes if traffic is Traffic.GATHER else self.reduce_bytes


@dataclass(frozen=True, order=True)
class Price:
    """Seconds: `time_s` until the last rank is done, its work alone, and the most that any NIC sends, by link."""

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
    for traffic in Traffic:
        for t in schedule.transfers(traffic):
            sent[t.link, _nic(schedule.topology, links, t.link, t.src)] += load.bytes_of(traffic) / schedule.parts
    busy_s = {link: max((n for (of, _), n in sent.items() if of is link), default=0.0) for link in Link}
    most = max(sum(schedule.work(rank)) for rank in range(schedule.ranks))
    return Price(
        time_s=_Simulation(schedule, load, links).run(),
        compute_s=most * load.visit_s,
        link_s={link: nbytes / links.bytes_per_s(link) for link, nbytes in busy_s.items()},
    )


class Plan(NamedTuple):
    """One way to run attention, and what its passes cost; `step_s` is both."""

    strategy: Strategy
    forward: Price
    backward: Price

    @property
    def step_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.forward.time_s + self.backward.time_s

    @property
    def parts(self) -> int:
        """Of a forward and a backward pass together."""
        return sum(map(self.strategy.parts_of, DIRECTIONS))


def pass_price(
    strategy: Strategy, direction: str, topology: Topology, shapes: Shapes, visit_s: float, links: Links
) -> Price:
    """That of one pass by `strategy`; `visit_s` is the seconds of work on a whole block where no heads are exchanged.

    With such an exchange a visit is that of a longer block with fewer heads, and the exchange, which nothing hides,
    is added: all operands on their way to their heads, all results on their way back.
    """
    degree = strategy.ulysses_degree
    ring = shapes.of_team(degree)._replace(q_len=degree * shapes.q_len, kv_len=degree * shapes.kv_len)
    traveller = choose_traveller(strategy, direction, ring)
    load = Load.of(ring, direction, traveller, degree * visit_s)
    teams = topology.of_teams(degree)
    schedule = SCHEDULES[strategy.schedule_for(teams)](teams, load.reduce_bytes > 0, None)
    found = price(schedule.in_parts(strategy.parts_of(direction)), load, links)
    exchange_s = _exchange_seconds(degree, topology, _exchanged_bytes(shapes, degree, direction), links)
    busy_s = {link: found.link_s[link] + exchange_s[link] for link in Link}
    return replace(found, time_s=found.time_s + max(exchange_s.values()), link_s=busy_s)


def _exchange_seconds(degree: int, topology: Topology, nbytes: int, links: Links) -> dict[Link, float]:
    """How long each link is busy while ranks exchange heads: every other member of a team gets `nbytes`."""
    inside = min(degree, topology.ranks_per_node)
    ranks_per_nic = topology.ranks_per_node if links.nic == "node" else 1
    return {
        Link.INTRA: nbytes * (inside - 1) / links.intra_bytes_per_s,
        Link.INTER: nbytes * (degree - inside) / links.inter_bytes_per_s * ranks_per_nic,
    }


def _exchanged_bytes(shapes: Shapes, degree: int, direction: str) -> int:
    """Of one member's share of a rank's q, k, v and out, or of their gradients.

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

    The best is the cheapest; of those that are alike to 1 %, the one with the lowest degree and the fewest parts.
    `visit_s` is the seconds of work on a whole block, forward and backward.
    """
    found = []
    for name, degree in product(SCHEDULES, (n for n in topology.team_sizes if n in shapes.team_degrees)):
        several = [n for n in _PARTS if shapes.of_team(degree).kv_heads % n == 0]
        options: dict[str, Any] = {"schedule": name, "ulysses_degree": degree}
        options["ranks_per_node"] = topology.ranks_per_node
        best = {
            (direction, parts): min(
                (pass_price(strategy, direction, topology, shapes, each_s, links), traveller)
                for traveller in TRAVELLERS
                for strategy in [Strategy(parts=parts, forward=traveller, backward=traveller, **options)]
            )
            for direction, each_s in zip(DIRECTIONS, visit_s, strict=True)
            for parts in several
        }
        for parts in product(several, several):
            (forward, forward_traveller), (backward, backward_traveller) = (
                best[each] for each in zip(DIRECTIONS, parts, strict=True)
            )
            strategy = Strategy(parts=parts, forward=forward_traveller, backward=backward_traveller, **options)
            found.append(Plan(strategy, forward, backward))
    best_s = min(each.step_s for each in found)
    return sorted(
        found,
        key=lambda each: (max(each.step_s, 1.01 * best_s), each.strategy.ulysses_degree, each.parts, each.step_s),
    )


def visit_seconds(shapes: Shapes, flops_per_s: float, causal: bool) -> tuple[float, float]:
    """Seconds of work on a whole block, forward and backward, at the rate of the kernel.

    2 FLOPs for each of query x key x head dim, in q @ k and in p @ v; a causal mask leaves half of that to every
    visit of a zigzag layout; backward is 2.5 times as much (FlashAttention-2, arXiv 2307.08691, section 4.1).
    """
    pairs = shapes.batch * shapes.q_len * shapes.kv_len * shapes.q_heads * (0.5 if causal else 1.0)
    forward = 2 * pairs * (shapes.qk_dim + shapes.v_dim) / flops_per_s
    return forward, 2.5 * forward


def _nic(topology: Topology, links: Links, link: Link, rank: int) -> int:
    """The NIC through which a rank sends over a link."""
    return topology.node(rank) if link is Link.INTER and links.nic == "node" else rank


class _Message(NamedTuple):
    traffic: Traffic
    transfer: Transfer

    @property
    def stream(self) -> tuple[Hashable, ...]:
        """Messages of one stream arrive in the order in which they were posted."""
        t = self.transfer
        return self.traffic, t.link, t.src, t.dst


@dataclass
class _Rank:
    """How far a rank has come."""

    step: int = -1
    free_s: float = 0.0


class _Simulation:
    """Ranks and messages in motion. Where all ranks do alike, one stands for all."""

    def __init__(self, schedule: Schedule, load: Load, links: Links) -> None:
        self._schedule, self._load, self._links = schedule, load, links
        self._alike = _all_ranks_are_alike(schedule) and (
            links.nic == "rank" or schedule.topology.ranks_per_node == 1
        )
        self._ranks = {rank: _Rank() for rank in range(1 if self._alike else schedule.ranks)}
        self._work = {rank: schedule.work(rank) for rank in self._ranks}
        everything = [_Message(traffic, t) for traffic in Traffic for t in schedule.transfers(traffic)]
        messages = [m for m in everything if not self._alike or m.transfer.src == 0]
        self._steps = max([len(schedule.visits[0]), *(m.transfer.due + 1 for m in messages)])
        self._issued: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        self._awaited: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        for message in sorted(messages, key=lambda m: (m.transfer.due, m.traffic)):
            for rank in self._ends(message):
                self._issued[rank, message.transfer.issue].append(message)
                self._awaited[rank, message.transfer.due].append(message)
        self._posted: Counter[_Message] = Counter()
        self._streams: dict[tuple[Hashable, ...], deque[_Message]] = {}
        self._left: dict[_Message, float] = {}
        self._finished: set[_Message] = set()

    def run(self) -> float:
        """Seconds until the last rank is done."""
        now = 0.0
        while True:
            while sum(self._proceed(rank, now) for rank in self._ranks):
                pass
            rates = self._rates()
            arrivals = [self._left[m] / rate for m, rate in rates.items()]
            ends = [rank.free_s - now for rank in self._ranks.values() if rank.free_s > now]
            passes = min([*arrivals, *ends], default=_NEVER)
            if passes == _NEVER:
                assert all(rank.step == self._steps - 1 for rank in self._ranks.values()), "nothing moves any more"
                return now
            now += passes
            for message, rate in rates.items():
                self._left[message] -= rate * passes
                if self._left[message] <= _DONE_BYTES:
                    self._arrived(message)

    def _ends(self, message: _Message) -> Iterable[int]:
        return (0,) if self._alike else (message.transfer.src, message.transfer.dst)

    def _proceed(self, number: int, now: float) -> bool:
        """Begin the next step of a rank if it can be begun."""
        rank = self._ranks[number]
        step = rank.step + 1
        if rank.free_s > now or step == self._steps:
            return False
        if any(message not in self._finished for message in self._awaited[number, step]):
            return False
        rank.step = step
        for message in self._issued[number, step]:
            self._posted[message] += 1
            if self._posted[message] == (1 if self._alike else 2):
                self._left[message] = max(self._load.bytes_of(message.traffic) / self._schedule.parts, 1.0)
                self._streams.setdefault(message.stream, deque()).append(message)
        if step < len(self._work[number]):
            rank.free_s = now + self._work[number][step] * self._load.visit_s
        return True

    def _rates(self) -> dict[_Message, float]:
        """Of the messages that move: the even share of the NICs at either end, whichever is less."""
        moving = [queue[0] for queue in self._streams.values()]
        users: Counter[tuple[Hashable, ...]] = Counter(nic for message in moving for nic in self._nics(message))
        return {
            message: self._links.bytes_per_s(message.transfer.link) / max(users[nic] for nic in self._nics(message))
            for message in moving
        }

    def _nics(self, message: _Message) -> Sequence[tuple[Hashable, ...]]:
        t, topology = message.transfer, self._schedule.topology
        out = ("out", t.link, _nic(topology, self._links, t.link, t.src))
        return (out,) if self._alike else (out, ("in", t.link, _nic(topology, self._links, t.link, t.dst)))

    def _arrived(self, message: _Message) -> None:
        self._finished.add(message)
        del self._left[message]
        queue = self._streams[message.stream]
        queue.popleft()
        if not queue:
            del self._streams[message.stream]


def _all_ranks_are_alike(schedule: Schedule) -> bool:
    """Whether every rank visits and sends at the same steps over the same links."""
    busy = {tuple(block is not None for block in visits) for visits in schedule.visits}
    sends: dict[int, Counter[tuple[object, ...]]] = {rank: Counter() for rank in range(schedule.ranks)}
    for traffic in Traffic:
        for t in schedule.transfers(traffic):
            sends[t.src][traffic, t.link, t.issue, t.due, t.rows is None] += 1
    return len(busy) == 1 and all(counts == sends[0] for counts in sends.values())
