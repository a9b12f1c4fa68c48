"""The in-process transport is unkind: it makes each mistake with buffers and waits show."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from burst_plugin import Link, RingError, Topology, Traffic, VirtualRing
from burst_plugin.executor import Ring, lockstep
from burst_plugin.in_process import InProcessNetwork, InProcessTransport
from burst_plugin.mask import Causal
from burst_plugin.transport import BufferPool, Channel, Message
from tests.support.reference import Problem, reference, relative

CHANNEL = Channel(Traffic.GATHER, Link.INTRA)
CPU = torch.device("cpu")


def ends() -> tuple[InProcessTransport, InProcessTransport]:
    first, second = InProcessNetwork(2).transports()
    return first, second


def test_data_exists_only_after_wait() -> None:
    a, b = ends()
    source, target = a.lease(8, CPU).fill_(7), b.lease(8, CPU)
    a.post([Message(1, CHANNEL, source)], [])
    (pending,) = b.post([], [Message(0, CHANNEL, target)])
    assert bool(target.view(torch.float32).isnan().all())
    pending.wait()
    assert target.tolist() == [7] * 8


def test_a_sender_that_does_not_wait_sends_what_it_wrote_later() -> None:
    a, b = ends()
    source, target = a.lease(8, CPU).fill_(7), b.lease(8, CPU)
    a.post([Message(1, CHANNEL, source)], [])
    (pending,) = b.post([], [Message(0, CHANNEL, target)])
    a.release(source)
    pending.wait()
    assert bool(target.view(torch.float32).isnan().all())


def test_what_nobody_sends_is_a_deadlock() -> None:
    a, _ = ends()
    (pending,) = a.post([], [Message(1, CHANNEL, a.lease(8, CPU))])
    with pytest.raises(RuntimeError, match=r"deadlock: rank 1 -> rank 0 .* never sent"):
        pending.wait()


def test_sizes_that_differ_are_an_error() -> None:
    a, b = ends()
    a.post([Message(1, CHANNEL, a.lease(8, CPU))], [])
    (pending,) = b.post([], [Message(0, CHANNEL, b.lease(16, CPU))])
    with pytest.raises(RuntimeError, match="8 bytes sent, 16 expected"):
        pending.wait()


def test_a_pool_hands_buffers_out_again() -> None:
    pool = BufferPool()
    first = pool.lease(16, CPU)
    pool.release(first)
    assert pool.lease(16, CPU).data_ptr() == first.data_ptr()
    assert pool.lease(16, CPU).data_ptr() != first.data_ptr()
    assert pool.allocated_bytes == 32


def test_a_pool_does_not_grow_with_the_number_of_lengths() -> None:
    pool = BufferPool()
    for nbytes in [*range(1, 100), *range(100, 0, -7)]:
        pair = [pool.lease(nbytes, CPU) for _ in range(2)]
        assert [buffer.numel() for buffer in pair] == [nbytes, nbytes]
        assert pair[0].data_ptr() != pair[1].data_ptr()
        for buffer in pair:
            pool.release(buffer)
        assert pool.allocated_bytes <= 2 * 100


def test_lockstep_takes_turns_and_returns_in_order() -> None:
    log: list[tuple[int, int]] = []

    def program(rank: int) -> Generator[None, None, int]:
        for step in range(rank + 1):
            log.append((step, rank))
            yield
        return rank

    assert lockstep([program(0), program(1), program(2)]) == [0, 1, 2]
    assert log == sorted(log)


def _forget_to_wait(ring: Ring, number: int, step: object) -> None:
    ring._due.pop(number, None)


def _release_too_early(ring: Ring, number: int, step: object) -> None:
    for owner, buffer in ring._buffers.items():
        if ring._plan.steps[number].visit == owner:
            buffer.fill_(0xFF)  # as releasing does


@pytest.mark.parametrize("damage", [_forget_to_wait, _release_too_early])
def test_mistakes_of_the_executor_show(monkeypatch: pytest.MonkeyPatch, damage: object) -> None:
    problem = Problem.draw(32, (2, 2))
    ring = VirtualRing(Topology(2, 2))
    assert relative(ring.attention(*problem[:3])[0], reference(problem, Causal()).out) < 2e-6
    original = Ring._advance

    def damaged(self: Ring, number: int, step: object) -> None:
        if damage is _forget_to_wait:
            _forget_to_wait(self, number, step)
        original(self, number, step)  # type: ignore[arg-type]
        if damage is _release_too_early:
            _release_too_early(self, number, step)

    monkeypatch.setattr(Ring, "_advance", damaged)
    with pytest.raises(RingError, match="belongs to another call"):  # NaN is no label either
        VirtualRing(Topology(2, 2)).attention(*problem[:3])
    monkeypatch.setattr(Ring, "_is_ours", lambda ring, buffer: True)
    out, _ = VirtualRing(Topology(2, 2)).attention(*problem[:3])
    assert bool(out.isnan().any())
