"""What a rank of the ring does in one direction of a call: its visits with their tiles, and its messages.

Where both sides move, in different visits, the pass has two halves, each with a plan of its own: its schedule has the
visits in which its side moves. They are run together, step by step, and what they give is accumulated together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch

from burst_plugin.comm.buffers import Packing
from burst_plugin.compute.accumulators import BlockAccumulators
from burst_plugin.compute.passes import Part
from burst_plugin.compute.shapes import Shapes
from burst_plugin.compute.tile_attention import NO_POSITIONS, VisitPositions
from burst_plugin.kernels.varlen import DQ_ROWS
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.routes import Attending, PassKey, Route
from burst_plugin.ring.send_recv_plan import SendRecvPlan
from burst_plugin.sequence.layout import positions, token_count
from burst_plugin.sequence.tile_splitting import batched, cut, split_pieces, split_tail
from burst_plugin.sequence.tiles import Tile
from burst_plugin.topology import Traffic
from burst_plugin.types import SIDES, Direction, Rows, Side, Spec, row_count

__all__ = ["KernelTiles", "PassPlan"]

_LARGEST_BATCH = 2**16 - 1  # the most that a CUDA kernel accepts; pieces and spans of a tile count as batch rows
_FILLED_BYTES = 2**29  # of rows that kernels may add to documents in one call, in float32


class KernelTiles(NamedTuple):
    """The tiles that a kernel can take: with its `features`, for `shapes`, told of positions or not."""

    features: frozenset[str]
    shapes: Shapes
    uses_positions: bool
    max_logits: bool

    def of(self, tiles: Sequence[Tile]) -> tuple[Tile, ...]:
        """Return the same work in tiles that the kernel can take."""
        if "windows" not in self.features:
            most = max(1, _LARGEST_BATCH // self.shapes.batch)
            tiles = [piece for tile in tiles for piece in cut(tile, most)]
        if self.uses_positions:  # which pieces cannot share as a batch
            tiles = [piece for tile in tiles for piece in split_pieces(tile)]
        elif "varlen" in self.features and not self.max_logits:
            tiles = [*batched(tiles, self.most_spans)]
        return tuple(tiles)

    @property
    def most_spans(self) -> int:
        """Return how many documents go into one call: kernels have rows of their own, filled up, for dq of each."""
        widest = max(self.shapes.qk_dim, self.shapes.v_dim)
        document_bytes = self.shapes.batch * self.shapes.q_heads * DQ_ROWS * widest * 4
        return min(_LARGEST_BATCH // self.shapes.batch, _FILLED_BYTES // document_bytes)


@dataclass(frozen=True, eq=False, repr=False)
class PassPlan:
    """What a rank of the ring does in one direction of a call.

    moving: the side whose blocks go around.
    rounded: by side, whether results may be in the type of contributions: if nothing is added to them any more.
    packing: how tensors travel.
    halved: whether this is a half of the pass, and the other side moves in the other one.
    other: the other half, if this is the first.
    """

    direction: Direction
    moving: Side
    rank_state: RankState
    attending: Attending
    kernel_tiles: KernelTiles
    rounded: Mapping[Side, bool]
    device: torch.device
    packing: Callable[[tuple[Spec, ...]], Packing]
    halved: bool = False
    other: PassPlan | None = None

    @property
    def halves(self) -> tuple[PassPlan, ...]:
        """Return both halves, or all of it if one side moves in all visits."""
        return (self,) if self.other is None else (self, self.other)

    @property
    def moving_sides(self) -> str:
        """Return which side moves, or which two, for people to read."""
        return " and ".join(half.moving for half in self.halves)

    @property
    def parts(self) -> int:
        """Return how many parts the heads are cut into."""
        return self.rank_state.strategy.parts_of(self.direction)

    @cached_property
    def route(self) -> Route:
        """Return the visits of this rank, and what it sends."""
        _, results = self.kernel_tiles.shapes.side(self.direction, self.moving)
        state, place = self.rank_state, self.rank_state.mesh_group.place
        key = PassKey(self.attending, self.moving, bool(results), self.parts, place, self.halved)
        return state.route_table.route(state.ring_rank, key)

    @cached_property
    def tiles(self) -> dict[tuple[int, bool], tuple[Tile, ...]]:
        """Return the work of a visit, in tiles that the kernel takes, by owner and whether it is the tail."""
        schedule, tiles = self.route.schedule, {}
        for owner, work in self.route.tiles.items():
            head, tail = split_tail(work, schedule.tail_share if owner == schedule.rank else 0.0)
            tiles[owner, False], tiles[owner, True] = self.kernel_tiles.of(head), self.kernel_tiles.of(tail)
        return tiles

    def positions(self, owner: int) -> VisitPositions:
        """Return the positions of the tokens that meet in a visit, if anything depends on them."""
        if not self.kernel_tiles.uses_positions:
            return NO_POSITIONS
        table, trees = self.rank_state.positions, self.attending.mask.trees
        most = (self.attending.q.length + self.attending.kv.length) * (2 if trees else 1)
        held = [self.route.runs[side][owner] for side in SIDES]
        q, k = (table.of((runs, self.device), most, partial(positions, runs, self.device)) for runs in held)
        if len(trees) != 1:  # of several none counts: see `choices`
            return VisitPositions(q, k, columns=k)
        (tree,) = trees
        places = zip(held, (q, k), strict=True)
        logical = [table.of((runs, self.device, tree), most, partial(tree.logical, x)) for runs, x in places]
        return VisitPositions(logical[0], logical[1], columns=k)

    @cached_property
    def send_recv(self) -> SendRecvPlan:
        """Return the steps and messages."""
        packing = cache(self._packing_of_block)
        schedule, peers = self.route.schedule, self.rank_state.ring_peers
        return SendRecvPlan(self.direction, self.moving, self.device, schedule, peers, packing)

    def accumulators(self, side: Side, parts: Sequence[Part]) -> BlockAccumulators:
        """Return empty accumulators of a side of this rank's own block."""
        return BlockAccumulators(self._specs[side], self.device, [partial(part.accumulator, side) for part in parts])

    @cached_property
    def _specs(self) -> dict[Side, Sequence[Spec]]:
        """Shapes and types of what accumulates of this rank's block, by side."""
        whole = self._of_block(self.route.schedule.rank, None)
        return {side: whole.side(self.direction, side)[1] for side in SIDES}

    def _packing_of_block(self, traffic: Traffic, block: int, rows: Rows | None) -> Packing:
        """Return how rows of a part of a rank's block travel, or partial results of them."""
        part = self._of_block(self.route.schedule.owner(block), rows).of_part(self.parts)
        operands, results = part.side(self.direction, self.moving)
        return self.packing(tuple(operands if traffic is Traffic.GATHER else results))

    def _of_block(self, owner: int, rows: Rows | None) -> Shapes:
        """Return the shapes of one rank's block, or of some of its rows, whichever side moves."""
        shapes = self.kernel_tiles.shapes
        if rows is not None:
            count = row_count(rows)
            return shapes._replace(q_len=count, kv_len=count)
        return shapes._replace(q_len=self._lengths["q"][owner], kv_len=self._lengths["kv"][owner])

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """Return by side and rank of the ring the tokens of its block."""
        state = self.rank_state
        runs = state.route_table.pairs(self.attending, self.moving, state.mesh_group.place).runs
        return {side: [*map(token_count, held)] for side, held in runs.items()}
