"""A rank's plan of one attention call: every choice made, every tile and message looked up.

A `Plan` has a `PassPlan` for each direction. Calls of one kind share all of it but the seed of dropout, so that the
steady state looks up nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Packing
from burst_plugin.comm.call_identity import CallId
from burst_plugin.compute.accumulators import BlockAccumulators, Tensors, in_parts
from burst_plugin.compute.passes import BackwardPart, ForwardPart, OfQueries, Part, VisitPositions
from burst_plugin.compute.shapes import Shapes
from burst_plugin.compute.up_projection import LatentBackwardPart, LatentForwardPart, UpProjection
from burst_plugin.compute.varlen import SpanTable
from burst_plugin.kernels import How, Kernel, Queries
from burst_plugin.kernels.varlen import DQ_ROWS, sent
from burst_plugin.ring.executor import RingPass, SendRecvPlan
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.request import Inputs, Wanted
from burst_plugin.ring.routes import Attending, PassKey, Route, Visits
from burst_plugin.ring.systems.group_exchange import GroupExchange
from burst_plugin.ring.systems.rank_groups import GroupBlock, member_rows
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Run, positions, token_count
from burst_plugin.sequence.tiles import Tile, batched, cut, split_pieces, split_tail, split_taken
from burst_plugin.topology import Traffic
from burst_plugin.types import FULL, SIDES, Direction, Rows, Side, Spec, row_count

if TYPE_CHECKING:
    from burst_plugin.profiling.recorder import PassLog

_MOST_WARM_UPS = 32  # passes of a thread
_LARGEST_BATCH = 2**16 - 1  # the most that a CUDA kernel accepts; pieces and spans of a tile count as batch rows
_FILLED_BYTES = 2**29  # of rows that kernels may add to documents in one call, in float32


class KernelTiles(NamedTuple):
    """Rules to cut or batch tiles into tiles that a call's kernel takes.

    features: of the kernel: with "windows" it takes any band, with "varlen" several sequences in one call.
    shapes: the shapes on the ring.
    uses_positions: whether the kernel needs the position of every row, as for a bias.
    max_logits: whether the largest scores are asked for.
    """

    features: frozenset[str]
    shapes: Shapes
    uses_positions: bool
    max_logits: bool

    def of(self, tiles: Sequence[Tile]) -> tuple[Tile, ...]:
        """Return `tiles`, cut or batched into tiles that the kernel can take."""
        if self.uses_positions or self.max_logits:
            tiles = [part for tile in tiles for part in split_taken(tile)]
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
        """Return how many documents one call of the kernel may take; each costs rows of memory in its dq."""
        widest = max(self.shapes.qk_dim, self.shapes.v_dim)
        document_bytes = self.shapes.batch * self.shapes.q_heads * DQ_ROWS * widest * 4
        return min(_LARGEST_BATCH // self.shapes.batch, _FILLED_BYTES // document_bytes)


@dataclass(frozen=True, eq=False, repr=False)
class PassPlan:
    """The plan of one rank for the forward or the backward pass of a call around the ring.

    moving: the side whose blocks go around.
    rank_state: the rank's place in the ring, its options and its caches.
    attending: the sequences and the mask.
    kernel_tiles: how tiles are cut for the kernel.
    rounded: by side, whether results may be in the narrow type of contributions, since nothing is added to them any
        more.
    packing: returns the layout of a message from the shapes and types of its tensors.
    visits: selects the visits of this pass: takes the rows that all visits require, `moving` and the number of ranks,
        and returns the required rows of some visits. None for all visits.
    other: the plan that moves queries, where this one moves keys and values in half of the visits; else None.
    """

    direction: Direction
    moving: Side
    rank_state: RankState
    attending: Attending
    kernel_tiles: KernelTiles
    rounded: Mapping[Side, bool]
    device: torch.device
    packing: Callable[[tuple[Spec, ...]], Packing]
    visits: Visits | None = None
    other: PassPlan | None = None

    @cached_property
    def rings(self) -> tuple[PassPlan, ...]:
        """Return the plan of each ring that the pass goes around: this one and, if both sides move, `other`."""
        return (self,) if self.other is None else (self, self.other)

    @property
    def moving_sides(self) -> str:
        """Return "q", "kv" or, if both sides move, "kv and q", for people to read."""
        return " and ".join(ring.moving for ring in self.rings)

    @cached_property
    def parts(self) -> int:
        """Return into how many parts the heads, and so blocks, are cut in this pass."""
        return self.rank_state.strategy.parts_of(self.direction)

    @cached_property
    def route(self) -> Route:
        """Return the route of this rank: its visits with their tiles, and its transfers."""
        _, results = self.kernel_tiles.shapes.side(self.direction, self.moving)
        state, place = self.rank_state, self.rank_state.group.ring_place
        key = PassKey(self.attending, self.moving, bool(results), self.parts, place, self.visits)
        return state.route_table.route(state.ring_rank, key)

    @cached_property
    def tiles(self) -> dict[tuple[int, bool], tuple[Tile, ...]]:
        """Return the tiles of each visit, cut for the kernel, by (owner of the block, whether it is the tail)."""
        schedule, tiles = self.route.schedule, {}
        for owner, work in self.route.tiles.items():
            head, tail = split_tail(work, schedule.tail_share if owner == schedule.rank else 0.0)
            tiles[owner, False], tiles[owner, True] = self.kernel_tiles.of(head), self.kernel_tiles.of(tail)
        return tiles

    def positions(self, owner: int) -> VisitPositions:
        """Return the positions of the queries and keys that meet in the visit of rank `owner`'s block."""
        table, trees = self.rank_state.positions, self.attending.mask.trees
        most = (self.attending.q.length + self.attending.kv.length) * (2 if trees else 1)
        held = [self.route.runs[side][owner] for side in SIDES]
        q, k = (table.of((runs, self.device), most, partial(positions, runs, self.device)) for runs in held)
        if len(trees) != 1:  # several trees count as none: see `choices`
            return VisitPositions(q, k, columns=k)
        (tree,) = trees
        places = zip(held, (q, k), strict=True)
        logical = [table.of((runs, self.device, tree), most, partial(tree.logical, x)) for runs, x in places]
        return VisitPositions(logical[0], logical[1], columns=k)

    @cached_property
    def send_recv(self) -> SendRecvPlan:
        """Return the plan of this rank's steps and messages in the pass."""
        packing = cache(self._packing_of_block)
        schedule, peers = self.route.schedule, self.rank_state.ring_peers
        return SendRecvPlan(self.direction, self.moving, self.device, schedule, peers, packing)

    def accumulators(self, parts: Sequence[Part]) -> dict[Side, BlockAccumulators]:
        """Return empty accumulators of this rank's own results: of its queries and, backward, its keys and values.

        parts: the parts of the heads, which make them.
        """
        accumulators = {}
        for side, specs in self._specs.items():
            if specs:
                accumulators[side] = BlockAccumulators(specs, self.device, parts, side)
        return accumulators

    @cached_property
    def _specs(self) -> dict[Side, Sequence[Spec]]:
        """The shapes and types of the accumulated results of this rank's block, by side."""
        whole = self._of_block(self.route.schedule.rank, None)
        return {side: whole.side(self.direction, side)[1] for side in SIDES}

    def _packing_of_block(self, traffic: Traffic, block: int, rows: Rows | None) -> Packing:
        """Return the layout of a message with rows of a part of a rank's block, or with their partial results."""
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
        """Return, by side and rank of the ring, the number of tokens in the rank's block."""
        state = self.rank_state
        runs = state.route_table.pairs(self.attending, self.moving, state.group.ring_place).runs
        return {side: [*map(token_count, held)] for side, held in runs.items()}


