"""`bench overhead`, and what it and `bench attention` put in the place of kernels and transports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("psutil", reason="psutil is not installed")

from benchmarks import overhead
from benchmarks.attention_ranks import Whole
from burst_plugin import Strategy, Topology, VirtualRing
from burst_plugin.comm.copies import CopyNetwork, NullTransport
from burst_plugin.comm.transport import Channel, Message
from burst_plugin.topology import Link, Traffic

CPU = torch.device("cpu")


# --------------------------------------------------------------------------------------- the network of plain copies


@pytest.mark.parametrize("schedule", ["flat_ring", "two_level_ring", "direct"])
@pytest.mark.parametrize("moving", ["q", "kv"])
def test_plain_copies_carry_what_the_hostile_network_does(schedule: str, moving: str) -> None:
    topology, strategy = Topology(2, 2), Strategy(schedule=schedule, forward=moving, backward=moving)
    q, k, v, dout = Whole.draw((1, 64, 4, 2, 8), torch.float32, CPU)
    found = []
    for network in (None, CopyNetwork(topology.ranks, CPU)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        ring = VirtualRing(topology, strategy, network=network)
        for _ in range(2):  # the second time in buffers that were used before
            out, _ = ring.attention(*leaves)
            grads = torch.autograd.grad(out, leaves, dout)
        assert ring.traffic(1) == ring.expected_traffic(1)
        found.append((out, *grads))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_plain_copies_say_what_was_never_sent() -> None:
    first, second = CopyNetwork(2, CPU).transports()
    channel = Channel(Traffic.GATHER, Link.INTRA)
    (pending,) = second.post([], [Message(0, channel, second.pool.lease(8, CPU).data)])
    with pytest.raises(RuntimeError, match="deadlock: rank 0 -> rank 1: never sent"):
        pending.wait()
    first.post([Message(1, channel, first.pool.lease(8, CPU).data.fill_(7))], [])
    pending.wait()


def test_plain_copies_arrive_in_the_order_in_which_they_were_sent() -> None:
    first, second = CopyNetwork(2, CPU).transports()
    channel = Channel(Traffic.GATHER, Link.INTRA)
    sent, received = ([end.pool.lease(8, CPU).data for _ in range(3)] for end in (first, second))
    for number, buffer in enumerate(sent):
        first.post([Message(1, channel, buffer.fill_(number))], [])
    for buffer in received:
        second.post([], [Message(0, channel, buffer)])
    assert [buffer.tolist() for buffer in received] == [[number] * 8 for number in range(3)]


def test_silence_does_not_read_sums_as_operands() -> None:
    """Buffers of one size go from hand to hand; float32 bits read as bfloat16 are slow numbers, and NaN."""
    transport, channels = NullTransport(), {kind: Channel(kind, Link.INTRA) for kind in Traffic}

    def exchange(kind: Traffic, value: int | None) -> list[int]:
        buffer = transport.pool.lease(32, CPU)
        mine = [] if value is None else [Message(1, channels[kind], torch.full((32,), value, dtype=torch.uint8))]
        transport.post(mine, [Message(1, channels[kind], buffer.data)])
        transport.pool.release(buffer)
        return buffer.data[:16].unique().tolist()

    assert exchange(Traffic.GATHER, None) == [0], "nothing of that kind to take"
    assert exchange(Traffic.REDUCE, 7) == [7]
    assert exchange(Traffic.GATHER, 8) == [8], "another kind"
    assert exchange(Traffic.REDUCE, None) == [7]


# -------------------------------------------------------------------------------------------------------- overhead


def rows_of_overhead() -> list[dict[str, Any]]:
    return overhead.measure(layers=2, steps=10, ranks=4)


def test_what_a_visit_takes_is_told_from_calls_with_more_of_them() -> None:
    """2 visits of 100 us and 600 us beside them, then 8 visits."""
    found = overhead._by_visits({"own_s": 400e-6}, {"own_s": 175e-6})
    assert found["visit_s"] == pytest.approx(100e-6)
    assert found["call_s"] == pytest.approx(600e-6)


@pytest.mark.alone
def test_overhead_is_small_and_does_not_grow() -> None:
    """Ten times the goal, of the fastest step: what a busy machine does not reach, and a sleep in the ring does."""
    rows = rows_of_overhead()
    assert {(row["transport"], row["direction"]) for row in rows} == {
        (where, direction)
        for where in ("4 ranks in one process", "2 processes on gloo")
        for direction in ("forward", "backward")
    }
    for row in rows:
        assert 0 < row["own_s_min"] < 10 * overhead.GOAL_S, row
        assert row["own_s_min"] <= row["own_s"] <= row["own_s_max"]
        assert row["visit_s"] == row["own_s"] or row["call_s"]
        assert row["buffer_bytes"] == row["buffer_bytes_late"] > 0
        assert row["python_bytes_grown"] < 200_000, "10 steps of 2 layers"


def test_calls_are_timed_beside_other_libraries() -> None:
    rows = overhead.beside_peers((2,), (16,), 3)
    assert {overhead.NOT_COMPARING, overhead.COMPARING} <= {row["library"] for row in rows}
    assert all(row["call_s"] > 0 and (row["ranks"], row["tokens"]) == (2, 16) for row in rows)
