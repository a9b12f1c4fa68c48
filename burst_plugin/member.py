"""One rank's place in a ring: what stays the same from call to call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from burst_plugin.executor import Packing, Trace
from burst_plugin.layout import LAYOUTS, Layout
from burst_plugin.mask import Mask, Tile, tiles
from burst_plugin.schedule import SCHEDULES, RankPlan, Schedule
from burst_plugin.strategy import Shapes, Strategy
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.transport import Channel, Transport

__all__ = ["Member", "TileTable", "as_traffic"]

_KNOWN_TABLES = 64  # tile tables to remember; lengths may vary without end
TileTable = Mapping[int, tuple[Tile, ...]]


@dataclass
class Member:
    """A rank, the ring it is in, and its transport."""

    rank: int
    topology: Topology
    strategy: Strategy
    transport: Transport
    trace: Trace | None = None
    choices: dict[str, str] = field(default_factory=dict)
    expected_bytes: Counter[Channel] = field(default_factory=Counter)
    _plans: dict[bool, RankPlan] = field(default_factory=dict)
    _tiles: dict[tuple[Mask, int, int, bool], TileTable] = field(default_factory=dict)
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _stream: object = None

    @property
    def layout(self) -> Layout:
        """The rule by which tokens are dealt out."""
        return LAYOUTS[self.strategy.layout]

    def schedule(self, reduces: bool) -> Schedule:
        """The schedule of all ranks, for passes that reduce sums or do not."""
        return SCHEDULES[self.strategy.schedule_for(self.topology)](self.topology, reduces)

    def plan(self, reduces: bool) -> RankPlan:
        """The schedule of this rank, worked out once."""
        if reduces not in self._plans:
            self._plans[reduces] = self.schedule(reduces).plan(self.rank)
        return self._plans[reduces]

    def tiles(self, mask: Mask, shapes: Shapes, queries_travel: bool) -> TileTable:
        """The tiles of this rank's visits, by the owner of the block visited; worked out once."""
        key = (mask, shapes.q_len, shapes.kv_len, queries_travel)
        if key not in self._tiles:
            if len(self._tiles) >= _KNOWN_TABLES:
                self._tiles.clear()
            ranks = self.topology.ranks
            q = [self.layout.runs(r, ranks, shapes.q_len * ranks) for r in range(ranks)]
            k = [self.layout.runs(r, ranks, shapes.kv_len * ranks) for r in range(ranks)]
            self._tiles[key] = {
                owner: tiles(
                    mask, q[owner if queries_travel else self.rank], k[self.rank if queries_travel else owner]
                )
                for owner in range(ranks)
            }
        return self._tiles[key]

    def count(self, operands: Packing, sums: Packing | None) -> None:
        """Note what the schedule says that one pass with these blocks sends."""
        for channel, hops in self.plan(sums is not None).sends.items():
            packing = operands if channel[0] is Traffic.GATHER or sums is None else sums
            self.expected_bytes[Channel(*channel)] += hops * packing.nbytes

    @contextmanager
    def exclusive(self, device: torch.device) -> Iterator[None]:
        """One pass at a time and, on GPUs, all on one stream: nothing else has been tested."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "burst attention was entered while another of its passes was running on the same group; run "
                "microbatches one after another, or give each its own ContextParallel"
            )
        try:
            if device.type == "cuda":
                self._check_stream()
            yield
        finally:
            self._busy.release()

    def _check_stream(self) -> None:
        stream = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("burst attention inside a CUDA graph is not supported; switch CUDA graphs off")
        self._stream = self._stream or stream
        if stream != self._stream:
            raise RuntimeError(
                f"burst attention ran on {self._stream} before and now on {stream}; run all passes of one "
                "context-parallel group on one CUDA stream"
            )


def as_traffic(sent_bytes: Mapping[Channel, int]) -> dict[str, dict[str, int]]:
    """Bytes by channel as `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`."""
    return {
        link.value: {traffic.value: sent_bytes.get(Channel(traffic, link), 0) for traffic in Traffic} for link in Link
    }
