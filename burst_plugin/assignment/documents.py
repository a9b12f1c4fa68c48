"""Causal documents assigned to nodes, and there to ranks: as many tokens and as much work for each, and few cuts.

Documents a, b, c and d over two ranks. A token of a document of n tokens has n + 1 pairs on average, pairs
of its query and of its key added up:

    documents     a a a a a a a a b b b b c c d d
    pairs         9 9 9 9 9 9 9 9 5 5 5 5 3 3 3 3
    ranks         0 0 0 1 1 1 0 0 1 1 1 1 0 1 0 0     54 and 50

The longest documents have the most work per token, so a rank takes some from either end of the line of all documents
in order of their lengths: so many that its work is even, too. Nodes may also take whole documents from the beginning,
and the rest from anywhere in the line, where that cuts shorter documents. Of a document that nodes share, each rank
of these nodes may take a part, so that all NICs send it.

Where a document is cut, ranks get the rest of it from the outside in: tokens of its beginning and as many of its
end, which is even work for queries and for keys. Short ones are just cut in two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from burst_plugin.sequence.layout import Tokens
from burst_plugin.topology import Topology

# The share of its work that a holder may have more or less than others, for fewer cuts.
_NODE_SLACK = 0.03
_RANK_SLACK = 0.01
_SHORT = 0.01  # of a rank's work that queries have more than keys, or less, where a short document is cut in two


class _Document(NamedTuple):
    start: int
    length: int
    work: int  # pairs per token, of its query and of its key
    folds: bool  # whether it is cut from the outside in


_Piece = tuple[_Document, int]  # a document, and a number of its tokens, wherever they are


class _DocumentShare(NamedTuple):
    """Tokens of a document for one rank; ranks of one node are side by side, and nodes ordered by their tokens."""

    of_node: int
    node: int
    tokens: int
    rank: int


def assign_documents(
    documents: Sequence[tuple[int, int]], length: int, topology: Topology, degree: int = 1, spread: bool = False
) -> Tokens:
    """Return an assignment of tokens that gives all ranks equally many tokens and about equal work.

    Args:
        documents: (start, stop) of each document, in ascending order. Documents are causal; tokens outside all
            documents have no work.
        length: the tokens of the sequence.
        topology: the nodes and ranks of the ring.
        degree: the ranks of the group that stands for each rank of the ring, and works on all its tokens together; 1
            without groups.
        spread: whether the long documents that are cut between nodes are shared by all ranks of their nodes, so that
            all NICs send them; otherwise by as few ranks as possible.
    """
    ranks = topology.ranks * degree
    bounds = [rank * length // ranks for rank in range(ranks + 1)]
    rooms = [stop - start for start, stop in pairwise(bounds[::degree])]
    per_node = topology.ranks_per_node
    by_node = [rooms[first : first + per_node] for first in range(0, len(rooms), per_node)]
    shares = defaultdict[_Document, list[_DocumentShare]](list)
    line = _in_order(documents, length, topology.ranks)
    for node, pieces in enumerate(_deal(line, list(map(sum, by_node)), _NODE_SLACK, anywhere=True)):
        of_node = dict(pieces)
        shared = [piece for piece in pieces if spread and piece[0].folds and piece[1] < piece[0].length]
        of_all, left = _shared_by_all(shared, by_node[node])
        by_rank = _deal([piece for piece in pieces if piece not in shared], left, _RANK_SLACK)
        for number, held in enumerate(map(add, of_all, by_rank)):
            for document, tokens in held:
                shares[document].append(_DocumentShare(of_node[document], node, tokens, node * per_node + number))
    chunks = sorted(chunk for document, shared in shares.items() for chunk in _placed(document, shared))
    return _tokens(chunks, bounds, degree)


def _shared_by_all(pieces: Sequence[_Piece], rooms: Sequence[int]) -> tuple[list[list[_Piece]], list[int]]:
    """Return each rank's part of every piece, in proportion to the ranks' rooms, and the room that is left."""
    held, left = [list[_Piece]() for _ in rooms], list(rooms)
    for document, tokens in pieces:
        whole = sum(left)
        bounds = [tokens * before // whole for before in accumulate(left, initial=0)]
        for rank, (start, stop) in enumerate(pairwise(bounds)):
            left[rank] -= stop - start
            if stop > start:
                held[rank].append((document, stop - start))
    return held, left


def _in_order(documents: Sequence[tuple[int, int]], length: int, ranks: int) -> list[_Piece]:
    """Return all documents in order of their lengths, and tokens outside documents last."""
    per_rank = sum((stop - start) * (stop - start + 1) / 2 for start, stop in documents) / ranks
    ends = [0, *(end for document in documents for end in document), length]
    pieces = []
    for number, (start, stop) in enumerate(pairwise(ends)):
        size = stop - start
        # Cut in the middle, its first half has size ** 2 / 8 queries less than half of all, and as many keys more.
        if size:
            pieces.append(_Document(start, size, size + 1 if number % 2 else 0, size**2 / 8 > _SHORT * per_rank))
    pieces.sort(key=lambda document: (-document.work, document.start))
    return [(document, document.length) for document in pieces]


class _Line:
    """Pieces side by side; places are numbers of tokens from the beginning of the first."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self.pieces = pieces
        self.ends = [0, *accumulate(tokens for _, tokens in pieces)]
        self._works = [0, *accumulate(document.work * tokens for document, tokens in pieces)]
        self._rates = [*(document.work for document, _ in pieces), 0]

    def work(self, place: int) -> int:
        """Return the work before a place."""
        number = bisect_right(self.ends, place) - 1
        return self._works[number] + (place - self.ends[number]) * self._rates[number]

    def rows(self, place: int) -> float:
        """Return about how many keys go from one side of a place to the other, if a piece is cut there."""
        number = bisect_right(self.ends, place) - 1
        before = place - self.ends[number]
        if not before:
            return 0
        document, tokens = self.pieces[number]
        after = tokens - before
        return document.length - max(before, after) / 2 if document.folds else min(before, after)

    def ends_near(self, place: int) -> list[int]:
        """Return the last end of a piece that is not after a place, and the next one if there is one."""
        number = bisect_right(self.ends, place)
        return self.ends[number - 1 : number + 1]

    def without(self, stop: int, first: int, last: int) -> tuple[list[_Piece], list[_Piece]]:
        """Return the pieces before `stop` or between the places `first` and `last`, and the rest."""
        taken, left = [], []
        for (document, tokens), (start, end) in zip(self.pieces, pairwise(self.ends), strict=True):
            here = max(0, min(stop, end) - start) + max(0, min(last, end) - max(first, start))
            if here:
                taken.append((document, here))
            if here < tokens:
                left.append((document, tokens - here))
        return taken, left