class Extras(NamedTuple):
    """Which inputs a call has besides queries, keys and values, as ranks compare them.

    shared_bias: whether all heads share the bias.
    exchanged_bias: text with its batch rows and type where ranks exchange heads, which have to be equal; ""
        elsewhere.
    """

    sink: bool = False
    bias: bool = False
    shared_bias: bool = False
    exchanged_bias: str = ""
    selection: bool = False

    @property
    def of_queries(self) -> str:
        """Return "bias" or "selection", an input with a row per query, which keeps queries in place; "" for none."""
        return "bias" if self.bias else "selection" if self.selection else ""

    @property
    def listed(self) -> tuple[str, ...]:
        """Return the names of the inputs that there are, for people to read."""
        named = (
            ("sink", self.sink),
            ("bias", self.bias),
            ("shared bias", self.shared_bias),
            ("selection", self.selection),
        )
        return (*(name for name, there in named if there), *([self.exchanged_bias] if self.exchanged_bias else []))


@dataclass(frozen=True, repr=False)
class Plan:
    """The plan of one attention call of one rank, with all choices made; see `choices.make_plan`.

    shapes: the shapes of tensors on the ring, after heads have been exchanged, with the lengths of the longest block.
    attending: the sequences and the mask.
    scores: how scores are computed, of all heads.
    extras: which inputs there are besides q, k and v.
    max_logits, lse: whether the largest scores, and lse, are asked for.
    ranks_per_kv_head: how many ranks of a Ulysses group share a key/value head.
    forward, backward: the plans of the two passes.
    spans: the rows of tiles that are made of several documents.
    packing: returns the layout of a message from the shapes and types of its tensors.
    exchange_kind: what this rank's group does before and after the ring; None for a group of one rank.
    """

    rank_state: RankState
    shapes: Shapes
    attending: Attending
    scores: Scores
    kernel: Kernel
    device: torch.device
    extras: Extras
    deterministic: bool
    max_logits: bool
    lse: bool
    ranks_per_kv_head: int
    forward: PassPlan
    backward: PassPlan
    spans: SpanTable
    packing: Callable[[tuple[Spec, ...]], Packing]
    exchange_kind: type[GroupExchange] | None

    @property
    def rings(self) -> tuple[PassPlan, ...]:
        """Return the plan of each ring of both passes: one per pass, or two where both sides move."""
        return (*self.forward.rings, *self.backward.rings)

    @property
    def warms_up(self) -> bool:
        """Return whether a call first runs its passes without messages: on GPUs, for the first few kinds of calls.

        Not so where ranks share a process. Later batches may bring new kinds without end.
        """
        state = self.rank_state
        return self.device.type == "cuda" and state.is_process and len(state.warmed_up) < _MOST_WARM_UPS

    @property
    def heads(self) -> int:
        """Return the number of query heads before an exchange of heads: of all ranks of a Ulysses group together."""
        return self.shapes.q_heads * self.rank_state.strategy.degree

    def with_seed(self, seed: int) -> Plan:
        """Return the plan of a call of this kind whose dropout has another seed; all else that was made is kept."""
        plan = copy(self)
        fields = vars(plan)  # with the values of cached properties
        fields["scores"] = replace(self.scores, seed=seed)
        for name in ("signature", "digest", "_hows"):
            fields.pop(name, None)
        return plan

    @cached_property
    def choices(self) -> dict[str, str]:
        """Return this call's moving side in each pass, its kernel and its schedule, by name, for people to read."""
        schedules = dict.fromkeys(each.route.schedule.name for each in self.rings)
        moving: dict[str, str] = {each.direction: each.moving_sides for each in (self.forward, self.backward)}
        return {**moving, "kernel": self.kernel.name, "schedule": " / ".join(schedules)}

    @cached_property
    def by_link(self) -> frozenset[bool]:
        """Return whether schedules need separate communicators for the two links: {False}, {True} or both."""
        return frozenset(each.route.schedule.by_link for each in self.rings)

    @cached_property
    def sends_row_factor(self) -> bool:
        """Return whether queries that travel backward carry a factor per row in place of out.

        It is `online_softmax.row_factor`. They do where queries move, or are gathered by a group, except in float16.
        """
        state = self.rank_state
        around = state.route_table.ring_ranks > 1 and any(ring.moving == "q" for ring in self.backward.rings)
        in_group = self.backward.moving == "kv" and state.group.gathers
        return (around or in_group) and not self.shapes.sends_out

    @cached_property
    def signature(self) -> Mapping[str, object]:
        """Return the values of this call that must be equal on every rank, by name."""
        degree = self.rank_state.group.head_shares
        heads = {"q_heads": self.heads, "kv_heads": self.shapes.kv_heads * degree // self.ranks_per_kv_head}
        named = {**self.shapes._asdict(), **heads}
        return {
            **{name: named[name] for name in ("batch", "q_heads", "kv_heads", "qk_dim", "v_dim", "dtype")},
            "query tokens": self.attending.q,
            "key tokens": self.attending.kv,
            "with": self.extras.listed,
            **({"return_lse": self.lse} if degree > 1 else {}),  # then it is exchanged
            **({} if self.shapes.latent is None else {"latents": self.shapes.latent}),
            **{f"{each.direction} moving": each.moving_sides for each in (self.forward, self.backward)},
            "kernel in use": self.kernel.name,
            "mask": self.attending.mask,
            "scores": self.scores,
        }

    # ----------------------------------------------------------------------------------------- what a pass is made of

    def forward_parts(self, inputs: Inputs) -> list[ForwardPart]:
        """Return the parts of the heads of `inputs`, ready for a forward pass."""
        parts = []
        make = ForwardPart if self.shapes.latent is None else partial(LatentForwardPart, self._up_projection(inputs))
        for how, rows, q, kv in self._by_part(self.forward.parts, inputs[:1], inputs):
            parts.append(make(self.kernel, how, self.spans, rows, q, kv))
        if self.max_logits:
            shape, wide = (self.shapes.q_heads // len(parts),), self.shapes.sum_dtype
            for part in parts:
                part.max_logits = torch.full(shape, -torch.inf, dtype=wide, device=self.device)
        return parts

    def _up_projection(self, inputs: Inputs) -> UpProjection:
        assert self.shapes.latent is not None
        return UpProjection(inputs.weight, self.shapes.kv_heads, self.shapes.qk_dim - self.shapes.latent[1])

    def backward_parts(
        self, queries: Queries, inputs: Inputs, factor: Tensor | None, wanted: Wanted
    ) -> list[BackwardPart]:
        """Return the parts of the heads, ready for a backward pass.

        Args:
            queries: q, dout, out and lse of all heads.
            inputs: the inputs of the forward pass on the ring.
            factor: [B, H, S], what travelling queries send in place of out; None if they send out, or do not travel.
            wanted: whether the gradients of bias and weight are computed.
        """
        count = self.backward.parts
        parts: list[BackwardPart] = []
        make: Callable[..., BackwardPart] = BackwardPart
        if self.shapes.latent is not None:
            make = partial(LatentBackwardPart, self._up_projection(inputs), wanted.weight)
        for how, rows, *operands in self._by_part(count, queries, inputs):
            told = how if rows.bias is None else how._replace(bias_has_grad=wanted.bias)
            parts.append(make(self.kernel, told, self.spans, rows, *operands))
        if factor is not None:
            for part, (mine,) in zip(parts, in_parts((factor,), count), strict=True):
                part.factor = mine
        return parts

    def _by_part(self, count: int, q: Tensors, inputs: Inputs) -> list[tuple[How, OfQueries, Tensors, Tensors]]:
        """Return for each part of the heads the kernel's arguments, its bias and selection, and its operands."""
        kv, rows = inputs[1:3], OfQueries.of(inputs.bias, inputs.selection)
        if count == 1:
            return [(self._hows[1][0], rows, tuple(q), tuple(kv))]
        both = zip(in_parts(q, count), in_parts(kv, count), strict=True)
        return [
            (how, rows.of_part(number, count), *operands)
            for number, (how, operands) in enumerate(zip(self._hows[count], both, strict=True))
        ]

    @cached_property
    def _hows(self) -> Mapping[int, Sequence[How]]:
        """Return the kernel's arguments for each part of the heads, by the number of parts."""
        first_head, by_count = self.rank_state.group.heads_of(self.heads).start, {}
        for count in {self.forward.parts, self.backward.parts}:
            heads = self.shapes.q_heads // count
            by_count[count] = hows = list[How]()
            for first in range(first_head, first_head + self.shapes.q_heads, heads):
                scores = self.scores.of_heads(slice(first, first + heads))
                hows.append(How(FULL, scores, first_head=first, deterministic=self.deterministic))
        return by_count

    def ring_pass(
        self,
        pass_plan: PassPlan,
        parts: Sequence[Part],
        own: Mapping[Side, BlockAccumulators],
        call: CallId,
        log: PassLog | None,
    ) -> RingPass:
        """Return a new run of a pass around the ring.

        Once it is done, `own` holds the complete results of the moving side. The bytes that it will send are added to
        the expected ones.

        Args:
            pass_plan: the plan of the pass.
            parts: the parts of the heads.
            own: the accumulators of this rank's own block, by side.
            call: the identity of the call, for the labels of messages.
            log: notes the pass for a profile; None if there is none.
        """
        state, direction, send_recv = self.rank_state, pass_plan.direction, pass_plan.send_recv
        state.expected_bytes.update(send_recv.sent_bytes)
        accumulators = own[send_recv.moving].parts if send_recv.moving in own else ()
        label = self.label(direction, call) if send_recv.has_messages else None
        ring = RingPass(send_recv, state.transport, parts, accumulators, label=label, log=log)
        state.progress.ring_pass = ring
        return ring

    @property
    def q_runs(self) -> tuple[Run, ...]:
        """Return the positions of the queries whose outputs this rank has after the ring, as runs."""
        state, whole = self.rank_state, self.attending.q
        table = state.route_table
        return table.shards(whole)[state.rank] if state.group.gathers else table.runs(whole)[state.ring_rank]

    def exchange(self, direction: Direction, call: CallId) -> GroupExchange:
        """Return this rank's part in its group's exchange, before and after the ring, for one pass of `call`."""
        assert self.exchange_kind is not None, "groups have several ranks"
        state, label = self.rank_state, self.label(direction, call)
        return self.exchange_kind(
            group=state.group,
            transport=state.ulysses_transport,
            blocks=self._group_blocks,
            expected_bytes=state.expected_bytes,
            packing=self.packing,
            moving=(self.forward if direction == "forward" else self.backward).moving,
            label=label,
            profile=state.profile,
            ranks_per_kv_head=self.ranks_per_kv_head,
            rows=self._exchanged_rows() if label is None else None,
        )

    def _exchanged_rows(self) -> dict[Side, Tensor] | None:
        """Return the rows of all members of this rank's group, by side, if they can be exchanged all at once.

        That saves launches: on CPUs, whose messages have labels, an index takes four times as long as copies of runs.
        Where PyTorch is to be deterministic it sorts indices first.
        """
        blocks, state = self._group_blocks, self.rank_state
        alike = all(len(set(block.counts)) == 1 for block in blocks.values())
        if not alike or self.ranks_per_kv_head > 1 or torch.are_deterministic_algorithms_enabled():
            return None
        table, most = state.exchanged_rows, self.attending.q.length + self.attending.kv.length

        def rows_of(side: Side) -> Tensor:
            return sent(member_rows(blocks[side], state.group.place), self.device)

        return {
            side: table.of((self.attending.of(side), self.device), most, partial(rows_of, side)) for side in blocks
        }

    @cached_property
    def _group_blocks(self) -> dict[Side, GroupBlock]:
        """Return the block of this rank's group for either side."""
        table, rank = self.rank_state.route_table, self.rank_state.ring_rank
        return {side: table.group_blocks(self.attending.of(side))[rank] for side in SIDES}

    def label(self, direction: Direction, which: CallId) -> Tensor | None:
        """Return the label of the messages of a pass, [LABEL_BYTES], uint8, on CPUs; None on GPUs.

        It tells the kind of call, the number of the call `which`, and the direction.
        """
        if self.device.type != "cpu":
            return None
        return torch.frombuffer(bytearray(which.label(direction, self.digest)), dtype=torch.uint8)

    @cached_property
    def digest(self) -> bytes:
        """Return 8 bytes that stand for the kind of call: its ring, signature and options; equal on all ranks."""
        state = self.rank_state
        text = repr((state.ring_id, self.signature, state.topology, state.strategy.compared))
        return blake2b(text.encode(), digest_size=8).digest()
