"""How a cluster is described: the rates of its links, and for a training run its GPUs and hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from burst_plugin.topology import Link, Topology


@dataclass(frozen=True)
class Links:
    """The links of a cluster: rates in bytes per second and latencies in seconds, in one direction.

    intra_bytes_per_s, intra_latency_s: of each rank, to the ranks of its node.
    inter_bytes_per_s, inter_latency_s: of each NIC, to other nodes.
    nic: "rank" if each rank has a NIC, "node" if the ranks of a node share one.

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
        """Return the bytes per second of the links inside nodes, or between them."""
        return self.intra_bytes_per_s if link is Link.INTRA else self.inter_bytes_per_s

    def latency_s(self, link: Link) -> float:
        """Return the latency, in seconds, of the links inside nodes, or between them."""
        return self.intra_latency_s if link is Link.INTRA else self.inter_latency_s

    def of_ring(self, topology: Topology, degree: int) -> Links:
        """Return the links of one of the rings that send at the same time where groups have `degree` ranks.

        The ranks at one place in all groups are a ring. If the ranks of a node share a NIC, a ring has its share of
        it. `topology` is of all ranks.
        """
        share = 1 if self.nic == "rank" else min(degree, topology.ranks_per_node)
        return replace(self, inter_bytes_per_s=self.inter_bytes_per_s / share)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of GPUs, as plans of training runs describe it; by default H100s, with rates that runs reach.

    gpu_gib, host_gib: the memory of a GPU, and of a node's host.
    margin_gib: memory of a GPU that plans leave free: the CUDA context, NCCL beside attention, cuBLAS, fragmentation.
    process_gib: host memory of a process before anything is offloaded: PyTorch, pinned batches, data loading.
    peak_flops: FLOP per second of a GPU in 16 bits, as advertised.
    matmul_share, attention_share: the shares of this peak that matrix products and attention kernels reach.
    recurrent_share: the share that kernels of layers with a state reach: by the published times of
        flash-linear-attention's.
    intra_bytes_per_s, inter_bytes_per_s: of each GPU, in one direction, inside its node and between nodes.
    pcie_bytes_per_s: between a GPU and its host, in either direction, all GPUs of a node at once.
    host_bytes_per_s: of a node's memory, while an optimizer runs on its CPUs.
    hop_s: seconds that a message between ranks takes besides its bytes, where nothing hides it.
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
    intra_bytes_per_s: float = 350e9
    inter_bytes_per_s: float = 40e9
    pcie_bytes_per_s: float = 40e9
    host_bytes_per_s: float = 200e9
    hop_s: float = 30e-6

    @property
    def gpus(self) -> int:
        """Return how many GPUs all nodes have."""
        return self.nodes * self.gpus_per_node

    @property
    def links(self) -> Links:
        """Return the links for a simulation of schedules: a NIC for each GPU, and no latency."""
        return Links(self.intra_bytes_per_s, self.inter_bytes_per_s)
