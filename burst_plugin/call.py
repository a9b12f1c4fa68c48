"""One attention call of one rank: its arguments checked, and every choice made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from hashlib import blake2b

import torch
from torch import Tensor

from burst_plugin.cargo import CallCargo
from burst_plugin.executor import Itinerary, Ring
from burst_plugin.kernels import Case, How, Kernel, choose_kernel
from burst_plugin.layout import Tokens, positions
from burst_plugin.mask import Mask
from burst_plugin.member import Member
from burst_plugin.packing import Packing, Spec
from burst_plugin.passes import Pass
from burst_plugin.request import Inputs, Request, check_extras, check_tensors
from burst_plugin.routes import Attending, Route
from burst_plugin.scores import Scores
from burst_plugin.strategy import DIRECTIONS, Shapes, Strategy, choose_traveller
from burst_plugin.sums import OwnSums, TileSums
from burst_plugin.tile_work import NOWHERE, Site, TileWork
from burst_plugin.tiles import FULL, Tile, cut, in_turns, one_by_one
from burst_plugin.topology import Traffic
from burst_plugin.transfers import Rows
from burst_plugin.ulysses import HeadExchange, Joined

__all__ = ["Call", "prepare"]

_KNOWN_CALLS = 64  # kinds of calls to remember; lengths may vary without end


@dataclass(frozen=True)
class Call:
    """One attention call of one rank, all choices made.

    `shapes` are those of the ring, after heads have been exchanged, with the lengths of the longest block; `scores`
    are those of all heads; `sharing` ranks of a team work with the same key/value head.
    """

    member: Member
    shapes: Shapes
    attending: Attending
    scores: Scores
    kernel: Kernel
    travellers: Mapping[str, str]  # by direction
    device: torch.device
    has: tuple[str, ...] = ()  # of sink and bias, those that are there; "shared bias" if heads share it
    max_logits: bool = False
    lse: bool = False
    sharing: int = 1
    first: Call | None = None  # of its kind, which keeps for all of them what no seed changes; None is itself

    @property
    def _kind(self) -> Call:
        return self.first or self

    @cached_property
    def signature(self) -> Mapping[str, object]:
        """What has to be the same on every rank."""
        degree = self.member.team.degree
        heads = {"q_heads": self.heads, "kv_heads": self.shapes.kv_heads * degree // self.sharing}
        named = {**self.shapes._asdict(), **heads}
        return {
            **{name: named[name] for name in ("batch", "q_heads", "kv_heads", "qk_dim", "v_dim", "dtype")},
            "query tokens": self.attending.q,
            "key tokens": self.attending.kv,
            "with": self.has,
            **({"return_lse": self.lse} if degree > 1 else {}),  # then it is exchanged
            **{f"{direction} traveller": side for direction, side in self.travellers.items()},
            "kernel in use": self.kernel.name,
            "mask": self.attending.mask,
            "scores": self.scores,
        }

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen, for people to read."""
        return self._kind._choices

    @cached_property
    def _choices(self) -> dict[str, str]:
        schedules = dict.fromkeys(self.route(direction).schedule for direction in DIRECTIONS)
        return {**self.travellers, "kernel": self.kernel.name, "schedule": " / ".join(schedules)}

    def route(self, direction: str) -> Route:
        """The visits of this rank, and what it sends."""
        return self._kind._routes[direction]

    @cached_property
    def _routes(self) -> dict[str, Route]:
        member, found = self.member, {}
        for direction, away in self.travellers.items():
            reduces = bool(self.shapes.side(direction, away)[1])
            route = member.routes.route(member.ring_rank, self.attending, away, reduces, self.parts(direction))
            found[direction] = replace(route, plan=route.plan._replace(peers=member.ring_peers))
        return found

    @cached_property
    def _tiles(self) -> dict[tuple[str, int, int], tuple[Tile, ...]]:
        windows = "windows" in self.kernel.features
        found = {}
        for direction in DIRECTIONS:
            route = self.route(direction)
            for owner, tiles in route.tiles.items():
                turns = in_turns(tiles, route.kept if owner == self.member.ring_rank else 0.0)
                for turn, mine in enumerate(turns):
                    if not windows:
                        mine = tuple(piece for tile in mine for piece in cut(tile))
                    if "bias" in self.has or self.scores.needs_positions:  # which pieces cannot share as a batch
                        mine = tuple(piece for tile in mine for piece in one_by_one(tile))
                    found[direction, owner, turn] = mine
        return found

    def tiles(self, direction: str, owner: int, turn: int) -> tuple[Tile, ...]:
        """The work of a visit, in tiles that the kernel has."""
        return self._kind._tiles[direction, owner, turn]

    def site(self, direction: str, owner: int) -> Site:
        """Which tokens meet in a visit, if anything depends on them."""
        if not (self.scores.needs_positions or "bias" in self.has):
            return NOWHERE
        runs = self.route(direction).runs
        return Site(*(positions(runs[side][owner], self.device) for side in ("q", "kv")))

    def parts(self, direction: str) -> int:
        """How many parts the heads are cut into."""
        return self.member.strategy.parts_of(direction)

    def works(self, direction: str, bias: Tensor | None) -> list[TileWork]:
        """The kernel, ready to work on the tiles of a pass; one for each part of the heads."""
        parts = self.parts(direction)
        heads, found = self.shapes.q_heads // parts, []
        first_head = self.member.team.share(self.heads).start
        for part in range(parts):
            largest = None
            if self.max_logits and direction == "forward":
                largest = torch.full((heads,), -torch.inf, dtype=self.shapes.sum_dtype, device=self.device)
            mine = slice(part * heads, (part + 1) * heads)
            first = first_head + mine.start
            how = How(FULL, self.scores.of_heads(slice(first, first + heads)), first_head=first)
            how = how._replace(deterministic=_deterministic(self.member.strategy))
            bias_of_part = bias if bias is None or bias.shape[1] == 1 else bias[:, mine]
            found.append(TileWork(self.kernel, how, bias_of_part, largest))
        return found

    @property
    def heads(self) -> int:
        """Query heads of all ranks of a team together, those that q had before they were exchanged."""
        return self.shapes.q_heads * self.member.strategy.ulysses_degree

    def head_exchange(self, direction: str, number: int) -> HeadExchange:
        """That before and after the ring, in one pass."""
        member = self.member
        label = self._label(direction, number) if member.team.degree > 1 else None  # no messages in a team of one
        kind = self._kind
        return HeadExchange(
            member.team,
            member.team_transport,
            kind._held,
            member.expected_bytes,
            kind._packed,
            label,
            member.profile,
            self.sharing,
        )

    @cached_property
    def _held(self) -> dict[str, Joined]:
        """What the team of this rank holds of either side."""
        teams, place = self.member.routes.teams, self.member.ring_rank
        return {side: teams(self.attending.of(side))[place] for side in ("q", "kv")}

    def own_sums(self, works: Sequence[Pass], side: str) -> OwnSums:
        """The sums of a side of this rank's block, empty."""
        specs = self._kind._own_specs[works[0].direction, side]
        return OwnSums(specs, self.device, len(works), lambda part, place: works[part].sums(side, place, False))

    @cached_property
    def _own_specs(self) -> dict[tuple[str, str], Sequence[Spec]]:
        """Of the sums of this rank's block, by direction and side."""
        whole = self._of_block(self.member.ring_rank, None)
        return {(direction, side): whole.side(direction, side)[1] for direction in DIRECTIONS for side in ("q", "kv")}

    def ring(self, works: Sequence[Pass], own: OwnSums, number: int) -> Ring[TileSums]:
        """The ring of this pass; what travels is summed up in `own` when it is home."""
        direction = works[0].direction
        itinerary = self.itinerary(direction)
        self.member.expected_bytes.update(itinerary.sent_bytes)
        return Ring(
            itinerary,
            self.member.transport,
            CallCargo(self, works, self.travellers[direction], own),
            direction=direction,
            label=self._label(direction, number),
            profile=self.member.profile,
        )

    def itinerary(self, direction: str) -> Itinerary:
        """The steps and messages of a pass."""
        return self._kind._itineraries[direction]

    @cached_property
    def _itineraries(self) -> dict[str, Itinerary]:
        return {d: Itinerary(self.route(d).plan, cache(partial(self._packing, d))) for d in DIRECTIONS}

    @property
    def separate_links(self) -> set[bool]:
        """Whether the schedules of this call need separate communicators for the two links."""
        return {self.route(direction).plan.separate_links for direction in DIRECTIONS}

    def _packing(self, direction: str, traffic: Traffic, block: int, rows: Rows | None) -> Packing:
        """How rows of a part of a rank's block, or of its sums, travel."""
        part = self._of_block(block % self.member.routes.ranks, rows).of_part(self.parts(direction))
        operands, sums = part.side(direction, self.travellers[direction])
        return self._packed(tuple(operands if traffic is Traffic.GATHER else sums))

    @cached_property
    def _packed(self) -> Callable[[tuple[Spec, ...]], Packing]:
        """How tensors travel; blocks of one length, and the parts of their heads, travel alike."""
        return cache(partial(Packing, labelled=self.device.type == "cpu"))

    def _of_block(self, owner: int, rows: Rows | None) -> Shapes:
        """The shapes of one rank's block, or of some of its rows, whichever side travels."""
        if rows is not None:
            count = sum(stop - start for start, stop in rows)
            return self.shapes._replace(q_len=count, kv_len=count)
        lengths = self._kind._lengths
        return self.shapes._replace(q_len=lengths["q"][owner], kv_len=lengths["kv"][owner])

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """How many tokens of either side every rank holds."""
        runs = self.member.routes.pairs(self.attending).runs
        return {side: [sum(run.length for run in held) for held in ranks] for side, ranks in runs.items()}

    @cached_property
    def _digest(self) -> bytes:
        text = repr((self.signature, self.member.topology, self.member.strategy.compared()))
        return blake2b(text.encode(), digest_size=8).digest()

    def _label(self, direction: str, number: int) -> Tensor | None:
        """What every message of a pass carries on CPUs: of which kind of call it is, which one, and which pass."""
        if self.device.type != "cpu":
            return None
        which = 2 * number + DIRECTIONS.index(direction)
        return torch.frombuffer(bytearray(self._digest + which.to_bytes(8, "little")), dtype=torch.uint8)


