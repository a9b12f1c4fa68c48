"""The in-process transport delays and reorders, so that each mistake with buffers and waits shows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_plugin import (
    Documents,
    Keys,
    Link,
    Mask,
    RingError,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    Traffic,
    VirtualRing,
    direct,
)
from burst_plugin.comm.buffers import LABEL_BYTES, Buffer, BufferPool, Packing
from burst_plugin.comm.in_process import HostileNetwork, InProcessTransport
from burst_plugin.comm.transport import Channel, Message
from burst_plugin.ring.executor import RingPass, lockstep
from burst_plugin.ring.routes import Attending
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.schedule.steps import Step
from burst_plugin.sequence import required_rows
from burst_plugin.sequence.masks import Causal
from tests.support.reference import Problem, Result, errors, reference, relative

CHANNEL = Channel(Traffic.GATHER, Link.INTRA)
CPU = torch.device("cpu")


def ends() -> tuple[InProcessTransport, InProcessTransport]:
    first, second = HostileNetwork(2).transports()
    return first, second


def test_data_exists_only_after_wait() -> None:
    a, b = ends()
    leaving, target = a.pool.lease(8, CPU), b.pool.lease(8, CPU).data
    leaving.data.fill_(7)
    a.post([Message(1, CHANNEL, leaving.data)], [])
    (pending,) = b.post([], [Message(0, CHANNEL, target)])
    assert bool(target.view(torch.float32).isnan().all())
    pending.wait()
    assert target.tolist() == [7] * 8


def test_a_sender_that_does_not_wait_sends_what_it_wrote_later() -> None:
    a, b = ends()
    leaving, target = a.pool.lease(8, CPU), b.pool.lease(8, CPU).data
    leaving.data.fill_(7)
    a.post([Message(1, CHANNEL, leaving.data)], [])
    (pending,) = b.post([], [Message(0, CHANNEL, target)])
    a.pool.release(leaving)
    pending.wait()
    assert bool(target.view(torch.float32).isnan().all())


def test_what_nobody_sends_is_a_deadlock() -> None:
    a, _ = ends()
    (pending,) = a.post([], [Message(1, CHANNEL, a.pool.lease(8, CPU).data)])
    with pytest.raises(RuntimeError, match="deadlock: rank 1 -> rank 0: never sent"):
        pending.wait()


def test_sizes_that_differ_are_an_error() -> None:
    a, b = ends()
    a.post([Message(1, CHANNEL, a.pool.lease(8, CPU).data)], [])
    (pending,) = b.post([], [Message(0, CHANNEL, b.pool.lease(16, CPU).data)])
    with pytest.raises(RuntimeError, match="8 bytes sent, 16 expected"):
        pending.wait()


def test_a_pool_hands_buffers_out_again() -> None:
    pool = BufferPool()
    first = pool.lease(16, CPU)
    pool.release(first)
    assert pool.lease(16, CPU) is first
    assert pool.lease(16, CPU).data.data_ptr() != first.data.data_ptr()
    assert pool.allocated_bytes == 32


def test_a_pool_does_not_grow_with_the_number_of_lengths() -> None:
    pool = BufferPool()
    for nbytes in [*range(1, 100), *range(100, 0, -7)]:
        pair = [pool.lease(nbytes, CPU) for _ in range(2)]
        assert [buffer.data.numel() for buffer in pair] == [nbytes, nbytes]
        assert pair[0].data.data_ptr() != pair[1].data.data_ptr()
        for buffer in pair:
            pool.release(buffer)
        assert pool.allocated_bytes <= 2 * 100


def test_a_pool_lets_go_of_memory_that_is_too_small_at_once() -> None:
    """Not when Python next looks for cycles, which jobs may have switched off."""
    pool = BufferPool()
    first = pool.lease(16, CPU)
    first.views(Packing([((4,), torch.float32)]))
    whole = weakref.ref(first.data)
    pool.release(first)
    del first
    gc.disable()
    try:
        pool.lease(32, CPU)
        assert whole() is None
    finally:
        gc.enable()


def test_lockstep_takes_turns_and_returns_in_order() -> None:
    log: list[tuple[int, int]] = []

    def program(rank: int) -> Generator[None, None, int]:
        for step in range(rank + 1):
            log.append((step, rank))
            yield
        return rank

    assert lockstep([program(0), program(1), program(2)]) == [0, 1, 2]
    assert log == sorted(log)


def _forget_to_wait(ring: RingPass, step: int) -> None:
    ring._endings[step].pending.clear()


def _release_too_early(ring: RingPass, step: int) -> None:
    for owner, buffer in ring._buffers.items():
        if ring._schedule.steps[step].visit == owner:
            buffer.data.fill_(0xFF)  # as releasing does


@pytest.mark.parametrize("damage", [_forget_to_wait, _release_too_early])
def test_mistakes_of_the_executor_show(monkeypatch: pytest.MonkeyPatch, damage: object) -> None:
    problem = Problem.draw(32, (2, 2))
    ring = VirtualRing(Topology(2, 2))
    assert relative(ring.attention(*problem[:3])[0], reference(problem, Causal()).out) < 2e-6
    original = RingPass.move

    def damaged(self: RingPass, step: Step) -> None:
        if damage is _forget_to_wait:
            _forget_to_wait(self, self.step)
        original(self, step)
        if damage is _release_too_early:
            _release_too_early(self, self.step)

    monkeypatch.setattr(RingPass, "move", damaged)
    with pytest.raises(RingError, match="belongs to another call"):  # NaN is no label either
        VirtualRing(Topology(2, 2)).attention(*problem[:3])
    monkeypatch.setattr(Buffer, "has_label", lambda buffer, label: True)
    out, _ = VirtualRing(Topology(2, 2)).attention(*problem[:3])
    assert bool(out.isnan().any())


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(5)], ids=str)
@pytest.mark.parametrize("moving", ["q", "kv"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_buffer_is_given_back(schedule: str, moving: str, mask: Mask) -> None:
    strategy = Strategy(schedule=schedule, forward=moving, backward=moving, layout="contiguous")
    ring, allocated = VirtualRing(Topology(2, 2), strategy), []
    for _ in range(3):
        q, k, v = (x.requires_grad_() for x in Problem.draw(32, (2, 2))[:3])
        ring.attention(q, k, v, mask=mask)[0].sum().backward()
        pools = [member.transport.pool for member in ring.rank_states]
        assert not any(pool.leased for pool in pools)
        allocated.append([pool.allocated_bytes for pool in pools])
    assert allocated[1] == allocated[2]


@pytest.mark.parametrize("moving", ["q", "kv"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_that_nothing_was_added_to_travel_as_nothing(
    monkeypatch: pytest.MonkeyPatch, schedule: str, moving: str
) -> None:
    """Where too many ranks meet to be looked at, blocks go to all, and what has no work on them sends sums too."""
    monkeypatch.setattr(required_rows, "MOST_MEETINGS", 0)
    problem = Problem.draw(24, (2, 2), dtype=torch.float64)
    strategy = Strategy(schedule=schedule, forward=moving, backward=moving, layout="contiguous")
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = VirtualRing(Topology(2, 2), strategy).attention(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    found = errors(Result(out.detach(), *grads), reference(problem, Causal()))
    assert max(found.values()) < 1e-13, found


@pytest.mark.parametrize("moving", ["q", "kv"])
@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(2, 4), Topology(3, 2)], ids=str)
def test_rows_that_two_ranks_of_a_node_need_are_handed_on_and_their_sums_added_up(
    topology: Topology, moving: str
) -> None:
    """Of the last block of the first node all but the first row, and but keys that are masked."""
    length = 8 * topology.ranks
    last = 8 * topology.ranks_per_node
    problem = Problem.draw(length, (2, 2), dtype=torch.float64)
    mask = Documents((0, last - 7, length - 4, length)) & Keys(((0, last - 6), (last - 4, length)))
    strategy = Strategy(schedule="direct", forward=moving, backward=moving, layout="contiguous")
    ring = VirtualRing(topology, strategy)
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = ring.attention(q, k, v, mask=mask)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    found = errors(Result(out.detach(), *grads), reference(problem, mask))
    assert max(found.values()) < 1e-13, found
    table = ring.rank_states[0].route_table
    schedule = direct(topology, required=table.pairs(Attending(Tokens(length), Tokens(length), mask)).required("kv"))
    crossing = [t for t in schedule.gather if t.link is Link.INTER and t.block == topology.ranks_per_node - 1]
    assert {t.rows for t in crossing} == {((1, 2), (4, 8))}
    assert schedule.by_link


@pytest.mark.parametrize("labelled", [False, True])
def test_a_packing_starts_every_tensor_at_64_bytes_and_ends_with_the_label(labelled: bool) -> None:
    """So that kernels read blocks that came by with whole vectors; and a message too short leaves no label behind."""
    packing = Packing([((2, 3), torch.float32), ((5,), torch.bfloat16), ((4,), torch.float64)], labelled)
    assert packing.nbytes == 128 + 32 + (LABEL_BYTES if labelled else 0)
    buffer = torch.empty(packing.nbytes, dtype=torch.uint8)
    views = packing.views(buffer)
    assert [view.data_ptr() - buffer.data_ptr() for view in views] == [0, 64, 128]
    assert [(view.shape, view.dtype) for view in views] == [
        ((2, 3), torch.float32),
        ((5,), torch.bfloat16),
        ((4,), torch.float64),
    ]
    for number, view in enumerate(views):
        view.fill_(number + 1)
    assert [view.unique().tolist() for view in views] == [[1], [2], [3]]
    empty = Packing([((0, 3), torch.float32)])
    assert empty.nbytes > 0, "no backend is sure to carry empty messages"
    assert empty.views(torch.empty(empty.nbytes, dtype=torch.uint8))[0].shape == (0, 3)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
            st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8]),
        ),
        max_size=4,
    )
)
def test_packed_sections_are_aligned_and_do_not_overlap(specs: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    packing = Packing(specs)
    buffer = torch.zeros(packing.nbytes, dtype=torch.uint8)
    views = packing.views(buffer)
    for number, (view, (shape, dtype)) in enumerate(zip(views, specs, strict=True), start=1):
        assert (tuple(view.shape), view.dtype) == (shape, dtype)
        assert view.numel() == 0 or (view.data_ptr() - buffer.data_ptr()) % 16 == 0
        view.fill_(number)
    for number, view in enumerate(views, start=1):
        assert bool((view == number).all())


@pytest.mark.parametrize(
    "options",
    [{}, {"parts": 2}, {"ulysses_degree": 2}, {"mesh_degree": 2}, {"backward": "q"}, {"backward": "kv"}],
    ids=str,
)
def test_training_after_inference_mode_uses_what_that_has_made(options: dict[str, Any]) -> None:
    """Tensors made in it can never be written to outside of it, which buffers are."""
    problem = Problem.draw(32, (2, 2))
    ring = VirtualRing(Topology(2, 2), Strategy(**options))
    scores = Scores(alibi_slopes=(0.5, 0.25))
    truth = reference(problem, Causal(), scores)
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    for _ in range(2):
        with torch.inference_mode():
            seen = ring.attention(*problem[:3], scores=scores)[0]
        out = ring.attention(q, k, v, scores=scores)[0]
        found = errors(Result(out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout)), truth)
        assert max(found.values()) < 2e-6, found
        assert torch.equal(seen, out)
