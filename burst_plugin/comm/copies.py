"""All ranks in one process at full speed: every message is one copy in memory, on GPUs at the same time as work.

It is for timing what a ring does besides its kernels, on one machine without a network:

    ring = burst_plugin.VirtualRing(topology, network=CopyNetwork(topology.ranks, device))

On a GPU the copies run on a stream of the receiving rank, ordered by events after what the sender and the receiver
have done before they post; waiting orders the current stream behind the copy and never stalls the host. On a CPU a
message is copied when its second end is posted. To make faults show, use `in_process.HostileNetwork` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burst_plugin.comm.in_process import InProcessNetwork, Parcel


class CopyNetwork(InProcessNetwork):
    """A network that copies as soon as both ends of a message are posted. Tensors are on `device`."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        super().__init__(ranks)
        self._device = device
        streams = range(ranks) if device.type == "cuda" else ()
        # They go before kernels that are queued already, as the streams of NCCL's communicators do.
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in streams]  # type: ignore[no-untyped-call]

    def _posted(self, parcel: Parcel) -> None:
        if not self._streams:
            if parcel.is_whole:
                parcel.deliver()
            return
        parcel.events.append(torch.cuda.current_stream(self._device).record_event())
        if parcel.is_whole:
            stream = self._streams[parcel.route[1]]
            with torch.cuda.stream(stream):
                for event in parcel.events:
                    stream.wait_event(event)
                parcel.deliver()
                parcel.events.append(stream.record_event())

    def collect(self, parcels: Sequence[Parcel]) -> None:
        """Have a GPU's current stream wait for these messages. Raise RuntimeError if an end was never posted."""
        for parcel in parcels:
            if not parcel.is_whole:
                parcel.deliver()  # which raises an error with what is missing
            if parcel.events:
                torch.cuda.current_stream(self._device).wait_event(parcel.events[-1])
