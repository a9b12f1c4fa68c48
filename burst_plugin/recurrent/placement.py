"""Where a rank's tokens lie in a sequence and its documents, for layers that carry a state along the sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from burst_plugin.recurrent.halo import HaloFunction
from burst_plugin.recurrent.heads import ExchangeOfHeads, can_share
from burst_plugin.recurrent.held_pieces import Group, HeldPieces
from burst_plugin.recurrent.passes import OfOneRank, OfVirtualRing, Passes
from burst_plugin.recurrent.pieces import START, cut_into_pieces
from burst_plugin.recurrent.scan import ScanOfProcess, ScanPlan
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.request import as_tokens, check_mask
from burst_plugin.ring.routes import RouteTable
from burst_plugin.sequence.layout import Tokens, positions
from burst_plugin.sequence.mask import Mask
from burst_plugin.virtual import VirtualRing

_KNOWN = 8  # batches of a ring whose pieces are kept
STATE_BYTES = 4  # of a number of a state


class States(NamedTuple):
    """The states that enter pieces, while a scan finds them: `Call.begin` returns it, and `wait` returns the states.

    scan: the scan under way. begun: the tensor that `scan.begin` has returned, for `scan.end`.
    """

    scan: ScanOfProcess
    begun: Tensor

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the scan; return the states that enter pieces, and the states after the last tokens of batch rows.

        The first are [pieces of this process, ...], zeros for pieces that no state enters. The second are [B, ...],
        without gradient, on every rank; [0, ...] if the scan was begun without `finals`.
        """
        with unseen_by_selective_checkpoints():
            return self.scan.end(self.begun)


