"""The bound: seconds that no plan beats on described links."""

from __future__ import annotations

from itertools import product

from burst_plugin.compute.shapes import Shapes, hop_bytes_by_traffic
from burst_plugin.planning.exchange import exchanged_bytes, groupings, in_ring
from burst_plugin.planning.links import Links
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology
from burst_plugin.types import DIRECTIONS, SIDES, Direction, Side

__all__ = ["least_seconds"]


def least_seconds(
    topology: Topology, shapes: Shapes, visit_s: tuple[float, float], links: Links, mesh_degree: int = 1
) -> float:
    """Return the bound: seconds of a forward and a backward pass together that no plan beats.

    For one pass, a degree of the exchange of heads, or a `mesh_degree`, and a moving side it is the longest of

    - computing, spread evenly over all ranks;
    - sending between nodes, over all NICs evenly: each block of the ring, and its partial results, once per node;
    - sending from one rank: every block but its own, and its partial results, once, over both of its links together.

    The last two include what groups send. The bound is, for either pass, the shortest over all degrees
    and sides.
    """
    return sum(
        min(
            _least_seconds_of_pass(topology, grouped, each_s, links, _sent_bytes(shapes, grouped, direction, side))
            for grouped, side in product(groupings(topology, shapes, mesh_degree), SIDES)
        )
        for direction, each_s in zip(DIRECTIONS, visit_s, strict=True)
    )


def _sent_bytes(shapes: Shapes, grouped: Strategy, direction: Direction, moving: Side) -> tuple[int, int, int]:
    """Return the bytes of a block, those of its partial results, and those for each other rank of a group."""
    gather, reduce = hop_bytes_by_traffic(in_ring(shapes, grouped.degree), direction, moving)
    return gather, reduce, exchanged_bytes(shapes, grouped, direction, moving)


def _least_seconds_of_pass(
    topology: Topology, grouped: Strategy, visit_s: float, links: Links, sent_bytes: tuple[int, int, int]
) -> float:
    """Return the bound of one pass with such messages; see `least_seconds`."""
    degree, width = grouped.group_size, topology.ranks_per_node
    groups = topology.of_ulysses_groups(degree)
    gather, reduce, exchanged = sent_bytes
    others, block = groups.nodes - 1, gather + reduce
    inter_bytes_per_s = links.inter_bytes_per_s / (width if links.nic == "node" else 1)  # for each rank
    inter_bytes = block * others + exchanged * max(0, degree - width)
    all_bytes = block * (groups.ranks - 1) + exchanged * (degree - 1)
    return max(
        topology.ranks * visit_s,
        inter_bytes / inter_bytes_per_s,
        all_bytes / (links.intra_bytes_per_s + (inter_bytes_per_s if topology.nodes > 1 else 0)),
    )
