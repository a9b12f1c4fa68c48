"""What a schedule is priced with: the rates of links, and the work of a pass."""

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
