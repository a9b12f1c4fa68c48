"""Ways to compute pieces of a sequence with the states that enter them.

- Outputs are linear in the entering state, by numbers (`OnePass`): the kernel runs once, from zero, and the
  contribution of the entering state is added.
- The kernel has stages (`InStages`): the maps of states; all work that needs no other pieces, which from about a
  thousand tokens on hides the messages; and the contributions of the entering states.
- The map of states is a matrix (`TwoPasses`): the maps of states first, then the kernel with the entering states.
  Pieces that begin a document take one pass.
- States have exponents of their own, so that they do not overflow (`with_exponents`): ranks agree on these first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from burst_plugin.recurrent.affine import ELEMENTWISE, LARGEST, Affine
from burst_plugin.recurrent.heads import can_hide, can_share, heads_of
from burst_plugin.recurrent.held_pieces import Group
from burst_plugin.recurrent.placement import Call

P = ParamSpec("P")
T = TypeVar("T")
GoesOn = Callable[[Tensor], Tensor]  # returns the outputs of pieces, given the states that enter them
OutputsOf = Callable[[Tensor | None], Tensor]  # likewise, where None stands for zeros
Kernel = Callable[..., tuple[Tensor, Tensor]]  # of dense pieces, and the states that enter them: outputs, and states
_NO_EXPONENT = -1e30
_FINEST = 64  # exponents are multiples of 1 / 64, whose sums are exact


class State(NamedTuple):
    """The map S -> A S + B of a piece on states, by its kind and the shapes of A and S.

    affine: how such maps are applied and composed.
    transition, state: the shapes of A and of S for one piece.
    out: a tensor of the outputs' shape and type, [B, S, ...].
    takes_lengths: whether the kernel takes the pieces' numbers of tokens, int64 [N], as its last argument, because it
        has to know where padding begins.
    """

    affine: Affine
    transition: tuple[int, ...]
    state: tuple[int, ...]
    out: Tensor
    takes_lengths: bool = False


def state_type(x: Tensor) -> torch.dtype:
    """Return the type of the states of a layer with inputs like x: float64 for float64, else float32."""
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
        """Set the tensors of a group's pieces, x [pieces, ...]."""
        for number, each in zip(group.pieces, x.unbind(), strict=True):
            self.found[number] = each.to(self.zero.dtype)

    def stacked(self) -> Tensor:
        """Return the tensors of all pieces, [pieces, ...]."""
        return torch.stack(self.found) if self.found else self.zero.new_zeros((0, *self.zero.shape))


class TwoPasses(NamedTuple):
    """A computation in two passes: `pair` finds each piece's map of states, then the kernel gets entering states.

    kernel: `kernel(*tensors, states)` returns the outputs of pieces [N, L, ...], and the states that leave them,
        given the states that enter them; None for zeros.
    pair: `pair(*tensors)` returns the transitions and biases of pieces, [N, ...], and None; or in place of None a
        function that, given the entering states, returns the outputs with less work than the kernel.
    state: the map of states.
    """

    kernel: Kernel
    pair: Callable[..., tuple[Tensor, Tensor, GoesOn | None]]
    state: State

    def start(self, work: Work, needs_pairs: bool) -> None:
        """Compute the outputs of pieces that no state enters, and if `needs_pairs` the maps of states of pieces."""
        for group, inputs in work.groups(work.fresh):
            out, final = self.kernel(*inputs, *(work.call.initial_of(group) or (None,)))
            work.done.append((group, out))
            work.biases.put(group, final)
        for group, inputs in work.groups(work.paired if needs_pairs else ()):
            transition, bias, goes_on = self.pair(*inputs)
            work.transitions.put(group, transition)
            work.biases.put(group, bias)
            if goes_on is not None:
                work.begun.append((group, goes_on))

    def finish(self, work: Work) -> None:
        """Compute the outputs of pieces that a state enters."""
        begun = {number for group, _ in work.begun for number in group.pieces}
        while work.begun:  # so that each group's tensors go with it
            group, goes_on = work.begun.pop(0)
            work.done.append((group, goes_on(group.of_pieces(work.entries))))
            del goes_on
        for group, inputs in work.groups([number for number in work.entered if number not in begun]):
            work.done.append((group, self.kernel(*inputs, group.of_pieces(work.entries))[0]))


