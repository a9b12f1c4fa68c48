"""The events of a ring's profile, and its summaries: by step, by peer, by rank; as tables and as a timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from burst_plugin.topology import Link, Topology, Traffic

_MS, _US, _MB = 1e3, 1e6, 1e-6


class Event(NamedTuple):
    """One thing that a rank did, from `start_s` to `stop_s`, in `time.perf_counter()` seconds.

    kind: "pass"; within it "kernel" and "move", and within a move "post" and "wait".
    direction: "forward", "backward", "exchange" of heads, "merge" at inference, or "comparison" of ranks.
    step: of the ring. number: of the pass, from 0.
    link, batch: of posts and waits, "intra" or "inter", and the number of the messages that are posted together.
    due, traffic, sent_bytes: of posts, the step at which they are waited for, "gather" or "reduce", and the bytes.
    peers: of waits, the ranks waited for.
    """

    kind: str  # "pass"; within it "kernel" and "move", and within that "post" and "wait"
    direction: str  # "forward", "backward", "exchange" of heads, "merge" at inference, or "comparison" of ranks
    step: int
    link: str  # of posts and waits: "intra" or "inter"
    start_s: float
    stop_s: float
    number: int = 0  # of the pass, counted from 0
    batch: int = -1  # of posts and waits: which messages; those posted together are waited for together
    due: int = -1  # of posts: the step at which they are waited for
    traffic: str = ""  # of posts: "gather" or "reduce"
    sent_bytes: int = 0  # of posts
    peers: tuple[int, ...] = ()  # of waits: the ranks waited for; several where a backend waits for these together

    @property
    def duration_s(self) -> float:
        """Return the seconds from start to stop."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class StepCost:
    """The cost of one step of the ring on one rank, summed over all passes in a direction; step -1 is all steps.

    `compute_s` is kernels and merging; `wait_s` communication that was not hidden; `other_s` posting, packing and
    adding up what arrived. `sent_bytes` is by link and traffic, as in `ContextParallel.traffic`.
    """

    direction: str
    step: int
    passes: int
    compute_s: float
    wait_s: float
    other_s: float
    sent_bytes: Mapping[str, Mapping[str, int]]

    @property
    def total_s(self) -> float:
        """Return the seconds of the step: computing, waiting and all others."""
        return self.compute_s + self.wait_s + self.other_s

    @staticmethod
    def of(events: Sequence[Event], step: int, passes: int) -> StepCost:
        """Return the cost of a step from its events, at least one, all in one direction and of `passes` passes."""
        spent_s: dict[str, float] = defaultdict(float)
        sent = {link.value: {traffic.value: 0 for traffic in Traffic} for link in Link}
        for event in events:
            spent_s[event.kind] += event.duration_s
            if event.kind == "post":
                sent[event.link][event.traffic] += event.sent_bytes
        other_s = spent_s["move"] - spent_s["wait"]
        return StepCost(events[0].direction, step, passes, spent_s["kernel"], spent_s["wait"], other_s, sent)