def prepare(member: Member, inputs: Inputs, request: Request, known: dict[Hashable, Call]) -> Call:
    """Check one rank's local tensors and make every choice; once for calls that are alike, kept in `known`.

    Raises ValueError, before any communication.
    """
    if not isinstance(request.mask, Mask):
        raise ValueError(f"mask={request.mask!r} is not a mask; use one of burst_plugin.mask, such as Causal()")
    scores = request.scores
    seedless = request if scores.seed == 0 else request._replace(scores=replace(scores, seed=0))
    tensors = (None if x is None else (x.shape, x.dtype, x.device) for x in inputs)
    key = (seedless, _deterministic(member.strategy), *tensors)
    call = known.get(key)
    if call is None:
        call = _choose(member, inputs, request)
        if len(known) >= _KNOWN_CALLS:
            known.clear()
        known[key] = call
    if scores.seed != call.scores.seed:
        call = replace(call, scores=replace(call.scores, seed=scores.seed), first=call)
    member.choices = call.choices
    return call


def _choose(member: Member, inputs: Inputs, request: Request) -> Call:
    """The call that these arguments make."""
    q, k, v = inputs[:3]
    check_tensors(q, k, v)
    shapes = Shapes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype)
    shares = inputs.bias is not None and inputs.bias.dim() == 4 and inputs.bias.shape[1] == 1
    has = tuple(name for name in ("sink", "bias") if getattr(inputs, name) is not None) + ("shared bias",) * shares
    ranks, rank, routes = member.topology.ranks, member.rank, member.routes
    degree, all_heads = member.strategy.ulysses_degree, shapes.q_heads
    lengths = {"q": shapes.q_len, "kv": shapes.kv_len}
    given = dict(zip(lengths, request.tokens, strict=True))
    tokens = {side: given[side] or Tokens(max(1, n * ranks)) for side, n in lengths.items()}
    longest = {}
    for side, whole in tokens.items():
        held = [sum(run.length for run in runs) for runs in routes.shards(whole)]
        longest[side] = max(sum(held[first : first + degree]) for first in range(0, ranks, degree))
        if lengths[side] != held[rank]:
            raise ValueError(
                f"rank {rank} of {ranks} holds {held[rank]} of {whole} in layout {routes.layout(whole).name!r}, but "
                f"its {'queries have' if side == 'q' else 'keys have'} {lengths[side]}; cut tensors with "
                "ContextParallel.shard, and pass the same tokens= to it and here"
            )
    if degree not in shapes.team_degrees:
        raise ValueError(
            f"ulysses_degree={degree} ranks cannot share the {shapes.q_heads} query heads and {shapes.kv_heads} "
            f"key/value heads that are here; use one of {shapes.team_degrees}"
        )
    if inputs.bias is not None and degree > 1:  # its rows are exchanged
        has += (f"bias of {inputs.bias.shape[0]} batch rows in {inputs.bias.dtype}",)
    if request.mask.shifts and request.scores.alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes need positions that count alike for queries and keys, but the mask's documents have keys "
            "that begin elsewhere; add the slopes as a bias"
        )
    sharing = max(1, degree // shapes.kv_heads)
    shapes = shapes.of_team(degree)._replace(q_len=longest["q"], kv_len=longest["kv"])
    if request.mask.rows not in (None, shapes.batch):
        raise ValueError(f"the mask is for {request.mask.rows} batch rows, but q, k, v have {shapes.batch}")
    if any(shapes.kv_heads % member.strategy.parts_of(direction) for direction in DIRECTIONS):
        raise ValueError(
            f"parts={member.strategy.parts} does not divide the {shapes.kv_heads} key/value heads that are here; use "
            f"one of {_divisors(shapes.kv_heads)}"
        )
    attending = Attending(tokens["q"], tokens["kv"], request.mask)
    routes.pairs(attending)  # raises ValueError if the mask does not fit the lengths
    check_extras(inputs, attending.kv.length)
    scores = request.scores.resolved(shapes.qk_dim, all_heads)
    features = _features(shapes, scores, member.strategy, has)
    case = Case(q.device.type, shapes.dtype, shapes.q_heads, shapes.kv_heads, shapes.qk_dim, shapes.v_dim, features)
    kernel = choose_kernel(member.strategy.kernel, case)
    travellers = {d: "kv" if "bias" in has else choose_traveller(member.strategy, d, shapes) for d in DIRECTIONS}
    _check_bias_traveller(member.strategy, has)
    wanted = (request.max_logits, request.lse)
    return Call(member, shapes, attending, scores, kernel, travellers, q.device, has, *wanted, sharing)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _features(shapes: Shapes, scores: Scores, strategy: Strategy, has: tuple[str, ...]) -> frozenset[str]:
    """What a kernel needs to be able to do, by its name in `kernels.FEATURES`."""
    wanted = {
        "head dims": shapes.qk_dim != shapes.v_dim,
        "softcap": scores.softcap is not None,
        "alibi": scores.alibi_slopes is not None,
        "bias": "bias" in has,
        "dropout": scores.dropout > 0,
        "deterministic": _deterministic(strategy),
    }
    return frozenset(name for name, needed in wanted.items() if needed)


def _deterministic(strategy: Strategy) -> bool:
    """Asked for here, or by PyTorch's switch for the process."""
    switch = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return strategy.deterministic or switch


def _check_bias_traveller(strategy: Strategy, has: tuple[str, ...]) -> None:
    for direction in DIRECTIONS:
        if "bias" in has and getattr(strategy, direction) == "q":
            raise ValueError(
                f"{direction}='q' cannot be had with a bias: its rows belong to the queries, which would have to "
                f"take all of them along; use {direction}='kv' or 'auto'"
            )