class ExchangeInFlight(NamedTuple):
    """Tensors on their way in an exchange of heads: `Call.exchange_heads` returns it, and `wait` returns the tensors.

    exchange: the exchange under way. begun: the tensor that `exchange.begin` has returned, for `exchange.end`.
    """

    exchange: ExchangeOfHeads
    begun: Tensor

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the exchange; return its tensors."""
        with unseen_by_selective_checkpoints():
            return self.exchange.end(self.begun)


class Call(NamedTuple):
    """A call of a recurrent function that all ranks have agreed on, with the steps that its ways of computing share.

    held: the pieces that this process holds.
    number: the identity of the call.
    name: of the function.
    tensors: all tensors that the call is a function of.
    initial: the states that documents begin with, [B, ...] each; empty for zeros.
    """

    held: HeldPieces
    number: CallId
    name: str
    tensors: Sequence[Tensor]  # all that the call is a function of
    initial: Sequence[Tensor] = ()  # see `Placement`

    def initial_of(self, group: Group) -> tuple[Tensor, ...] | None:
        """Return the states that a group's pieces start from, each [pieces, ...]; None for zeros.

        Pieces that begin a document have the initial states of their batch rows; pieces that continue others have
        zeros.
        """
        if not self.initial:
            return None
        pieces = [self.held.pieces.every[self.held.numbers[n]] for n in group.pieces]
        device = self.initial[0].device
        rows = torch.tensor([piece.row for piece in pieces], device=device)
        goes_on = torch.tensor([piece.before != START for piece in pieces], device=device)
        return tuple(x[rows].masked_fill(goes_on.view(-1, *(1,) * (x.dim() - 1)), 0) for x in self.initial)

    def tied(self, x: Tensor, *others: Tensor) -> Tensor:
        """Return x so that autograd takes it for a function of `others` as well; their gradients are zeros.

        So every rank has a backward pass, even if nothing that it holds takes part in the result.
        """
        tied: Tensor = _Tied.apply(x, *others)  # type: ignore[no-untyped-call]
        return tied

    def begin(
        self,
        affine: Affine,
        transitions: Tensor,
        biases: Tensor,
        finals: bool = False,
        part: tuple[int, int] = (0, 1),
        is_hidden: bool = False,
    ) -> States:
        """Begin the scan that finds the states entering pieces; return an object that waits for them.

        affine: how maps of states are applied and composed.
        transitions, biases: A and B of the map S -> A S + B of each piece of this process, [pieces, ...]; zeros where
            the schedule does not need them.
        finals: whether all ranks get the states after the last tokens of batch rows, too.
        part: (number of this part of the heads, number of parts).
        is_hidden: whether the caller computes something else before it waits, which hides the messages.
        """
        held = self.held
        if affine.has_gradients:
            with_gradients = [x for x in self.tensors if x.requires_grad]
            biases = self.tied(biases, *sorted(with_gradients, key=torch.numel)[:1])
        which = "" if part[1] == 1 else f", part {part[0] + 1} of {part[1]}"
        name = f"{self.name} ({affine.name}{which})"
        transition, state = ((tuple(x.shape[1:]), x.dtype) for x in (transitions, biases))
        schedule = held.schedule(finals, heads=min((*transition[0][:1], *state[0][:1]), default=1))
        plans = [
            ScanPlan(owner, schedule, held.pieces.of_rank(owner.rank), affine, transition, state, biases.device, name)
            for owner in held.passes.states
        ]
        scan = ScanOfProcess(held.passes, plans, self.number, self._kept(name), is_hidden=is_hidden)
        with unseen_by_selective_checkpoints():
            return States(scan, scan.begin(transitions, biases))

    def exchange_heads(
        self, heads: Sequence[int] | None, xs: Sequence[Tensor], is_hidden: bool = False
    ) -> ExchangeInFlight:
        """Begin to exchange tokens of this process for whole sequences of its heads, or back; collective.

        Returns an object that waits for the tensors, through which gradients flow.

        heads: None to exchange xs [B, S_local, H, ...] for [B, S, h, ...]; for the way back, the number of all heads
            H of each of xs.
        is_hidden: whether the caller computes something else before it waits, which hides the messages.
        """
        held, plans = self.held, self.held.head_plans(xs[0].device)
        exchange = ExchangeOfHeads(held.passes, plans, self.number, heads, is_hidden=is_hidden)
        with unseen_by_selective_checkpoints():
            return ExchangeInFlight(exchange, exchange.begin(xs))

    def _kept(self, name: str) -> KeptTensors | None:
        """Return the place where a checkpoint keeps the tensors that this rank receives next."""
        return next_kept_tensors(self.held.passes.states[0].strategy, name)

    def halos(self, xs: Sequence[Tensor], width: int) -> list[Tensor]:
        """Return the `width` tokens before each piece, for each x [T, ...]; collective, with gradient.

        Each is [pieces, width, ...], with zeros where a document begins later. The backward pass is collective, too,
        so that every rank's results have to depend on it (`tied`).
        """
        held, device = self.held, xs[0].device
        plans = held.halo_plans(width, device)
        kept = self._kept(plans[0].what)
        with unseen_by_selective_checkpoints():
            halos = HaloFunction.apply(held.passes, plans, held.counts, self.number, kept, *xs)  # type: ignore[no-untyped-call]
        return [halo.view(len(held.numbers), width, *halo.shape[1:]) for halo in halos]

    def with_tokens_before(self, xs: Sequence[Tensor], width: int) -> tuple[list[Tensor], Tensor]:
        """Put the `width` tokens before each piece in front of it, for each x [T, ...]; collective, with gradient.

        Returns the extended tensors [T + pieces * width, ...], and where the rows of x are in them, int64 [T].
        Without pieces the extended tensors are `width + 1` zeros.
        """
        held, halos = self.held, self.halos(xs, width)
        rows, keep = held.with_halos(width, xs[0].device)
        both = [torch.cat([halo.flatten(0, 1), x]) for halo, x in zip(halos, xs, strict=True)]
        if not held.numbers:  # something for the function to be called with
            return [torch.cat([x, x.new_zeros((width + 1, *x.shape[1:]))]) for x in both], keep
        return [x[rows] for x in both], keep


class _Tied(torch.autograd.Function):
    """The first tensor as a function of the others, too, although its values do not depend on them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        ctx.save_for_backward(x.new_empty(0))  # so that checkpoints compute again on every rank
        return x.detach()  # a new tensor, which may be modified in place

    @staticmethod
    @between_graphs
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        zeros = (  # in memory of their own: callers sum gradients of parameters over ranks, in place
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.others, ctx.needs_input_grad[1:], strict=True)
        )
        return grad, *zeros


