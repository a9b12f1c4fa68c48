"""A simulation of the ranks and messages of a schedule on described links, from event to event.

Every rank works through its steps: waits for messages that are due, posts messages, computes. Messages between two
ranks on one communicator go one after another; messages that share a NIC share its rate evenly. A message arrives the
link's latency after its last byte has left; the next one does not wait for that. Nothing else is modelled.

Ranks with equal work are simulated once. A schedule may be a `sample` (`burst_plugin.schedule.rings`) that draws
only the first ranks: each of them then stands for the ranks with its number in all nodes, or rank 0 for every rank. A
message goes from the rank that stands for its sender to the rank that stands for its receiver.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from burst_plugin.compute.shapes import Shapes, hop_bytes_by_traffic
from burst_plugin.planning.cluster import Links
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.schedule.steps import Transfer
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import Direction, Side, row_count

_ROUNDING = 1e-10  # shares of a message, or of a time, that differ by less than that are the same
_LONGEST_PERIOD = 6  # nodes


@dataclass(frozen=True)
class Load:
    """The bytes and the work of one pass, by block.

    gather_bytes, reduce_bytes: the bytes of a whole block's operands, and of its partial results, in one hop.
    work_s: the seconds of a ring step that works on a whole block.
    rows: how many rows a block has, so that a transfer of some rows has their share of the bytes; 0 counts all
        transfers as whole blocks.
    work_shares: by rank and owner of the block, the work of a step as a share of `work_s`, where a mask leaves unlike
        work; None for `work_s` everywhere.
    """

    gather_bytes: float
    reduce_bytes: float
    work_s: float
    rows: int = 0
    work_shares: Mapping[tuple[int, int], float] | None = field(default=None, hash=False)

    @classmethod
    def of(cls, shapes: Shapes, direction: Direction, moving: Side, work_s: float) -> Load:
        """Return the load of a "forward" or "backward" pass whose blocks are of the `moving` side, "q" or "kv".

        shapes: of one rank's block. work_s: seconds of work on a whole block.
        """
        return cls(*hop_bytes_by_traffic(shapes, direction, moving), work_s)

    def bytes_of(self, transfer: Transfer) -> float:
        """Return the bytes of a transfer with all parts of the heads, even if it is sent in parts."""
        nbytes = self.gather_bytes if transfer.traffic is Traffic.GATHER else self.reduce_bytes
        return nbytes * row_count(transfer.rows) / self.rows if self.rows and transfer.rows is not None else nbytes

    def work(self, schedule: Schedule, rank: int) -> list[float]:
        """Return the work of each step of a rank, as shares of `work_s`; 0 for a step without a visit."""
        shares = schedule.work(rank)
        if self.work_shares is None:
            return shares
        owners = (None if block is None else schedule.owner(block) for block in schedule.visits[rank])
        left_by_mask = [0.0 if owner is None else self.work_shares[rank, owner] for owner in owners]
        return [share * left for share, left in zip(shares, left_by_mask, strict=True)]


class Period(NamedTuple):
    """The period of a simulation that repeats itself: visiting the blocks of `nodes` more nodes takes `seconds` more.

    After a period ranks are as far behind each other as before it, with as much of each message left to send.
    """

    nodes: int
    seconds: float


class SimulatedRun(NamedTuple):
    """The result of a simulation: seconds until the last rank is done, and the period; None if ranks repeat none."""

    time_s: float
    period: Period | None


def simulate(schedule: Schedule, load: Load, links: Links) -> SimulatedRun:
    """Simulate a schedule, or a sample of one, until the last rank is done; return the time and the period.

    `load` has the bytes and the work of a whole block.
    """
    return _Simulation(schedule, load, links).run()


def seconds_by_link(schedule: Schedule, load: Load, links: Links) -> dict[Link, float]:
    """Return, for each kind of link, the seconds that its busiest NIC spends on sending in one pass by `schedule`.

    `load` has the bytes of a whole block.
    """
    topology, drawn = schedule.topology, len(schedule.visits)
    sent: dict[Link, dict[int, float]] = {link: defaultdict(float) for link in Link}
    for t in schedule.transfers:
        src = t.src % drawn
        seconds = load.bytes_of(t) / schedule.parts / links.bytes_per_s(t.link)
        sent[t.link][_nic_of(topology, links, t.link, src)] += seconds
    return {
        link: _ranks_sharing_nic(schedule, links, link) * max(by_nic.values(), default=0.0)
        for link, by_nic in sent.items()
    }


def _nic_of(topology: Topology, links: Links, link: Link, rank: int) -> int:
    """Return the NIC through which a rank sends over a link."""
    return topology.node(rank) if link is Link.INTER and links.nic == "node" else rank


def _ranks_sharing_nic(schedule: Schedule, links: Links, link: Link) -> int:
    """Return how many ranks use a NIC per drawn rank: a whole node where one rank stands for all of its ranks."""
    shared = link is Link.INTER and links.nic == "node"
    return -(-schedule.topology.ranks_per_node // len(schedule.visits)) if shared else 1


@dataclass(eq=False, slots=True)
class _Message:
    """A transfer in progress: ranks `ends` wait for it at step `due`; `nics` send and receive it."""

    issue: int
    due: int
    ends: tuple[int, ...]
    stream: int
    nics: tuple[int, int]
    latency_s: float
    nbytes: float
    left_bytes: float
    posted: int = 0
    arrival_s: float = 0.0  # known once its last byte has left
    is_there: bool = False


class _Simulation:
    """The state of ranks and messages, and how it changes."""

    def __init__(self, schedule: Schedule, load: Load, links: Links) -> None:
        self._ranks = range(len(schedule.visits))
        self._work_s = [[share * load.work_s for share in load.work(schedule, rank)] for rank in self._ranks]
        self._steps = max([len(schedule.visits[0]), *(t.due + 1 for t in schedule.transfers)])
        self._issued: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        self._awaited: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        messages, self._bytes_per_s = _messages(schedule, load, links)
        for message in messages:
            for rank in message.ends:
                self._issued[rank, message.issue].append(message)
                self._awaited[rank, message.due].append(message)
        self._at = [-1 for _ in self._ranks]  # the step of each rank
        self._busy_until_s: dict[int, float] = {}
        self._streams: dict[int, deque[_Message]] = {}
        self._sent: list[_Message] = []  # that have left, and are not there yet
        self._search = _PeriodSearch(schedule)

    def run(self) -> SimulatedRun:
        """Go from event to event: a rank has done its work of a step, or a message has arrived. Return the end."""
        now, free = 0.0, set(self._ranks)
        while True:
            for rank in sorted(free):
                while self._proceed(rank, now):
                    pass
            if self._search.is_wanted(self._at):
                self._search.note(self._state(now, self._search.next_step))
            moving = [queue[0] for queue in self._streams.values()]
            rates = _rates(moving, self._bytes_per_s)
            events = [m.left_bytes / rate for m, rate in zip(moving, rates, strict=True)]
            events += [end_s - now for end_s in self._busy_until_s.values()]
            events += [m.arrival_s - now for m in self._sent]
            elapsed_s = min(events, default=math.inf)
            if elapsed_s == math.inf:
                assert all(step == self._steps - 1 for step in self._at), "nothing moves any more"
                return SimulatedRun(now, self._search.period)
            now += elapsed_s
            free = {rank for rank, end_s in self._busy_until_s.items() if end_s - now <= _ROUNDING * elapsed_s}
            for rank in free:
                del self._busy_until_s[rank]
            for message, rate in zip(moving, rates, strict=True):
                message.left_bytes -= rate * elapsed_s
                if message.left_bytes <= _ROUNDING * message.nbytes:
                    self._leave(message, now)
            free.update(self._arrivals(now, _ROUNDING * elapsed_s))

    def _proceed(self, rank: int, now: float) -> bool:
        """Begin the next step of a rank if it can begin. Return whether it did."""
        step = self._at[rank] + 1
        if rank in self._busy_until_s or step == self._steps:
            return False
        if not all(message.is_there for message in self._awaited.get((rank, step), ())):
            return False
        self._at[rank] = step
        for message in self._issued.get((rank, step), ()):
            message.posted += 1
            if message.posted == len(message.ends):
                self._streams.setdefault(message.stream, deque()).append(message)
        if step < len(self._work_s[rank]) and self._work_s[rank][step]:
            self._busy_until_s[rank] = now + self._work_s[rank][step]
        return True

    def _leave(self, message: _Message, now: float) -> None:
        """Take a message off its stream: its last byte has left."""
        message.left_bytes, message.arrival_s = 0.0, now + message.latency_s
        self._sent.append(message)
        queue = self._streams[message.stream]
        queue.popleft()
        if not queue:
            del self._streams[message.stream]

    def _arrivals(self, now: float, rounding_s: float) -> Iterator[int]:
        """Note which messages are there by now. Yield the ranks that may have waited for them."""
        for message in self._sent:
            message.is_there = message.arrival_s - now <= rounding_s
            if message.is_there:
                yield from message.ends
        self._sent = [message for message in self._sent if not message.is_there]

    def _state(self, now: float, origin: int) -> _State:
        """Return all that later events depend on: steps counted from `origin`, messages and work that are left."""
        places, shares = list[tuple[int, ...]](), list[float]()
        ends_s = [self._busy_until_s.get(rank, now) - now for rank in self._ranks]
        for rank, at in enumerate(self._at):
            in_flight = [
                message
                for step in range(max(0, at - self._search.longest), at + 1)
                for message in self._issued.get((rank, step), ())
                if message.due > at
            ]
            places.append(
                (at - origin, *(n for m in in_flight for n in (m.issue - origin, m.due - origin, m.posted)))
            )
            shares += [message.left_bytes / message.nbytes for message in in_flight]
            ends_s += [max(0.0, message.arrival_s - now) for message in in_flight]
        return _State(now, places, shares, ends_s)


def _messages(schedule: Schedule, load: Load, links: Links) -> tuple[list[_Message], list[float]]:
    """Return the transfers as messages between the ranks that are drawn, in the order in which steps post them.

    Also returns the bytes per second of every NIC, by its number.
    """
    topology, drawn = schedule.topology, len(schedule.visits)
    nodes, width = topology.nodes, topology.ranks_per_node
    streams: dict[Hashable, int] = {}
    nics: dict[Hashable, int] = {}
    bytes_per_s = list[float]()

    def nic(way: str, link: Link, rank: int) -> int:
        number = nics.setdefault((way, link, _nic_of(topology, links, link, rank)), len(nics))
        if number == len(bytes_per_s):
            bytes_per_s.append(links.bytes_per_s(link) / _ranks_sharing_nic(schedule, links, link))
        return number

    messages = []
    for t in sorted(schedule.transfers, key=lambda t: (t.due, t.traffic)):
        src, dst = t.src % drawn, t.dst % drawn
        distance = (t.dst // width - t.src // width) % nodes, (t.dst - t.src) % width
        stream = streams.setdefault((t.traffic, t.link, src, distance), len(streams))
        ends, size = (src,) if src == dst else (src, dst), max(load.bytes_of(t) / schedule.parts, 1.0)
        both = nic("out", t.link, src), nic("in", t.link, dst)
        messages.append(_Message(t.issue, t.due, ends, stream, both, links.latency_s(t.link), size, size))
    return messages, bytes_per_s


def _rates(moving: list[_Message], bytes_per_s: list[float]) -> list[float]:
    """Return bytes per second of each message: the even share of the NIC at either end, whichever is less."""
    users = Counter(nic for message in moving for nic in message.nics)
    return [min(bytes_per_s[nic] / users[nic] for nic in m.nics) for m in moving]


class _State(NamedTuple):
    """The state of ranks and messages at `now`; see `_Simulation._state`."""

    now: float
    places: list[tuple[int, ...]]
    shares: list[float]
    ends_s: list[float]

    def is_like(self, before: _State) -> bool:
        """Return whether the state equals the state at another time, except for rounding."""
        if self.places != before.places:
            return False
        rounding_s = _ROUNDING * (self.now - before.now)
        shares = zip(self.shares, before.shares, strict=True)
        ends_s = zip(self.ends_s, before.ends_s, strict=True)
        return all(abs(one - other) <= _ROUNDING for one, other in shares) and all(
            abs(one - other) <= rounding_s for one, other in ends_s
        )


class _PeriodSearch:
    """A search for two nodes whose visits begin in the same state, where the schedule repeats itself.

    In the middle of a schedule the same steps are repeated for every node; only steps of the first and the last three
    nodes differ (tests hold every schedule to that).
    """

    def __init__(self, schedule: Schedule) -> None:
        self._node_steps = schedule.parts * schedule.topology.ranks_per_node  # that visit one node's blocks
        self._stop = len(schedule.visits[0]) - 3 * self._node_steps
        self._before: deque[_State] = deque(maxlen=_LONGEST_PERIOD)
        self.longest = max((t.due - t.issue for t in schedule.transfers), default=0)
        self.next_step = 3 * self._node_steps
        self.period: Period | None = None

    def is_wanted(self, at: list[int]) -> bool:
        """Return whether ranks, at these steps, are where the state is to be noted."""
        return self.period is None and self.next_step <= min(at) and max(at) < self._stop

    def note(self, state: _State) -> None:
        """Compare the state with the states of some nodes before, and remember it."""
        self.next_step += self._node_steps
        for nodes, before in enumerate(reversed(self._before), start=1):
            if state.is_like(before):
                self.period = Period(nodes, state.now - before.now)
                return
        self._before.append(state)
