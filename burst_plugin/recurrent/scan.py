"""A scan over the pieces of a sequence: it finds the state that enters each piece from each piece's map of states.

The backward pass goes through the schedule in the opposite order: states that enter pieces get gradients, which go
where the states came from. Transitions are not sent again, since each rank keeps the transitions that it has met.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from burst_plugin.activations.kept_attention import KeptTensors
from burst_plugin.comm.call_identity import CallId
from burst_plugin.recurrent.affine import Affine
from burst_plugin.recurrent.heads import heads_of
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.passes import Passes, Results
from burst_plugin.recurrent.scan_schedule import WHOLE, Compute, Kind, Move, ScanSchedule, Value
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.rank_state import RankState
from burst_plugin.types import Direction, Spec

Values = dict[Value, Tensor]


@dataclass(frozen=True, eq=False)
class ScanPlan:
    """One rank's plan of a scan, which finds the state that enters each piece.

    rank_state: of the rank.
    schedule: the operations and messages of all ranks.
    pieces: the numbers of this rank's pieces.
    affine: how maps of states are applied and composed.
    transition, state: shape and type of the transition and of the state of one piece.
    device: of all tensors.
    what: a description of the scan for labels and errors, equal on all ranks.
    """

    rank_state: RankState
    schedule: ScanSchedule
    pieces: range
    affine: Affine
    transition: Spec
    state: Spec
    device: torch.device
    what: str

    def messages(self, direction: Direction, call: CallId) -> Messages:
        """Return the object that sends and receives this rank's messages of one pass of the scan."""
        return Messages(self.rank_state, self.device, self.what, direction, call)

    def spec(self, value: Value) -> Spec:
        """Return the shape and the type of a value of the scan."""
        shape, dtype = self.transition if value.kind == "transition" else self.state
        if value.share == WHOLE:
            return shape, dtype
        rows = self.rows(value)
        return (rows.stop - rows.start, *shape[1:]), dtype

    def rows(self, value: Value) -> slice:
        """Return the rows of the whole value that a share of it has."""
        shape, _ = self.transition if value.kind == "transition" else self.state
        return heads_of(value.share, self.schedule.shares, shape[0])

    def zeros(self, value: Value) -> Tensor:
        """Return zeros of the shape and the type of a value."""
        shape, dtype = self.spec(value)
        return torch.zeros(shape, dtype=dtype, device=self.device)