@dataclass(frozen=True)
class Summary:
    """The summary of one rank's profile: costs by step and direction, and the seconds waited for each other rank.

    wall_s: from the start of the profile to its end. totals: by direction. waited_s: by the rank waited for.

    A peer that is waited for may itself have waited for another: `RingProfile` shows which.
    """

    rank: int
    topology: Topology
    wall_s: float
    steps: tuple[StepCost, ...]
    totals: Mapping[str, StepCost]  # by direction
    waited_s: Mapping[int, float]

    @staticmethod
    def of(events: Sequence[Event], rank: int, topology: Topology, wall_s: float) -> Summary:
        """Return the summary of the events of one rank in a profile that was open for `wall_s` seconds."""
        by_direction: dict[str, list[Event]] = defaultdict(list)
        waited_s: dict[int, float] = defaultdict(float)
        for event in events:
            by_direction[event.direction].append(event)
            for peer in event.peers:
                waited_s[peer] += event.duration_s / len(event.peers)
        steps, totals = [], {}
        for direction, of_direction in by_direction.items():
            passes = len({event.number for event in of_direction})
            by_step: dict[int, list[Event]] = defaultdict(list)
            for event in of_direction:
                by_step[event.step].append(event)
            steps += [StepCost.of(by_step[step], step, passes) for step in sorted(by_step)]
            totals[direction] = StepCost.of(of_direction, -1, passes)
        return Summary(rank, topology, wall_s, tuple(steps), totals, dict(waited_s))

    @property
    def compute_s(self) -> float:
        """Return the seconds of kernels and merging, in all passes."""
        return sum(total.compute_s for total in self.totals.values())

    @property
    def wait_s(self) -> float:
        """Return the seconds of communication that was not hidden, in all passes."""
        return sum(total.wait_s for total in self.totals.values())

    @property
    def other_s(self) -> float:
        """Return the seconds spent neither computing nor waiting, such as on posting and packing, in all passes."""
        return sum(total.other_s for total in self.totals.values())

    @property
    def slowest_peers(self) -> list[tuple[int, float]]:
        """Return (rank, seconds that this rank waited for it) of all ranks waited for, longest first."""
        return sorted(self.waited_s.items(), key=lambda pair: -pair[1])

    def __str__(self) -> str:
        if not self.steps:
            return f"rank {self.rank} of {self.topology.ranks}: no attention was called"
        runs = " and ".join(f"{total.passes} {name}" for name, total in self.totals.items())
        attention_s = sum(total.total_s for total in self.totals.values())
        kinds = [(link.value, traffic.value) for link in Link for traffic in Traffic]
        kinds = [kind for kind in kinds if any(step.sent_bytes[kind[0]][kind[1]] for step in self.steps)]
        head = ["per pass", "compute ms", "wait ms", "other ms", "waiting", *(f"{a} {b} MB" for a, b in kinds)]
        rows = [head]
        for direction, total in self.totals.items():
            for cost in (*(step for step in self.steps if step.direction == direction), total):
                rows.append(_row(cost, kinds))
        peers = ", ".join(f"rank {peer} {_ms(waited)} ms" for peer, waited in self.slowest_peers[:4])
        return "\n".join(
            [
                f"rank {self.rank} of {self.topology.ranks} in {self.topology}: {runs} passes took "
                f"{_ms(attention_s)} of {_ms(self.wall_s)} ms",
                *_aligned(rows),
                f"waited for: {peers or 'no rank'}",
            ]
        )


@dataclass(frozen=True)
class RingProfile:
    """The summaries of all ranks' profiles, in rank order; `str` of it is a table by rank."""

    summaries: tuple[Summary, ...]

    @property
    def caused_s(self) -> list[float]:
        """Return, by rank, the seconds that its peers waited for it, less the seconds that it waited for its peers.

        It is near 0 for a rank that only passes a delay on, and above for the rank where the delay began.
        """
        return [
            sum(other.waited_s.get(summary.rank, 0.0) for other in self.summaries) - summary.wait_s
            for summary in self.summaries
        ]

    @property
    def slowest(self) -> int:
        """Return the rank that its peers waited for most, net of its own waits."""
        return max(range(len(self.summaries)), key=self.caused_s.__getitem__)

    def __str__(self) -> str:
        rows = [["rank", "wall ms", "compute ms", "wait ms", "other ms", "waited for by peers, ms", "net"]]
        for rank, caused_s in zip(self.summaries, self.caused_s, strict=True):
            times = (rank.wall_s, rank.compute_s, rank.wait_s, rank.other_s, caused_s + rank.wait_s, caused_s)
            rows.append([str(rank.rank), *map(_ms, times)])
        middle_s = median(rank.compute_s for rank in self.summaries)
        slowest = self.summaries[self.slowest]
        verdict = (
            f"rank {slowest.rank} kept the others waiting most: {_ms(self.caused_s[slowest.rank])} ms; "
            f"it computed for {_ms(slowest.compute_s)} ms (median {_ms(middle_s)})"
        )
        return "\n".join([*_aligned(rows), verdict if len(self.summaries) > 1 else "one rank waits for no other"])


