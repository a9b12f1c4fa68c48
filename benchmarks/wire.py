"""Long wires between nodes: a switch that hands every frame on a while after it came, for kernels without netem.

Its ports are TAP devices. Their frames are as large as TCP makes them, as they are on a veth (`IFF_VNET_HDR` and
offloads, linux/if_tun.h).
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from collections import deque
from collections.abc import Sequence

__all__ = ["DEVICE", "serve", "tap"]

DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_BEFORE = 10  # bytes of struct virtio_net_hdr, which is handed on with its frame
_ADDRESS = 6  # bytes: a frame begins with where it goes and where it is from
_LARGEST = 1 << 17


def serve(ports: Sequence[int], latency_s: float, end: int) -> None:
    """Hand frames from each of `ports` on to the others until `end` can be read, which it can be once it is closed.

    A frame goes to where its address has been heard of, else everywhere. They stay in order.

    Args:
        ports: files that give and take a frame a time.
        latency_s: how long a frame is held.
        end: a file.
    """
    heard: dict[bytes, int] = {}
    held: deque[tuple[float, list[int], bytes]] = deque()
    while True:
        patience_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([end, *ports], [], [], patience_s)
        if end in ready:
            return
        for port in ready:
            frame = os.read(port, _LARGEST)
            to, source = (frame[_BEFORE + n * _ADDRESS :][:_ADDRESS] for n in range(2))
            heard[source] = port
            known = heard.get(to)
            others = [other for other in ports if other != port] if known is None else [known]
            held.append((time.monotonic() + latency_s, others, frame))
        while held and held[0][0] <= time.monotonic():
            _, others, frame = held.popleft()
            for other in others:
                os.write(other, frame)


def tap(name: str) -> int:
    """A TAP device of this network namespace, opened: with whole segments, and checksums left to be filled in."""
    file = os.open(DEVICE, os.O_RDWR)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return file
