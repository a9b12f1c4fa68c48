"""A network of copies that come late, between ranks of this process on one GPU: what does not wait for them shows.

    ring = VirtualRing(topology, network=LateNetwork(topology.ranks, device, seed=1))

Streams sleep for times that are drawn: those of the copies before each copy, so that what was sent is read late and
what is received is there late, and the current stream before each end of a message is posted, so that work is late as
well. Buffers are full of NaN until something arrives in them, and again when they are released. On CPUs there are no
streams, and only the buffers show anything.
"""

from __future__ import annotations

import random

import torch

from burst_plugin.comm.buffers import BufferPool
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.comm.in_process import Parcel, PoolOfNaN

__all__ = ["LateNetwork"]

_LONGEST = 200_000  # cycles: 0.1 ms at 2 GHz, as long as tens of the kernels of a small ring


class LateNetwork(CopyNetwork):
    """A `CopyNetwork` whose streams sleep for times drawn by `seed`, between none and `_LONGEST` cycles."""

    def __init__(self, ranks: int, device: torch.device, seed: int = 0) -> None:
        super().__init__(ranks, device)
        self._random = random.Random(seed)

    def _posted(self, parcel: Parcel) -> None:
        if self._streams:
            self._sleep()
        if self._streams and parcel.is_whole:
            with torch.cuda.stream(self._streams[parcel.route[1]]):
                self._sleep()
        super()._posted(parcel)

    def _sleep(self) -> None:
        if self._random.random() < 0.5:  # else what comes next may be early
            torch.cuda._sleep(self._random.randrange(_LONGEST))  # type: ignore[no-untyped-call]

    def _pool(self) -> BufferPool:
        return PoolOfNaN()