def _deal(pieces: list[_Piece], rooms: Sequence[int], slack: float, anywhere: bool = False) -> list[list[_Piece]]:
    """Return pieces for each of `rooms`, of as many tokens as it says and of even work but for `slack`."""
    held = []
    total, whole = sum(document.work * tokens for document, tokens in pieces), sum(rooms)
    mean = total / whole if whole else 0
    for room in rooms[:-1]:
        line = _Line(pieces)
        total, last = line.work(line.ends[-1]), line.ends[-1]
        share = total * room / last if last else 0
        most = slack * mean * min(room, last - room)  # so that neither this one nor the others get too much
        low, high = mean * room, total - mean * (last - room)  # what is even for this one, and for the others
        low, high = max(low, high) - most, min(low, high) + most
        best = None
        for stop, first in _places(line, room, share, anywhere):
            work = line.work(stop) + line.work(first + room - stop) - line.work(first)
            if best is None or low <= work <= high:
                rows = line.rows(stop) * (stop < first) + line.rows(first) + line.rows(first + room - stop)
                found = (rows, abs(work - share), stop, first)
                best = found if best is None else min(best, found)
        assert best is not None
        _, _, stop, first = best
        taken, pieces = line.without(stop, first, first + room - stop)
        held.append(taken)
    return [*held, pieces]


def _places(line: _Line, room: int, share: float, anywhere: bool) -> Iterator[tuple[int, int]]:
    """Yield the tokens that a holder of `room` tokens may take: all before one place, and the rest from another on.

    The first choice has the work `share`; some of the others have about as much.
    """
    last = line.ends[-1]
    total, back = line.work(last), last - room
    stop = bisect_left(range(room), share, key=lambda stop: line.work(stop) + total - line.work(back + stop))
    for place in dict.fromkeys((stop, *line.ends_near(stop), *(end - back for end in line.ends_near(back + stop)))):
        if 0 <= place <= room:
            yield place, back + place
    if not anywhere or line.work(room) < share:
        return
    for stop in line.ends:
        tail_length, base = room - stop, line.work(stop)
        if tail_length <= 0 or base + total - line.work(last - tail_length) > share:
            return
        places = range(stop, last - tail_length)
        first = stop + bisect_left(
            places, -share, key=lambda first: line.work(first) - line.work(first + tail_length) - base
        )
        for place in dict.fromkeys(
            (first, *line.ends_near(first), *(end - tail_length for end in line.ends_near(first + tail_length)))
        ):
            if stop <= place <= last - tail_length:
                yield stop, place


def _placed(document: _Document, shares: Iterable[_DocumentShare]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, rank) of the tokens of every share.

    From the outside in the largest comes first, as it would require nearly all keys there too; of short documents the
    smallest, whose keys all others require.
    """
    sign, before = -1 if document.folds else 1, 0
    for share in sorted(
        shares, key=lambda share: (sign * share.of_node, share.node, sign * share.tokens, share.rank)
    ):
        after = before + share.tokens
        if document.folds:  # tokens 0, n - 1, 1, n - 2, ... of n
            start, stop = document.start, document.start + document.length
            yield start + (before + 1) // 2, start + (after + 1) // 2, share.rank
            yield stop - after // 2, stop - before // 2, share.rank
        else:
            yield document.start + before, document.start + after, share.rank
        before = after


def _tokens(chunks: Sequence[tuple[int, int, int]], bounds: Sequence[int], degree: int) -> Tokens:
    """Return the assignment from chunks (start, stop, group), in order; members of a group fill up one by one.

    Rank r holds as many tokens as there are from `bounds[r]` to `bounds[r + 1]`.
    """
    holders, starts = list[int](), list[int]()
    filled = list(bounds[:-1:degree])  # by group: what its chunks so far would take up, if all were side by side
    for start, stop, group in chunks:
        while start < stop:
            rank = bisect_right(bounds, filled[group]) - 1
            tokens = min(stop - start, bounds[rank + 1] - filled[group])
            if not holders or holders[-1] != rank:
                holders.append(rank)
                starts.append(start)
            filled[group] += tokens
            start += tokens
    empty = sorted(set(range(len(bounds) - 1)) - set(holders))
    return Tokens(bounds[-1], holders=(*holders, *empty), bounds=(*starts, *(bounds[-1] for _ in (*empty, 0))))
