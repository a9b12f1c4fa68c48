"""Which tokens of which documents a rank holds, for layers that carry a state along the sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.activations.kept_attention import (
    KeptTensors,
    next_kept_tensors,
    unseen_by_selective_checkpoints,
)
from burst_plugin.checks import shown
from burst_plugin.comm.call_identity import CallId
from burst_plugin.context import ContextParallel
from burst_plugin.recurrent.affine import Affine
from burst_plugin.recurrent.halo import HaloFunction, HaloPlan, halo_plan
from burst_plugin.recurrent.heads import HeadFunction, HeadPlan, can_share, check_heads, gathered
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.passes import OfOneRank, OfVirtualRing, Passes
from burst_plugin.recurrent.pieces import START, Pieces, cut_into_pieces
from burst_plugin.recurrent.scan import ScanFunction, ScanPlan
from burst_plugin.recurrent.scan_schedule import ScanSchedule, scan_schedule
from burst_plugin.ring.request import as_tokens, check_mask
from burst_plugin.ring.routes import RouteTable
from burst_plugin.sequence.layout import Tokens, positions
from burst_plugin.sequence.mask import Mask

_KNOWN = 8  # batches of a ring whose pieces are kept
_LEAST_FILLED = 0.75  # of a batch of pieces, how much are tokens; the rest pads pieces to one length
STATE_BYTES = 4  # of a number of a state
_SLACK = 8  # tokens of padding that are always all right


class Group(NamedTuple):
    """Pieces that a kernel takes at once, padded to one length: [pieces, length, ...].

    pieces: their numbers among those of this process.
    lengths: the tokens of each.
    start: their first row if they lie one after another, without padding; else `rows` [pieces, length] are their
        rows, and `is_padding` says which of them are none.
    """

    pieces: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int | None
    rows: Tensor | None
    is_padding: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of pieces, and the length."""
        return len(self.pieces), max(self.lengths)

    def take(self, x: Tensor) -> Tensor:
        """Return the tokens of these pieces, of x [T, ...], with zeros as padding."""
        if self.start is not None:
            count, length = self.shape
            return x.narrow(0, self.start, count * length).view(*self.shape, *x.shape[1:])
        taken = x[self.rows]
        if self.is_padding is None:
            return taken
        return taken.masked_fill(self.is_padding.view(*self.shape, *(1,) * (x.dim() - 1)), 0)

    def without_padding(self, x: Tensor) -> Tensor:
        """Return x [pieces, length, ...] with zeros as padding."""
        if self.is_padding is None:
            return x
        return x.masked_fill(self.is_padding.view(*self.shape, *(1,) * (x.dim() - 2)), 0)

    def counts(self, device: torch.device) -> Tensor:
        """Return the tokens of each piece, [pieces], int64."""
        return torch.tensor(self.lengths, device=device)

    def of_pieces(self, x: Tensor) -> Tensor:
        """Return what x has for these pieces, of all pieces of this process."""
        return x[list(self.pieces)]


