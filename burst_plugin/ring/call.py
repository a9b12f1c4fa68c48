"""One attention call of one rank, all choices made.

Calls that differ in nothing but the seed of dropout share a `CallKind`, which looks up routes, tiles and messages
once; a `Call` is a kind and a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Packing
from burst_plugin.comm.call_identity import CallId
from burst_plugin.compute.accumulators import OwnSums
from burst_plugin.compute.passes import Part, PassCargo
from burst_plugin.compute.shapes import Shapes
from burst_plugin.compute.tile_attention import NO_POSITIONS, TileWork, VisitPositions
from burst_plugin.compute.varlen import SpanTable
from burst_plugin.kernels import How, Kernel
from burst_plugin.kernels.varlen import DQ_ROWS
from burst_plugin.ring.executor import RingPass
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.routes import Attending, Route
from burst_plugin.ring.send_recv_plan import SendRecvPlan
from burst_plugin.ring.ulysses import HeadExchange
from burst_plugin.ring.ulysses_groups import GroupBlock
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import positions, token_count
from burst_plugin.sequence.tile_splitting import batched, cut, split_pieces, split_tail
from burst_plugin.sequence.tiles import Tile
from burst_plugin.topology import Traffic
from burst_plugin.types import DIRECTIONS, FULL, SIDES, Direction, Rows, Side, Spec

__all__ = ["Call", "CallKind", "Extras"]

_LARGEST_BATCH = 2**16 - 1  # the most that a CUDA kernel accepts; pieces and spans of a tile count as batch rows
_FILLED_BYTES = 2**29  # of rows that kernels may add to documents in one call, in float32


class Extras(NamedTuple):
    """What a call has besides queries, keys and values, as ranks compare it.

    `shared_bias`: one for all heads; `exchanged_bias`: its rows and type, where it is exchanged with heads.
    """

    sink: bool = False
    bias: bool = False
    shared_bias: bool = False
    exchanged_bias: str = ""

    @property
    def listed(self) -> tuple[str, ...]:
        """What there is, for people to read."""
        named = (("sink", self.sink), ("bias", self.bias), ("shared bias", self.shared_bias))
        return (*(name for name, there in named if there), *([self.exchanged_bias] if self.exchanged_bias else []))


@dataclass(frozen=True)
class CallKind:
    """Calls of one rank that differ in nothing but the seed of dropout, and what is looked up once for all of them.

    `shapes` are those of the ring, after heads have been exchanged, with the lengths of the longest block; `scores`
    are those of all heads, seed aside; `ranks_per_kv_head` ranks of a Ulysses group share a key/value head.
    """

    rank_state: RankState
    shapes: Shapes
    attending: Attending
    scores: Scores
    kernel: Kernel
    moving_sides: Mapping[Direction, Side]
    device: torch.device
    extras: Extras
    deterministic: bool = False
    max_logits: bool = False
    lse: bool = False
    ranks_per_kv_head: int = 1

    @property
    def heads(self) -> int:
        """Query heads of all ranks of a Ulysses group together, those that q had before they were exchanged."""
        return self.shapes.q_heads * self.rank_state.strategy.ulysses_degree

    @cached_property
    def choices(self) -> dict[str, str]:
        """What was chosen, for people to read."""
        schedules = dict.fromkeys(route.schedule.name for route in self.routes.values())
        return {
            **dict[str, str](self.moving_sides.items()),
            "kernel": self.kernel.name,
            "schedule": " / ".join(schedules),
        }

    # -------------------------------------------------------------------------------------------- visits and tiles

    @cached_property
    def routes(self) -> dict[Direction, Route]:
        """By direction: the visits of this rank, and what it sends."""
        table, rank, routes = self.rank_state.route_table, self.rank_state.ring_rank, {}
        for direction, moving in self.moving_sides.items():
            _, sums = self.shapes.side(direction, moving)
            routes[direction] = table.route(rank, self.attending, moving, bool(sums), self.part_count(direction))
        return routes

    @cached_property
    def tiles(self) -> dict[tuple[Direction, int, bool], tuple[Tile, ...]]:
        """By direction, owner and whether it is the tail: the work of a visit, in tiles that the kernel has."""
        by_visit = {}
        for direction, route in self.routes.items():
            for owner, tiles in route.tiles.items():
                halves = split_tail(tiles, route.schedule.tail_share if owner == self.rank_state.ring_rank else 0.0)
                for is_tail, mine in zip((False, True), halves, strict=True):
                    by_visit[direction, owner, is_tail] = self._supported_by_the_kernel(mine)
        return by_visit

    def _supported_by_the_kernel(self, tiles: Sequence[Tile]) -> tuple[Tile, ...]:
        if "windows" not in self.kernel.features:
            most = max(1, _LARGEST_BATCH // self.shapes.batch)
            tiles = [piece for tile in tiles for piece in cut(tile, most)]
        if self._needs_positions:  # which pieces cannot share as a batch
            tiles = [piece for tile in tiles for piece in split_pieces(tile)]
        elif "varlen" in self.kernel.features and not self.max_logits:
            tiles = [*batched(tiles, self._most_spans)]
        return tuple(tiles)

    @property
    def _most_spans(self) -> int:
        """How many documents go into one call: kernels have rows of their own, filled up, for dq of each."""
        widest = max(self.shapes.qk_dim, self.shapes.v_dim)
        document_bytes = self.shapes.batch * self.shapes.q_heads * DQ_ROWS * widest * 4
        return min(_LARGEST_BATCH // self.shapes.batch, _FILLED_BYTES // document_bytes)

    @cached_property
    def spans(self) -> SpanTable:
        """The rows of tiles that are put together of several."""
        return SpanTable(self.shapes.batch, self.device)

    def positions(self, direction: Direction, owner: int) -> VisitPositions:
        """Which tokens meet in a visit, if anything depends on them."""
        if not self._needs_positions:
            return NO_POSITIONS
        runs = self.routes[direction].runs
        return VisitPositions(*(positions(runs[side][owner], self.device) for side in SIDES))

    @cached_property
    def _needs_positions(self) -> bool:
        return self.extras.bias or self.scores.needs_positions

    # ---------------------------------------------------------------------------------------- blocks, sums, messages

    @property
    def sends_row_factor(self) -> bool:
        """Whether queries travel backward, with a factor per row in place of out (`softmax.row_factor`)."""
        travel = self.moving_sides["backward"] == "q" and self.rank_state.route_table.ring_ranks > 1
        return travel and not self.shapes.sends_out

    def part_count(self, direction: Direction) -> int:
        """How many parts the heads are cut into."""
        return self.rank_state.strategy.parts_of(direction)

    def rounds(self, direction: Direction, side: Side) -> bool:
        """Whether complete sums go into the type of q, k and v before anything else is done to them."""
        return not self.extras.sink if direction == "forward" else side == "q" or self.ranks_per_kv_head == 1

    def own_sums(self, direction: Direction, parts: Sequence[Part], side: Side) -> OwnSums:
        """The sums of a side of this rank's block, empty."""
        specs = self._own_specs[direction, side]
        return OwnSums(specs, self.device, len(parts), lambda part, place: parts[part].sums(side, place, False))

    @cached_property
    def _own_specs(self) -> dict[tuple[Direction, Side], Sequence[Spec]]:
        """Shapes and types of the sums of this rank's block, by direction and side."""
        whole = self._of_block(self.rank_state.ring_rank, None)
        return {(direction, side): whole.side(direction, side)[1] for direction in DIRECTIONS for side in SIDES}

    @cached_property
    def itineraries(self) -> dict[Direction, SendRecvPlan]:
        """By direction: the steps and messages of a pass."""
        peers = self.rank_state.ring_peers
        return {
            direction: SendRecvPlan(route.schedule, peers, cache(partial(self._packing_of_block, direction)))
            for direction, route in self.routes.items()
        }

    @cached_property
    def by_link(self) -> frozenset[bool]:
        """Whether the schedules of this call need separate communicators for the two links."""
        return frozenset(route.schedule.by_link for route in self.routes.values())

    def _packing_of_block(self, direction: Direction, traffic: Traffic, block: int, rows: Rows | None) -> Packing:
        """How rows of a part of a rank's block, or of its sums, travel."""
        owner = self.routes[direction].schedule.owner(block)
        part = self._of_block(owner, rows).of_part(self.part_count(direction))
        operands, sums = part.side(direction, self.moving_sides[direction])
        return self.packing(tuple(operands if traffic is Traffic.GATHER else sums))

    @cached_property
    def packing(self) -> Callable[[tuple[Spec, ...]], Packing]:
        """How tensors travel; blocks of one length, and the parts of their heads, travel alike."""
        return cache(partial(Packing, labelled=self.device.type == "cpu"))

    def _of_block(self, owner: int, rows: Rows | None) -> Shapes:
        """The shapes of one rank's block, or of some of its rows, whichever side travels."""
        if rows is not None:
            count = sum(stop - start for start, stop in rows)
            return self.shapes._replace(q_len=count, kv_len=count)
        return self.shapes._replace(q_len=self._lengths["q"][owner], kv_len=self._lengths["kv"][owner])

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """How many tokens of either side every rank holds."""
        runs = self.rank_state.route_table.pairs(self.attending).runs
        return {side: [token_count(held) for held in ranks] for side, ranks in runs.items()}

    @cached_property
    def group_blocks(self) -> dict[str, GroupBlock]:
        """What the Ulysses group of this rank holds of either side."""
        table, rank = self.rank_state.route_table, self.rank_state.ring_rank
        return {side: table.group_blocks(self.attending.of(side))[rank] for side in SIDES}