class Scan:
    """A scan on one rank, forward and backward.

    values: the transitions and biases of the rank's pieces; `forward` adds all values that it computes or receives.
    """

    def __init__(self, plan: ScanPlan, values: Values) -> None:
        self.plan, self.values = plan, values

    @classmethod
    def of(cls, plan: ScanPlan, transitions: Tensor, biases: Tensor) -> Scan:
        """Return the scan over this rank's pieces, given their transitions and biases, [pieces, ...]."""
        values: Values = {}
        for local, number in enumerate(plan.pieces):
            if plan.schedule.needs_pair[number]:
                values[Value("bias", number)] = biases[local]
                if plan.schedule.is_entered[number]:
                    values[Value("transition", number)] = transitions[local]
        return cls(plan, values)

    def forward(self, call: CallId) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
        """Run the scan; return the states that enter this rank's pieces, and the states after batch rows.

        A generator, which yields while messages are under way. The first are [pieces, ...], zeros where no state
        enters; the second a list with a state for each batch row, empty unless the schedule has final pieces.
        """
        messages, rank = self.plan.messages("forward", call), self.plan.rank_state.rank
        for step in self.plan.schedule.rounds:
            for where, compute in step.computes:
                if where == rank:
                    self._compute(compute)
            yield from self._move(messages, step.moves)
        for moves in self.plan.schedule.final_moves:
            yield from self._move(messages, moves)
        last = [self._known("exit", number) for number in self.plan.schedule.final_pieces]
        return self._entries(), last

    def _entries(self) -> Tensor:
        """Return the states that enter this rank's pieces, [pieces, ...]: zeros where none does."""
        shape, dtype = self.plan.state
        entries = torch.zeros((len(self.plan.pieces), *shape), dtype=dtype, device=self.plan.device)
        for local, number in enumerate(self.plan.pieces):
            if self.plan.schedule.is_entered[number]:
                entries[local] = self._known("entry", number)
        return entries

    def _value(self, value: Value) -> Tensor | None:
        """Return a value: the whole if it is there in shares, a share if it is there as a whole.

        None for a value that is missing: no state, or the state zero.
        """
        tensor = self.values.get(value)
        if tensor is not None:
            return tensor
        if value.share != WHOLE:
            full_value = self.values.get(value._replace(share=WHOLE))
            return None if full_value is None else full_value[self.plan.rows(value)]
        shares = [value._replace(share=n) for n in range(self.plan.schedule.shares)]
        if not any(share in self.values for share in shares):
            return None
        self.values[value] = torch.cat([self.values.pop(share) for share in shares])
        return self.values[value]

    def _known(self, kind: Kind, span: int, share: int = WHOLE) -> Tensor:
        """Return a value that is not missing."""
        tensor = self._value(Value(kind, span, share))
        assert tensor is not None
        return tensor

    def _compute(self, compute: Compute) -> None:
        """Run one operation of the schedule."""
        values, affine, (kind, span, left, right, share) = self.values, self.plan.affine, compute
        if kind == "join":
            late, bias = self._known("transition", right, share), self._known("bias", right, share)
            values[Value("bias", span, share)] = affine.through(late, bias, self._known("bias", left, share))
            early = self._value(Value("transition", left, share))
            if early is not None:
                values[Value("transition", span, share)] = affine.compose(late, early)
        elif kind == "hand":
            values[Value("entry", left, share)] = self._known("entry", span, share)
        elif kind == "begin":
            values[Value("entry", span, share)] = self._known("exit", left, share)
        else:
            source, target = (left, Value("entry", right, share)) if kind == "enter" else (span, Value("exit", span))
            bias, entry = self._known("bias", source, share), self._value(Value("entry", span, share))
            if entry is None:
                values[target] = bias
            else:
                values[target] = affine.through(self._known("transition", source, share), bias, entry)

    def _move(self, messages: Messages, moves: Sequence[Move]) -> Generator[None, None, None]:
        """Send and receive the values of one round."""
        rank = self.plan.rank_state.rank
        sends: dict[int, list[Tensor]] = defaultdict(list)
        recvs: dict[int, list[Value]] = defaultdict(list)
        for move in moves:
            if move.src == rank:
                sends[move.dst].append(self._known(*move.value))
            elif move.dst == rank:
                recvs[move.src].append(move.target)
        specs = {peer: [self.plan.spec(value) for value in targets] for peer, targets in recvs.items()}
        received = yield from messages.exchange(sends, specs)
        for peer, tensors in received.items():
            self.values.update(zip(recvs[peer], tensors, strict=True))

    def backward(self, call: CallId, grads: Tensor) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Run the backward pass; return the gradients of transitions and biases, [pieces, ...] each.

        A generator, which yields while messages are under way.

        grads: the gradients of the states that enter this rank's pieces, [pieces, ...].
        """
        gradients: Values = {}
        for local, number in enumerate(self.plan.pieces):
            if self.plan.schedule.is_entered[number]:
                gradients[Value("entry", number)] = grads[local]
        messages, rank = self.plan.messages("backward", call), self.plan.rank_state.rank
        for step in reversed(self.plan.schedule.rounds):
            yield from self._move_back(messages, step.moves, gradients)
            for where, compute in reversed(step.computes):
                if where == rank:
                    self._compute_back(compute, gradients)
        return self._of_pieces(gradients)

    def _compute_back(self, compute: Compute, gradients: Values) -> None:
        """Add the contributions of the gradients of `compute`'s results to the gradients of its operands."""
        affine, (kind, span, left, right, share) = self.plan.affine, compute
        if kind == "join":
            grad = self._grad(gradients, Value("bias", span, share))
            if grad is not None:
                _add(gradients, Value("bias", right, share), grad)
                late = self._known("transition", right, share)
                _add(gradients, Value("bias", left, share), affine.apply_transposed(late, grad))
        elif kind in ("hand", "begin"):
            copy, original = Value("entry", left, share), Value("entry", span, share)
            if kind == "begin":
                copy, original = original, Value("exit", left, share)
            grad = self._grad(gradients, copy)
            if grad is not None:
                _add(gradients, original, grad)
        else:
            source, target = (left, Value("entry", right, share)) if kind == "enter" else (span, Value("exit", span))
            grad = self._grad(gradients, target)
            if grad is not None:
                _add(gradients, Value("bias", source, share), grad)
                if self._value(Value("entry", span, share)) is not None:
                    transition = self._known("transition", source, share)
                    _add(gradients, Value("entry", span, share), affine.apply_transposed(transition, grad))

    def _grad(self, gradients: Values, value: Value) -> Tensor | None:
        """Return the gradient of a value, the sum of its gradients for all heads and for shares; None for zero.

        gradients: gradients by name.
        """
        grad = gradients.get(value)
        if value.share != WHOLE:
            full_grad = gradients.get(value._replace(share=WHOLE))
            rows = None if full_grad is None else full_grad[self.plan.rows(value)]
            return rows if grad is None else grad if rows is None else grad + rows
        shares = [value._replace(share=n) for n in range(self.plan.schedule.shares)]
        shares = [share for share in shares if share in gradients]
        if shares:
            grad = self.plan.zeros(value) if grad is None else grad.clone()
            for share in shares:
                grad[self.plan.rows(share)] += gradients[share]
        return grad

    def _move_back(self, messages: Messages, moves: Sequence[Move], gradients: Values) -> Generator[None, None, None]:
        """Send the gradients of the values received in a round back to the ranks that sent the values."""
        rank = self.plan.rank_state.rank
        sends: dict[int, list[Tensor]] = defaultdict(list)
        recvs: dict[int, list[Value]] = defaultdict(list)
        for move in moves:
            if move.value.kind == "transition":
                continue
            if move.dst == rank:
                grad = self._grad(gradients, move.target)
                gradients.pop(move.target, None)
                sends[move.src].append(self.plan.zeros(move.target) if grad is None else grad)
            elif move.src == rank:
                recvs[move.dst].append(move.value)
        specs = {peer: [self.plan.spec(value) for value in values] for peer, values in recvs.items()}
        received = yield from messages.exchange(sends, specs)
        for peer, tensors in received.items():
            for value, grad in zip(recvs[peer], tensors, strict=True):
                _add(gradients, value, grad)

    def _of_pieces(self, gradients: Values) -> tuple[Tensor, Tensor]:
        """Return the gradients of transitions and biases of this rank's pieces."""
        plan, count = self.plan, len(self.plan.pieces)
        (transition, dtype), (state, _) = plan.transition, plan.state
        transitions = torch.zeros((count, *transition), dtype=dtype, device=plan.device)
        biases = torch.zeros((count, *state), dtype=dtype, device=plan.device)
        for local, number in enumerate(plan.pieces):
            grad, entry = self._grad(gradients, Value("bias", number)), self._value(Value("entry", number))
            if grad is not None:
                biases[local] = grad
                if entry is not None:
                    transitions[local] = plan.affine.grad_of_transition(grad, entry, transitions[local])
        return transitions, biases


