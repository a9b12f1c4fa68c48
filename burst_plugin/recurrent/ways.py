"""Ways to compute pieces of a sequence with the states that enter them.

- Outputs are linear in the entering state, by numbers (`in_one_pass`): the kernel runs once, from zero, and what the
  entering state adds is added.
- The map of states is a matrix (`in_two_passes`): what pieces do to a state first, then the kernel with the entering
  states. Pieces that begin a document take one pass.
- States have exponents of their own, so that they do not overflow (`with_exponents`): ranks agree on these first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from burst_plugin.recurrent.affine import ELEMENTWISE, LARGEST, Affine
from burst_plugin.recurrent.held_pieces import Group
from burst_plugin.recurrent.placement import Call

P = ParamSpec("P")
T = TypeVar("T")
Kernel = Callable[..., tuple[Tensor, Tensor]]  # of dense pieces, and the states that enter them: outputs, and states
_NO_EXPONENT = -1e30
_FINEST = 64  # exponents are multiples of 1 / 64, whose sums are exact


class State(NamedTuple):
    """How a piece maps states: the shapes of the transition and of the state of one piece.

    out: a tensor of the outputs' shape and type, [B, S, ...].
    takes_lengths: the kernel has to know where padding begins.
    """

    affine: Affine
    transition: tuple[int, ...]
    state: tuple[int, ...]
    out: Tensor
    takes_lengths: bool = False


def state_type(x: Tensor) -> torch.dtype:
    """Return the type of states: float64 for float64, else float32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _without_autocast(compute: Callable[P, T]) -> Callable[P, T]:
    """Return a function that computes in the types of its tensors: states would lose their digits in fewer bits."""

    @functools.wraps(compute)
    def computed(*args: P.args, **kwargs: P.kwargs) -> T:
        call = args[0]
        assert isinstance(call, Call)
        kind = call.tensors[0].device.type
        if not torch.is_autocast_enabled(kind):
            return compute(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return compute(*args, **kwargs)

    return computed


class _OfPieces:
    """A tensor for each piece of this process; zeros where there is none."""

    def __init__(self, call: Call, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.zero = torch.zeros(shape, dtype=dtype, device=device)
        self.found = [self.zero] * len(call.held.numbers)

    def put(self, group: Group, x: Tensor) -> None:
        """Set those of a group."""
        for number, each in zip(group.pieces, x.unbind(), strict=True):
            self.found[number] = each.to(self.zero.dtype)

    def stacked(self) -> Tensor:
        """Return all of them, [pieces, ...]."""
        return torch.stack(self.found) if self.found else self.zero.new_zeros((0, *self.zero.shape))


@_without_autocast
def in_two_passes(
    call: Call,
    tensors: Sequence[Tensor],
    kernel: Kernel,
    pair: Callable[..., tuple[Tensor, Tensor]],
    state: State,
    finals: bool,
) -> Any:
    """Return the outputs of a kind whose pairs `pair` computes; with `finals` the states after rows as well."""
    held, device, dtype = call.held, state.out.device, state_type(state.out)
    rows, (fresh, entered, paired) = [held.flat(x) for x in tensors], _sorted_pieces(call, finals)
    transitions, biases = (_OfPieces(call, shape, dtype, device) for shape in (state.transition, state.state))
    done: list[tuple[Group, Tensor]] = []
    for group in held.groups(fresh, device):
        out, final = kernel(*(group.take(x) for x in rows), None)
        done.append((group, out))
        biases.put(group, final)
    last = biases.zero
    if held.exchanges or finals:
        for group in held.groups(paired, device):
            transition, bias = pair(*(group.take(x) for x in rows))
            transitions.put(group, transition)
            biases.put(group, bias)
        entries, last = call.entries(state.affine, transitions.stacked(), biases.stacked(), finals)
        for group in held.groups(entered, device):
            done.append((group, kernel(*(group.take(x) for x in rows), group.of_pieces(entries))[0]))
        out = call.tied(_joined(call, done, state.out), entries)
    else:
        out = _joined(call, done, state.out)
    return (out, last) if finals else out


@_without_autocast
def in_one_pass(
    call: Call,
    tensors: Sequence[Tensor],
    kernel: Kernel,
    transition: Callable[[Sequence[Tensor], Group], Tensor],
    read: Callable[[Sequence[Tensor], Tensor], Tensor],
    state: State,
    finals: bool,
) -> Any:
    """Return the outputs of a kind in which what an entering state adds to outputs is added afterwards.

    transition: returns the transitions of a group's pieces, of its tensors.
    read: returns what entering states [N, ...] add to the outputs of a group, of its tensors.
    """
    held, device, dtype = call.held, state.out.device, state_type(state.out)
    rows, (_, entered, _) = [held.flat(x) for x in tensors], _sorted_pieces(call, finals)
    transitions, biases = (_OfPieces(call, shape, dtype, device) for shape in (state.transition, state.state))
    done: list[tuple[Group, Tensor]] = []
    taken: list[list[Tensor]] = []
    for group in held.groups(range(len(held.numbers)), device):
        given = [group.take(x) for x in rows]
        out, final = kernel(*given, None, *((group.counts,) if state.takes_lengths else ()))
        done.append((group, out))
        taken.append(given)
        biases.put(group, final)
        transitions.put(group, transition(given, group))
    if not (held.exchanges or finals):
        return _joined(call, done, state.out)
    entries, last = call.entries(state.affine, transitions.stacked(), biases.stacked(), finals)
    for place, ((group, out), given) in enumerate(zip(done, taken, strict=True)):
        if not set(group.pieces).isdisjoint(entered):
            done[place] = group, (out + read(given, group.of_pieces(entries))).to(out.dtype)
    out = call.tied(_joined(call, done, state.out), entries)
    return (out, last) if finals else out


class Exponential(NamedTuple):
    """A state of several parts, all times e to an exponent.

    parts: the shapes of the parts for one piece; they begin with the shape of the exponent.
    exponent: the shape of the exponent, of one dim.
    out: a tensor of the outputs' shape and type, [B, S, ...].
    """

    parts: Sequence[tuple[int, ...]]
    exponent: tuple[int]
    out: Tensor

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts [N, ...] as one tensor, [N, *exponent, sizes]."""
        return torch.cat([part.reshape(len(part), *self.exponent, -1) for part in parts], -1)

    def split(self, state: Tensor) -> list[Tensor]:
        """Return the parts of a tensor that `joined` made."""
        parts = state.tensor_split([*accumulate(self.sizes)][:-1], -1)
        return [x.reshape(len(x), *shape) for x, shape in zip(parts, self.parts, strict=True)]

    def nothing(self, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return states of `count` pieces in which there is nothing, not even an exponent."""
        zeros = [torch.zeros((count, *shape), dtype=dtype, device=self.out.device) for shape in self.parts]
        return *zeros, torch.full((count, *self.exponent), _NO_EXPONENT, dtype=dtype, device=self.out.device)

    @property
    def sizes(self) -> list[int]:
        """Return the size of each part for one exponent."""
        return [torch.Size(shape[1:]).numel() for shape in self.parts]


@_without_autocast
def with_exponents(
    call: Call,
    tensors: Sequence[Tensor],
    kernel: Callable[..., tuple[Tensor, Sequence[Tensor], Tensor]],
    log_decay: Callable[[Sequence[Tensor], Group], Tensor],
    state: Exponential,
    finals: bool,
) -> Any:
    """Return the outputs of a kind whose states are several tensors, all times e to an exponent.

    States travel with exponents that are multiples of 1 / 64, whose sums do not depend on their order, so that both
    ends of a message know the same one. Kernels get the exponents that one rank would have, which matter where one
    adds to a denominator.

    kernel: takes tensors, the entering states with their exponent last, and lengths; returns outputs, the parts of
        the state that leaves, and its exponent.
    log_decay: returns the logarithm of what a group's pieces multiply states with, of the exponent's shape.
    """
    held, device, dtype = call.held, state.out.device, state_type(state.out)
    rows, (fresh, entered, paired) = [held.flat(x) for x in tensors], _sorted_pieces(call, finals)
    logs, mosts = (_OfPieces(call, state.exponent, dtype, device) for _ in range(2))
    states = _OfPieces(call, (*state.exponent, sum(state.sizes)), dtype, device)
    done: list[tuple[Group, Tensor]] = []
    for of_kind in (fresh, paired if held.exchanges or finals else []):
        for group in held.groups(of_kind, device):
            given = [group.take(x) for x in rows]
            nothing = None if of_kind is fresh else state.nothing(len(group.pieces), dtype)
            out, parts, most = kernel(given, nothing, group.counts)
            states.put(group, state.joined(parts))
            mosts.put(group, most)
            logs.put(group, log_decay(given, group))
            if of_kind is fresh:
                done.append((group, out))
    if not (held.exchanges or finals):
        return _joined(call, done, state.out)
    log, most = logs.stacked(), mosts.stacked()
    exact_log, exact_most = log.detach().double(), most.detach().double()
    both_logs, both_mosts = (torch.stack([(x * _FINEST).round() / _FINEST, x], -1) for x in (exact_log, exact_most))
    enters, last_most = call.entries(LARGEST, both_logs, both_mosts, finals)
    is_entered = held.is_entered(device).unsqueeze(1)
    fine = enters[..., 0]
    leaves = torch.where(is_entered, torch.maximum(both_logs[..., 0] + fine, both_mosts[..., 0]), both_mosts[..., 0])
    transitions = torch.where(is_entered, log + (fine - leaves), 0).exp().to(dtype).unsqueeze(-1)
    biases = states.stacked() * (most - leaves).exp().to(dtype).unsqueeze(-1)
    entries, last = call.entries(ELEMENTWISE, transitions, biases, finals)
    to_exact = torch.where(is_entered, enters[..., 0] - enters[..., 1], 0).exp().to(dtype).unsqueeze(-1)
    for group in held.groups(entered, device):
        parts = state.split(group.of_pieces(entries * to_exact))
        initial = (*parts, group.of_pieces(enters[..., 1]).to(dtype))
        done.append((group, kernel([group.take(x) for x in rows], initial, group.counts)[0]))
    out = call.tied(_joined(call, done, state.out), entries)
    return (out, (*state.split(last), last_most[..., 0].to(dtype))) if finals else out


def _sorted_pieces(call: Call, finals: bool) -> tuple[list[int], list[int], list[int]]:
    """Return the pieces of this process that no state enters, those that one does, and which of these need pairs."""
    held, schedule = call.held, call.held.schedule(finals)
    fresh = [n for n, number in enumerate(held.numbers) if not schedule.is_entered[number]]
    entered = [n for n, number in enumerate(held.numbers) if schedule.is_entered[number]]
    return fresh, entered, [n for n in entered if schedule.needs_pair[held.numbers[n]]]


def _joined(call: Call, done: Sequence[tuple[Group, Tensor]], out: Tensor) -> Tensor:
    """Return [B, S, ...] from the outputs of groups of all pieces; of none an empty tensor like `out`."""
    if not done:
        return torch.zeros_like(out)
    return call.held.unflat(call.held.joined([group for group, _ in done], [each for _, each in done]))
