"""What a schedule is priced with: the rates of links and what differs from node to node, and the work of a pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from burst_plugin.compute.shapes import Shapes, hop_bytes_by_traffic
from burst_plugin.schedule.schedule import Schedule, Transfer
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import Direction, Side, row_count

__all__ = ["Links", "Load"]


@dataclass(frozen=True)
class Links:
    """Rates per direction: of every rank inside its node, and of every NIC between nodes; `nic` is "rank" or "node".

    node_bytes_per_s: the rate of the NICs of single nodes, by node, where it is not `inter_bytes_per_s`.
    rank_speed: how fast single ranks compute, by rank, where it is not 1: with 0.8 a visit takes 1 / 0.8 of its time.

    Raises ValueError for rates and speeds of 0, latencies below 0, numbers that are not finite, and another `nic`.
    """

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    nic: str = "rank"
    intra_latency_s: float = 0.0
    inter_latency_s: float = 0.0
    node_bytes_per_s: Mapping[int, float] = field(default_factory=dict, hash=False)
    rank_speed: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for link in ("intra", "inter"):
            rate, latency_s = getattr(self, f"{link}_bytes_per_s"), getattr(self, f"{link}_latency_s")
            if not 0 < rate < math.inf:
                raise ValueError(f"Links({link}_bytes_per_s={rate}) is not valid; use a positive, finite rate")
            if not 0 <= latency_s < math.inf:
                raise ValueError(f"Links({link}_latency_s={latency_s}) is not valid; use finite seconds, 0 or more")
        for name in ("node_bytes_per_s", "rank_speed"):
            for number, value in getattr(self, name).items():
                if number < 0 or not 0 < value < math.inf:
                    raise ValueError(
                        f"Links({name}={{{number}: {value}}}) is not valid; use numbers of {name[:4]}s, from 0 on, "
                        "with positive, finite values"
                    )
        if self.nic not in ("rank", "node"):
            raise ValueError(f'Links(nic={self.nic!r}) is not valid; use "rank" or "node"')

    @property
    def is_even(self) -> bool:
        """Return whether all nodes, and all ranks, are alike."""
        return not self.node_bytes_per_s and not self.rank_speed

    @property
    def even(self) -> Links:
        """Return the links without what differs of single nodes and ranks."""
        return replace(self, node_bytes_per_s={}, rank_speed={})

    def bytes_per_s(self, link: Link, node: int | None = None) -> float:
        """Return the rate of a link, between nodes that of the NICs of `node`; None for the usual one."""
        if link is Link.INTRA:
            return self.intra_bytes_per_s
        return self.inter_bytes_per_s if node is None else self.node_bytes_per_s.get(node, self.inter_bytes_per_s)

    def latency_s(self, link: Link) -> float:
        """Return the latency of a link."""
        return self.intra_latency_s if link is Link.INTRA else self.inter_latency_s

    def speed(self, rank: int) -> float:
        """Return how fast a rank computes, 1 the usual."""
        return self.rank_speed.get(rank, 1.0)

    def nic_rates(self, topology: Topology) -> list[float]:
        """Return the rates of NICs by node; only one where all are alike."""
        return [self.bytes_per_s(Link.INTER, node) for node in range(topology.nodes if self.node_bytes_per_s else 1)]

    def speeds(self, topology: Topology) -> list[float]:
        """Return how fast ranks compute, by rank; only one where all are alike."""
        return [self.speed(rank) for rank in range(topology.ranks if self.rank_speed else 1)]

    def check(self, topology: Topology) -> None:
        """Raise ValueError for nodes and ranks that a topology does not have."""
        for what, given, count in (
            ("node", self.node_bytes_per_s, topology.nodes),
            ("rank", self.rank_speed, topology.ranks),
        ):
            if given and max(given) >= count:
                raise ValueError(
                    f"{what} {max(given)} is not one of {topology}, whose {what}s have numbers from 0 to {count - 1}"
                )

    def of_rings(self, topology: Topology, degree: int) -> list[Links]:
        """Return the links of the rings that go on beside each other where groups have `degree` ranks.

        The ranks with one number in all groups are a ring. Their NICs are their own, or they have a share of
        their node's. Rings that are alike are returned once.
        """
        share = 1 if self.nic == "rank" else min(degree, topology.ranks_per_node)
        groups, found = topology.of_ulysses_groups(degree), list[Links]()
        for member in range(1 if self.is_even else degree):
            ranks = range(member, topology.ranks, degree)
            speeds = {group: self.rank_speed[rank] for group, rank in enumerate(ranks) if rank in self.rank_speed}
            nodes = {groups.node(group): topology.node(rank) for group, rank in enumerate(ranks)}
            rates = {ring_node: self.node_bytes_per_s.get(node) for ring_node, node in nodes.items()}
            ring = replace(
                self,
                inter_bytes_per_s=self.inter_bytes_per_s / share,
                node_bytes_per_s={n: rate / share for n, rate in rates.items() if rate and groups.nodes > 1},
                rank_speed=speeds,
            )
            if ring not in found:
                found.append(ring)
        return found


@dataclass(frozen=True)
class Load:
    """The work of one pass: bytes per block and hop, and seconds of computing per visit of a whole block.

    rows: how many rows a block has, so that a transfer of some rows has their share of the bytes; 0 counts all
        transfers as whole blocks.
    work_shares: by rank and owner of the block, the work of a visit as a share of `visit_s`, where a mask leaves
        unlike work; None for `visit_s` everywhere.
    """

    gather_bytes: float
    reduce_bytes: float
    visit_s: float
    rows: int = 0
    work_shares: Mapping[tuple[int, int], float] | None = field(default=None, hash=False)

    @classmethod
    def of(cls, shapes: Shapes, direction: Direction, moving: Side, visit_s: float) -> Load:
        """Return the load of a "forward" or "backward" pass with the moving side "q" or "kv"."""
        return cls(*hop_bytes_by_traffic(shapes, direction, moving), visit_s)

    def bytes_of(self, transfer: Transfer) -> float:
        """Return the bytes of a transfer of a whole block, not of one of its parts."""
        nbytes = self.gather_bytes if transfer.traffic is Traffic.GATHER else self.reduce_bytes
        return nbytes * row_count(transfer.rows) / self.rows if self.rows and transfer.rows is not None else nbytes

    def work(self, schedule: Schedule, rank: int) -> list[float]:
        """Return the work of every step of a rank, as a share of `visit_s`."""
        shares = schedule.work(rank)
        if self.work_shares is None:
            return shares
        owners = (None if block is None else schedule.owner(block) for block in schedule.visits[rank])
        of_visits = [0.0 if owner is None else self.work_shares[rank, owner] for owner in owners]
        return [share * of_visit for share, of_visit in zip(shares, of_visits, strict=True)]
