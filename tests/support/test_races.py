"""Races are found where nothing orders two accesses, and only there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_plugin.comm.transport import Channel, Message, Pending, Transport
from burst_plugin.topology import Link, Traffic
from tests.support.fake_gpu import GPU
from tests.support.late_copies import LateNetwork
from tests.support.races import RaceError
from tests.support.recorded_gpu import NcclNetwork, recorded_gpus

CHANNEL = Channel(Traffic.GATHER, Link.INTRA)
ACCESSES: dict[str, Callable[[Tensor], Any]] = {
    "writes": lambda x: x.fill_(1),
    "copies to": lambda x: x.copy_(torch.ones(4, device=GPU)),
    "copies to a part of": lambda x: x[1:3].copy_(torch.ones(2, device=GPU)),
    "reads": lambda x: x + 1,
    "copies from": lambda x: torch.empty(4, device=GPU).copy_(x),
    "looks at": lambda x: (x[0], x.view(2, 2), x.new_zeros(3), torch.empty_like(x)),
}
WRITES = {*list(ACCESSES)[:3]}


def _filled() -> Tensor:
    return torch.zeros(4, device=GPU)


def _on_side_stream(work: Callable[[], object]) -> Any:
    """Do some work on a new stream, after all that was done so far; return the event at its end."""
    stream = torch.cuda.Stream(GPU)
    stream.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(stream):
        work()
    return stream.record_event()


def test_one_of_two_streams_that_access_the_same_has_to_wait_unless_both_read() -> None:
    for first, access in ACCESSES.items():
        for then, again in ACCESSES.items():
            with recorded_gpus():
                x = _filled()
                done = _on_side_stream(lambda access=access, x=x: access(x))
                if "looks at" not in (first, then) and {first, then} & WRITES:
                    with pytest.raises(RaceError, match="nothing orders this after that"):
                        again(x)
                else:
                    again(x)
                torch.cuda.current_stream(GPU).wait_event(done)
                again(x)


def test_what_an_event_says_is_what_came_before_it_was_recorded() -> None:
    with recorded_gpus():
        x = _filled()
        stream, never, early = torch.cuda.Stream(GPU), torch.cuda.Event(), torch.cuda.Event()
        early.record(stream)
        with torch.cuda.stream(stream):
            y = _filled()
        for event in (never, early):
            torch.cuda.current_stream(GPU).wait_event(event)
            with pytest.raises(RaceError, match=r"written by zeros .* on side stream 1"):
                x.add_(y)


@pytest.mark.parametrize("left_out", [None, 0, 1, 2])
def test_an_order_may_come_by_way_of_a_third_stream(left_out: int | None) -> None:
    """Whichever of the waits is left out, what comes next is a race."""
    with recorded_gpus():
        x = _filled()
        here, first, second = torch.cuda.current_stream(GPU), torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
        reached = 0
        with nullcontext() if left_out is None else pytest.raises(RaceError, match="nothing orders this after that"):
            for number, (before, stream) in enumerate(((here, first), (first, second), (second, here))):
                if number != left_out:
                    stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    x.fill_(1)
                reached += 1
        assert reached == (3 if left_out is None else left_out)


def test_memory_is_not_given_back_while_another_stream_uses_it() -> None:
    with recorded_gpus() as gpus:
        for waits in (True, False):
            x = _filled()
            done = _on_side_stream(lambda x=x: x + 1)
            if waits:
                torch.cuda.current_stream(GPU).wait_event(done)
            del x
            if waits:
                gpus.check_frees()
                assert gpus.frees == 1
        with pytest.raises(RaceError, match=r"16 bytes, .* were read by add .*; they are given back"):
            gpus.check_frees()


def test_new_memory_may_still_be_used_by_what_had_it_before() -> None:
    with recorded_gpus():
        x, stream = torch.empty(4, device=GPU), torch.cuda.Stream(GPU)
        for waits in (False, True):
            if waits:
                stream.wait_stream(torch.cuda.current_stream(GPU))
            with torch.cuda.stream(stream), nullcontext() if waits else pytest.raises(RaceError, match="allocated"):
                x.fill_(1)


def test_ranks_have_compute_streams_of_their_own() -> None:
    with recorded_gpus() as gpus:
        with gpus.rank(0):
            x = _filled()
        with gpus.rank(1), pytest.raises(RaceError, match=r"compute stream of rank 0; they are read by .* of rank 1"):
            x.clone()


def _post(transport: Transport, peer: int, sent: list[Tensor], received: list[Tensor]) -> Pending:
    """P2POp one batch."""
    (pending,) = transport.post(*([Message(peer, CHANNEL, x) for x in tensors] for tensors in (sent, received)))
    return pending


def test_messages_of_a_batch_are_under_way_at_the_same_time() -> None:
    with recorded_gpus():
        transport, _ = NcclNetwork(2).transports()
        x, y = _filled(), _filled()
        pending = _post(transport, 1, [x, x], [y])
        with pytest.raises(RaceError, match="read by send"):
            x.fill_(1)
        pending.wait()
        x.fill_(1)
        y.clone()
        with pytest.raises(RaceError, match=r"written by receive .* they are read by send"):
            _post(transport, 1, [x], [x])


def test_late_copies_sleep_on_both_streams_and_come_in_buffers_of_nan() -> None:
    with recorded_gpus() as gpus:
        transports = LateNetwork(2, GPU).transports()
        for _ in range(64):
            leased = [transport.pool.lease(16, GPU) for transport in transports]
            sends = _post(transports[0], 1, [leased[0].data], [])
            receives = _post(transports[1], 0, [], [leased[1].data])
            sends.wait()
            receives.wait()
            for transport, buffer in zip(transports, leased, strict=True):
                transport.pool.release(buffer)
    assert len(gpus.slept) == 2
    assert sorted(gpus.slept.values()) == pytest.approx([16, 32], abs=8), (
        "half of 32 copies, and of 64 ends of messages"
    )
    assert sum(gpus.accesses.values()) == 64 * 6, "each buffer is filled twice, and copied"
