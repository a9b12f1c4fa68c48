"""Where the time of ring attention goes: computing, messages and waits of a rank, and the ranks that it waits for.

    with cp.profile() as p:         # a few training steps; p holds every event
        train_step()
    print(p)                        # per step of the ring: compute, wait, bytes; and which ranks were slow
    p.save_chrome_trace("rank0.json")
    print(p.gather())               # collective: all ranks side by side

On CPUs times are the host's. On GPUs they are the stream's: CUDA events are recorded on it and read when the profile
is, so that the host never waits while training. A pass alternates between *moves* and *kernels*; a move is
all that is done between two kernels: waiting, posting, packing, adding up what arrived.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from burst_plugin.comm.transport import Channel, Message, Pending, Transport
from burst_plugin.profiling.summary import Event, RingProfile, Summary, save_chrome_trace
from burst_plugin.topology import Topology

_Mark = Any  # of a clock: seconds, or a CUDA event


class _Clock(Protocol):
    def now(self) -> _Mark:
        """Return a mark of this moment, to be read later."""
        ...

    def reader(self) -> Callable[[_Mark], float]:
        """Return a function from marks to `time.perf_counter()` seconds; this may wait for the device."""
        ...


class _HostClock:
    now = staticmethod(time.perf_counter)

    def reader(self) -> Callable[[_Mark], float]:
        return float


class _StreamClock:
    """A clock of a GPU's current stream, exact to 1 us in the first 10 s and 8 us at 100 s: CUDA's float32 of ms."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.now()

    def now(self) -> _Mark:
        mark: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        self._latest = mark
        return mark

    def reader(self) -> Callable[[_Mark], float]:
        self._latest.synchronize()  # which may be on another stream than where it is read
        last = self.now()
        last.synchronize()
        origin_s = time.perf_counter() - self._origin.elapsed_time(last) / 1e3
        return lambda mark: origin_s + self._origin.elapsed_time(mark) / 1e3


class _Interval(NamedTuple):
    """An event with a start and a stop that are still marks of a clock, not seconds."""

    blank: Event
    fields: dict[str, Any]
    clock: _Clock
    start: _Mark
    stop: _Mark


class PassLog:
    """A log of the work of one rank in one pass, written meanwhile; `step` is the present step of the ring."""

    def __init__(self, blank: Event, clock: _Clock, intervals: list[_Interval], batches: Iterator[int]) -> None:
        self._blank, self._intervals, self._batches = blank, intervals, batches
        self.clock = clock
        self.step = 0  # of what is noted from now on

    def note(self, start: _Mark, kind: str, **what: Any) -> None:
        """Note an event of the current step that began at `start`, a reading of `clock`, and ends now.

        `kind` and `what` are fields of `Event`.
        """
        what.update(kind=kind, step=self.step)
        self._intervals.append(_Interval(self._blank, what, self.clock, start, self.clock.now()))

    def timed(self, kind: str, inside: AbstractContextManager[None] | None = None) -> AbstractContextManager[None]:
        """Return a context manager that notes its duration as an event of this `kind`; it enters `inside`, if any."""
        return _Timed(self, kind, inside or nullcontext())

    def watch(self, transport: Transport) -> Transport:
        """Return a transport that does what `transport` does, and notes each post and wait as an event."""
        return _WatchedTransport(transport, self)

    def posted(self, start: _Mark, sends: Sequence[Message], pending: Pending) -> _WatchedPending:
        """Note messages posted together as "post" events, one per channel; return a `pending` that notes the waits.

        start: a reading of `clock` from before the post. sends: the messages sent, whose bytes are counted.
        """
        batch = next(self._batches)
        sent_bytes = Counter[Channel]()
        for message in sends:
            sent_bytes[message.channel] += message.data.numel()
        for channel in dict.fromkeys(message.channel for message in pending.messages):
            traffic, link = channel.traffic.value, channel.link.value
            self.note(start, "post", link=link, traffic=traffic, batch=batch, sent_bytes=sent_bytes[channel])
        return _WatchedPending(pending, self, batch)

    def watched(self, pending: Pending) -> Pending:
        """Return a wrapper of `pending` that notes the waits for its messages, where their post was not noted."""
        return _WatchedPending(pending, self, -1)