@dataclass(frozen=True, eq=False)
class HeldPieces:
    """The pieces of a batch, and which of them the ranks of this process hold."""

    passes: Passes
    pieces: Pieces
    tokens: Tokens
    mask: Mask | None
    rows: int
    whole_rows: Tensor | None  # of a virtual ring: where its ranks' tokens, in order, are in whole sequences
    known: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the pieces of this process, in the order of its tokens."""
        return tuple(number for state in self.passes.states for number in self.pieces.of_rank(state.rank))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the first row of each of these pieces, and the number of rows."""
        return tuple(accumulate((self.pieces.every[n].length for n in self.numbers), initial=0))

    @cached_property
    def counts(self) -> list[int]:
        """Return the number of rows of every rank of this process."""
        return [
            sum(self.pieces.every[number].length for number in self.pieces.of_rank(state.rank))
            for state in self.passes.states
        ]

    def flat(self, x: Tensor) -> Tensor:
        """Return the rows of x [B, S, ...], those of piece after piece: [T, ...]."""
        flat = x.flatten(0, 1)
        return flat if self.whole_rows is None else flat[self._kept("whole", x.device, lambda: self.whole_rows)]

    def unflat(self, rows: Tensor) -> Tensor:
        """Return [B, S, ...] from the rows of all pieces."""
        if self.whole_rows is not None:
            whole = self.whole_rows
            rows = rows[self._kept("back", rows.device, lambda: torch.argsort(whole))]
        return rows.view(self.rows, len(rows) // self.rows, *rows.shape[1:])

    def in_rank_order(self, x: Tensor) -> Tensor:
        """Return x [B, S, ...], of a virtual ring with the tokens of one rank after another."""
        if self.whole_rows is None:
            return x
        return x[:, self._kept("order", x.device, lambda: self._order().to(x.device))]

    def from_rank_order(self, x: Tensor) -> Tensor:
        """Return x [B, S, ...] in the order of the sequence, if it is of a virtual ring."""
        if self.whole_rows is None:
            return x
        return x[:, self._kept("from order", x.device, lambda: torch.argsort(self._order()).to(x.device))]

    def _order(self) -> Tensor:
        states = self.passes.states
        return torch.cat([positions(runs) for runs in states[0].route_table.shards(self.tokens)])

    def schedule(self, finals: bool) -> ScanSchedule:
        """Return the schedule of a scan; with `finals` the states after all rows go to all ranks."""
        topology = self.passes.states[0].topology
        found: ScanSchedule = self._kept("scan", finals, lambda: scan_schedule(self.pieces, topology.node, finals))
        return found

    @cached_property
    def exchanges(self) -> bool:
        """Return whether a state enters any piece of any rank."""
        return any(self.schedule(False).is_entered)

    def groups(self, wanted: Sequence[int], device: torch.device) -> list[Group]:
        """Return groups of these pieces of this process, of about equal lengths."""
        wanted = tuple(wanted)
        if not wanted:
            return []
        found: list[Group] = self._kept(wanted, device, lambda: self._grouped(wanted, device))
        return found

    def _grouped(self, wanted: tuple[int, ...], device: torch.device) -> list[Group]:
        lengths = {n: self.offsets[n + 1] - self.offsets[n] for n in wanted}
        alike = len(set(lengths.values())) == 1
        if alike and list(wanted) == list(range(wanted[0], wanted[-1] + 1)):
            return [Group(wanted, tuple(lengths.values()), self.offsets[wanted[0]], None, None)]
        groups: list[list[int]] = []
        for number in sorted(wanted, key=lambda n: (-lengths[n], n)):
            most = lengths[groups[-1][0]] if groups else 0
            if groups and lengths[number] >= _LEAST_FILLED * most - _SLACK:
                groups[-1].append(number)
            else:
                groups.append([number])
        return [self._group(tuple(sorted(group)), lengths, device) for group in groups]

    def _group(self, group: tuple[int, ...], lengths: Mapping[int, int], device: torch.device) -> Group:
        of_group = tuple(lengths[n] for n in group)
        if len(group) == 1:
            return Group(group, of_group, self.offsets[group[0]], None, None)
        steps = torch.arange(max(of_group), device="cpu")
        starts = torch.tensor([self.offsets[n] for n in group], device="cpu").unsqueeze(1)
        stops = torch.tensor(of_group, device="cpu").unsqueeze(1)
        is_padding = steps >= stops
        rows = (starts + steps).masked_fill(is_padding, 0)
        padding = is_padding.to(device) if bool(is_padding.any()) else None
        return Group(group, of_group, None, rows.to(device), padding)

    def joined(self, groups: Sequence[Group], outs: Sequence[Tensor]) -> Tensor:
        """Return rows [T, ...] of all pieces from the outputs of groups, which have each piece once."""
        if len(groups) == 1 and groups[0].start is not None:
            return outs[0].flatten(0, 1)
        key = tuple(group.pieces for group in groups)
        back = self._kept(key, outs[0].device, lambda: self._back(groups).to(outs[0].device))
        return torch.cat([out.flatten(0, 1) for out in outs])[back]

    def _back(self, groups: Sequence[Group]) -> Tensor:
        """Return for each row where it is among the outputs of groups, one behind the other."""
        back = torch.empty(self.offsets[-1], dtype=torch.int64, device="cpu")
        at = 0
        for group in groups:
            length = max(group.lengths)
            for place, (number, count) in enumerate(zip(group.pieces, group.lengths, strict=True)):
                first = at + place * length
                start = self.offsets[number]
                back[start : start + count] = torch.arange(first, first + count, device="cpu")
            at += len(group.pieces) * length
        return back

    def halo_plans(self, width: int, device: torch.device) -> list[HaloPlan]:
        """Return each rank's plan for the `width` tokens before every piece."""
        what = f"a halo of {width} tokens"
        plans: list[HaloPlan] = self._kept(
            width, device, lambda: [halo_plan(s, self.pieces, width, what, device) for s in self.passes.states]
        )
        return plans

    def _kept(self, key: object, other: object, make: Callable[[], Any]) -> Any:
        found = self.known.get((key, other))
        if found is None:
            found = self.known[key, other] = make()
        return found


class Call(NamedTuple):
    """A call that ranks have agreed on."""

    held: HeldPieces
    number: CallId
    name: str
    tensors: Sequence[Tensor]  # all that the call is a function of

    def tied(self, x: Tensor, *others: Tensor) -> Tensor:
        """Return x as a function of others, too, without a gradient of theirs.

        So that every rank has a backward pass, whether or not anything that it holds has a part in it.
        """
        tied: Tensor = _Tied.apply(x, *others)  # type: ignore[no-untyped-call]
        return tied

    def entries(
        self, affine: Affine, transitions: Tensor, biases: Tensor, finals: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the states that enter the pieces of this process, [pieces, ...], and those after all rows.

        `transitions` and `biases` are [pieces, ...], and zeros where the schedule does not need them.
        """
        held, schedule = self.held, self.held.schedule(finals)
        if affine.has_gradients:
            with_gradients = [x for x in self.tensors if x.requires_grad]
            biases = self.tied(biases, *sorted(with_gradients, key=torch.numel)[:1])
        what = f"{self.name} ({affine.name})"
        transition, state = ((tuple(x.shape[1:]), x.dtype) for x in (transitions, biases))
        plans = [
            ScanPlan(each, schedule, held.pieces.of_rank(each.rank), affine, transition, state, biases.device, what)
            for each in held.passes.states
        ]
        with unseen_by_selective_checkpoints():
            both: tuple[Tensor, Tensor] = ScanFunction.apply(
                held.passes, plans, self.number, self._kept(what), transitions, biases
            )  # type: ignore[no-untyped-call]
        return both

    def _kept(self, what: str) -> KeptTensors | None:
        """Return where a checkpoint keeps what this rank receives next."""
        return next_kept_tensors(self.held.passes.states[0].strategy, what)

    def with_tokens_before(self, xs: Sequence[Tensor], width: int) -> tuple[list[Tensor], Tensor]:
        """Return the rows of each x [T, ...] with the `width` rows before each piece in front, and where rows are."""
        held, device = self.held, xs[0].device
        plans = held.halo_plans(width, device)
        kept = self._kept(plans[0].what)
        with unseen_by_selective_checkpoints():
            halos = HaloFunction.apply(held.passes, plans, held.counts, self.number, kept, *xs)  # type: ignore[no-untyped-call]
        rows, keep = held._kept("extended", (width, device), lambda: _extended(held.offsets, width, device))
        both = [torch.cat([halo, x]) for halo, x in zip(halos, xs, strict=True)]
        if not held.numbers:  # something for the function to be called with
            return [torch.cat([x, x.new_zeros((width + 1, *x.shape[1:]))]) for x in both], keep
        return [x[rows] for x in both], keep


def _gathered(call: Call, plans: Sequence[HeadPlan], last: Tensor) -> Tensor:
    """Return final states of all heads from those of the ranks of this process, [B, h, ...]; collective."""
    parts = last.detach().chunk(len(plans), 1)
    programs = []
    for plan, part in zip(plans, parts, strict=True):
        messages = Messages(plan.rank_state, last.device, "final states", "forward", call.number)
        programs.append(gathered(plan, messages, part))
    whole: Tensor = call.held.passes.run("forward", call.number, programs, last.device)[0]
    return whole


class _Tied(torch.autograd.Function):
    """The first tensor as a function of the others, too, of which none has a part in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return x.detach()  # a new tensor, which may be modified in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            torch.zeros((), dtype=dtype, device=device).expand(shape) if needed else None
            for (shape, dtype, device), needed in zip(ctx.others, ctx.needs_input_grad[1:], strict=True)
        )
        return grad, *zeros


def _extended(offsets: Sequence[int], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows of pieces with their halos, of halos and then tokens; and where the tokens are among these."""
    rows, keep, halos = list[int](), list[int](), (len(offsets) - 1) * width
    for number, (start, stop) in enumerate(pairwise(offsets)):
        rows += [*range(number * width, (number + 1) * width), *range(halos + start, halos + stop)]
        keep += range(len(rows) - (stop - start), len(rows))
    return torch.tensor(rows, device=device, dtype=torch.int64), torch.tensor(keep, device=device, dtype=torch.int64)


class Placement:
    """Which tokens a rank holds, and which of them belong to one document.

    Args:
        cp: the ring; with a `VirtualRing` tensors are whole sequences.
        mask: documents, padding on the left, and prefix trees, in positions of the whole sequence; None for none.
        tokens: the sequence that rows are taken from, as for `burst_attention`.
        tag: a name for the next call that is the same on every rank.

    Raises:
        ValueError: for an argument of another type.
    """

    def __init__(
        self,
        cp: ContextParallel | VirtualRing,
        mask: Mask | None = None,
        tokens: Tokens | None = None,
        tag: object = None,
    ) -> None:
        if not isinstance(cp, ContextParallel | VirtualRing):
            raise ValueError(f"cp={shown(cp)} is not valid; give a ContextParallel, or a VirtualRing")
        if mask is not None:
            check_mask(mask)
        self.passes: Passes = OfOneRank(cp) if isinstance(cp, ContextParallel) else OfVirtualRing(cp)
        self.plans: dict[Any, Any] = cp.plans
        self.mask, self.tokens, self.tag = mask, None if tokens is None else as_tokens(tokens), tag

    def call(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        check: Callable[[], Mapping[str, object]],
        parameters: Sequence[Tensor] = (),
    ) -> Call:
        """Return a call that all ranks have agreed on; collective.

        name: of the function.
        tensors: by name, all [B, S, ...] of one device.
        check: raises ValueError for tensors that do not fit each other; returns what is equal on all ranks.
        parameters: other tensors that the call is a function of.
        """
        x = next(iter(tensors.values()))
        every = (*tensors.values(), *parameters)

        def prepare() -> tuple[HeldPieces, Mapping[str, object]]:
            for state in self.passes.states:
                state.check_usable(x.device)
            for other, y in tensors.items():
                if y.shape[:2] != x.shape[:2] or y.device != x.device:
                    raise ValueError(
                        f"{name}: {other} is {list(y.shape)} on {y.device}, beside {list(x.shape)} on {x.device}; "
                        "all of them are [batch, tokens, ...] of one shard"
                    )
            return self.held(x), check()

        def signature(prepared: tuple[HeldPieces, Mapping[str, object]]) -> Mapping[str, object]:
            held, equal = prepared
            needs_gradients = torch.is_grad_enabled() and any(y.requires_grad for y in every)
            return {
                "call": name,
                "takes part in gradients": needs_gradients,
                **equal,
                "batch": held.rows,
                "tokens": held.tokens,
                "mask": held.mask,
            }

        (held, _), number = self.passes.agree(prepare, signature, self.tag)
        return Call(held, number, name, every)

    def exchanges_heads(self, tensors: Mapping[str, Tensor], state: int, transition: int = 1) -> bool:
        """Return whether ranks exchange heads of a call rather than states, as `Strategy.recurrent` says.

        tensors: [B, S_local, H, ...], first one of the outputs' shape.
        state, transition: how many numbers these are for one head.
        """
        rank_state, first = self.passes.states[0], next(iter(tensors.values()))
        asked, ranks = rank_state.strategy.recurrent, rank_state.topology.ranks
        if ranks == 1 or asked == "state" or any(x.dim() < 3 for x in tensors.values()):
            return False
        if asked == "heads":
            return True
        heads = [x.shape[2] for x in tensors.values()]
        if not can_share(ranks, heads):
            return False
        shards = rank_state.route_table.shards(tokens := self._tokens(first))
        if any(run.stride > 1 for runs in shards for run in runs):
            return True
        numbers = sum(x.shape[2:].numel() for x in (*tensors.values(), first)) * tokens.length
        per_piece = max(heads) * (2 * state + transition)  # a pair goes up the tree, and a state comes down
        return numbers * first.element_size() < sum(map(len, shards)) * per_piece * STATE_BYTES

    def by_heads(
        self,
        function: Callable[..., Any],
        tensors: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        finals: bool,
    ) -> Any:
        """Return what a layer does, by an exchange of heads; collective.

        function: the layer, which takes tensors, parameters and a `place` by name.
        tensors: [B, S_local, H, ...]; each has as many heads as ranks share evenly, or one for several ranks.
        parameters: [H, ...] of all heads.
        """
        heads, states = [x.shape[2] for x in tensors.values()], self.passes.states
        ranks = states[0].topology.ranks

        def check() -> dict[str, object]:
            check_heads(ranks, heads)
            return {"sizes": [list(x.shape[2:]) for x in tensors.values()], "final state": finals}

        call = self.call("an exchange of heads", tensors, check, tuple(parameters.values()))
        held, most = call.held, max(heads)
        shards = [positions(runs) for runs in states[0].route_table.shards(held.tokens)]
        plans = [HeadPlan(state, shards, held.rows) for state in states]
        rows = [held.in_rank_order(call.tied(x, *call.tensors)) for x in tensors.values()]
        whole = HeadFunction.apply(held.passes, plans, call.number, None, *rows)  # type: ignore[no-untyped-call]
        mine = slice(plans[0].heads_of(states[0].rank, most).start, plans[-1].heads_of(states[-1].rank, most).stop)
        alone = Placement(self._alone(), self.mask, Tokens(held.tokens.length))
        given = {**dict(zip(tensors, whole, strict=True)), **{name: x[mine] for name, x in parameters.items()}}
        found = function(**given, place=alone, return_final_state=finals)
        out = HeadFunction.apply(held.passes, plans, call.number, [most], found[0] if finals else found)[0]  # type: ignore[no-untyped-call]
        return (held.from_rank_order(out), _gathered(call, plans, found[1])) if finals else held.from_rank_order(out)

    def _alone(self) -> ContextParallel:
        """Return a ring of one rank."""
        if "alone" not in self.plans:
            self.plans["alone"] = ContextParallel(hierarchy=[1])
        alone: ContextParallel = self.plans["alone"]
        return alone

    def _tokens(self, x: Tensor) -> Tokens:
        """Return the sequence that x [B, S, ...] is of."""
        whole = 1 if isinstance(self.passes, OfVirtualRing) else self.passes.states[0].topology.ranks
        return self.tokens or Tokens(max(1, x.shape[1] * whole))

    def starts(self, x: Tensor) -> Tensor:
        """Return which of this rank's tokens begin a document, bool [B, S_local], of x [B, S_local, ...]."""
        held = self.held(x)
        begin = [
            held.offsets[n] for n, number in enumerate(held.numbers) if held.pieces.every[number].before == START
        ]
        starts = torch.zeros(held.offsets[-1], dtype=torch.bool, device=x.device)
        starts[begin] = True
        return held.unflat(starts)

    def held(self, x: Tensor) -> HeldPieces:
        """Return the pieces of a batch of which this process holds x [B, S, ...]. Raise ValueError if it does not."""
        states = self.passes.states
        table, tokens = states[0].route_table, self._tokens(x)
        key = (HeldPieces, x.shape[0], tokens, self.mask)
        held: HeldPieces | None = self.plans.get(key)
        if held is None:
            mine = [known for known in self.plans if isinstance(known, tuple) and known[:1] == (HeldPieces,)]
            for known in mine if len(mine) >= _KNOWN else ():
                del self.plans[known]
            held = self.plans[key] = self._made(x.shape[0], tokens, table)
        expected = sum(held.counts) // max(1, held.rows)
        if x.shape[1] != expected:
            raise ValueError(
                f"rank {states[0].rank} holds {expected} of {tokens.length} tokens, but {list(x.shape)} has "
                f"{x.shape[1]}; pass the tokens= of its shard"
            )
        return held

    def _made(self, rows: int, tokens: Tokens, table: RouteTable) -> HeldPieces:
        shards = table.shards(tokens)
        pieces = cut_into_pieces(shards, rows, tokens.length, self.mask)
        whole = None
        if isinstance(self.passes, OfVirtualRing):
            of_row = [positions(runs) for runs in shards]
            whole = torch.cat([row * tokens.length + at for at in of_row for row in range(rows)])
        return HeldPieces(self.passes, pieces, tokens, self.mask, rows, whole)
