"""A transport that carries nothing, to time a ring's visits without its transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_plugin.comm.buffers import LABEL_BYTES, Buffer, BufferPool, Memory
from burst_plugin.comm.transport import Message, Pending, Transport, Waited
from burst_plugin.ring.rank_state import RankState
from burst_plugin.topology import Traffic

__all__ = ["SilentTransport", "silenced"]


@dataclass
class _Nothing:
    messages: Sequence[Message]

    def wait(self, waited: Waited | None = None) -> None:
        """There is nothing to wait for."""
        if waited is not None:
            waited(self.messages)


class SilentTransport(Transport):
    """Every message has arrived when it is posted; what it holds is this rank's own of the same size and kind, or 0.

    So kernels work on numbers like those of a real block: bits of another type would be full of numbers that take
    a CPU ten times as long. A buffer that holds the right kind already is left as it is. Results are wrong. On CPUs
    messages get the label of this rank's last one, which is that of the pass in every schedule in which a rank sends
    before it receives.
    """

    def __init__(self) -> None:
        super().__init__(_PoolOfNumbers())
        self._kinds: dict[int, Traffic] = {}  # of what buffers hold, by address
        self._label: Tensor | None = None

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        if sends and sends[0].data.device.type == "cpu":
            self._label = sends[0].data[-LABEL_BYTES:].clone()
        own = {(sent.channel.traffic, sent.data.numel()): sent.data for sent in sends}
        self._kinds.update({sent.data.data_ptr(): sent.channel.traffic for sent in sends})
        for message in recvs:
            kind, buffer = message.channel.traffic, message.data
            if self._kinds.get(buffer.data_ptr()) is not kind:
                alike = own.get((kind, buffer.numel()))
                buffer.zero_() if alike is None else buffer.copy_(alike)
                self._kinds[buffer.data_ptr()] = kind
            if self._label is not None:
                buffer[-LABEL_BYTES:] = self._label
        return [_Nothing((*recvs, *sends))]


class _PoolOfNumbers(BufferPool):
    """A buffer for every length, so that what it held stays of its kind; zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        self._spare: dict[tuple[int, torch.device], list[Buffer]] = {}

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """See `BufferPool.lease`."""
        spare = self._spare.setdefault((nbytes, device), [])
        if spare:
            return spare.pop()
        made = Memory(nbytes, device).buffer(nbytes)
        made.data.zero_()
        return made

    def release(self, buffer: Buffer) -> None:
        """See `BufferPool.release`."""
        self._spare[buffer.data.numel(), buffer.data.device].append(buffer)


@contextmanager
def silenced(rank_states: Sequence[RankState], transports: Sequence[SilentTransport]) -> Iterator[None]:
    """These rank_states' passes without transfers."""
    loud = [(rank_state.transport, rank_state.ulysses_transport) for rank_state in rank_states]
    for rank_state, transport in zip(rank_states, transports, strict=True):
        rank_state.transport = rank_state.ulysses_transport = transport
    try:
        yield
    finally:
        for rank_state, (ring, team) in zip(rank_states, loud, strict=True):
            rank_state.transport, rank_state.ulysses_transport = ring, team