def _row(cost: StepCost, kinds: Iterable[tuple[str, str]]) -> list[str]:
    name = f"{cost.direction} {cost.step}" if cost.step >= 0 else f"{cost.direction} in all"
    times = [_ms(x / cost.passes) for x in (cost.compute_s, cost.wait_s, cost.other_s)]
    share = cost.wait_s / cost.total_s if cost.total_s else 0.0
    sent = [f"{cost.sent_bytes[link][traffic] / cost.passes * _MB:.3f}" for link, traffic in kinds]
    return [name, *times, f"{share:.0%}", *sent]


def _ms(seconds: float) -> str:
    return f"{seconds * _MS:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of columns; the first is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    return ["  ".join(p(cell, n) for p, cell, n in zip(pad, row, widths, strict=True)).rstrip() for row in rows]


class Timeline(Protocol):
    """A source of one rank's events for a trace, such as a `Profile`.

    `epoch_s`, added to the times of events, gives seconds since 1970.
    """

    rank: int
    epoch_s: float

    @property
    def events(self) -> list[Event]:
        """Return all events of the rank."""
        ...


_ROWS = ("pass", "move", "kernel", "wait", "post")  # of a rank, from the top


def save_chrome_trace(path: str | Path, profiles: Iterable[Timeline]) -> None:
    """Write a trace of ranks to `path`: a process per rank, a row per kind of event, arrows from posts to waits.

    Times are microseconds since 1970. Format: Trace Event Format, of chrome://tracing and https://ui.perfetto.dev.
    """
    trace = [line for profile in profiles for line in _trace_of(profile)]
    Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))


def _trace_of(profile: Timeline) -> list[dict[str, Any]]:
    def us(seconds: float) -> float:
        return round((seconds + profile.epoch_s) * _US, 3)

    events = [*_passes(profile.events), *profile.events]
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": profile.rank, "args": {"name": f"rank {profile.rank}"}}
    ]
    for row, kind in enumerate(_ROWS):
        place = {"pid": profile.rank, "tid": row}
        trace.append({"ph": "M", "name": "thread_name", **place, "args": {"name": kind}})
        for event in (event for event in events if event.kind == kind):
            start, stop = us(event.start_s), us(event.stop_s)
            args = {name: value for name, value in event._asdict().items() if not name.endswith("_s")}
            name = event.direction if kind == "pass" else f"{event.direction} {event.step} {event.link}".strip()
            trace.append(
                {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": stop - start, **place, "args": args}
            )
    for batch, (post, wait) in _messages(events).items():
        arrow = {"name": "message", "cat": "message", "id": f"{profile.rank}.{batch}", "pid": profile.rank}
        trace.append({"ph": "s", "ts": us(post.start_s), "tid": _ROWS.index("post"), **arrow})
        trace.append({"ph": "f", "bp": "e", "ts": us(wait.start_s), "tid": _ROWS.index("wait"), **arrow})
    return trace


def _messages(events: Iterable[Event]) -> dict[int, tuple[Event, Event]]:
    """Return the first post and the last wait of each batch of messages that has both."""
    posts: dict[int, Event] = {}
    waits: dict[int, Event] = {}
    for event in events:
        if event.kind == "post":
            posts.setdefault(event.batch, event)
        elif event.kind == "wait":
            waits[event.batch] = event
    return {batch: (post, waits[batch]) for batch, post in posts.items() if batch in waits}


def _passes(events: Iterable[Event]) -> list[Event]:
    """Return an event from the beginning to the end of each pass."""
    by_number: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_number[event.number].append(event)
    return [
        Event(
            "pass",
            in_pass[0].direction,
            0,
            "",
            min(event.start_s for event in in_pass),
            max(event.stop_s for event in in_pass),
            number,
        )
        for number, in_pass in by_number.items()
    ]