@dataclass(frozen=True)
class Call:
    """One call of a kind; its `scores` have the seed."""

    kind: CallKind
    scores: Scores

    @cached_property
    def signature(self) -> Mapping[str, object]:
        """What has to be the same on every rank."""
        kind = self.kind
        degree = kind.rank_state.ulysses_group.degree
        heads = {"q_heads": kind.heads, "kv_heads": kind.shapes.kv_heads * degree // kind.ranks_per_kv_head}
        named = {**kind.shapes._asdict(), **heads}
        return {
            **{name: named[name] for name in ("batch", "q_heads", "kv_heads", "qk_dim", "v_dim", "dtype")},
            "query tokens": kind.attending.q,
            "key tokens": kind.attending.kv,
            "with": kind.extras.listed,
            **({"return_lse": kind.lse} if degree > 1 else {}),  # then it is exchanged
            **{f"{direction} moving": side for direction, side in kind.moving_sides.items()},
            "kernel in use": kind.kernel.name,
            "mask": kind.attending.mask,
            "scores": self.scores,
        }

    def tile_works(self, direction: Direction, bias: Tensor | None, wants_dbias: bool = True) -> list[TileWork]:
        """The kernel, ready to work on the tiles of a pass; one for each part of the heads."""
        kind, parts = self.kind, self.kind.part_count(direction)
        heads, works = kind.shapes.q_heads // parts, []
        first_head = kind.rank_state.ulysses_group.heads_of(kind.heads).start
        for part in range(parts):
            largest = None
            if kind.max_logits and direction == "forward":
                largest = torch.full((heads,), -torch.inf, dtype=kind.shapes.sum_dtype, device=kind.device)
            mine = slice(part * heads, (part + 1) * heads)
            first = first_head + mine.start
            how = How(FULL, self.scores.of_heads(slice(first, first + heads)), first_head=first)
            how = how._replace(deterministic=kind.deterministic, bias_has_grad=wants_dbias)
            bias_of_part = bias if bias is None or bias.shape[1] == 1 else bias[:, mine]
            works.append(TileWork(kind.kernel, how, kind.spans, bias_of_part, largest))
        return works

    def head_exchange(self, direction: Direction, which: CallId) -> HeadExchange:
        """The exchange of heads before and after the ring, in one pass."""
        kind, rank_state = self.kind, self.kind.rank_state
        label = (
            self._label(direction, which) if rank_state.ulysses_group.degree > 1 else None
        )  # no messages in a group of one
        return HeadExchange(
            ulysses_group=rank_state.ulysses_group,
            transport=rank_state.ulysses_transport,
            blocks=kind.group_blocks,
            expected_bytes=rank_state.expected_bytes,
            packing=kind.packing,
            label=label,
            profile=rank_state.profile,
            ranks_per_kv_head=kind.ranks_per_kv_head,
        )

    def ring_pass(self, direction: Direction, parts: Sequence[Part], own: OwnSums, which: CallId) -> RingPass:
        """The ring of this pass; what travels is summed up in `own` when it is home."""
        kind, rank_state = self.kind, self.kind.rank_state
        send_recv = kind.itineraries[direction]
        rank_state.expected_bytes.update(send_recv.sent_bytes)
        rank_state.progress.ring_pass = ring_pass = RingPass(
            send_recv,
            rank_state.transport,
            PassCargo(parts, kind.moving_sides[direction], own, kind.device),
            direction=direction,
            label=self._label(direction, which),
            profile=rank_state.profile,
        )
        return ring_pass

    @cached_property
    def _digest(self) -> bytes:
        rank_state = self.kind.rank_state
        text = repr((rank_state.ring_id, self.signature, rank_state.topology, rank_state.strategy.compared()))
        return blake2b(text.encode(), digest_size=8).digest()

    def _label(self, direction: Direction, which: CallId) -> Tensor | None:
        """What every message of a pass carries on CPUs: of which kind of call it is, which one, and which pass."""
        if self.kind.device.type != "cpu":
            return None
        return torch.frombuffer(bytearray(which.label(direction, self._digest)), dtype=torch.uint8)
