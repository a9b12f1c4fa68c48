"""What a measured cluster says to the planner: the rates of its links, and the seconds of its kernel on a block."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.links import Links
from burst_plugin.profiling.cluster_profile import ClusterProfile, KernelRate, Model
from burst_plugin.topology import Topology

__all__ = ["measured_links", "measured_visit_seconds", "model_shapes", "rate_at"]


def model_shapes(model: Model, topology: Topology, dtype: str) -> Shapes:
    """Return the shapes of one layer's attention on each rank, in the type of that name.

    Raises ValueError for a sequence with fewer tokens than ranks.
    """
    if model.seq < topology.ranks:
        raise ValueError(f"--seq {model.seq} is fewer tokens than the {topology.ranks} ranks; use a longer sequence")
    local, dim = -(-model.seq // topology.ranks), model.head_dim
    return Shapes(1, local, local, model.q_heads, model.kv_heads, dim, dim, getattr(torch, dtype))


def measured_links(profile: ClusterProfile, topology: Topology | None = None) -> Links:
    """Return a profile's links as a ring on `topology` has them, by default one of all ranks.

    Of a NIC that the ranks of a node share a ring has its ranks' share: others beside it send, too. A link that the
    ring does not have gets the rate of the other one.

    Raises ValueError if the ring has links, or more ranks on a node, that were not measured.
    """
    ring = topology or profile.topology
    lacks_intra = ring.ranks_per_node > profile.ranks_per_node
    if lacks_intra or (ring.nodes > 1 and profile.inter is None):
        raise ValueError(
            f"the profile is of another cluster: it was measured on {profile.topology}, and this is {ring}; run "
            "burst check again here"
        )
    intra, inter = profile.intra or profile.inter, profile.inter or profile.intra
    if intra is None or inter is None:
        return Links(1e12, 1e12)  # one rank sends nothing
    share = ring.ranks_per_node / profile.ranks_per_node if profile.nic == "node" else 1.0
    rates = intra.bytes_per_s, share * inter.bytes_per_s
    return Links(*rates, profile.nic, intra.latency_s, inter.latency_s)


def measured_visit_seconds(profile: ClusterProfile, shapes: Shapes, causal: bool) -> tuple[float, float]:
    """Return the seconds of work on a whole block, forward and backward, at the measured rates of the kernel.

    As `planner.visit_seconds`, but each pass has its own rate, that of tiles as long as the block.
    """
    pairs = shapes.batch * shapes.q_len * shapes.kv_len * shapes.q_heads * (0.5 if causal else 1.0)
    flops = 2 * pairs * (shapes.qk_dim + shapes.v_dim)
    rate = rate_at(profile.rates, max(1, min(shapes.q_len, shapes.kv_len)))
    return flops / rate.forward_flops_per_s, 2.5 * flops / rate.backward_flops_per_s


def rate_at(rates: tuple[KernelRate, ...], rows: int) -> KernelRate:
    """Return the rate on tiles of so many rows: interpolated on a logarithmic scale, beyond the ends the nearest."""
    if rows <= rates[0].rows:
        return rates[0]
    for below, above in pairwise(rates):
        if rows <= above.rows:
            share = math.log(rows / below.rows) / math.log(above.rows / below.rows)
            forward = _between(below.forward_flops_per_s, above.forward_flops_per_s, share)
            return KernelRate(rows, forward, _between(below.backward_flops_per_s, above.backward_flops_per_s, share))
    return rates[-1]


def _between(first: float, second: float, share: float) -> float:
    return first + share * (second - first)
