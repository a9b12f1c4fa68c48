"""What kernels on GPUs are told of the messages that are under way while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel, Message
from burst_plugin.kernels import How
from burst_plugin.profiling.recorder import Profile
from burst_plugin.topology import Link, Topology, Traffic
from tests.support.nccl_groups import Config, NcclGroup, Options, nccl
from tests.support.recorded_gpu import PlainKernel
from tests.support.recorded_layers import train

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
BLOCK = 2 * 60 * 4 * 64 * 2  # K and V of 60 rows, in 16 bits


def _told(monkeypatch: pytest.MonkeyPatch, topology: Topology, **options: Any) -> list[tuple[int, float]]:
    """Return what the first visits of a forward pass were told, on rank 0; each communicator has 8 thread blocks."""
    told: list[tuple[int, float]] = []
    forward: Callable[..., Any] = PlainKernel.forward

    def noted(self: PlainKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> Any:
        told.append(tuple(how.in_flight))  # type: ignore[arg-type]
        return forward(self, q, k, v, how)

    monkeypatch.setattr(PlainKernel, "forward", noted)
    train("nccl", topology, **options)
    return told[: 4 * topology.ranks : topology.ranks]


def test_a_flat_ring_has_one_communicator_at_work_until_the_last_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _told(monkeypatch, Topology(1, 4)) == [(8, BLOCK)] * 3 + [(0, 0)]


def test_a_message_between_nodes_may_take_all_steps_of_an_inner_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps here, so that it counts for half at either; the inner ring has a message at its first."""
    found = _told(monkeypatch, Topology(2, 2))
    assert found == [(16, BLOCK + BLOCK / 2), (8, BLOCK / 2), (8, BLOCK), (0, 0)]


def test_partial_results_take_thread_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ctas for ctas, _ in _told(monkeypatch, Topology(1, 4), forward="q")] == [8, 8, 16, 8]


def test_what_nccl_has_for_peers_is_counted_once_for_each_that_sends() -> None:
    """Where there is no limit it has 32 thread blocks inside a node, and 4 between nodes."""
    node, world = NcclGroup(range(4), Options(config=Config(max_ctas=8))), NcclGroup(range(8))
    inside, leaving = Channel(Traffic.GATHER, Link.INTRA), Channel(Traffic.REDUCE, Link.INTER)
    data = torch.zeros(16, dtype=torch.uint8)
    with nccl(), mock.patch.object(dist, "P2POp"), mock.patch.object(dist, "batch_isend_irecv", return_value=[]):
        transport = DistributedTransport({inside: node, leaving: world}, range(8))  # type: ignore[dict-item]
        assert transport.backend_bytes == 0
        for sender in (1, 2, 1):
            transport.post([Message(3, inside, data)], [Message(sender, inside, data)])
        transport.post([], [Message(5, leaving, data)])
    assert transport.backend_bytes == (2 * 8 + 4) * 9.4 * 2**20


def test_a_limit_is_known_if_all_communicators_have_one() -> None:
    limited, unlimited = (NcclGroup(range(2), Options(config=Config(max_ctas=n))) for n in (8, -1))
    one, two, three = Channel(Traffic.GATHER, Link.INTRA), *(Channel(Traffic.REDUCE, link) for link in Link)
    with nccl():
        transport = DistributedTransport({one: limited, two: limited, three: unlimited}, range(2))  # type: ignore[dict-item]
        log = Profile(0, Topology(1, 2)).begin_pass("forward", torch.device("cpu"))
        for each in (transport, log.watch(transport)):
            assert each.ctas([one]) == each.ctas([one, two]) == 8, "they share it"
            assert each.ctas([one, three]) == 0
