"""What a profile says is true: its numbers add up, it names the slow rank, and it costs nothing when off."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import Causal, ContextParallel, Full, Mask, Strategy, Topology, VirtualRing, burst_attention
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.comm.transport import Channel, Message
from burst_plugin.compute.passes import ForwardPart
from burst_plugin.profiling.recorder import Profile
from burst_plugin.profiling.summary import Event, RingProfile, Summary, save_chrome_trace
from burst_plugin.ring.executor import RingPass, SendRecvPlan, Visit
from burst_plugin.schedule.steps import Step
from burst_plugin.topology import Link, Traffic
from tests.support.ranks import run_ranks
from tests.support.reference import Problem

CAUSAL = Causal()


def _train_step(cp: ContextParallel, problem: Problem, mask: Mask = CAUSAL) -> None:
    q, k, v = (cp.shard(x).requires_grad_() for x in problem[:3])
    burst_attention(q, k, v, cp, mask=mask).backward(cp.shard(problem.dout))  # type: ignore[union-attr]


def _add_up(profile: Profile, traffic: dict[str, dict[str, int]], visits: dict[str, int]) -> None:
    summary = profile.summary
    for direction, total in summary.totals.items():
        steps = [step for step in summary.steps if step.direction == direction]
        assert sum(step.total_s for step in steps) == pytest.approx(total.total_s)
        assert [step.compute_s > 0 for step in steps] == [step.step < visits[direction] for step in steps]
        assert min(step.other_s for step in steps) >= 0
    assert summary.compute_s + summary.wait_s + summary.other_s <= summary.wall_s
    assert sum(summary.waited_s.values()) == pytest.approx(summary.wait_s)
    sent = [total.sent_bytes for total in summary.totals.values()]
    assert {a: {b: sum(each[a][b] for each in sent) for b in traffic[a]} for a in traffic} == traffic


# ------------------------------------------------------------------------------------------- processes and gloo

SLOW, NAP_S, PASSES = 3, 0.03, 2
VISITS = {"forward": 4, "backward": 5, "comparison": 0}  # of 2 x 2 ranks; backward twice of the own block


def _with_a_slow_rank(rank: int, path: Path) -> dict[str, Any]:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    problem = Problem.draw(64, (4, 2))
    _train_step(cp, problem)
    cp.reset_traffic()
    if rank == SLOW:
        original = ForwardPart.compute

        def slowly(*args: Any) -> Any:
            time.sleep(NAP_S)
            return original(*args)

        ForwardPart.compute = slowly  # type: ignore[method-assign]
    with cp.profile() as profile:
        for _ in range(PASSES):
            _train_step(cp, problem)
    _add_up(profile, cp.traffic(), VISITS)
    totals = profile.summary.totals
    passes = {direction: total.passes for direction, total in totals.items()}
    assert passes == {"forward": PASSES, "backward": PASSES, "comparison": 2 * PASSES}
    assert profile.summary.compute_s >= (rank == SLOW) * PASSES * cp.ranks * NAP_S
    everyone = profile.gather()
    profile.save_chrome_trace(path / f"{rank}.json")
    return {"peers": profile.summary.slowest_peers, "slowest": everyone.slowest, "text": f"{profile}\n{everyone}"}


@pytest.mark.alone
def test_a_slow_rank_is_named_and_the_numbers_add_up(tmp_path: Path) -> None:
    """2 x 2 ranks: those next to the slow one see it; the one opposite needs what the others saw."""
    found = run_ranks(_with_a_slow_rank, 4, tmp_path)
    for rank, outcome in enumerate(found):
        assert outcome["slowest"] == SLOW
        assert f"rank {SLOW} kept the others waiting most" in outcome["text"]
        if rank in (1, 2):
            peer, waited_s = outcome["peers"][0]
            assert peer == SLOW
            assert waited_s > PASSES * NAP_S
        check_chrome_trace(tmp_path / f"{rank}.json", [rank])


def check_chrome_trace(path: Path, ranks: list[int]) -> None:
    """Slices of a row nest; what is inside something else in truth is so here; each arrow joins two slices."""
    lines = json.loads(path.read_text())["traceEvents"]
    assert {line["pid"] for line in lines} == set(ranks)
    names = {(x["pid"], x["tid"]): x["args"]["name"] for x in lines if x["name"] == "thread_name"}
    for pid in ranks:
        rows: dict[str, list[tuple[float, float]]] = {}
        for x in (x for x in lines if x["ph"] == "X" and x["pid"] == pid):
            rows.setdefault(names[pid, x["tid"]], []).append((x["ts"], x["ts"] + x["dur"]))
        assert set(rows) == {"pass", "move", "kernel", "wait", "post"}
        assert abs(rows["pass"][0][0] / 1e6 - time.time()) < 600
        for slices in rows.values():
            _nest(slices)
        for inner, outer in (("move", "pass"), ("kernel", "pass"), ("wait", "move"), ("post", "move")):
            assert all(any(a <= start and stop <= b for a, b in rows[outer]) for start, stop in rows[inner])
        for start, stop in rows["kernel"]:
            assert not any(max(a, start) < min(b, stop) for a, b in rows["move"])
        arrows: dict[str, list[tuple[float, str]]] = {}
        for x in (x for x in lines if x["ph"] in "sf" and x["pid"] == pid):
            arrows.setdefault(x["id"], []).append((x["ts"], names[pid, x["tid"]]))
        assert len(arrows) > 0
        for (start, post), (stop, wait) in arrows.values():
            assert (post, wait) == ("post", "wait")
            assert start <= stop
            assert all(any(a <= t <= b for a, b in rows[row]) for t, row in ((start, post), (stop, wait)))


def _nest(slices: list[tuple[float, float]]) -> None:
    open_until: list[float] = []
    for start, stop in sorted(slices, key=lambda x: (x[0], -x[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or stop <= open_until[-1]
        open_until.append(stop)


def _waits(rank: int) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Whom passes of the ring wait for, and comparisons."""
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=4)
    with cp.profile() as profile:
        _train_step(cp, Problem.draw(16, (2, 2)), Full())
    waits = [event for event in profile.events if event.kind == "wait"]
    compared = {event.peers for event in waits if event.direction == "comparison"}
    return {event.peers for event in waits if event.direction != "comparison"}, compared


