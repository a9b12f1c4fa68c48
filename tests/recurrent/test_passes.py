"""Passes beside what their thread does next, on GPUs that are not there: streams wait for each other."""

from __future__ import annotations

from collections.abc import Generator
from unittest import mock

import pytest
import torch
from torch import Tensor

from burst_plugin import ContextParallel, Topology
from burst_plugin.comm.buffers import Memory
from burst_plugin.comm.call_identity import CallId
from burst_plugin.recurrent import messages as recurrent_messages
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.passes import OfOneRank
from tests.support.fake_gpu import GPU
from tests.support.races import Gpus, RaceError, Stream
from tests.support.recorded_gpu import NcclNetwork, recorded_gpus


def _program(x: Tensor) -> Generator[None, None, Tensor]:
    yield
    return x * 2


def _nothing(*_: object) -> None:
    """Do nothing, and hold nothing, as a mock would."""


def _layers() -> Gpus:
    """Run passes of two layers, each of which reads what the layer made, and makes what the layer reads."""
    with recorded_gpus() as gpus, gpus.rank(0):
        passes = OfOneRank(ContextParallel())
        for number in range(2):
            x = torch.empty(4, device=GPU).fill_(1)
            program = _program(x)
            wait = passes.start("forward", CallId(number), [program], [x], beside=True)
            del x, program
            torch.empty(4, device=GPU).fill_(2)  # meanwhile
            (found,) = wait()
            found.add_(1)
            del found, wait
        gpus.check_frees()
    return gpus


def _growing_messages() -> None:
    """Run a pass whose second message is longer than any buffer that attention has left in the pool."""
    with recorded_gpus() as gpus, gpus.rank(0):
        cp = ContextParallel()
        state, device = cp.rank_state, torch.device(GPU)
        state.topology = Topology(1, 2)
        transport = NcclNetwork(2).transports()[0]
        left = [transport.pool.lease(800, device) for _ in range(2)]
        for buffer in left:
            buffer.data.fill_(0)
            transport.pool.release(buffer)
        del left, buffer
        x = torch.empty(300, device=GPU).fill_(1)

        def program() -> Generator[None, None, Tensor]:
            messages = Messages(state, device, "a scan", "forward", CallId(1))
            for size in (100, 300):
                arrived = yield from messages.exchange({1: [x[:size]]}, {1: [((size,), torch.float32)]})
            return arrived[1][0]

        with mock.patch.dict(recurrent_messages.TRANSPORTS, {state: transport}):
            wait = OfOneRank(cp).start("forward", CallId(1), [program()], [x], beside=True)
        torch.empty(4, device=GPU).fill_(2)  # meanwhile
        (result,) = wait()
        result.add_(1)
        gpus.check_frees()


def test_buffers_of_attention_that_a_pass_gives_up_are_not_used_meanwhile() -> None:
    _growing_messages()
    with mock.patch.object(Memory, "give_up", _nothing), pytest.raises(RaceError, match="given back to it"):
        _growing_messages()


def test_a_pass_that_fails_at_once_tells_the_other_ranks() -> None:
    def failing() -> Generator[None, None, Tensor]:
        yield
        raise torch.OutOfMemoryError("out of memory")

    with recorded_gpus() as gpus, gpus.rank(0):
        cp, told = ContextParallel(), list[str]()
        cp.rank_state.topology = Topology(1, 2)
        cp.rank_state.transport.report_failure = told.append  # type: ignore[method-assign, assignment]
        with pytest.raises(torch.OutOfMemoryError):
            OfOneRank(cp).start("forward", CallId(1), [failing()], [torch.empty(4, device=GPU)], beside=True)
        assert not cp.rank_state.is_in_pass
        assert "out of memory" in told[0]


def test_streams_wait_for_each_other() -> None:
    gpus = _layers()
    assert any(name.startswith("side stream") for name in gpus.accesses), "nothing ran beside the layers"
    assert gpus.frees


@pytest.mark.parametrize(
    "left_out", [(Stream, "wait_stream"), (Stream, "wait_event"), (Gpus, "record_stream")], ids=lambda each: each[1]
)
def test_a_wait_that_is_left_out_is_found(left_out: tuple[type, str]) -> None:
    with mock.patch.object(*left_out, _nothing), pytest.raises(RaceError):
        _layers()
