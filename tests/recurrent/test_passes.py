"""Passes beside what their thread does next, on GPUs that are not there: streams wait for each other."""

from __future__ import annotations

from collections.abc import Generator
from unittest import mock

import pytest
import torch
from torch import Tensor

from burst_plugin import ContextParallel
from burst_plugin.comm.call_identity import CallId
from burst_plugin.recurrent.passes import OfOneRank
from tests.support.fake_gpu import GPU
from tests.support.races import Gpus, RaceError, Stream
from tests.support.recorded_gpu import recorded_gpus


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