def test_each_message_is_waited_for_by_its_peer() -> None:
    for rank, (in_ring, compared) in enumerate(run_ranks(_waits, 4)):
        assert in_ring == {((rank - 1) % 4,), ((rank + 1) % 4,)}
        assert compared == {(peer,) for peer in range(4) if peer != rank}


# -------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("backward", ["q", "kv"])
def test_a_virtual_ring_is_profiled_rank_by_rank(backward: str, tmp_path: Path) -> None:
    ring = VirtualRing(Topology(2, 2), Strategy(backward=backward))
    problem = Problem.draw(512, (4, 4))
    with ring.profile() as profiles:
        out, _ = ring.attention(*(x.requires_grad_() for x in problem[:3]))
        out.backward(problem.dout)
    for rank, profile in enumerate(profiles):
        _add_up(profile, ring.traffic(rank), VISITS)
    busy_s = sum(total.total_s for profile in profiles for total in profile.summary.totals.values())
    assert busy_s <= profiles[0].summary.wall_s, "no rank's time holds another's turn"
    save_chrome_trace(tmp_path / "all.json", profiles)
    check_chrome_trace(tmp_path / "all.json", [0, 1, 2, 3])


def test_one_rank_alone() -> None:
    cp = ContextParallel()
    with cp.profile() as profile:
        pass
    assert str(profile) == "rank 0 of 1: no attention was called"
    with cp.profile() as profile:
        _train_step(cp, Problem.draw(16, (2, 2)))
    assert "waited for: no rank" in str(profile)
    assert "1 forward and 1 backward passes" in str(profile)
    assert "one rank waits for no other" in str(profile.gather())


def test_profiles_end_and_do_not_overlap() -> None:
    cp, problem = ContextParallel(), Problem.draw(16, (2, 2))
    with cp.profile() as first:
        with pytest.raises(RuntimeError, match="profiled already"), cp.profile():
            pass
        _train_step(cp, problem)
    seen = len(first.events)
    with pytest.raises(ZeroDivisionError), cp.profile() as second:
        raise ZeroDivisionError
    _train_step(cp, problem)
    assert cp.rank_state.profile is None
    assert (len(first.events), len(second.events)) == (seen, 0)


# ------------------------------------------------------------------------------------------------------- texts


def _events() -> list[Event]:
    """Two passes of two steps: 3 ms of move, 1 ms of it waiting for rank 1 and 2 together, then 6 ms of kernel."""
    events = []
    for number, direction in enumerate(("forward", "backward")):
        for step in range(2):
            t = 0.1 * number + 0.01 * step
            blank = Event("", direction, step, "", t, t, number=number)
            sent = {"link": "inter", "traffic": "reduce" if number else "gather", "sent_bytes": 2_000_000}
            events += [
                blank._replace(kind="wait", link="intra", stop_s=t + 0.001, peers=(1, 2), batch=step - 1),
                blank._replace(kind="post", start_s=t + 0.001, stop_s=t + 0.002, batch=step, **sent),
                blank._replace(kind="move", stop_s=t + 0.003),
                blank._replace(kind="kernel", start_s=t + 0.003, stop_s=t + 0.009),
            ]
    return events


