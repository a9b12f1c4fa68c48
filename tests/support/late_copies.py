"""A network of copies that come late, between ranks of this process on one GPU: what does not wait for them shows.

    ring = VirtualRing(topology, network=LateNetwork(topology.ranks, device, seed=1))

Streams sleep for times that are drawn, for some messages those of the copies, before each copy, so that what was sent
is read late and what is received is there late; for the next ones the current stream, before each end of a message is
posted, so that work is late. Never both: copies are late only if work is not. Buffers are full of NaN until something
arrives in them, and again when they are released. On CPUs there are no streams, and only the buffers show anything.

On an H100 the host takes up to 1 ms for a step of one rank, and all ranks take turns between two ends of a message;
with copies that were late by 0.1 ms at most no fault showed there.
"""

from __future__ import annotations

import random

import torch

from burst_plugin.comm.buffers import BufferPool
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.comm.in_process import Parcel, PoolOfNaN

_LATE_COPY, _LATE_WORK = 20_000_000, 4_000_000  # cycles at most: 10 and 2 ms at 2 GHz
_MESSAGES = 16  # of which either the copies are late, or the work is


class LateNetwork(CopyNetwork):
    """A `CopyNetwork` whose streams sleep for times drawn by `seed`."""

    def __init__(self, ranks: int, device: torch.device, seed: int = 0) -> None:
        super().__init__(ranks, device)
        self._random = random.Random(seed)
        self._ends = 0  # of messages, posted so far

    def note_posted(self, parcel: Parcel) -> None:
        copies_are_late = self._ends // (2 * _MESSAGES) % 2 == 0
        self._ends += 1
        if self.streams and copies_are_late and parcel.is_whole:
            with torch.cuda.stream(self.streams[parcel.route[1]]):
                self._sleep(_LATE_COPY)
        if self.streams and not copies_are_late:
            self._sleep(_LATE_WORK)
        super().note_posted(parcel)

    def _sleep(self, most: int) -> None:
        if self._random.random() < 0.5:  # else what comes next may be early
            torch.cuda._sleep(self._random.randrange(most))  # type: ignore[no-untyped-call]

    def _pool(self) -> BufferPool:
        return PoolOfNaN()
