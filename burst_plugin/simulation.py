"""Ranks and messages of a schedule in motion on described links, second by second.

Every rank works through its steps: waits for what is due, posts what is issued, computes. Messages between the same
two ranks on one communicator go one after another; messages that share a NIC share its rate evenly. Nothing else is
modelled: no latency, no launch times, no memory traffic.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from burst_plugin.shapes import Shapes, hop_bytes_by_traffic
from burst_plugin.sides import Direction, Side
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.transfers import Schedule, Transfer

__all__ = ["Links", "Load", "nic_of", "simulate"]

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
    def of(cls, shapes: Shapes, direction: Direction, traveller: Side, visit_s: float) -> Load:
        """The load of a "forward" or "backward" pass in which side `traveller`, "q" or "kv", travels."""
        return cls(*hop_bytes_by_traffic(shapes, direction, traveller), visit_s)

    def bytes_of(self, traffic: Traffic) -> float:
        """Bytes of a hop."""
        return self.gather_bytes if traffic is Traffic.GATHER else self.reduce_bytes


def simulate(schedule: Schedule, load: Load, links: Links) -> float:
    """Seconds until the last rank is done."""
    return _Simulation(schedule, load, links).run()


def nic_of(topology: Topology, links: Links, link: Link, rank: int) -> int:
    """The NIC through which a rank sends over a link."""
    return topology.node(rank) if link is Link.INTER and links.nic == "node" else rank


def _stream(t: Transfer) -> tuple[Hashable, ...]:
    """Messages of one stream arrive in the order in which they were posted."""
    return t.traffic, t.link, t.src, t.dst


@dataclass
class _Rank:
    """How far a rank has come."""

    step: int = -1
    free_s: float = 0.0


class _Simulation:
    """Ranks and messages in motion.

    Where all ranks do alike, only rank 0 is looked at: what it sends stands for what it receives, and one side of
    its NIC for both.
    """

    def __init__(self, schedule: Schedule, load: Load, links: Links) -> None:
        self._schedule, self._load, self._links = schedule, load, links
        self._alike = _all_ranks_are_alike(schedule) and (
            links.nic == "rank" or schedule.topology.ranks_per_node == 1
        )
        self._ranks = {rank: _Rank() for rank in range(1 if self._alike else schedule.ranks)}
        self._work = {rank: schedule.work(rank) for rank in self._ranks}
        transfers = [t for t in schedule.transfers if not self._alike or t.src == 0]
        self._steps = max([len(schedule.visits[0]), *(t.due + 1 for t in transfers)])
        self._issued: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self._awaited: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for t in sorted(transfers, key=lambda t: (t.due, t.traffic)):
            for rank in self._ends(t):
                self._issued[rank, t.issue].append(t)
                self._awaited[rank, t.due].append(t)
        self._posted: Counter[Transfer] = Counter()
        self._streams: dict[tuple[Hashable, ...], deque[Transfer]] = {}
        self._left_bytes: dict[Transfer, float] = {}
        self._finished: set[Transfer] = set()

    def run(self) -> float:
        """Seconds until the last rank is done."""
        now = 0.0
        while True:
            while sum(self._proceed(rank, now) for rank in self._ranks):
                pass
            rates = self._rates()
            arrivals = [self._left_bytes[t] / rate for t, rate in rates.items()]
            ends = [rank.free_s - now for rank in self._ranks.values() if rank.free_s > now]
            elapsed_s = min([*arrivals, *ends], default=_NEVER)
            if elapsed_s == _NEVER:
                assert all(rank.step == self._steps - 1 for rank in self._ranks.values()), "nothing moves any more"
                return now
            now += elapsed_s
            for t, rate in rates.items():
                self._left_bytes[t] -= rate * elapsed_s
                if self._left_bytes[t] <= _DONE_BYTES:
                    self._arrived(t)

    def _ends(self, t: Transfer) -> Iterable[int]:
        return (0,) if self._alike else (t.src, t.dst)

    def _proceed(self, number: int, now: float) -> bool:
        """Begin the next step of a rank if it can be begun."""
        rank = self._ranks[number]
        step = rank.step + 1
        if rank.free_s > now or step == self._steps:
            return False
        if any(t not in self._finished for t in self._awaited[number, step]):
            return False
        rank.step = step
        for t in self._issued[number, step]:
            self._posted[t] += 1
            if self._posted[t] == (1 if self._alike else 2):
                self._left_bytes[t] = max(self._load.bytes_of(t.traffic) / self._schedule.parts, 1.0)
                self._streams.setdefault(_stream(t), deque()).append(t)
        if step < len(self._work[number]):
            rank.free_s = now + self._work[number][step] * self._load.visit_s
        return True

    def _rates(self) -> dict[Transfer, float]:
        """Bytes per second of the messages that move: the even share of the NIC at either end, whichever is less."""
        moving = [queue[0] for queue in self._streams.values()]
        users: Counter[tuple[Hashable, ...]] = Counter(nic for t in moving for nic in self._nics(t))
        return {t: self._links.bytes_per_s(t.link) / max(users[nic] for nic in self._nics(t)) for t in moving}

    def _nics(self, t: Transfer) -> Sequence[tuple[Hashable, ...]]:
        topology = self._schedule.topology
        out = ("out", t.link, nic_of(topology, self._links, t.link, t.src))
        return (out,) if self._alike else (out, ("in", t.link, nic_of(topology, self._links, t.link, t.dst)))

    def _arrived(self, t: Transfer) -> None:
        self._finished.add(t)
        del self._left_bytes[t]
        queue = self._streams[_stream(t)]
        queue.popleft()
        if not queue:
            del self._streams[_stream(t)]


def _all_ranks_are_alike(schedule: Schedule) -> bool:
    """Whether every rank visits and sends at the same steps over the same links."""
    busy = {tuple(block is not None for block in visits) for visits in schedule.visits}
    sends: dict[int, Counter[tuple[object, ...]]] = {rank: Counter() for rank in range(schedule.ranks)}
    for t in schedule.transfers:
        sends[t.src][t.traffic, t.link, t.issue, t.due, t.rows is None] += 1
    return len(busy) == 1 and all(counts == sends[0] for counts in sends.values())
