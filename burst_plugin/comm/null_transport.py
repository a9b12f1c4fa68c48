"""A transport that carries nothing, to time a ring without its transfers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from burst_plugin.comm.buffers import LABEL_BYTES, BufferPool
from burst_plugin.comm.transport import Message, Pending, Transport, Waited
from burst_plugin.topology import Traffic


class NullTransport(Transport):
    """A transport that carries nothing: every message has arrived when it is posted. Results are wrong.

    A received message holds this rank's own first one of the same size and kind, or 0, without `copies` always, which
    takes no memory: bits of another type would be full of numbers that take a CPU ten times as long. On CPUs it gets
    the label of this rank's last one, which is that of the pass in every schedule in which a rank sends before it
    receives; before that it gets `label`.
    """

    def __init__(self, pool: BufferPool | None = None, label: Tensor | None = None, copies: bool = True) -> None:
        super().__init__(pool)
        self._copies = copies
        self._sent: dict[tuple[Traffic, int], Tensor] = {}
        self._label = label

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        if sends and sends[0].data.device.type == "cpu":
            self._label = sends[0].data[-LABEL_BYTES:].clone()
        for sent in sends:
            key = (sent.channel.traffic, sent.data.numel())
            if self._copies and key not in self._sent:
                self._sent[key] = sent.data.clone()
        for message in recvs:
            same = self._sent.get((message.channel.traffic, message.data.numel()))
            message.data.zero_() if same is None else message.data.copy_(same)
            if self._label is not None:
                message.data[-LABEL_BYTES:] = self._label
        return [_Arrived((*recvs, *sends))]


class _Arrived:
    """Messages that are there already."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages

    def wait(self, waited: Waited | None = None) -> None:
        """Return at once: all has arrived."""
        if waited is not None:
            waited(self.messages)
