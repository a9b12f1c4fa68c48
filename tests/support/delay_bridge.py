"""A switch that forwards every frame after a delay, for Linux kernels without netem.

Its ports are TAP devices, whose frames are as large as TCP makes them, as on a veth (`IFF_VNET_HDR` and offloads,
linux/if_tun.h).
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from tests.support.processes import undisturbed_fork

DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_BEFORE = 10  # bytes of struct virtio_net_hdr, which is forwarded with its frame
_ADDRESS = 6  # bytes: a frame begins with its destination and its source
_LARGEST = 1 << 17
_READY = "ready"


def start(names: Sequence[str], latency_s: float, enter: Callable[[], None]) -> tuple[int, int]:
    """Fork a process that calls `enter`, opens the TAP devices of these names, and serves them.

    Returns:
        Its process id, and a file descriptor: it exits once that is closed.

    Raises:
        RuntimeError: if it ends before it serves.
    """
    here, there = socket.socketpair()
    with here, there:
        with undisturbed_fork() as process:
            if process == 0:
                here.close()
                _run(names, latency_s, enter, there)
        there.close()
        said = here.recv(1 << 16).decode()
        if said != _READY:
            os.waitpid(process, 0)
            raise RuntimeError(f"the process that connects the nodes has ended: {said}")
        return process, here.detach()


def _run(names: Sequence[str], latency_s: float, enter: Callable[[], None], parent: socket.socket) -> NoReturn:
    try:
        enter()
        taps = [_tap(name) for name in names]
        parent.sendall(_READY.encode())
        serve(taps, latency_s, parent.fileno())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        parent.sendall(b"its traceback is above")
    finally:
        os._exit(1)


def serve(ports: Sequence[int], latency_s: float, end: int) -> None:
    """Forward frames from each of `ports` to the others, in order, until `end` is readable or closed.

    A frame goes to the port from which its address was last heard, or to all other ports if it never was.

    Args:
        ports: file descriptors; each read or write is one frame.
        latency_s: delay of every frame.
        end: file descriptor.
    """
    heard: dict[bytes, int] = {}
    held: deque[tuple[float, list[int], bytes]] = deque()
    while True:
        timeout_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([end, *ports], [], [], timeout_s)
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


def _tap(name: str) -> int:
    """Open a TAP device of this network namespace, with whole segments and checksums left to be filled in."""
    file = os.open(DEVICE, os.O_RDWR)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return file
