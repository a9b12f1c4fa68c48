"""What ranks of a group send each other before and after a ring, for the planner: heads, or blocks of a mesh.

What an exchange of heads makes of blocks, what is sent, and how long that takes. Nothing hides it: it is for all
operands before the ring, and all results after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from burst_plugin.compute.shapes import Shapes, hop_bytes, hop_bytes_by_traffic
from burst_plugin.planning.links import Links
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology
from burst_plugin.types import DIRECTIONS, OTHER_SIDE, Direction, Side

__all__ = ["exchange_buffer_bytes", "exchange_seconds", "exchanged_bytes", "groupings", "in_ring"]


def groupings(topology: Topology, shapes: Shapes, mesh_degree: int = 1) -> list[Strategy]:
    """Return between how many ranks heads can be exchanged; 1 is no exchange. With a `mesh_degree` there is none."""
    sizes = topology.ulysses_degrees
    if mesh_degree > 1:
        return [Strategy(mesh_degree=mesh_degree)] if mesh_degree in sizes else []
    possible = set(shapes.ulysses_degrees)
    return [Strategy(ulysses_degree=degree) for degree in sizes if degree in possible]


def in_ring(shapes: Shapes, degree: int) -> Shapes:
    """Return the shapes in the ring, after ranks have exchanged heads: blocks of all tokens of a Ulysses group."""
    return shapes.of_ulysses_group(degree)._replace(q_len=degree * shapes.q_len, kv_len=degree * shapes.kv_len)


def exchange_seconds(group_size: int, topology: Topology, nbytes: int, links: Links) -> dict[Link, float]:
    """Return how long each link is busy with what groups send: `nbytes` for each other rank of the group."""
    inside = min(group_size, topology.ranks_per_node)
    ranks_per_nic = topology.ranks_per_node if links.nic == "node" else 1
    return {
        Link.INTRA: nbytes * (inside - 1) / links.intra_bytes_per_s,
        Link.INTER: nbytes * (group_size - inside) / links.inter_bytes_per_s * ranks_per_nic,
    }


def exchanged_bytes(shapes: Shapes, strategy: Strategy, direction: Direction, moving: Side) -> int:
    """Return the bytes that a rank sends to one other of its group: before the ring and after it.

    In a mesh its block of the side that stays, and partial results of the other's. Else its share of q, k, v and out,
    or of their gradients, in the type of the inputs; gradients of key/value heads that several ranks share are wide.
    """
    if strategy.mesh_degree > 1:
        return hop_bytes(shapes, direction, OTHER_SIDE[moving])
    degree = strategy.degree
    share = shapes.of_ulysses_group(degree)
    dims = share.batch * (share.qk_dim + share.v_dim)
    q_numel, kv_numel = dims * share.q_len * share.q_heads, dims * share.kv_len * share.kv_heads
    is_wide = direction == "backward" and degree > shapes.kv_heads
    kv_dtype = share.sum_dtype if is_wide else share.dtype
    return q_numel * share.dtype.itemsize + kv_numel * kv_dtype.itemsize


def exchange_buffer_bytes(shapes: Shapes, strategy: Strategy, moving_sides: Sequence[Side]) -> int:
    """Return the bytes of the buffers in which a mesh gathers and reduces: to send and to receive, one for each."""
    messages = [
        nbytes
        for direction, moving in zip(DIRECTIONS, moving_sides, strict=True)
        for nbytes in hop_bytes_by_traffic(shapes, direction, OTHER_SIDE[moving])
    ]
    return 2 * (strategy.mesh_degree - 1) * max(messages)
