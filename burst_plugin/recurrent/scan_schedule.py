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

Results of a span inside a node are with the rank of its last piece. Spans that begin a document have no state before
them, so that they have no A, and nothing comes down to them. A chain that continues a branch of a prefix tree begins
with the state that leaves the piece before it.

Between nodes bytes count for more than hops, in two ways. Where a document is on few nodes, its state goes from node
to node, and no A does: each span is cut before the last of its groups, pieces in a row on one node. And ranks of a
node take shares of the heads of values of groups and larger spans, so that all of them send and receive:

    zigzag on two nodes of two ranks        pieces of ranks 0 1 | 2 3 2 | 1 0
    span of all
    |  span of ranks 0 1 2 3 2              share 0 of its pair with rank 2, share 1 with rank 3
    |  |  span of ranks 0 1                 share 0 with rank 0, share 1 with rank 1
    |  |  span of ranks 2 3 2               share 0 with rank 2, share 1 with rank 3
    |  span of ranks 1 0

The schedule is data. In the backward pass the operations and moves run in the opposite order (see `scan`): gradients
of states go where the states came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import Literal, NamedTuple

from burst_plugin.recurrent.pieces import START, Pieces

Kind = Literal["transition", "bias", "entry", "exit"]
WHOLE = -1  # all heads, in place of the number of a share
_FEW_GROUPS = 8  # up to which a state goes from group to group


class Value(NamedTuple):
    """The name of a value of a scan: of the transition A or the bias B of a span, or of a state.

    kind: "transition", "bias", "entry" (the state that enters the span) or "exit" (the state that leaves it).
    span: the number of the span; below the number of pieces, the span is the piece of that number.
    share: which share of the heads, or `WHOLE`.
    """

    kind: Kind
    span: int
    share: int = WHOLE


class Compute(NamedTuple):
    """An operation that one rank does in a round of a scan, on values of spans that it has.

    join: compute the transition and bias of `span` from its halves, `left` and then `right`.
    enter: compute the state that enters `right` from the state that enters `span`, through its left half `left`.
    hand: take the state that enters `span` as the state that enters its left half `left`.
    leave: compute the state that leaves `span`, a piece, from the state that enters it.
    begin: take the state that leaves piece `left` as the state that enters `span`, a chain that continues the piece.

    left, right: -1 where an operation does not use them.
    share: the share of the heads that it is done for, or `WHOLE`.
    """

    what: Literal["join", "enter", "hand", "leave", "begin"]
    span: int
    left: int = -1
    right: int = -1
    share: int = WHOLE


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
    shares: the number of shares of the heads.
    """

    rounds: tuple[ScanRound, ...]
    needs_pair: tuple[bool, ...]
    is_entered: tuple[bool, ...]
    final_pieces: tuple[int, ...]
    final_moves: tuple[tuple[Move, ...], ...]
    shares: int

    @cached_property
    def sends(self) -> bool:
        """Return whether the scan sends anything from rank to rank, final states aside."""
        return any(step.moves for step in self.rounds)

    def format(self) -> str:
        """Return the messages of rounds as text, a line for each round."""
        lines = []
        for number, step in enumerate(self.rounds):
            moves = ((m, "" if m.value.share == WHOLE else f".{m.value.share}") for m in step.moves)
            texts = (f"{m.value.kind} {m.value.span}{share}: {m.src} -> {m.dst}" for m, share in moves)
            lines.append(f"{number}: " + ", ".join(texts))
        return "\n".join(lines)


class _Span:
    """Consecutive pieces of a chain, with the times at which their values are there, and the ranks that have them.

    ranks: one, or one for each share of the heads.
    """

    def __init__(
        self, number: int, ranks: Sequence[int], left: _Span | None = None, right: _Span | None = None
    ) -> None:
        self.number, self.ranks, self.left, self.right = number, ranks, left, right
        self.is_first = False  # in a chain that begins a document: nothing enters it
        self.ready = 0
        self.entered = 0
        self.is_needed = False  # its pair

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return (share, rank) for each share of the heads; (`WHOLE`, rank) for a span that is not shared."""
        return [(WHOLE, self.ranks[0])] if len(self.ranks) == 1 else [*enumerate(self.ranks)]

    def rank_of(self, share: int) -> int:
        """Return the rank that has a share of this span's values, or all of them."""
        return self.ranks[share if len(self.ranks) > 1 else 0]


def scan_schedule(pieces: Pieces, ranks_per_node: int, shares: int = 1, finals: bool = False) -> ScanSchedule:
    """Return the schedule of a scan over these pieces; spans of pieces on several nodes are cut between nodes.

    ranks_per_node: consecutive ranks are on one node.
    shares: into how many shares of the heads values are cut between nodes, at most `ranks_per_node`.
    finals: whether the states that leave the last piece of every batch row go to all ranks.
    """
    return _Builder(pieces, ranks_per_node, shares).schedule(finals)


class _Chain(NamedTuple):
    """The pieces of a document, or of a branch of a prefix tree.

    numbers, nodes: the number of each piece, and its node.
    in_turn: whether the state goes from group to group of pieces in a row on one node.
    is_shared: whether ranks take shares of the heads: two pieces alone would reach the same NICs by more messages.
    """

    numbers: Sequence[int]
    nodes: Sequence[int]
    in_turn: bool
    is_shared: bool

    def is_of_groups(self, start: int, stop: int) -> bool:
        """Return whether pieces `start:stop` are one group or several, rather than a part of one."""
        nodes = self.nodes
        begins = start == 0 or nodes[start - 1] != nodes[start]
        return begins and (stop == len(nodes) or nodes[stop - 1] != nodes[stop])

    def middle(self, start: int, stop: int) -> int:
        """Return where to cut pieces `start:stop`: between groups if they are several."""
        between = [at for at in range(start + 1, stop) if self.nodes[at] != self.nodes[at - 1]]
        if self.in_turn and between:
            return between[-1]
        return min(between or range(start + 1, stop), key=lambda at: abs(2 * at - start - stop))