class InStages(NamedTuple):
    """A computation in stages that continue each other.

    kernel: all stages at once, see `TwoPasses`; for lengths see `state.takes_lengths`.
    begin: returns, from a group's tensors and the group, the transitions and biases of pieces, [N, ...], and a
        function for the second stage, which computes all that needs no entering states, and returns the third stage:
        a function from the states that enter pieces, None if none does, to outputs.
    state: the map of states.
    """

    kernel: Kernel
    begin: Callable[[Sequence[Tensor], Group], tuple[Tensor, Tensor, Callable[[], OutputsOf]]]
    state: State

    def start(self, work: Work, needs_pairs: bool) -> None:
        """Compute the maps of states of pieces; without `needs_pairs` all outputs from initial states."""
        for group, inputs in work.groups(range(len(work.call.held.numbers))):
            initial = work.call.initial_of(group) or (None,)
            if not needs_pairs:
                lengths = (group.counts,) if self.state.takes_lengths else ()
                work.done.append((group, self.kernel(*inputs, *initial, *lengths)[0]))
                continue
            transition, bias, second = self.begin(inputs, group)
            if initial[0] is not None:
                bias = work.affine.through(transition, bias, initial[0])
            work.transitions.put(group, transition)
            work.biases.put(group, bias)
            work.begun.append((group, second))

    def between(self, work: Work) -> None:
        """Compute the second stage, while the states that enter pieces travel."""
        work.begun = [(group, second()) for group, second in work.begun]

    def finish(self, work: Work) -> None:
        """Compute the outputs, with the states that enter pieces."""
        while work.begun:  # so that each group's tensors go with it
            group, third = work.begun.pop(0)
            initial = work.call.initial_of(group)
            entries = None if set(group.pieces).isdisjoint(work.entered) else group.of_pieces(work.entries)
            if initial is not None:
                entries = initial[0].to(work.entries.dtype) + (0 if entries is None else entries)
            work.done.append((group, third(entries)))
            del third


class OnePass(NamedTuple):
    """A computation in one pass: the kernel starts from zero, and what entering states contribute is added later.

    kernel: `kernel(*tensors, states)` returns the outputs of pieces [N, L, ...], and the states that leave them;
        `states` are initial states, None for zeros. With `state.takes_lengths` it takes lengths [N], too.
    transition: returns the transitions of a group's pieces, [N, ...], from the group's tensors and the group.
    read: returns what entering states [N, ...] add to the outputs of a group, from the group's tensors and the
        states.
    state: the map of states.
    """

    kernel: Kernel
    transition: Callable[[Sequence[Tensor], Group], Tensor]
    read: Callable[[Sequence[Tensor], Tensor], Tensor]
    state: State

    def start(self, work: Work, needs_pairs: bool) -> None:
        """Compute all outputs from initial states, and if `needs_pairs` the maps of states of pieces."""
        for group, inputs in work.groups(range(len(work.call.held.numbers))):
            lengths = (group.counts,) if self.state.takes_lengths else ()
            out, final = self.kernel(*inputs, *(work.call.initial_of(group) or (None,)), *lengths)
            work.done.append((group, out))
            if needs_pairs:
                work.biases.put(group, final)
                work.transitions.put(group, self.transition(inputs, group))

    def finish(self, work: Work) -> None:
        """Add to the outputs what the states that enter pieces contribute."""
        for place, (group, out) in enumerate(work.done):
            if not set(group.pieces).isdisjoint(work.entered):
                read = self.read([group.take(x) for x in work.rows], group.of_pieces(work.entries))
                work.done[place] = group, (out + read).to(out.dtype)


Way = OnePass | InStages | TwoPasses