class _Timed:
    def __init__(self, log: PassLog, kind: str, inside: AbstractContextManager[None]) -> None:
        self._log, self._kind, self._inside = log, kind, inside

    def __enter__(self) -> None:
        self._start = self._log.clock.now()
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        self._log.note(self._start, self._kind)


class _WatchedTransport(Transport):
    def __init__(self, transport: Transport, log: PassLog) -> None:
        super().__init__(transport.pool, transport.board)
        self._transport, self._log = transport, log

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        start = self._log.clock.now()
        return [self._log.posted(start, sends, pending) for pending in self._transport.post(sends, recvs)]

    def has_met(self, in_flight: Sequence[Pending]) -> bool:
        return self._transport.has_met([x._pending if isinstance(x, _WatchedPending) else x for x in in_flight])


class _WatchedPending:
    def __init__(self, pending: Pending, log: PassLog, batch: int) -> None:
        self._pending, self._log, self._batch = pending, log, batch
        self.messages = pending.messages

    def wait(self, waited: Callable[[Sequence[Message]], None] | None = None) -> None:
        start = self._log.clock.now()

        def note(messages: Sequence[Message]) -> None:
            nonlocal start
            peers = tuple(dict.fromkeys(message.peer for message in messages))
            link = messages[0].channel.link.value
            self._log.note(start, "wait", link=link, batch=self._batch, peers=peers)
            start = self._log.clock.now()
            if waited is not None:
                waited(messages)

        self._pending.wait(note)


class Profile:
    """The events of one rank while `ContextParallel.profile()` was open; to be read after it is closed.

    `str` of it is a table by step of the ring.
    """

    def __init__(self, rank: int, topology: Topology, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.topology = rank, topology
        self._group = group
        self._clocks: dict[str, _Clock] = {"cpu": _HostClock()}
        self._intervals: list[_Interval] = []
        self._events: list[Event] = []
        self._batches = itertools.count()
        self._passes = itertools.count()
        self._start_s, self._stop_s = time.perf_counter(), 0.0
        self.epoch_s = time.time() - self._start_s  # added to an event's times, it gives seconds since 1970

    def begin_pass(self, direction: str, device: torch.device) -> PassLog:
        """Return a log for a new pass on `device`, whose events become part of the profile.

        `direction` is the pass's in its events: "forward", "backward", or another kind of work, see `Event`.
        """
        if device.type not in self._clocks:
            self._clocks[device.type] = _StreamClock(device)
        blank = Event("", direction, 0, "", 0.0, 0.0, number=next(self._passes))
        return PassLog(blank, self._clocks[device.type], self._intervals, self._batches)

    def close(self) -> None:
        """End the profile's wall time; events stay readable."""
        self._stop_s = time.perf_counter()

    @property
    def events(self) -> list[Event]:
        """Return all events, ordered by when they ended. On GPUs this waits for the stream."""
        clocks = {id(interval.clock): interval.clock for interval in self._intervals}
        readers = {key: clock.reader() for key, clock in clocks.items()}
        new_events = []
        for blank, fields, clock, start, stop in self._intervals:
            read = readers[id(clock)]
            new_events.append(blank._replace(start_s=read(start), stop_s=read(stop), **fields))
        self._events += new_events
        self._intervals.clear()
        due = {event.batch: event.step for event in self._events if event.kind == "wait"}
        self._events = [e._replace(due=due.get(e.batch, -1)) if e.kind == "post" else e for e in self._events]
        return self._events

    @property
    def summary(self) -> Summary:
        """Return the rank's times and bytes by step of the ring, and its waits by peer; on GPUs it synchronizes."""
        events = self.events
        stop_s = max([self._stop_s or time.perf_counter(), *(event.stop_s for event in events)])
        return Summary.of(events, self.rank, self.topology, stop_s - self._start_s)

    def __str__(self) -> str:
        return str(self.summary)

    def gather(self) -> RingProfile:
        """Return the summaries of all ranks, on every rank; collective."""
        if self._group is None:
            return RingProfile((self.summary,))
        summaries: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(summaries, self.summary, group=self._group)
        return RingProfile(tuple(summaries))

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write a timeline for https://ui.perfetto.dev or chrome://tracing; give every rank a path of its own."""
        save_chrome_trace(path, [self])