def _add(gradients: Values, value: Value, grad: Tensor) -> None:
    gradients[value] = gradients[value] + grad if value in gradients else grad


class ScanOfProcess:
    """A scan on the ranks of this process: of one rank, or of all ranks of a virtual ring.

    Autograd sees two steps, `begin` and `end`. Computing between them hides the messages, in the backward pass as
    well: the gradient of `end` begins a pass, and the gradient of `begin` ends it.

    Args:
        passes: run programs on the ranks of this process.
        plans: one for each of these ranks.
        call: the call that ranks have agreed on.
        kept: where a checkpoint keeps the results, so that its second run sends nothing; None to keep none.
        is_hidden: whether the caller computes between `begin` and `end`, so that passes run on a stream or in a
            thread of their own.
    """

    def __init__(
        self, passes: Passes, plans: Sequence[ScanPlan], call: CallId, kept: KeptTensors | None, is_hidden: bool
    ) -> None:
        self.plans, self.kept = plans, kept
        self._start, self._call = partial(passes.start, call=call, beside=is_hidden), call
        self._results: Results | None = None
        self._scans: list[Scan] = []

    def begin(self, transitions: Tensor, biases: Tensor) -> Tensor:
        """Begin the scan over transitions and biases [pieces, ...], one rank's after another's.

        Returns an empty tensor for `end`, by which autograd knows that the end follows from this beginning.
        """
        begun: Tensor = _Begun.apply(self, transitions, biases)  # type: ignore[no-untyped-call]
        return begun

    def end(self, begun: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for the scan; return the states that enter pieces, and the states after the last tokens of batch rows.

        The first are [pieces, ...]; the second [B, ...], or [0, ...] if the schedule has no final pieces, without
        gradient. `begun` is the tensor that `begin` returned.
        """
        both: tuple[Tensor, Tensor] = _Ended.apply(self, begun)  # type: ignore[no-untyped-call]
        return both

    def start(self, transitions: Tensor, biases: Tensor) -> None:
        """Start the forward pass, unless a checkpoint has kept its results.

        transitions, biases: [pieces, ...], one rank's after another's.
        """
        if self.kept is not None and self.kept.found is not None:
            return
        cuts = self._cuts()
        self._scans = [
            Scan.of(plan, transitions[at:stop], biases[at:stop])
            for plan, at, stop in zip(self.plans, cuts, cuts[1:], strict=False)
        ]
        programs = [scan.forward(self._call) for scan in self._scans]
        self._results = self._start("forward", programs=programs, inputs=(transitions, biases))

    def found(self) -> tuple[Tensor, Tensor, list[Values]]:
        """Wait for the forward pass; return entering states, final states, and what the backward pass needs.

        Entering states are [pieces, ...], final states [B, ...] or [0, ...]; the last is a list of each rank's
        transitions and entering states by name, for `start_backward`.
        """
        if self._results is None:
            assert self.kept is not None
            known: tuple[Tensor, Tensor, list[Values]] = self.kept.found
            return known
        results, scans, self._results, self._scans = self._results(), self._scans, None, []
        parts, finals = zip(*results, strict=True)
        entries = torch.cat(parts)
        last = torch.stack(finals[0]) if finals[0] else entries.new_empty((0, *entries.shape[1:]))
        needed = [{key: x for key, x in scan.values.items() if key.kind in ("transition", "entry")} for scan in scans]
        if self.kept is not None:
            self.kept.found = entries, last, needed
        return entries, last, needed

    def abandon(self) -> None:
        """Wait for a pass whose results are not needed any more, so that no later pass receives its messages."""
        results, self._results, self._scans = self._results, None, []
        if results is not None:
            with suppress(Exception):
                results()

    def start_backward(self, grad: Tensor, values: Sequence[Values]) -> None:
        """Start the backward pass, which `gradients` waits for.

        grad: the gradient of the entering states, [pieces, ...].
        values: the values of each rank that `found` returned.
        """
        cuts = self._cuts()
        programs = [
            Scan(plan, rank_values).backward(self._call, grad[at:stop])
            for plan, rank_values, at, stop in zip(self.plans, values, cuts, cuts[1:], strict=False)
        ]
        inputs = (grad, *(x for rank_values in values for x in rank_values.values()))
        self._results = self._start("backward", programs=programs, inputs=inputs)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Wait for the backward pass; return the gradients of transitions and biases, [pieces, ...] each."""
        assert self._results is not None
        results, self._results = self._results(), None
        transitions, biases = (torch.cat(parts) for parts in zip(*results, strict=True))
        return transitions, biases

    def _cuts(self) -> list[int]:
        """Return the first piece of each rank, and the number of pieces."""
        return [*accumulate((len(plan.pieces) for plan in self.plans), initial=0)]


class _Begun(torch.autograd.Function):
    """The beginning of a scan; returns an empty tensor that its end is a function of."""

    @staticmethod
    def forward(ctx: Any, scan: ScanOfProcess, transitions: Tensor, biases: Tensor) -> Tensor:
        ctx.scan = scan
        scan.start(transitions, biases)
        return biases.new_empty(0)

    @staticmethod
    @between_graphs
    def backward(ctx: Any, unused: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.scan.gradients()


class _Ended(torch.autograd.Function):
    """The end of a scan; returns entries of all pieces, and the states after all rows, without gradient."""

    @staticmethod
    def forward(ctx: Any, scan: ScanOfProcess, begun: Tensor) -> tuple[Tensor, Tensor]:
        entries, last, values = scan.found()
        ctx.scan, ctx.keys = scan, [list(rank_values) for rank_values in values]
        # The first, so that a checkpoint computes again before the backward pass on every rank, or on none.
        ctx.save_for_backward(entries.new_empty(0), *(x for rank_values in values for x in rank_values.values()))
        entries, last = entries.view_as(entries), last.view_as(last)
        ctx.mark_non_differentiable(last)
        return entries, last

    @staticmethod
    @between_graphs
    def backward(ctx: Any, grad: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors[1:])
        ctx.scan.start_backward(grad, [dict(zip(keys, saved, strict=False)) for keys in ctx.keys])
        return None, grad.new_empty(0)
