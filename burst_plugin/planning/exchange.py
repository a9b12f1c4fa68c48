"""An exchange of heads, as the planner sees it: what it makes of blocks, what it sends, and how long that takes."""

from __future__ import annotations

from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.links import Links
from burst_plugin.topology import Link, Topology
from burst_plugin.types import Direction

__all__ = ["degrees", "exchange_seconds", "exchanged_bytes", "in_ring"]


def degrees(topology: Topology, shapes: Shapes) -> list[int]:
    """Return between how many ranks heads can be exchanged; 1 is no exchange."""
    possible = set(shapes.ulysses_degrees)
    return [degree for degree in topology.ulysses_degrees if degree in possible]


def in_ring(shapes: Shapes, degree: int) -> Shapes:
    """Return the shapes in the ring, after ranks have exchanged heads: blocks of all tokens of a Ulysses group."""
    return shapes.of_ulysses_group(degree)._replace(q_len=degree * shapes.q_len, kv_len=degree * shapes.kv_len)


def exchange_seconds(degree: int, topology: Topology, nbytes: int, links: Links) -> dict[Link, float]:
    """Return how long each link is busy while ranks exchange heads: `nbytes` for each other rank of the group.

    Between nodes that is the slowest one, since every rank has messages for all others, and of all others.
    """
    inside = min(degree, topology.ranks_per_node)
    ranks_per_nic = topology.ranks_per_node if links.nic == "node" else 1
    return {
        Link.INTRA: nbytes * (inside - 1) / links.intra_bytes_per_s,
        Link.INTER: nbytes * (degree - inside) / min(links.nic_rates(topology)) * ranks_per_nic,
    }


def exchanged_bytes(shapes: Shapes, degree: int, direction: Direction) -> int:
    """Return the bytes that a rank sends to one other of its group, of q, k, v and out, or of their gradients.

    They are exchanged in the type of the inputs, except gradients of key/value heads that several ranks share.
    """
    share = shapes.of_ulysses_group(degree)
    dims = share.batch * (share.qk_dim + share.v_dim)
    q_numel, kv_numel = dims * share.q_len * share.q_heads, dims * share.kv_len * share.kv_heads
    is_wide = direction == "backward" and degree > shapes.kv_heads
    kv_dtype = share.sum_dtype if is_wide else share.dtype
    return q_numel * share.dtype.itemsize + kv_numel * kv_dtype.itemsize