class _Builder:
    """Makes a schedule, chain after chain; a chain comes after the one that it continues."""

    def __init__(self, pieces: Pieces, ranks_per_node: int, shares: int) -> None:
        self.pieces, self.per_node, self.shares = pieces, ranks_per_node, shares
        self.rounds: list[ScanRound] = []
        self.spans = [_Span(number, [piece.rank]) for number, piece in enumerate(pieces.every)]
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
            self.shares,
        )

    def _add_chain(self, numbers: Sequence[int], leaving: set[int]) -> None:
        """Add the steps for the pieces of one chain; for `leaving` pieces also the state after them."""
        before = self.pieces.every[numbers[0]].before
        nodes = [self.pieces.every[number].rank // self.per_node for number in numbers]
        groups = 1 + sum(one != other for one, other in pairwise(nodes))
        is_shared = self.shares > 1 and groups > 1 and len(numbers) > 2
        chain = _Chain(numbers, nodes, before == START and groups <= _FEW_GROUPS, is_shared)
        root = self._tree(chain, 0, len(numbers))
        if before == START:
            _mark_first(root)
        _note_needed(root, False)
        self._up(root)
        if before != START:
            parent = self.spans[before]
            self._bring_state(parent.entered, parent, root, Value("exit", before), "begin", before)
        self._down(root)
        for number in numbers:
            if number in leaving:
                span = self.spans[number]
                span.is_needed = True
                self._compute(span.entered, span.ranks[0], Compute("leave", number))

    def _tree(self, chain: _Chain, start: int, stop: int) -> _Span:
        """Return the span of pieces `start:stop` of a chain, over the spans of its two halves."""
        if stop - start == 1:
            return self.spans[chain.numbers[start]]
        middle = chain.middle(start, stop)
        left, right = self._tree(chain, start, middle), self._tree(chain, middle, stop)
        last = self.pieces.every[chain.numbers[stop - 1]].rank
        first_of_node = last - last % self.per_node
        shared = chain.is_shared and chain.is_of_groups(start, stop)
        ranks = range(first_of_node, first_of_node + self.shares) if shared else [last]
        span = _Span(self.next_number, ranks, left, right)
        self.next_number += 1
        return span

    def _up(self, span: _Span) -> None:
        """Add the operations that make the pair of a span, with the moves of pairs to its ranks."""
        left, right = span.left, span.right
        if left is None or right is None:
            return
        self._up(left)
        self._up(right)
        left.ready = self._bring_pair(left, span)  # from now on: with the ranks of the span
        if span.is_needed:
            span.ready = max(left.ready, self._bring_pair(right, span))
            for share, rank in span.places:
                self._compute(span.ready, rank, Compute("join", span.number, left.number, right.number, share))

    def _down(self, span: _Span) -> None:
        """Add the steps that bring the state that enters a span to all pieces in it."""
        left, right = span.left, span.right
        if left is None or right is None:
            return
        time = max(span.entered, left.ready)
        for share, rank in span.places:
            self._compute(time, rank, Compute("enter", span.number, left.number, right.number, share))
        self._bring_state(time, span, right, Value("entry", right.number))
        if not span.is_first:
            self._bring_state(span.entered, span, left, Value("entry", span.number), "hand", left.number)
        self._down(left)
        self._down(right)

    def _bring_pair(self, half: _Span, span: _Span) -> int:
        """Move the pair of a half to the ranks of its span; return when all of it is there."""
        kinds: tuple[Kind, ...] = ("bias",) if half.is_first else ("transition", "bias")
        there = half.ready
        for kind, (share, rank) in product(kinds, span.places):
            value = Value(kind, half.number, share)
            there = max(there, self._bring(half.ready, half.rank_of(share), rank, value, value))
        return there

    def _bring_state(
        self,
        time: int,
        source: _Span,
        to: _Span,
        state: Value,
        operation: Literal["hand", "begin"] | None = None,
        left: int = -1,
    ) -> None:
        """Move a state, which ranks of `source` have at `time`, to the ranks of `to`, as the state that enters `to`.

        operation, left: the operation that names a share which is there already; None if `state` is its name.
        """
        to.entered = time
        for share, _ in max(source.places, to.places, key=len):
            src, dst = source.rank_of(share), to.rank_of(share)
            value, target = state._replace(share=share), Value("entry", to.number, share)
            to.entered = max(to.entered, self._bring(time, src, dst, value, target))
            if operation is not None and src == dst:
                span = source.number if operation == "hand" else to.number
                self._compute(time, dst, Compute(operation, span, left, share=share))

    def _bring(self, time: int, src: int, dst: int, value: Value, target: Value) -> int:
        """Move a value that is there at `time` from rank to rank; return when it is there."""
        if src == dst:
            return time
        self._round(time).moves.append(Move(src, dst, value, target))
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
    """Note whether the pairs of a span, and of all spans in it, are used."""
    span.is_needed = is_needed
    if span.left is not None and span.right is not None:
        _note_needed(span.left, True)
        _note_needed(span.right, is_needed)


def _chains(pieces: Pieces) -> list[list[int]]:
    """Return the chains: the first piece that continues a piece is of its chain, others begin chains of their own."""
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
