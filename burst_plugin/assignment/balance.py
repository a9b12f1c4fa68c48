"""How evenly the work under a mask is spread over ranks, and which tokens each rank should hold.

Causal documents a, b, c and d over two ranks; digits are the work of eight chunks, and below them their ranks:

    documents     a a a a b b c d
    work          1 3 5 7 1 3 1 1
    contiguous    0 0 0 0 1 1 1 1    16 and 6
    in chunks     0 1 1 0 0 1 0 1    the heaviest first: 10 and 12
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from burst_plugin.assignment.chunks import assign_chunks
from burst_plugin.assignment.document_costs import DocumentCosts, causal_documents
from burst_plugin.assignment.documents import assign_documents
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.ring.systems.both_sides import work_of_ranks
from burst_plugin.sequence.layout import LAYOUTS, Tokens, even_length, positions, token_count
from burst_plugin.sequence.mask import work_by_token
from burst_plugin.sequence.masks import Mask
from burst_plugin.topology import Groups
from burst_plugin.types import BOTH, SIDES, Side

GOOD = 1.05  # an imbalance below this is not worth more bytes
_CHUNKS = (4, 8, 16, 32)  # per rank, to try
_SHORTEST = 128  # tokens of a chunk, which is what a kernel works on at a time
MOST_CHUNKS = 4096  # of all ranks: with more, finding out which of them meet takes too long
# In pairs of a query and a key: what a row costs, with four query heads to one of keys and 400 TFLOP/s.
VISITED = 128  # in a visit, besides its pairs: blocks that are half full, and merging
SENT_INTER = 2000  # at 50 GB/s
SENT_INTRA = 250  # at 400 GB/s
_NOTICED = 0.1  # of what a rank computes
_BARE = 0.5  # of computing or sending, whichever is shorter, is not hidden behind the other


def work_by_rank(table: RouteTable, attending: Attending, local: Side) -> list[int]:
    """Return how many (query, key) pairs each rank of the ring computes if side `local`, "q" or "kv", does not move.

    table: the topology and strategy of the ring. attending: the tokens of both sides, and the mask between them,
    whose work is added up over batch rows if their masks differ.
    """
    return work_of_shares(table, attending.of(local), summed_work(attending, local))


def _staying(table: RouteTable, mask: Mask) -> tuple[Side, ...]:
    """Return the sides that may stay where they are: under a prefix tree queries, unless they are asked to move."""
    return ("q",) if mask.trees and not table.moving & {"q", BOTH} else SIDES


def imbalance(table: RouteTable, attending: Attending) -> float:
    """Return the work of the busiest rank of the ring, in (query, key) pairs, over the mean of all its ranks.

    It is 1 if all ranks have equal work, or none. Work depends on the side that moves: of all sides that may move,
    the one with the least even work counts.
    """
    sides = () if table.moving == {BOTH} else _staying(table, attending.mask)
    shares = [work_by_rank(table, attending, local) for local in sides]
    if BOTH in table.moving:
        shares.append(work_of_ranks(table, attending))
    return max(map(_uneven, shares))


def choose_tokens(table: RouteTable, length: int, mask: Mask, alike: bool = False) -> Tokens:
    """Return the assignment of tokens to ranks for a sequence that attends to itself within `mask`.

    The candidates are the layouts that suit the mask. If none of them gives ranks even work, there are more: for
    causal documents, documents cut and assigned to nodes, and there to ranks; for other masks, chunks assigned by
    their work, and chunks assigned so that documents stay inside nodes. Of all candidates the one with the least
    estimated time is chosen.

    Args:
        table: the topology and strategy of the ring.
        length: the tokens of the sequence.
        alike: whether only candidates count by which all ranks hold equally many tokens.

    Raises ValueError if `alike` leaves no candidate.
    """
    documents = causal_documents(mask, length)
    costs = _ByToken(table, length, mask) if documents is None else _ByDocument(table, length, documents)
    suitable = [Tokens(length, layout=name) for name, layout in LAYOUTS.items() if layout.suits(mask)]
    least = _candidates(costs, suitable, alike)
    if not least:
        raise ValueError(
            f"{table.cp_ranks} ranks cannot hold equally many of {length} tokens; "
            f"{even_length(length, table.cp_ranks)} would do"
        )
    times: dict[Tokens, float] = {}
    for tokens in sorted(least, key=least.__getitem__):
        if least[tokens] > min(times.values(), default=math.inf):  # so have all later ones, and none takes less time
            break
        times[tokens] = costs.time(tokens)
    return min(times, key=times.__getitem__)


def _candidates(costs: _ByToken | _ByDocument, suitable: Sequence[Tokens], alike: bool) -> dict[Tokens, float]:
    """Return the suitable layouts and, if none of them has even work, assignments made for even work.

    Each comes with the most work of any rank, on the side where that is more.
    """
    most_work: dict[Tokens, float] = {}

    def add(tokens: Tokens) -> bool:
        """Add a candidate unless it is not allowed. Return whether it is even."""
        if alike and len({count for block in costs.table.group_blocks(tokens) for count in block.counts}) > 1:
            return False
        shares = costs.shares(tokens)
        most_work[tokens] = max(map(max, shares))
        return all(_uneven(share) <= GOOD for share in shares)

    some_are_even = [add(tokens) for tokens in suitable]
    if not any(some_are_even):
        for finer_and_finer in costs.assignments():
            any(add(_of_members(tokens, costs.table.groups)) for tokens in finer_and_finer)  # until one is even
    return most_work


def _of_members(tokens: Tokens, groups: Groups) -> Tokens:
    """Return an assignment to groups of neighbours as an assignment to the actual members of the groups."""
    if not groups.apart or tokens.holders is None:
        return tokens
    ranks = [rank for group in range(groups.ring_size) for rank in groups.members(group)]
    return replace(tokens, holders=tuple(ranks[holder] for holder in tokens.holders))


@dataclass
class _ByToken:
    """Costs under any mask, from the work of every token."""

    table: RouteTable
    length: int
    mask: Mask

    @cached_property
    def _work(self) -> dict[Side, Tensor]:
        plain = Attending(Tokens(self.length), Tokens(self.length), self.mask)
        return {local: summed_work(plain, local) for local in _staying(self.table, self.mask)}

    def shares(self, tokens: Tokens) -> list[list[float]]:
        """Return the work of every rank, by side, averaged over batch rows."""
        batch = self.mask.rows or 1
        return [[share / batch for share in work_of_shares(self.table, tokens, work)] for work in self._work.values()]

    def time(self, tokens: Tokens) -> float:
        """Return how long the slowest rank computes and sends, in units of the time that one pair takes to compute.

        A pair is a query and a key that attend to each other.
        """
        return estimated_time(self.table, Attending(tokens, tokens, self.mask), self._work)

    def assignments(self) -> Iterator[Iterator[Tokens]]:
        """Yield more and more chunks, by work alone, and then with documents inside nodes."""
        ring, ranks = self.table.ring_topology, self.table.cp_ranks
        finest = max(_CHUNKS[0], min(self.length // _SHORTEST, MOST_CHUNKS) // ranks)
        numbers = [number for number in _CHUNKS if number <= finest]
        for documents in dict.fromkeys((None, self.mask.documents if ring.nodes > 1 else None)):
            chunks = (assign_chunks(self._work, ring, ranks // ring.ranks, number, documents) for number in numbers)
            yield (Tokens(self.length, holders=holders) for holders in chunks)


@dataclass
class _ByDocument:
    """Costs of causal documents, in closed form."""

    table: RouteTable
    length: int
    documents: list[tuple[int, int]]

    def __post_init__(self) -> None:
        self._known: dict[Tokens, DocumentCosts] = {}

    def _of(self, tokens: Tokens) -> DocumentCosts:
        if tokens not in self._known:
            runs = self.table.runs(tokens)
            self._known[tokens] = DocumentCosts(self.table.ring_topology, runs, self.documents)
        return self._known[tokens]

    def shares(self, tokens: Tokens) -> list[list[float]]:
        """Return two lists of how many (query, key) pairs each ring rank has: of its queries, then of its keys."""
        return self._of(tokens).work().tolist()

    def time(self, tokens: Tokens) -> float:
        """Return how long the slowest rank computes and sends, in units of the time that one pair takes to compute.

        A pair is a query and a key that attend to each other.
        """
        costs, ring = self._of(tokens), self.table.ring_topology
        computes = (costs.work().amax(0) + VISITED * costs.rows_visited()).max()
        most = max(map(token_count, self.table.runs(tokens)))
        all_rows = (most * (ring.nodes - 1), most * ring.nodes * (ring.ranks_per_node - 1))  # if blocks go to all
        return _duration(float(computes), *min(all_rows, costs.most_rows_moved()))

    def assignments(self) -> Iterator[Iterator[Tokens]]:
        """Yield documents assigned to nodes and ranks: with few cuts, and with all NICs sending what nodes share.

        The second takes time to find, and is left out where little crosses.
        """
        ring = self.table.ring_topology
        degree = self.table.cp_ranks // ring.ranks
        few_cuts = assign_documents(self.documents, self.length, ring, degree)
        yield iter((few_cuts,))
        costs = self._of(few_cuts)
        crossing = SENT_INTER * costs.most_rows_moved()[0]
        if min(ring.nodes, ring.ranks_per_node) > 1 and crossing > _NOTICED * costs.work().max():
            yield iter((assign_documents(self.documents, self.length, ring, degree, spread=True),))


def estimated_time(table: RouteTable, attending: Attending, work: Mapping[Side, Tensor]) -> float:
    """Return for how long the slowest rank computes and sends, in pairs of a query and a key.

    work: by side that may stay, the cumulative work before each token, as `summed_work` returns it.
    """
    batch = attending.mask.rows or 1  # work is that of all batch rows, if they differ
    shares = zip(*(work_of_shares(table, attending.of(local), work[local]) for local in work), strict=True)
    computes = 0.0
    for by_side, visited in zip(shares, table.rows_visited(attending), strict=True):
        computes = max(computes, max(by_side) / batch + VISITED * visited)
    return _duration(computes, *table.most_rows_moved(attending))


def _duration(computes: float, inter: int, intra: int) -> float:
    """Return how long a rank takes to compute these pairs and to send these rows, in units of pairs."""
    shorter, longer = sorted((computes, max(SENT_INTER * inter, SENT_INTRA * intra)))
    return longer + _BARE * shorter


def summed_work(attending: Attending, local: Side) -> Tensor:
    """Return the cumulative work before each token, int64 [S + 1], in pairs, if side `local` stays."""
    lengths = (attending.q.length, attending.kv.length)
    return torch.nn.functional.pad(work_by_token(attending.mask, lengths, local).cumsum(0), (1, 0))


def work_of_shares(table: RouteTable, tokens: Tokens, work: Tensor) -> list[int]:
    """Return the work of every rank, in pairs. work: cumulative, before each token, [S + 1]."""
    shares = []
    for runs in table.runs(tokens):
        if any(run.stride > 1 for run in runs):
            held = positions(runs)
            shares.append(int((work[held + 1] - work[held]).sum()))
        else:
            bounds = [(run.start, run.start + run.length) for run in runs]
            ends = torch.tensor(bounds, dtype=torch.int64, device="cpu").view(-1, 2)
            shares.append(int(work[ends].diff(dim=1).sum()))
    return shares


def _uneven(shares: Sequence[float]) -> float:
    return max(shares) * len(shares) / sum(shares) if any(shares) else 1.0