class Work:
    """The computing of a recurrent function for some heads, on all pieces of this process.

    Args:
        call: the call that ranks have agreed on.
        way: how pieces are computed.
        tensors: [B, S, h, ...], all inputs of the function for these heads.
        finals: whether the states after the last tokens of batch rows are asked for.

    Attributes that ways of computing read and fill:
        fresh, entered, paired: the pieces that begin a document, that a state enters, and whose maps are needed.
        transitions, biases: the maps of pieces.
        done: groups of pieces, with their outputs.
        begun: groups of pieces, with the function for their next stage.
        entries, last: once received, the states that enter pieces, and the states after batch rows.
    """

    def __init__(self, call: Call, way: Way, tensors: Sequence[Tensor], finals: bool) -> None:
        self.call, self.way, self.finals = call, way, finals
        self.rows = [call.held.flat(x) for x in tensors]
        out, affine, *shapes = way.state.out, way.state.affine, way.state.transition, way.state.state
        self.affine, self.device = affine, out.device
        self.transitions, self.biases = (_OfPieces(call, shape, state_type(out), self.device) for shape in shapes)
        self.fresh, self.entered, self.paired = _sorted_pieces(call, finals)
        self.done: list[tuple[Group, Tensor]] = []
        self.begun: list[tuple[Group, Callable[..., Any]]] = []

    def groups(self, pieces: Sequence[int]) -> Iterator[tuple[Group, list[Tensor]]]:
        """Yield the pieces with these numbers in groups, and with each group its tokens of every tensor.

        These are [pieces, length, h, ...], padded with zeros.
        """
        for group in self.call.held.groups(pieces, self.device):
            yield group, [group.take(x) for x in self.rows]

    def send(self, part: tuple[int, int]) -> None:
        """Start the scan that finds the states entering pieces, from the maps of pieces; `receive` waits for it.

        part: (number of this part of the heads, number of parts).
        """
        pairs = self.transitions.stacked(), self.biases.stacked()
        held = self.call.held
        is_hidden = part[1] > 1 or (
            isinstance(self.way, InStages) and held.exchanges and can_hide(held.average_tokens)
        )
        self._states = self.call.begin(self.affine, *pairs, self.finals, part, is_hidden=is_hidden)

    def receive(self) -> None:
        """Wait for the states that enter pieces, and set `entries` and `last`."""
        self.entries, self.last = self._states.wait()

    def abandon(self) -> None:
        """Wait, after an error, for the states that were on their way, and drop them."""
        self._states.scan.abandon()

    def out(self) -> Tensor:
        """Return the outputs of all pieces, [B, S, h, ...]."""
        return _joined(self.call, self.done, self.way.state.out)


@_without_autocast
def in_parts(
    call: Call,
    parts: int,
    of_heads: Callable[..., Way],
    tensors: Sequence[Tensor],
    finals: bool,
    *shared: Tensor,
) -> Any:
    """Compute a recurrent function a part of the heads at a time; return outputs, with `finals` also last states.

    States of a part are on their way while the next part is started, and the part before is finished.

    call: the call that ranks have agreed on.
    parts: into how many parts heads are cut, if ranks exchange states, and have many tokens.
    of_heads: returns how some heads are computed, given `tensors` [B, S, h, ...] and `shared` [h, ...].
    tensors: the inputs, [B, S, H, ...].
    finals: whether to return (outputs, states after the last tokens of batch rows).
    shared: parameters of heads, [H, ...].
    """
    held = call.held
    waits = held.exchanges or finals
    hides = parts > 1 and held.exchanges and can_hide(held.average_tokens) and not call.initial
    if not (hides and can_share(parts, [x.shape[2] for x in tensors])):
        parts = 1
    works: list[Work] = []
    try:
        for part in range(parts):
            cut = [x[:, :, heads_of(part, parts, x.shape[2])] for x in tensors] if parts > 1 else tensors
            way = of_heads(*cut, *(x[heads_of(part, parts, len(x))] for x in shared))
            work = Work(call, way, cut, finals)
            way.start(work, waits)
            if not waits:
                return work.out()
            previous = works[-1:]
            for before in previous:
                before.receive()
            work.send((part, parts))
            works.append(work)
            for before in previous:
                before.way.finish(before)
            if isinstance(way, InStages):
                way.between(work)
        works[-1].receive()
        works[-1].way.finish(works[-1])
    except BaseException:
        for work in works:
            work.abandon()
        raise
    out = torch.cat([work.out() for work in works], 2) if parts > 1 else works[0].out()
    out = call.tied(out, *(work.entries for work in works))
    return (out, torch.cat([work.last for work in works], 1)) if finals else out


