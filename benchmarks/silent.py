"""A transport that carries nothing, to time a ring's visits without its transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_plugin.executor import LABEL_BYTES
from burst_plugin.member import Member
from burst_plugin.transport import Channel, Message, Pending

__all__ = ["SilentTransport", "silenced"]


@dataclass
class _Nothing:
    channels: tuple[Channel, ...]

    def wait(self) -> None:
        """There is nothing to wait for."""


class SilentTransport:
    """Every message has arrived when it is posted, and what it holds is this rank's own of the same size, once.

    So kernels work on numbers like those of a real block: random, and of the right type, since a buffer is only
    used again for messages of one size. Results are wrong. On CPUs messages get the label of this rank's last one,
    which is that of the pass in every schedule in which a rank sends before it receives.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], list[Tensor]] = {}
        self._filled: set[int] = set()
        self._label: Tensor | None = None

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """See `Transport.post`."""
        if sends and sends[0].data.device.type == "cpu":
            self._label = sends[0].data[-LABEL_BYTES:].clone()
        for message in recvs:
            alike = next((sent.data for sent in sends if sent.data.numel() == message.data.numel()), None)
            if alike is not None and message.data.data_ptr() not in self._filled:
                message.data.copy_(alike)
                self._filled.add(message.data.data_ptr())
            elif self._label is not None:
                message.data[-LABEL_BYTES:] = self._label
        return [_Nothing(tuple(dict.fromkeys(message.channel for message in (*recvs, *sends))))]

    def lease(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Transport.lease`."""
        free = self._free.setdefault((nbytes, device), [])
        return free.pop() if free else torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def release(self, buffer: Tensor) -> None:
        """See `Transport.release`."""
        self._free[buffer.numel(), buffer.device].append(buffer)

    def first_failure(self, text: str) -> str:
        """See `Transport.first_failure`."""
        return text


@contextmanager
def silenced(members: Sequence[Member], transports: Sequence[SilentTransport]) -> Iterator[None]:
    """These members' passes without transfers."""
    loud = [member.transport for member in members]
    for member, transport in zip(members, transports, strict=True):
        member.transport = transport
    try:
        yield
    finally:
        for member, transport in zip(members, loud, strict=True):
            member.transport = transport
