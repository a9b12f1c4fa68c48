"""The schedule of a scan: how the state that enters every piece gets to the rank that holds the piece.

A piece turns the state S that enters it into A S + B. Pieces of a document are a chain, and a *span* is some
consecutive pieces of it, with a pair (A, B) of its own: pieces 1 and 2 have (A2 A1, A2 B1 + B2). Spans are a
binary tree, cut between nodes of the cluster where it can be. Pairs go up the tree and states come down, so that the
number of hops is twice the depth of the tree:

    span 0..3                 up      pair of 0..1 to the rank of piece 3
    |  span 0..1                      pair of 0 to the rank of piece 1, that of 2 to the rank of piece 3
    |  |  piece 0, piece 1    down    state before 2 to the rank of piece 2
    |  span 2..3
    |  |  piece 2, piece 3

Results of a span are with the rank of its last piece. What begins a document has no state before it, so that its
spans have no A, and nothing comes down to it. A chain that continues a branch of a prefix tree begins with the state
that leaves the piece before it.

The schedule is data. In the backward pass the operations and moves run in the opposite order (see `scan`): gradients
of states go where the states came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from burst_plugin.recurrent.pieces import START, Pieces

Kind = Literal["transition", "bias", "entry", "exit"]


class Value(NamedTuple):
    """The name of a value of a scan: of the transition A or the bias B of a span, or of a state.

    kind: "transition", "bias", "entry" (the state that enters the span) or "exit" (the state that leaves it).
    span: the number of the span; below the number of pieces, the span is the piece of that number.
    """

    kind: Kind
    span: int


class Compute(NamedTuple):
    """An operation that one rank does in a round of a scan, on values of spans that it has.

    join: compute the transition and bias of `span` from its halves, `left` and then `right`.
    enter: compute the state that enters `right` from the state that enters `span`, through its left half `left`.
    hand: take the state that enters `span` as the state that enters its left half `left`.
    leave: compute the state that leaves `span`, a piece, from the state that enters it.
    begin: take the state that leaves piece `left` as the state that enters `span`, a chain that continues the piece.

    left, right: -1 where an operation does not use them.
    """

    what: Literal["join", "enter", "hand", "leave", "begin"]
    span: int
    left: int = -1
    right: int = -1


class Move(NamedTuple):
    """A message of a scan: `value` goes from rank `src` to rank `dst`, which stores it as `target`."""

    src: int
    dst: int
    value: Value
    target: Value


@dataclass
class ScanRound:
    """One round of a scan: every rank does its operations in this order, and then sends.

    computes: (rank, operation), of all ranks. moves: the messages of all ranks.
    """

    computes: list[tuple[int, Compute]] = field(default_factory=list)  # by rank
    moves: list[Move] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ScanSchedule:
    """The operations and messages of a scan, round by round, which bring each piece the state that enters it.

    Span n is piece n for n below the number of pieces; spans with higher numbers are several pieces.

    needs_pair: of every piece, whether its bias is used, and its transition if a state enters it.
    is_entered: of every piece, whether a state enters it; none does where a document begins.
    final_pieces: the last piece of every batch row, if the states that leave them are asked for; else empty.
    final_moves: how these states get to all ranks, round by round.
    """

    rounds: tuple[ScanRound, ...]
    needs_pair: tuple[bool, ...]
    is_entered: tuple[bool, ...]
    final_pieces: tuple[int, ...]
    final_moves: tuple[tuple[Move, ...], ...]

    @cached_property
    def sends(self) -> bool:
        """Return whether the scan sends anything from rank to rank, final states aside."""
        return any(step.moves for step in self.rounds)

    def format(self) -> str:
        """Return the messages of rounds as text, a line for each round."""
        lines = []
        for number, step in enumerate(self.rounds):
            moves = (f"{m.value.kind} {m.value.span}: {m.src} -> {m.dst}" for m in step.moves)
            lines.append(f"{number}: " + ", ".join(moves))
        return "\n".join(lines)


class _Span:
    """Consecutive pieces of a chain, and at which time its values are there, with its rank."""

    def __init__(self, number: int, rank: int, left: _Span | None = None, right: _Span | None = None) -> None:
        self.number, self.rank, self.left, self.right = number, rank, left, right
        self.is_first = False  # in a chain that begins a document: nothing enters it
        self.ready = 0
        self.entered = 0
        self.is_needed = False  # its pair


def scan_schedule(pieces: Pieces, node_of: Callable[[int], int], finals: bool = False) -> ScanSchedule:
    """Return the schedule of a scan over these pieces; spans of pieces on several nodes are cut between nodes.

    node_of: returns the node of a rank.
    finals: whether the states that leave the last piece of every batch row go to all ranks.
    """
    return _Builder(pieces, node_of).schedule(finals)


class _Builder:
    """Makes a schedule, chain after chain; a chain comes after the one that it continues."""

    def __init__(self, pieces: Pieces, node_of: Callable[[int], int]) -> None:
        self.pieces, self.node_of = pieces, node_of
        self.rounds: list[ScanRound] = []
        self.spans = [_Span(number, piece.rank) for number, piece in enumerate(pieces.every)]
        self.next_number = len(self.spans)

    def schedule(self, finals: bool) -> ScanSchedule:
        chains = _chains(self.pieces)
        leaving = {self.pieces.every[chain[0]].before for chain in chains} - {START}
        leaving |= set(self.pieces.last_of_row) if finals else set()
        for chain in chains:
            self._add_chain(chain, leaving)
        every = self.spans[: len(self.pieces.every)]
        last = self.pieces.last_of_row if finals else ()
        return ScanSchedule(
            tuple(self.rounds),
            tuple(span.is_needed for span in every),
            tuple(not span.is_first for span in every),
            last,
            self._final_moves(last),
        )

    def _add_chain(self, chain: Sequence[int], leaving: set[int]) -> None:
        """Add the steps for the pieces of one chain; for `leaving` pieces also the state after them."""
        before = self.pieces.every[chain[0]].before
        root = self._tree(chain, 0, len(chain))
        if before == START:
            _mark_first(root)
        _note_needed(root, False)
        self._up(root)
        if before != START:
            parent = self.spans[before]
            begin = Compute("begin", root.number, before)
            root.entered = self._bring(
                parent.entered, parent, root, Value("exit", before), Value("entry", root.number)
            )
            if parent.rank == root.rank:
                self._compute(root.entered, root.rank, begin)
        self._down(root)
        for number in chain:
            if number in leaving:
                span = self.spans[number]
                span.is_needed = True
                self._compute(span.entered, span.rank, Compute("leave", number))

    def _tree(self, chain: Sequence[int], start: int, stop: int) -> _Span:
        """Return the span of pieces `start:stop` of a chain, over the spans of its two halves."""
        if stop - start == 1:
            return self.spans[chain[start]]
        middle = self._middle(chain, start, stop)
        left, right = self._tree(chain, start, middle), self._tree(chain, middle, stop)
        span = _Span(self.next_number, right.rank, left, right)
        self.next_number += 1
        return span

    def _middle(self, chain: Sequence[int], start: int, stop: int) -> int:
        """Return where to cut: nearest to the middle, between two nodes if the pieces are on several."""
        nodes = [self.node_of(self.pieces.every[number].rank) for number in chain[start:stop]]
        between = [start + at for at in range(1, stop - start) if nodes[at] != nodes[at - 1]]
        return min(between or range(start + 1, stop), key=lambda at: abs(2 * at - start - stop))

    def _up(self, span: _Span) -> None:
        """Add what makes the pair of a span, with the moves of pairs to its rank."""
        left, right = span.left, span.right
        if left is None or right is None:
            return
        self._up(left)
        self._up(right)
        there = left.ready
        kinds: tuple[Kind, ...] = ("bias",) if left.is_first else ("transition", "bias")
        for kind in kinds:
            value = Value(kind, left.number)
            there = self._bring(left.ready, left, span, value, value)
        left.ready = there  # from now on: with the rank of the span
        span.ready = max(there, right.ready)
        if span.is_needed:
            self._compute(span.ready, span.rank, Compute("join", span.number, left.number, right.number))

    def _down(self, span: _Span) -> None:
        """Add what brings the state that enters a span to all pieces in it."""
        left, right = span.left, span.right
        if left is None or right is None:
            return
        right.entered = max(span.entered, left.ready)
        self._compute(right.entered, span.rank, Compute("enter", span.number, left.number, right.number))
        if not span.is_first:
            state, target = Value("entry", span.number), Value("entry", left.number)
            left.entered = self._bring(span.entered, span, left, state, target)
            if left.rank == span.rank:
                self._compute(left.entered, span.rank, Compute("hand", span.number, left.number))
        self._down(left)
        self._down(right)

    def _bring(self, time: int, source: _Span, to: _Span, value: Value, target: Value) -> int:
        """Move a value that is there at `time` to the rank of a span; return when it is there."""
        if source.rank == to.rank:
            return time
        self._round(time).moves.append(Move(source.rank, to.rank, value, target))
        self._round(time + 1)
        return time + 1

    def _compute(self, time: int, rank: int, compute: Compute) -> None:
        self._round(time).computes.append((rank, compute))

    def _round(self, time: int) -> ScanRound:
        while len(self.rounds) <= time:
            self.rounds.append(ScanRound())
        return self.rounds[time]

    def _final_moves(self, last: Sequence[int]) -> tuple[tuple[Move, ...], ...]:
        """Return how the states after the last pieces of rows get to all ranks, twice as many in each round."""
        rounds: list[list[Move]] = []
        ranks = self.pieces.ranks
        for number in last:
            value, first, held = Value("exit", number), self.pieces.every[number].rank, 1
            for step in range((ranks - 1).bit_length()):
                if step == len(rounds):
                    rounds.append([])
                for place in range(held, min(2 * held, ranks)):
                    src, dst = (first + place - held) % ranks, (first + place) % ranks
                    rounds[step].append(Move(src, dst, value, value))
                held *= 2
        return tuple(map(tuple, rounds))


def _mark_first(span: _Span) -> None:
    """Mark the spans that a document begins with."""
    span.is_first = True
    if span.left is not None:
        _mark_first(span.left)


def _note_needed(span: _Span, is_needed: bool) -> None:
    """Note whether the pair of a span is used, and of all spans in it."""
    span.is_needed = is_needed
    if span.left is not None and span.right is not None:
        _note_needed(span.left, True)
        _note_needed(span.right, is_needed)


def _chains(pieces: Pieces) -> list[list[int]]:
    """Return the chains: a piece goes on with the first one after it, the others begin chains of their own."""
    chains = []
    begin = [number for number, piece in enumerate(pieces.every) if piece.before == START]
    while begin:
        number = begin.pop()
        chain = [number]
        while pieces.after[number]:
            number, *others = pieces.after[number]
            chain.append(number)
            begin += others
        chains.append(chain)
    return chains
