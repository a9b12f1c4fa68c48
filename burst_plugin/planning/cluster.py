"""How a cluster is described: the rates of its links, and for a training run its GPUs and hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from burst_plugin.topology import Link, Topology


@dataclass(frozen=True)
class Links:
    """Rates per direction: of every rank inside its node, and of every NIC between nodes; `nic` is "rank" or "node".

    Raises ValueError for rates of 0, latencies below 0, numbers that are not finite, and another `nic`.
    """

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    nic: str = "rank"
    intra_latency_s: float = 0.0
    inter_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for link in ("intra", "inter"):
            rate, latency_s = getattr(self, f"{link}_bytes_per_s"), getattr(self, f"{link}_latency_s")
            if not 0 < rate < math.inf:
                raise ValueError(f"Links({link}_bytes_per_s={rate}) is not valid; use a positive, finite rate")
            if not 0 <= latency_s < math.inf:
                raise ValueError(f"Links({link}_latency_s={latency_s}) is not valid; use finite seconds, 0 or more")
        if self.nic not in ("rank", "node"):
            raise ValueError(f'Links(nic={self.nic!r}) is not valid; use "rank" or "node"')

    def bytes_per_s(self, link: Link) -> float:
        """Return the rate of a link."""
        return self.intra_bytes_per_s if link is Link.INTRA else self.inter_bytes_per_s

    def latency_s(self, link: Link) -> float:
        """Return the latency of a link."""
        return self.intra_latency_s if link is Link.INTRA else self.inter_latency_s

    def of_ring(self, topology: Topology, degree: int) -> Links:
        """Return the links of one of the rings that go on beside each other where groups have `degree` ranks.

        The ranks with one number in all groups are a ring. Their NICs are their own, or they have a share of
        their node's.
        """
        share = 1 if self.nic == "rank" else min(degree, topology.ranks_per_node)
        return replace(self, inter_bytes_per_s=self.inter_bytes_per_s / share)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs. Rates are reached rates, not advertised ones; by default an H100's.

    margin_gib: memory of a GPU that plans leave free: the CUDA context, NCCL beside attention, cuBLAS, fragmentation.
    process_gib: host memory of a process before anything is offloaded: PyTorch, pinned batches, data loading.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    gpu_gib: float = 80.0
    host_gib: float = 2048.0
    margin_gib: float = 4.0
    process_gib: float = 8.0
    peak_flops: float = 989e12
    matmul_share: float = 0.45
    attention_share: float = 0.54
    recurrent_share: float = 0.08
    """Of the peak, that kernels of layers with a state reach: by the published times of flash-linear-attention's."""
    intra_bytes_per_s: float = 350e9
    inter_bytes_per_s: float = 40e9
    pcie_bytes_per_s: float = 40e9
    """Between a GPU and its host, in either direction, all GPUs of a node at once."""
    host_bytes_per_s: float = 200e9
    """Of a node's memory, while an optimizer runs on its CPUs."""
    hop_s: float = 30e-6
    """That a message between ranks takes besides its bytes, where nothing hides it."""

    @property
    def gpus(self) -> int:
        """Return how many GPUs all nodes have."""
        return self.nodes * self.gpus_per_node

    @property
    def links(self) -> Links:
        """Return the links as the simulator of schedules takes them."""
        return Links(self.intra_bytes_per_s, self.inter_bytes_per_s)