class Placement:
    """Which tokens of a sequence a rank holds, and which of them are of one document, for calls of recurrent layers.

    Args:
        cp: the ring; with a `VirtualRing` tensors are whole sequences.
        mask: documents, padding on the left, and prefix trees, in positions of the whole sequence; None if each batch
            row is one document.
        tokens: the sequence that rows are taken from, as for `burst_attention`; None for one that ranks hold equal
            parts of, in the ring's layout.
        tag: a name for the next call that is the same on every rank; None for none.
        initial: states [B, ...] that every document of a row begins with, as functions return them after rows, the
            same on all ranks; without gradient. None for zeros.

    Raises:
        ValueError: for an argument of another type.
    """

    def __init__(
        self,
        cp: ContextParallel | VirtualRing,
        mask: Mask | None = None,
        tokens: Tokens | None = None,
        tag: object = None,
        initial: Sequence[Tensor] | None = None,
    ) -> None:
        if not isinstance(cp, ContextParallel | VirtualRing):
            raise ValueError(f"cp={shown(cp)} is not valid; give a ContextParallel, or a VirtualRing")
        if mask is not None:
            check_mask(mask)
        self.passes: Passes = OfOneRank(cp) if isinstance(cp, ContextParallel) else OfVirtualRing(cp)
        self.plans: dict[Any, Any] = cp.plans
        self.mask, self.tokens, self.tag = mask, None if tokens is None else as_tokens(tokens), tag
        self.initial = () if initial is None else tuple(x.detach() for x in initial)

    def call(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        check: Callable[[], Mapping[str, object]],
        parameters: Sequence[Tensor] = (),
    ) -> Call:
        """Return a call of a recurrent function that all ranks have agreed on; collective.

        name: of the function.
        tensors: by name, all [B, S, ...] of one device.
        check: raises ValueError for tensors that do not fit each other; returns options that are equal on all ranks.
        parameters: other tensors that the call is a function of.

        Raises ValueError on every rank, if arguments do not fit on any, or ranks differ.
        """
        x = next(iter(tensors.values()))
        every = (*tensors.values(), *parameters)

        def prepare() -> tuple[HeldPieces, Mapping[str, object]]:
            for state in self.passes.states:
                state.check_usable(x.device)
            for argument, y in tensors.items():
                if y.shape[:2] != x.shape[:2] or y.device != x.device:
                    raise ValueError(
                        f"{name}: {argument} is {list(y.shape)} on {y.device}, beside {list(x.shape)} on {x.device}; "
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
                "types": [y.dtype for y in tensors.values()],  # several of them may travel
                "initial states": len(self.initial),
                "batch": held.rows,
                "tokens": held.tokens,
                "mask": held.mask,
            }

        (held, _), number = self.passes.agree(prepare, signature, self.tag)
        return Call(held, number, name, every, self.initial)

    def exchanges_heads(self, tensors: Mapping[str, Tensor], state: int, transition: int = 1) -> bool:
        """Return whether ranks exchange the heads of a call rather than states.

        `Strategy.recurrent` decides. Where it leaves the choice, ranks exchange heads if they can share them evenly,
        and if that sends fewer bytes, or tokens of a rank do not follow each other, as in striped layouts.

        tensors: [B, S_local, H, ...], by name; the first has the shape of the outputs.
        state, transition: how many numbers the state, and the transition, of one head have.
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

    def alone(self) -> ContextParallel:
        """Return a ring of one rank, which is made once."""
        if "alone" not in self.plans:
            self.plans["alone"] = ContextParallel(hierarchy=[1])
        alone: ContextParallel = self.plans["alone"]
        return alone

    def _tokens(self, x: Tensor) -> Tokens:
        """Return the sequence that x [B, S, ...] is of."""
        ranks = 1 if isinstance(self.passes, OfVirtualRing) else self.passes.states[0].topology.ranks
        return self.tokens or Tokens(max(1, x.shape[1] * ranks))

    def starts(self, x: Tensor) -> Tensor:
        """Return which of this rank's tokens begin a document, bool [B, S_local], for x [B, S_local, ...]."""
        held = self.held(x)
        return held.unflat(held.starts(x.device))

    def held(self, x: Tensor) -> HeldPieces:
        """Return the pieces of a batch, given any tensor x [B, S, ...] of this process's tokens.

        They are worked out once for a batch size, a sequence and a mask. Raises ValueError if B is 0, or S is not the
        number of tokens that this process holds of each batch row.
        """
        states = self.passes.states
        table, tokens = states[0].route_table, self._tokens(x)
        key = (HeldPieces, x.shape[0], tokens, self.mask)
        held: HeldPieces | None = self.plans.get(key)
        if held is None:
            kept_keys = [known for known in self.plans if isinstance(known, tuple) and known[:1] == (HeldPieces,)]
            for known in kept_keys if len(kept_keys) >= _KNOWN else ():
                del self.plans[known]
            if not x.shape[0]:
                raise ValueError(f"{list(x.shape)} has no batch rows; give 1 or more")
            with torch.inference_mode(False):
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
        whole_rows = None
        if isinstance(self.passes, OfVirtualRing):
            of_row = [positions(runs) for runs in shards]
            whole_rows = torch.cat([row * tokens.length + at for at in of_row for row in range(rows)])
        return HeldPieces(self.passes, pieces, tokens, self.mask, rows, whole_rows)
