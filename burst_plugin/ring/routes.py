"""Routes: the visits of a rank, their tiles, and its transfers, from a schedule, a mask and a layout.

Routes follow from data that every rank has, so that all ranks agree on them. A route is worked out once for each kind
of call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from burst_plugin.ring.systems.rank_groups import GroupBlock, group_block
from burst_plugin.schedule.direct import sent_early
from burst_plugin.schedule.rings import SCHEDULES, SPARSE
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.schedule.steps import RankSchedule, Required
from burst_plugin.sequence.layout import LAYOUTS, Layout, Run, Tokens, cut_runs, in_chunks, shortened, token_count
from burst_plugin.sequence.mask import regions_of
from burst_plugin.sequence.masks import Mask
from burst_plugin.sequence.required_rows import RequiredRows, find_required_rows
from burst_plugin.sequence.tiles import Regions, Tile, check_strides, tiles_of
from burst_plugin.strategy import AUTO, Strategy
from burst_plugin.topology import Topology
from burst_plugin.types import OTHER_SIDE, SIDES, Side, row_count

_KNOWN = 64  # kinds of calls to remember; lengths may vary without end


class Attending(NamedTuple):
    """An attention problem: the sequence `q` of queries, the sequence `kv` of keys, and the mask between them."""

    q: Tokens
    kv: Tokens
    mask: Mask

    def of(self, side: Side) -> Tokens:
        """Return the sequence of queries for side "q", of keys for side "kv"."""
        return self.q if side == "q" else self.kv


# From the rows that all visits require, the side that moves and the number of ranks: the rows of some visits.
Visits = Callable[[Required | None, Side, int], Required]


class PassKey(NamedTuple):
    """The key of a pass in tables of schedules and routes.

    moving: the side that travels.
    reduces: whether partial results travel, too.
    parts: into how many parts, by heads, blocks are cut.
    place: which of several rings, where groups gather blocks: the place of its ranks in their groups.
    visits: selects some of all visits, as `PassPlan.visits`; None for all.
    """

    attending: Attending
    moving: Side
    reduces: bool
    parts: int = 1
    place: int = 0
    visits: Visits | None = None


class Pairs:
    """The tiles of every pair of a query rank and a key rank of a ring, computed when they are asked for.

    runs: `runs[side][rank]` are the tokens that a rank of the ring holds of side "q" or "kv".
    """

    def __init__(self, attending: Attending, runs: Mapping[str, Sequence[tuple[Run, ...]]]) -> None:
        lengths, mask = (attending.q.length, attending.kv.length), attending.mask
        self._regions: list[tuple[tuple[int, int] | None, Regions]] = []  # with the batch rows that they are for
        if mask.rows is None:
            self._regions = [(None, Regions(regions_of(mask, *lengths)))]
        start = 0
        for of_row, alike in groupby(mask.of_row(row) for row in range(mask.rows or 0)):
            stop = start + len(list(alike))
            self._regions.append(((start, stop), Regions(regions_of(of_row, *lengths))))
            start = stop
        self.runs = runs
        check_strides(run for shards in runs.values() for held in shards for run in held)
        self._required: dict[Side, RequiredRows | None] = {}
        self._of_ranks: dict[tuple[int, int], tuple[Tile, ...]] = {}

    def tiles(self, q_runs: Sequence[Run], k_runs: Sequence[Run]) -> tuple[Tile, ...]:
        """Return the tiles in which queries at the positions `q_runs` attend to keys at the positions `k_runs`."""
        if not q_runs or not k_runs:
            return ()
        return tuple(
            tile if batch is None else tile._replace(batch=batch)
            for batch, regions in self._regions
            for tile in tiles_of(regions, q_runs, k_runs)
        )

    def of_visit(self, moving: Side, owner: int, rank: int) -> tuple[Tile, ...]:
        """Return the tiles of rank `owner`'s block of side `moving` with rank `rank`'s block of the other side."""
        return self.of_ranks(owner, rank) if moving == "q" else self.of_ranks(rank, owner)

    def of_ranks(self, q: int, k: int) -> tuple[Tile, ...]:
        """Return the tiles in which rank `q`'s queries attend to rank `k`'s keys."""
        if (q, k) not in self._of_ranks:
            self._of_ranks[q, k] = self.tiles(self.runs["q"][q], self.runs["kv"][k])
        return self._of_ranks[q, k]

    def required(self, moving: Side) -> RequiredRows | None:
        """Return the rows that each rank works on of every block of side `moving`, by rank and owner.

        None where every block goes to all ranks: if ranks need 40 % or more of every block, or too many runs meet.
        """
        if moving not in self._required:
            regions = [of_rows if moving == "kv" else of_rows.transposed for _, of_rows in self._regions]
            shards = self.runs[OTHER_SIDE[moving]], self.runs[moving]
            self._required[moving] = find_required_rows(regions, *shards)
        return self._required[moving]


@dataclass(frozen=True)
class Route:
    """One rank's part of one pass: its visits and transfers, and the tiles of its visits.

    schedule: the rank's steps.
    tiles: by owner of the block visited.
    runs: by side and owner, the tokens that meet in the visit.
    """

    schedule: RankSchedule
    tiles: Mapping[int, tuple[Tile, ...]]
    runs: Mapping[Side, Mapping[int, tuple[Run, ...]]]  # by side and owner: the tokens that meet in the visit


class RouteTable:
    """A table of the routes and schedules of passes under one topology and strategy.

    Ranks of one process may share it.

    With a `ulysses_degree` rank r of the ring is Ulysses group r, and its block has the tokens of that group. Only
    `shards` counts ranks of the context-parallel group; all other methods count ranks of the ring.

    Where groups gather blocks, this holds for the side that stays. Blocks of the side that moves belong to single
    ranks, at one `place` in their groups: every such ring has routes of its own.
    """

    def __init__(self, topology: Topology, strategy: Strategy) -> None:
        self._cp_topology, self._strategy = topology, strategy
        self.groups = strategy.groups(topology)
        self._ring_topology = self.groups.ring_topology
        self._pairs: dict[tuple[Attending, Side, int], Pairs] = {}
        self._group_blocks: dict[Tokens, list[GroupBlock]] = {}
        self._schedules: dict[PassKey, Schedule] = {}
        self._dense: dict[tuple[bool, int], Schedule] = {}
        self._routes: dict[tuple[int, PassKey], Route] = {}

    @property
    def cp_ranks(self) -> int:
        """Return the number of ranks of the context-parallel group."""
        return self._cp_topology.ranks

    @property
    def ring_ranks(self) -> int:
        """Return the number of ranks of the ring."""
        return self._ring_topology.ranks

    @property
    def ring_topology(self) -> Topology:
        """Return the nodes and ranks of a ring, where Ulysses groups or mesh groups count as one rank each."""
        return self._ring_topology

    @property
    def moving(self) -> frozenset[str]:
        """Return the values of the options `forward` and `backward`: the sides that are asked to move."""
        return frozenset((self._strategy.forward, self._strategy.backward))

    @property
    def schedule_name(self) -> str:
        """Return the name of the schedule that passes use unless a mask leaves out much of the work."""
        return self._strategy.schedule_for(self._ring_topology)

    def layout(self, tokens: Tokens) -> Layout:
        """Return the layout that spreads `tokens` over ranks: their own, else the strategy's.

        Raises ValueError if that is "auto", which is a choice by the mask, or if their `holders` name another number
        of ranks than the context-parallel group has.
        """
        own: Layout | None = getattr(tokens, "own_layout", None)  # of a subclass, which training need not import
        if own is not None:
            return own
        if tokens.holders is not None:
            ranks = len(set(tokens.holders))
            if ranks != self.cp_ranks:
                raise ValueError(
                    f"Tokens(holders={shortened(tokens.holders)}) is for {ranks} ranks, but the "
                    f"context-parallel group has {self.cp_ranks}"
                )
            return in_chunks(tokens.holders, tokens.bounds)
        name = tokens.layout or self._strategy.layout
        if name == AUTO:
            raise ValueError(
                "layout='auto' depends on the mask: let tokens = cp.tokens(length, mask), or what shard_batch has "
                "chosen, batch['burst'].tokens, and pass tokens= to shard, positions and burst_attention; or name a "
                "layout"
            )
        return LAYOUTS[name]

    def shards(self, tokens: Tokens) -> list[tuple[Run, ...]]:
        """Return the tokens of a sequence that each rank of the context-parallel group holds, by rank, as runs."""
        layout, ranks = self.layout(tokens), self._cp_topology.ranks
        return [layout.runs(rank, ranks, tokens) for rank in range(ranks)]

    def group_blocks(self, tokens: Tokens) -> list[GroupBlock]:
        """Return the tokens of a sequence that each group of ranks holds, and where each member's rows are."""
        if tokens not in self._group_blocks:
            if len(self._group_blocks) >= _KNOWN:
                self._group_blocks.clear()
            shards, groups = self.shards(tokens), map(self.groups.members, range(self.groups.ring_size))
            self._group_blocks[tokens] = [group_block([shards[rank] for rank in members]) for members in groups]
        return self._group_blocks[tokens]

    def runs(self, tokens: Tokens) -> list[tuple[Run, ...]]:
        """Return the tokens of a sequence that each rank of the ring holds, its group's block, as runs."""
        return [group.runs for group in self.group_blocks(tokens)]

    def pairs(self, attending: Attending, moving: Side = "kv", place: int = 0) -> Pairs:
        """Return the tiles of every pair of ranks of a ring, computed at the first call.

        moving, place: the side that moves, and which of several rings; read only where groups gather blocks.
        """
        gathers = self.groups.gathers
        key = (attending, moving, place) if gathers else (attending, "kv", 0)
        if key not in self._pairs:
            if len(self._pairs) >= _KNOWN * (self.groups.size if gathers else 1):
                for known in (self._pairs, self._schedules, self._routes):
                    known.clear()
            runs: dict[str, list[tuple[Run, ...]]] = {side: self.runs(attending.of(side)) for side in SIDES}
            if gathers:
                shards = self.shards(attending.of(moving))
                runs[moving] = [shards[rank] for rank in self.groups.ring(place)]
            self._pairs[key] = Pairs(attending, runs)
        return self._pairs[key]

    def route(self, ring_rank: int, key: PassKey) -> Route:
        """Return the route of rank `ring_rank` of the ring in a pass: its visits, its transfers and its tiles."""
        pairs = self.pairs(key.attending, key.moving, key.place)
        if (ring_rank, key) not in self._routes:
            schedule, moving, local = self.schedule(key).of_rank(ring_rank), key.moving, OTHER_SIDE[key.moving]
            owners = list(dict.fromkeys(schedule.owner(s.visit) for s in schedule.steps if s.visit is not None))
            rows_of = schedule.rows
            runs = {local: dict.fromkeys(owners, pairs.runs[local][ring_rank]), moving: {}}
            tiles = {}
            for owner in owners:
                rows = rows_of.get(owner)  # part 0 of a block has its owner's number
                block = pairs.runs[moving][owner]
                runs[moving][owner] = block if rows is None else cut_runs(block, rows)
                if rows is None:
                    tiles[owner] = pairs.of_visit(moving, owner, ring_rank)
                else:
                    tiles[owner] = pairs.tiles(runs["q"][owner], runs["kv"][owner])
            self._routes[ring_rank, key] = Route(schedule, tiles, runs)
        return self._routes[ring_rank, key]

    def dense(self, reduces: bool, parts: int = 1) -> Schedule:
        """Return the schedule that has every rank visit every block, cut into `parts`.

        reduces: whether partial results are sent to the owners of blocks.
        """
        if (reduces, parts) not in self._dense:
            whole = SCHEDULES[self.schedule_name](self._ring_topology, reduces, None)
            self._dense[reduces, parts] = whole.in_parts(parts)
        return self._dense[reduces, parts]

    def most_rows_moved(self, attending: Attending) -> tuple[int, int]:
        """Return the most rows of keys that a rank sends, or receives, if keys move: (between nodes, inside one)."""
        lengths = [token_count(held) for held in self.pairs(attending).runs["kv"]]
        return self.schedule(PassKey(attending, "kv", False)).most_rows_moved(lengths)

    def rows_visited(self, attending: Attending) -> list[int]:
        """Return by rank of the ring how many rows of keys its queries meet, in all its visits."""
        pairs = self.pairs(attending)
        required = pairs.required("kv")
        if required is None:
            return [sum(map(token_count, pairs.runs["kv"]))] * self.ring_ranks
        return [sum(map(row_count, needed.values())) for needed in required]

    def schedule(self, key: PassKey) -> Schedule:
        """Return the schedule of a pass; by "auto" a sparse one if it sends less over the scarcer link."""
        attending, moving, reduces, parts, place, visits = key
        pairs = self.pairs(attending, moving, place)
        if key in self._schedules:
            return self._schedules[key]
        required: Required | None = pairs.required(moving)
        if visits is not None:
            required = visits(required, moving, self.ring_ranks)
        lengths = [token_count(held) for held in pairs.runs[moving]]
        if required is None:
            self._schedules[key] = self.dense(reduces, parts)
        else:
            names = [self.schedule_name, *SPARSE] if self._strategy.schedule == AUTO else [self.schedule_name]
            candidates = [
                sent_early(SCHEDULES[name](self._ring_topology, reduces, required).in_parts(parts), lengths)
                if name in SPARSE
                else self.dense(reduces, parts).pruned(required)
                for name in names
            ]
            self._schedules[key] = min(candidates, key=lambda schedule: schedule.most_rows_moved(lengths))
        return self._schedules[key]
