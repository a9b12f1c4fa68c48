"""How a ring ends: closed, given up by one rank, entered by two threads, its groups destroyed by others."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin import (
    Causal,
    ContextParallel,
    RingError,
    Topology,
    VirtualRing,
    burst_attention,
    shard_batch,
)
from burst_plugin.comm import failure_watch as watch
from burst_plugin.comm import process_groups as communicators
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.process_groups import new_group_like
from burst_plugin.ring import autograd, connections
from burst_plugin.ring.agreement import error_text
from tests.support.fake_gpu import GPU, fake_driver
from tests.support.ranks import as_on_gpus, run_ranks, run_ranks_outcomes
from tests.support.reference import Problem, reference, relative

pytestmark = pytest.mark.alone
X = torch.randn(1, 16, 4, 8, generator=torch.Generator().manual_seed(0))


def test_a_second_thread_that_enters_ends_the_ring() -> None:
    ring = VirtualRing(Topology(1, 2))
    with ring.rank_states[1].alone(), pytest.raises(RuntimeError, match="while another of its passes was running"):
        ring.attention(*Problem.draw(8, (2, 2))[:3])
    assert ring.rank_states[1].is_broken


def test_another_stream_is_refused_before_anything_is_sent_and_the_ring_goes_on() -> None:
    state = VirtualRing(Topology(1, 2)).rank_states[1]
    for stream in ("training's", "an evaluation's", "training's"):
        refused = pytest.raises(RuntimeError, match="ran on training's before and now on an evaluation's")
        here = mock.patch.object(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        in_pass = state.one_pass("forward", CallId(1), GPU)
        with fake_driver(), here, nullcontext() if stream == "training's" else refused, in_pass:
            assert stream == "training's"
    assert not state.is_broken


def _entered_by_two(rank: int) -> None:
    """Rank 1 calls attention, at a call that ranks do not compare, while a thread of its own is in a pass."""
    cp = as_on_gpus(ContextParallel(dist.group.WORLD))
    for _ in range(4):
        burst_attention(X, X, X, cp)
    with cp.rank_state.alone() if rank else nullcontext():
        burst_attention(X, X, X, cp)


def test_other_ranks_hear_of_a_second_thread() -> None:
    first, second = run_ranks_outcomes(_entered_by_two, 2, timeout_s=30.0)
    assert "RuntimeError: burst attention was entered" in second.error
    assert "RingError: rank 1 gave up: RuntimeError: burst attention was entered" in first.error


def _no_memory_around_a_pass(rank: int, direction: str) -> None:
    """On rank 1, for what is kept after its forward pass, or for what is brought back before the backward pass."""

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    cp = ContextParallel(dist.group.WORLD)
    x = X.clone().requires_grad_()
    kept = mock.patch.object(autograd, "cut_loose", fails) if rank and direction == "forward" else nullcontext()
    back = fails if rank and direction == "backward" else lambda packed: packed
    with kept, torch.autograd.graph.saved_tensors_hooks(lambda packed: packed, back):
        out = burst_attention(x, x, x, cp)
    out.sum().backward()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_other_ranks_hear_of_what_fails_around_a_pass(direction: str) -> None:
    first, second = run_ranks_outcomes(_no_memory_around_a_pass, 2, direction, timeout_s=30.0)
    assert second.error.strip().endswith("MemoryError: no room")
    assert "RingError: rank 1 gave up: MemoryError: no room" in first.error


def _twice(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A second backward pass through one graph, which all ranks refuse before any message; then the ring goes on.

    Return the gradients before and after that.
    """
    cp = ContextParallel(dist.group.WORLD)
    x = X.clone().requires_grad_()
    out = burst_attention(x, x, x, cp)
    (before,) = torch.autograd.grad(out, x, X)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(out, x, X)
    (after,) = torch.autograd.grad(burst_attention(x, x, x, cp), x, X)
    return before, after


def test_a_graph_that_is_gone_through_twice_does_not_end_the_ring() -> None:
    for before, after in run_ranks(_twice, 2):
        assert before.any()
        assert torch.equal(after, before)


def _batch_in_a_thread(rank: int) -> list[str]:
    """One thread compares a batch while another is in a pass: their messages would be taken for each other's."""
    cp, said = ContextParallel(dist.group.WORLD), []
    burst_attention(X, X, X, cp)
    for now in (cp.rank_state.alone(), nullcontext()):
        with now, pytest.raises(RuntimeError) as raised:
            shard_batch({"input_ids": torch.arange(32)[None]}, cp)
        said.append(str(raised.value))
    return said


def test_batches_are_not_compared_in_the_middle_of_a_pass() -> None:
    for said in run_ranks(_batch_in_a_thread, 2):
        assert "cut batches in the thread that trains" in said[0]
        assert said[1].startswith("an earlier call on this ring was left half way (RuntimeError: burst attention was")


