"""All ranks in one process at full speed: every message is one copy in memory, on GPUs at the same time as work.

It is for timing what a ring does besides its kernels, on one machine without a network:

    ring = burst_plugin.VirtualRing(topology, network=CopyNetwork(topology.ranks, device))

On a GPU the copies run on a stream of the receiving rank, ordered by events after what the sender and the receiver
have done before they post; waiting orders the current stream behind the copy and never stalls the host. On a CPU a
message is copied when its second end is posted. To make faults show, use `in_process.HostileNetwork` instead.

`NullTransport` carries nothing, to time a ring without its transfers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_plugin.comm.buffers import LABEL_BYTES, BufferPool
from burst_plugin.comm.in_process import InProcessNetwork, Parcel
from burst_plugin.comm.transport import Message, Pending, Transport, Waited
from burst_plugin.topology import Traffic


class CopyNetwork(InProcessNetwork):
    """A network between ranks of this process that copies a message as soon as both its ends are posted.

    device: the device of all messages. streams: the CUDA streams on which ranks receive, by rank; none on CPUs.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        super().__init__(ranks)
        self._device = device
        streams = range(ranks) if device.type == "cuda" else ()
        # They go before kernels that are queued already, as the streams of NCCL's communicators do.
        self.streams = [torch.cuda.Stream(device, priority=-1) for _ in streams]  # type: ignore[no-untyped-call]

    def note_posted(self, parcel: Parcel) -> None:
        if not self.streams:
            if parcel.is_whole:
                parcel.deliver()
            return
        parcel.events.append(torch.cuda.current_stream(self._device).record_event())
        if parcel.is_whole:
            stream = self.streams[parcel.route[1]]
            with torch.cuda.stream(stream):
                for event in parcel.events:
                    stream.wait_event(event)
                parcel.deliver()
                parcel.events.append(stream.record_event())

    def collect(self, parcels: Sequence[Parcel]) -> None:
        """Have a GPU's current stream wait for these messages; on CPUs they have arrived.

        Raises RuntimeError if an end of one was never posted.
        """
        for parcel in parcels:
            if not parcel.is_whole:
                parcel.deliver()  # which raises an error with what is missing
            if parcel.events:
                torch.cuda.current_stream(self._device).wait_event(parcel.events[-1])


class NullTransport(Transport):
    """A transport that carries nothing: every message has arrived when it is posted. Results are wrong.

    A received message is a copy of the first one that this rank sent of its size and kind of traffic, since bits of
    another type would be full of numbers, such as denormal ones, that take a CPU ten times as long. It is zeros if
    this rank has sent none.

    Args:
        pool: where buffers are leased; None for a new pool.
        label: [LABEL_BYTES], uint8, with which received messages end until this rank sends one itself, on CPUs. From
            then on they end as this rank's last message, whose label is right in every schedule that has a rank send
            before it receives. None: messages have no label.
        copies: if False, received messages are all zeros, and no copies take memory.
    """

    def __init__(self, pool: BufferPool | None = None, label: Tensor | None = None, copies: bool = True) -> None:
        super().__init__(pool)
        self._copies = copies
        self._sent: dict[tuple[Traffic, int], Tensor] = {}
        self._label = label

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
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
