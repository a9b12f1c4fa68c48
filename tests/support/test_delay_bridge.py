"""The switch that delays frames: where each goes, and when."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support import delay_bridge

pytestmark = pytest.mark.alone
LATENCY_S = 0.03
HEADER = bytes(10)
EVERYBODY = b"\xff" * 6
ADDRESSES = [bytes([2, 0, 0, 0, 0, number]) for number in range(3)]


def frame(to: bytes, source: bytes, text: bytes) -> bytes:
    return HEADER + to + source + text


@pytest.fixture
def hosts() -> Iterator[list[socket.socket]]:
    """Three, on a switch."""
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in ADDRESSES]
        for each in pairs:
            stack.enter_context(each[0])
            stack.enter_context(each[1])
            each[0].settimeout(5)
        end, close = os.pipe()
        switch = threading.Thread(
            target=delay_bridge.serve, args=([there.fileno() for _, there in pairs], LATENCY_S, end)
        )
        switch.start()
        yield [here for here, _ in pairs]
        os.close(close)
        switch.join(5)
        os.close(end)
        assert not switch.is_alive()


def test_a_frame_is_held_for_the_latency_and_no_longer(hosts: list[socket.socket]) -> None:
    took_s = []
    for _ in range(30):
        begin_s = time.perf_counter()
        hosts[0].send(frame(EVERYBODY, ADDRESSES[0], b"hello"))
        assert hosts[1].recv(100) == frame(EVERYBODY, ADDRESSES[0], b"hello")
        took_s.append(time.perf_counter() - begin_s)
    assert min(took_s) >= LATENCY_S
    assert min(took_s) < 1.5 * LATENCY_S


def test_frames_under_way_do_not_wait_for_each_other(hosts: list[socket.socket]) -> None:
    begin_s = time.perf_counter()
    texts = [bytes([number]) for number in range(50)]
    for text in texts:
        hosts[0].send(frame(EVERYBODY, ADDRESSES[0], text))
    assert [hosts[2].recv(100)[-1:] for _ in texts] == texts
    assert time.perf_counter() - begin_s < 10 * LATENCY_S


def test_a_frame_goes_to_its_address_once_that_is_known(hosts: list[socket.socket]) -> None:
    hosts[0].send(frame(ADDRESSES[1], ADDRESSES[0], b"where are you?"))
    for other in hosts[1:]:
        assert other.recv(100).endswith(b"where are you?")
    hosts[1].send(frame(ADDRESSES[0], ADDRESSES[1], b"here"))
    assert hosts[0].recv(100).endswith(b"here")
    hosts[0].send(frame(ADDRESSES[1], ADDRESSES[0], b"good"))
    assert hosts[1].recv(100).endswith(b"good")
    hosts[2].setblocking(False)
    with pytest.raises(BlockingIOError):
        hosts[2].recv(100)