class Exponential(NamedTuple):
    """The shapes of a state of several tensors, its parts, each with a factor e^exponent.

    parts: the shapes of the parts for one piece; they begin with the shape of the exponent.
    exponent: the shape of the exponent, of one dim.
    out: a tensor of the outputs' shape and type, [B, S, ...].
    """

    parts: Sequence[tuple[int, ...]]
    exponent: tuple[int]
    out: Tensor

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of the states of N pieces, [N, ...] each, into one tensor [N, *exponent, sum of sizes]."""
        return torch.cat([part.reshape(len(part), *self.exponent, -1) for part in parts], -1)

    def split(self, state: Tensor) -> list[Tensor]:
        """Undo `joined`: return the parts [N, ...] of states [N, *exponent, sum of sizes]."""
        parts = state.tensor_split([*accumulate(self.sizes)][:-1], -1)
        return [x.reshape(len(x), *shape) for x, shape in zip(parts, self.parts, strict=True)]

    def nothing(self, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the parts and the exponent of `count` empty states: zeros, with the exponent -1e30."""
        zeros = [torch.zeros((count, *shape), dtype=dtype, device=self.out.device) for shape in self.parts]
        return *zeros, torch.full((count, *self.exponent), _NO_EXPONENT, dtype=dtype, device=self.out.device)

    @property
    def sizes(self) -> list[int]:
        """Return how many numbers of each part belong to one number of the exponent."""
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
    """Compute a recurrent function whose state is several tensors, each with a factor e^exponent; return its outputs.

    States travel with exponents that are multiples of 1 / 64, whose sums do not depend on their order, so that both
    ends of a message know the same exponent. Kernels get the exponents that one rank would have, which matter where
    an exponent adds to a denominator.

    call: the call that ranks have agreed on.
    tensors: the inputs, [B, S, ...].
    kernel: takes a list of tensors of pieces [N, L, ...], the entering states with their exponent last (None: empty
        ones), and lengths [N]; returns outputs, the parts of the states that leave, and their exponents.
    log_decay: returns the logarithm of what a group's pieces multiply states with, of the exponent's shape.
    state: the shapes of the state.
    finals: whether to return (outputs, states after the last tokens of batch rows, with their exponent last).
    """
    held, device, dtype = call.held, state.out.device, state_type(state.out)
    rows, (fresh, entered, paired) = [held.flat(x) for x in tensors], _sorted_pieces(call, finals)
    logs, mosts = (_OfPieces(call, state.exponent, dtype, device) for _ in range(2))
    states = _OfPieces(call, (*state.exponent, sum(state.sizes)), dtype, device)
    done: list[tuple[Group, Tensor]] = []
    for of_kind in (fresh, paired if held.exchanges or finals else []):
        for group in held.groups(of_kind, device):
            inputs = [group.take(x) for x in rows]
            begin = call.initial_of(group) if of_kind is fresh else state.nothing(len(group.pieces), dtype)
            out, parts, most = kernel(inputs, begin, group.counts)
            states.put(group, state.joined(parts))
            mosts.put(group, most)
            logs.put(group, log_decay(inputs, group))
            if of_kind is fresh:
                done.append((group, out))
    if not (held.exchanges or finals):
        return _joined(call, done, state.out)
    log, most = logs.stacked(), mosts.stacked()
    exact_log, exact_most = log.detach().double(), most.detach().double()
    both_logs, both_mosts = (torch.stack([(x * _FINEST).round() / _FINEST, x], -1) for x in (exact_log, exact_most))
    enters, last_most = call.begin(LARGEST, both_logs, both_mosts, finals).wait()
    is_entered = held.is_entered(device).unsqueeze(1)
    fine = enters[..., 0]
    leaves = torch.where(is_entered, torch.maximum(both_logs[..., 0] + fine, both_mosts[..., 0]), both_mosts[..., 0])
    transitions = torch.where(is_entered, log + (fine - leaves), 0).exp().to(dtype).unsqueeze(-1)
    biases = states.stacked() * (most - leaves).exp().to(dtype).unsqueeze(-1)
    entries, last = call.begin(ELEMENTWISE, transitions, biases, finals).wait()
    to_exact = torch.where(is_entered, enters[..., 0] - enters[..., 1], 0).exp().to(dtype).unsqueeze(-1)
    for group in held.groups(entered, device):
        parts = state.split(group.of_pieces(entries * to_exact))
        initial = (*parts, group.of_pieces(enters[..., 1]).to(dtype))
        done.append((group, kernel([group.take(x) for x in rows], initial, group.counts)[0]))
    out = call.tied(_joined(call, done, state.out), entries)
    if not finals:
        return out
    last = last * (last_most[..., 0] - last_most[..., 1]).exp().to(dtype).unsqueeze(-1)
    return out, (*state.split(last), last_most[..., 1].to(dtype))


def _sorted_pieces(call: Call, finals: bool) -> tuple[list[int], list[int], list[int]]:
    """Return the pieces of this process without an entering state, the pieces with one, and those that need pairs."""
    held, schedule = call.held, call.held.schedule(finals)
    fresh = [n for n, number in enumerate(held.numbers) if not schedule.is_entered[number]]
    entered = [n for n, number in enumerate(held.numbers) if schedule.is_entered[number]]
    return fresh, entered, [n for n in entered if schedule.needs_pair[held.numbers[n]]]


def _joined(call: Call, done: Sequence[tuple[Group, Tensor]], out: Tensor) -> Tensor:
    """Return [B, S, ...] from the outputs of groups of all pieces; without pieces, an empty tensor like `out`."""
    if not done:  # tied: layers before this one have backward passes that other ranks wait for
        return call.tied(torch.zeros_like(out), *call.tensors)
    return call.held.unflat(call.held.joined([group for group, _ in done], [each for _, each in done]))
