"""How messages are handed to a process group; what arrives is tested in test_gloo.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin.comm import process_groups as communicators
from burst_plugin.comm.process_groups import group_device
from burst_plugin.comm.torch_distributed import DistributedTransport, reason_of
from burst_plugin.comm.transport import Channel, Message, PeerLostError
from burst_plugin.topology import Link, Traffic

GATHER, REDUCE = (Channel(traffic, Link.INTRA) for traffic in Traffic)


class Group:
    """A process group of the global ranks 5, 6, 7, that notes what it is given; rank `gone` of it has closed."""

    def __init__(self, launches_batches: bool, gone: int | None = None) -> None:
        self.backend = SimpleNamespace(supports_coalescing=launches_batches)
        self.posted: list[tuple[Any, ...]] = []
        self.gone = gone

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return self.backend

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> str:
        if rank == self.gone:
            raise RuntimeError("[pair.cc:553] Connection closed by peer")
        self.posted.append(("send", tensors[0].item(), rank, tag))
        return "sent"

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> str:
        self.posted.append(("recv", tensors[0].item(), rank, tag))
        return "received"


def message(peer: int, channel: Channel, value: int) -> Message:
    return Message(peer, channel, torch.tensor([value], dtype=torch.uint8))


@pytest.fixture(autouse=True)
def _no_real_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "group_device", lambda group: torch.device("cpu"))
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank - 5)


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu"),
        ({"cpu": "gloo"}, "cpu"),
        ({"cuda": "nccl"}, "cuda:3"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda:3"),
    ],
    ids=str,
)
def test_a_group_of_two_backends_moves_tensors_of_gpus(
    backends: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it was made: `init_process_group()` alone, by one name, or by device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    group = SimpleNamespace(
        _device_types=[torch.device(each) for each in backends],
        _get_backend=lambda device: SimpleNamespace(name=lambda: backends[device.type]),
        bound_device_id=None,
    )
    assert group_device(group) == torch.device(device)  # type: ignore[arg-type]
    group.bound_device_id = torch.device("cuda", 3)
    assert group_device(group) == torch.device(device)  # type: ignore[arg-type]
    group.bound_device_id = torch.device("cuda", 1)
    if device != "cpu":
        with pytest.raises(
            ValueError, match=r"bound to cuda:1, but the current device is cuda:3; call .*set_device\(1"
        ):
            group_device(group)  # type: ignore[arg-type]


def test_messages_go_to_the_group_itself_receives_first() -> None:
    group = Group(launches_batches=False)
    ring = DistributedTransport({GATHER: group, REDUCE: group}, [5, 6, 7])  # type: ignore[dict-item]
    sends = [message(1, GATHER, 10), message(2, REDUCE, 20)]
    (pending,) = ring.post(sends, [message(2, GATHER, 30), message(0, REDUCE, 40)])
    received = [("recv", 30, 2, 0), ("recv", 40, 0, 0)]
    assert group.posted == [*received, ("send", 10, 1, 0), ("send", 20, 2, 0)]
    assert [m.data.item() for m in pending.messages] == [30, 40, 10, 20], "as their works are"
    assert ring.sent_bytes == {GATHER: 1, REDUCE: 1}


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_is_gone_before_anything_is_posted_is_named(gone: int) -> None:
    group = Group(launches_batches=False, gone=gone)
    ring = DistributedTransport({GATHER: group}, [5, 6, 7])  # type: ignore[dict-item]
    with pytest.raises(PeerLostError, match=f"^rank {gone}: Connection closed by peer$") as lost:
        ring.post([message(rank, GATHER, 0) for rank in range(3)], [message(1, GATHER, 0)])
    assert lost.value.peer == gone


def test_a_group_that_launches_batches_is_handed_one() -> None:
    groups = {GATHER: Group(launches_batches=True), REDUCE: Group(launches_batches=True)}
    ring = DistributedTransport(groups, [5, 6, 7])  # type: ignore[arg-type]
    batches: list[list[tuple[Any, ...]]] = []

    def launch(ops: list[tuple[Any, ...]]) -> list[str]:
        batches.append(ops)
        return ["all"]

    with (
        mock.patch.object(dist, "P2POp", side_effect=lambda op, data, peer, group: (op, data.item(), peer, group)),
        mock.patch.object(dist, "batch_isend_irecv", side_effect=launch),
    ):
        ring.post([message(1, GATHER, 10)], [message(2, GATHER, 30), message(0, REDUCE, 40)])
    assert batches == [
        [(dist.irecv, 30, 7, groups[GATHER]), (dist.isend, 10, 6, groups[GATHER])],
        [(dist.irecv, 40, 5, groups[REDUCE])],
    ]
    assert not groups[GATHER].posted


class Log(list[Any]):
    """Notes a name for everything that is appended."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self.name, self.order = name, order

    def append(self, item: Any) -> None:
        self.order.append(self.name)


def test_communicators_follow_one_order_whatever_a_rank_sends_and_receives() -> None:
    """One rank receives a block and sends sums, the other the reverse: NCCL would have them wait in a circle."""
    orders: list[list[str]] = []
    for sends, recvs in (([REDUCE], [GATHER]), ([GATHER], [REDUCE]), ([GATHER, REDUCE], [REDUCE])):
        groups = {channel: Group(launches_batches=False) for channel in (REDUCE, GATHER)}
        order: list[str] = []
        for channel, group in groups.items():
            group.posted = Log(channel.traffic.name, order)
        ring = DistributedTransport(groups, [5, 6, 7])  # type: ignore[arg-type]
        ring.post(*([message(1, channel, 0) for channel in channels] for channels in (sends, recvs)))
        orders.append(list(dict.fromkeys(order)))
    assert orders == [["GATHER", "REDUCE"]] * 3


def test_a_backends_error_is_cut_to_what_happened() -> None:
    said = "[../pair.cc:553] Connection closed by peer. This is typically a crash\nat line 3"
    assert reason_of(RuntimeError(said)) == "Connection closed by peer"
