"""Nodes and ranks: the nodes that ranks of a context-parallel group run on, and the links that join the ranks.

Pure Python, without torch: a `Topology` is two numbers, so that schedules for thousands of ranks can be made and
checked on a laptop.

    Topology(nodes=2, ranks_per_node=4)      rank = node * ranks_per_node + local rank

        node 0:  0 -- 1 -- 2 -- 3            intra: NVLink
                 |    |    |    |            inter: one NIC per rank
        node 1:  4 -- 5 -- 6 -- 7
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from burst_plugin.checks import as_whole, shown, whole_number, whole_numbers


class Link(str, Enum):
    """The link between two ranks: `INTRA` inside a node (NVLink), `INTER` between nodes (InfiniBand, Ethernet)."""

    INTRA = "intra"
    INTER = "inter"


class Traffic(str, Enum):
    """What a transfer carries: `GATHER` operands to where they are read, `REDUCE` partial results to their owner."""

    GATHER = "gather"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Topology:
    """The ranks of a group on its nodes: `ranks_per_node` on each of `nodes` nodes; consecutive ranks share a node.

    Raises ValueError if either is not a whole number of 1 or more.
    """

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        nodes, per_node = as_whole(self.nodes), as_whole(self.ranks_per_node)
        if nodes is None or per_node is None or nodes < 1 or per_node < 1:
            raise ValueError(
                "a topology needs whole numbers, at least 1 node and 1 rank per node, got "
                f"nodes={shown(self.nodes)}, ranks_per_node={shown(self.ranks_per_node)}"
            )
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "ranks_per_node", per_node)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def levels(self) -> int:
        """Return 2 if there are several nodes with several ranks each, which have links of both kinds; else 1."""
        return 2 if self.nodes > 1 and self.ranks_per_node > 1 else 1

    def node(self, rank: int) -> int:
        """Return the node of `rank`."""
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """Return the number of `rank` within its node."""
        return rank % self.ranks_per_node

    def rank(self, node: int, local_rank: int) -> int:
        """Return the rank with this number within a node; both numbers wrap around."""
        return (node % self.nodes) * self.ranks_per_node + local_rank % self.ranks_per_node

    def link(self, src: int, dst: int) -> Link:
        """Return the link between two ranks."""
        return Link.INTRA if self.node(src) == self.node(dst) else Link.INTER

    def node_peers(self, rank: int) -> tuple[int, ...]:
        """Return all ranks on the node of `rank`, itself included: its inner ring."""
        first = self.rank(self.node(rank), 0)
        return tuple(range(first, first + self.ranks_per_node))

    def counterparts(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same number within every node: the outer ring of `rank`."""
        return tuple(range(self.local_rank(rank), self.ranks, self.ranks_per_node))

    def of_ulysses_groups(self, degree: int, option: str = "ulysses_degree") -> Topology:
        """Return the topology of a ring of groups: `degree` consecutive ranks at a time take the place of one rank.

        Groups lie inside nodes, or are whole nodes: with 2 nodes of 8 ranks it is 2x4 for degree 2, and 2x1 for
        degree 8. Raises ValueError for other degrees, naming the `option` that has this value: "ulysses_degree" or
        "mesh_degree".
        """
        if degree < 1 or self.ranks % degree or (self.ranks_per_node % degree and degree % self.ranks_per_node):
            raise ValueError(
                f"{option}={degree} does not divide {self} into groups inside nodes, or of whole nodes; use "
                f"one of {self.ulysses_degrees}"
            )
        return Topology(max(1, self.ranks // max(degree, self.ranks_per_node)), max(1, self.ranks_per_node // degree))

    @property
    def ulysses_degrees(self) -> list[int]:
        """Return the sizes of Ulysses groups into which the ranks can be divided: within nodes, or of whole nodes."""
        inside = [n for n in range(1, self.ranks_per_node + 1) if self.ranks_per_node % n == 0]
        return [*inside, *(n * self.ranks_per_node for n in range(2, self.nodes + 1) if self.nodes % n == 0)]

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node} (nodes x ranks per node)"

    @classmethod
    def from_sizes(
        cls, ranks: int, hierarchy: Sequence[int] | None = None, ranks_per_node: int | None = None
    ) -> Topology:
        """Return the topology of `ranks` ranks, from hierarchical sizes (innermost first) or from the ranks per node.

        Sizes are given as in Megatron: `[w, n]` is n nodes of w ranks; `[8]` and `[1, 8]` are flat; of three levels
        the outer two are merged. With neither, all ranks are on one node.
        Raises ValueError if sizes do not multiply to `ranks`, or if the two options contradict each other.
        """
        if ranks_per_node is not None:
            ranks_per_node = whole_number("ranks_per_node={}", ranks_per_node, "use a positive number", None)
        if hierarchy is None:
            inner = ranks if ranks_per_node is None else ranks_per_node
        else:
            sizes = whole_numbers("hierarchy={}", hierarchy, "give a list of sizes, innermost first, such as [8, 2]")
            inner = _inner_size(ranks, sizes)
            if ranks_per_node not in (None, sizes[0]):
                raise ValueError(
                    f"ranks_per_node={ranks_per_node} contradicts hierarchy={list(sizes)}, whose innermost "
                    f"size is {sizes[0]}: give only one of them"
                )
        if inner < 1 or ranks % inner:
            raise ValueError(
                f"ranks_per_node={inner} does not divide the {ranks} ranks of the context-parallel group: "
                f"use a divisor of {ranks}, or 'auto'"
            )
        return cls(ranks // inner, inner)

    @classmethod
    def from_node_ids(cls, ids: Sequence[str]) -> Topology | None:
        """Return a topology from each rank's `node_id`; None if ranks of one node are not consecutive.

        Nodes of unlike size count as several of the largest size that divides them all: 4 and 2 ranks as 3 nodes of
        2, so that 2 NICs are at work wherever blocks cross. If that size is 1, although a node has more ranks, the
        result is None, too.
        """
        sizes = node_sizes(ids)
        size = math.gcd(*sizes)
        if not sizes or (size == 1 and max(sizes) > 1):
            return None
        return cls(len(ids) // size, size)


class Groups(NamedTuple):
    """The division of ranks into groups of `size`, and rings: the ranks at one place in all groups are a ring.

    apart: if False, a group is neighbours and the ranks of a ring are `size` apart; if True, a ring is neighbours and
        the ranks of a group are as far apart as can be.
    option: the option that gives the size, "ulysses_degree" or "mesh_degree", for errors.
    gathers: whether the ranks of a group gather each other's blocks, of all heads, instead of sharing heads.

        8 ranks, size 2    groups               rings
        apart=False        0 1, 2 3, 4 5, 6 7   0 2 4 6, 1 3 5 7
        apart=True         0 4, 1 5, 2 6, 3 7   0 1 2 3, 4 5 6 7
    """

    topology: Topology
    size: int
    apart: bool = False
    option: str = "ulysses_degree"
    gathers: bool = False

    @property
    def ring_size(self) -> int:
        """Return the number of ranks in a ring, which is the number of groups."""
        return self.topology.ranks // self.size

    def of(self, rank: int) -> tuple[int, int]:
        """Return (the number of the rank's group, the rank's place in it)."""
        if self.apart:
            return rank % self.ring_size, rank // self.ring_size
        return rank // self.size, rank % self.size

    def members(self, group: int) -> range:
        """Return the ranks of the group with this number, in the order of their places."""
        if self.apart:
            return range(group, self.topology.ranks, self.ring_size)
        return range(group * self.size, (group + 1) * self.size)

    def ring(self, place: int) -> range:
        """Return the ranks at one place in all groups, which are a ring, in the order of their groups."""
        return Groups(self.topology, self.ring_size, not self.apart).members(place)

    @property
    def ring_topology(self) -> Topology:
        """Return the topology that each ring has: the number of its nodes, and of its ranks on each of them.

        Of 2 nodes with 4 ranks each, in groups of 2, a ring has 2 nodes with 2 ranks each, or, `apart`, 1 node with
        4. Raises ValueError, naming the `option`, unless groups (if `apart`, rings) lie inside nodes or are whole
        nodes.
        """
        if not self.apart:
            return self.topology.of_ulysses_groups(self.size, self.option)
        per_node, sizes = (
            self.topology.ranks_per_node,
            [self.topology.ranks // n for n in self.topology.ulysses_degrees],
        )
        if self.size not in sizes:
            raise ValueError(
                f"{self.option}={self.size} does not divide {self.topology} into rings of neighbours, inside nodes "
                f"or of whole nodes; use one of {sizes[::-1]}"
            )
        return Topology(max(1, self.ring_size // per_node), min(self.ring_size, per_node))


def node_sizes(ids: Sequence[str]) -> list[int]:
    """Return how many ranks each node has, from each rank's `node_id`; [] if a node's ranks are not consecutive."""
    runs = [(node, len(list(ranks))) for node, ranks in groupby(ids)]
    return [count for _, count in runs] if len(runs) == len(set(ids)) else []


def _inner_size(ranks: int, hierarchy: Sequence[int]) -> int:
    """Return the ranks per node that hierarchical sizes mean. Raise ValueError if they do not fit."""
    if not hierarchy:
        raise ValueError(f"hierarchy=[] has no sizes; give them, innermost first, such as [{ranks}], or None")
    if any(size < 1 for size in hierarchy) or math.prod(hierarchy) != ranks:
        raise ValueError(
            f"hierarchy={list(hierarchy)} multiplies to {math.prod(hierarchy)}, but the context-parallel group "
            f"has {ranks} ranks: give sizes, innermost first, whose product is {ranks}"
        )
    if len(hierarchy) > 3:
        raise ValueError(f"hierarchy={list(hierarchy)} has {len(hierarchy)} levels; one to three are supported")
    return ranks if len(hierarchy) == 1 or hierarchy[0] == 1 else hierarchy[0]


def node_id() -> str:
    """Return this machine's identity: host name and, on Linux, the kernel's boot id (host names can collide)."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"