def test_the_table() -> None:
    summary = Summary.of(_events(), 0, Topology(2, 2), 0.2)
    assert str(summary).splitlines() == [
        "rank 0 of 4 in 2x2 (nodes x ranks per node): 1 forward and 1 backward passes took 36.00 of 200.00 ms",
        "per pass         compute ms  wait ms  other ms  waiting  inter gather MB  inter reduce MB",
        "forward 0              6.00     1.00      2.00      11%            2.000            0.000",
        "forward 1              6.00     1.00      2.00      11%            2.000            0.000",
        "forward in all        12.00     2.00      4.00      11%            4.000            0.000",
        "backward 0             6.00     1.00      2.00      11%            0.000            2.000",
        "backward 1             6.00     1.00      2.00      11%            0.000            2.000",
        "backward in all       12.00     2.00      4.00      11%            0.000            4.000",
        "waited for: rank 1 2.00 ms, rank 2 2.00 ms",
    ]
    assert summary.waited_s == pytest.approx({1: 0.002, 2: 0.002})


def test_who_hands_a_delay_on_is_not_who_caused_it() -> None:
    """3 is slow; 1 and 2 wait for it, and 0 for 1 and 2: what 1 and 2 cause is what they suffered."""
    step = Event("wait", "forward", 0, "intra", 0.0, 1.0)
    waits = [[(1, 0.5), (2, 0.5)], [(3, 1.0)], [(3, 1.0)], []]
    everyone = RingProfile(
        tuple(
            Summary.of([step._replace(peers=(peer,), stop_s=s) for peer, s in mine], rank, Topology(2, 2), 2.0)
            for rank, mine in enumerate(waits)
        )
    )
    assert everyone.caused_s == [-1.0, -0.5, -0.5, 2.0]
    assert everyone.slowest == 3
    assert str(everyone).splitlines()[-1].startswith("rank 3 kept the others waiting most: 2000.00 ms")


# -------------------------------------------------------------------------------------------------------- costs


class _Pending:
    messages = (Message(1, Channel(Traffic.GATHER, Link.INTRA), torch.empty(3, dtype=torch.uint8)),)

    def wait(self, waited: Any = None) -> None:
        waited(self.messages)


class _StreamEvent:
    """A stand-in for torch.cuda.Event on a stream that does one thing a second."""

    stream_s, waits = 100.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "that of cuda:0"
        type(self).stream_s += 1
        self._at_s = self.stream_s

    def synchronize(self) -> None:
        type(self).waits += 1

    def elapsed_time(self, other: _StreamEvent) -> float:
        return 1e3 * (other._at_s - self._at_s)


def test_on_gpus_the_host_waits_only_when_the_profile_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _StreamEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", "that of {}".format)
    profile = Profile(0, Topology(1, 2))
    log = profile.begin_pass("forward", torch.device("cuda", 0))  # moment 0 of the stream
    with log.timed("move"):  # 1 to 7
        pending = log.posted(log.clock.now(), _Pending.messages, _Pending())  # type: ignore[arg-type]  # 2 to 3
        pending.wait()  # 4 to 5, and 6 for the next message
    profile.close()
    assert _StreamEvent.waits == 0
    found = {event.kind: event for event in profile.events}
    assert _StreamEvent.waits == 2, "for the stream that was noted, and for the one that it is read on"
    assert [found[kind].duration_s for kind in ("post", "wait", "move")] == pytest.approx([1, 1, 6])
    origin_s = found["move"].start_s - 1
    assert [found[kind].start_s - origin_s for kind in ("post", "wait")] == pytest.approx([2, 4])
    assert origin_s + 8 == pytest.approx(time.perf_counter(), abs=0.5), "8: when it was read"
    assert found["post"].sent_bytes == 3


def test_off_it_costs_less_than_a_microsecond_per_step() -> None:
    """What a step does for profiles, with the step itself left out, in calls of a function that does nothing.

    Such a call takes 50 ns on the machine that is meant, so sixteen take 0.8 us; a slower machine is slower at both.
    """
    schedule: Any = SimpleNamespace(rank=0, ranks=1, steps=[Step(None, (), (), ())] * 200_000)
    plan = SendRecvPlan("forward", "kv", torch.device("cpu"), schedule, (0,), lambda *_: pytest.fail("a message"))
    ring = RingPass(plan, CopyNetwork(1, torch.device("cpu")).transports()[0], (), ())
    ring.move = lambda step: None  # type: ignore[method-assign]
    steps = ring.steps()
    visit: Visit = Visit(0, 0, 0, True, (), lambda: None)

    def seconds(step: Any) -> float:
        start = time.perf_counter()
        for _ in range(1000):
            step()
        return (time.perf_counter() - start) / 1000

    def one() -> None:
        next(steps)
        with ring.traced(visit):
            pass

    assert median(seconds(one) / seconds(lambda: None) for _ in range(101)) < 16