def _closed(cp: ContextParallel) -> tuple[int, int]:
    """Close a ring; return how often this rank waited for all, and how many groups are left."""
    with mock.patch.object(connections, "barrier") as barrier:
        cp.close()
    return barrier.call_count, len(dist.distributed_c10d._world.pg_map)


def _given_up(rank: int) -> tuple[int, int]:
    """Rank 1 gives up between two calls, and lives on; then, once the other knows, all close."""
    with mock.patch.object(watch, "PERIOD_S", 0.05):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=1)
        burst_attention(X, X, X, cp)
    assert any(thread.name == "burst_plugin watch" for thread in threading.enumerate())
    dist.barrier()  # a watch ends once it has seen that a rank gave up, so rank 1 waits until rank 0 has seen its own
    if rank:
        cp.rank_state.give_up(MemoryError("no room"))
    assert cp.connections.watch is not None
    while not cp.connections.watch.some_gave_up():
        time.sleep(0.01)
    return _closed(cp)


def test_closing_waits_for_nobody_once_a_rank_has_given_up() -> None:
    assert run_ranks(_given_up, 2) == [(0, 1)] * 2


def _destroyed(rank: int) -> tuple[int, int]:
    group = dist.new_group([0, 1])
    cp = ContextParallel(group)
    burst_attention(X, X, X, cp)
    dist.destroy_process_group(group)
    return _closed(cp)


def test_closing_after_the_group_was_destroyed_leaves_nothing_behind() -> None:
    assert run_ranks(_destroyed, 2) == [(0, 1)] * 2


def _barrier_fails(rank: int) -> tuple[int, int]:
    """That of rank 1; rank 0 closes once."""
    cp = ContextParallel(dist.group.WORLD)
    burst_attention(X, X, X, cp)
    if rank:
        lost = mock.patch.object(connections, "barrier", side_effect=RuntimeError("Connection closed by peer"))
        with lost, pytest.raises(RuntimeError, match="Connection closed"):
            cp.close()
    return _closed(cp)


def test_closing_again_after_it_failed_waits_for_nobody() -> None:
    assert run_ranks(_barrier_fails, 2) == [(1, 1), (0, 1)]


def _second_group_fails(rank: int, problem: Problem) -> float:
    """One of the two groups that sums travel on cannot be made at first."""
    cp, makes = ContextParallel(dist.group.WORLD, ranks_per_node=2), []

    def second_fails(*args: object) -> dist.ProcessGroup:
        makes.append(args)
        if len(makes) == 2:
            raise RuntimeError("out of memory")
        return new_group_like(*args)  # type: ignore[arg-type]

    with (
        mock.patch.object(communicators, "new_group_like", second_fails),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        cp.connect([True])
    cp.connect([True])
    q, k, v, dout = (cp.shard(x).requires_grad_() for x in problem[:4])
    burst_attention(q, k, v, cp, mask=Causal()).backward(dout)  # type: ignore[union-attr]
    assert q.grad is not None
    return relative(cp.unshard(q.grad), reference(problem, Causal()).dq)


def test_communicators_that_could_not_be_made_are_made_at_the_next_call() -> None:
    assert max(run_ranks(_second_group_fails, 4, Problem.draw(32, (4, 2)))) < 2e-6


def test_an_error_without_a_text_is_told_by_its_name() -> None:
    assert error_text(ValueError()) == "ValueError()"
    assert error_text(ValueError("of q")) == "of q"


def _backward_after_close(rank: int) -> float:
    """On rank 0 alone, which nobody would answer."""
    cp = ContextParallel(dist.group.WORLD)
    x = X.clone().requires_grad_()
    out = burst_attention(x, x, x, cp)
    cp.close()
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="this ContextParallel is closed"):
            out.sum().backward()
    return time.monotonic() - start


def test_a_backward_pass_on_a_closed_ring_raises_at_once() -> None:
    assert max(run_ranks(_backward_after_close, 2, timeout_s=30.0)) < 2.0


def _after_a_time_out(rank: int) -> tuple[str, float]:
    """Rank 1 is late for a comparison; then both go on with what they still have, and with a new ring."""
    cp = ContextParallel(dist.new_group([0, 1], timeout=timedelta(seconds=2)))
    said = ""
    burst_attention(X, X, X, cp)
    if rank:
        time.sleep(4.0)
    try:
        burst_attention(X, X, X, cp)
    except RingError as error:
        said = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    again = ContextParallel(dist.new_group([0, 1]))
    burst_attention(X, X, X, again)
    return said, float(total)


def test_a_time_out_of_a_ring_leaves_other_groups_alone() -> None:
    for said, total in run_ranks(_after_a_time_out, 2, timeout_s=40.0):
        assert "before the forward pass of call 2" in said
        assert total == 2.0
