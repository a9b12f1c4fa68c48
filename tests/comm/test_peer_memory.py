"""The memory that NCCL takes for peers, as transports count it."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel, Message
from burst_plugin.topology import Link, Traffic
from tests.support.nccl_groups import Config, NcclGroup, Options, nccl


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
