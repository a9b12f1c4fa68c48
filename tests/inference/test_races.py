"""A cache in host memory on GPUs that are not there: nothing is read before it has arrived, or freed while it is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from burst_plugin import ContextParallel
from burst_plugin.inference import KVCache
from burst_plugin.inference.host_storage import HostRowStore, copy_stream
from tests.support.fake_gpu import GPU
from tests.support.races import Gpus, RaceError, Stream
from tests.support.recorded_gpu import PlainKernel, recorded_gpus


def _talk() -> tuple[KVCache, Gpus]:
    """Go through turns in which rows grow, are laid out anew, and are cut off; windows are moved."""
    copy_stream.cache_clear()  # of other GPUs that are not there
    with (
        mock.patch.object(Stream, "synchronize", create=True),
        recorded_gpus() as gpus,
        gpus.rank(0),
    ):
        cache = KVCache(ContextParallel(kernel=PlainKernel(gpus)), 3, offload=True, windows=[None, 9, None], rewind=9)
        for lengths in ((70, 40), (1, 1), (3, 2), (90, 90), (1, 1), (1, 1)):
            size = cache.begin(lengths).size
            q, k = (torch.empty(2, size, heads, 64, dtype=torch.bfloat16, device=GPU) for heads in (8, 2))
            for layer in range(3):
                assert cache.attend(layer, q, k, k).device == GPU
        cache.truncate([160, 130])
    copy_stream.cache_clear()
    return cache, gpus


def test_a_layer_waits_for_what_it_reads() -> None:
    cache, gpus = _talk()
    assert cache.lengths == (160, 130)
    assert any(name.startswith("side stream") for name in gpus.accesses), "nothing was copied beside the layers"


@pytest.mark.parametrize("left_out", [(HostRowStore, "_wait"), (Stream, "wait_stream")], ids=lambda each: each[1])
def test_a_wait_that_is_left_out_is_found(left_out: tuple[type, str]) -> None:
    planted = mock.patch.object(*left_out, lambda *_: None)
    with planted, pytest.raises(RaceError, match=r"were written by copy_ at inference/(host_)?storage"):
        _talk()
