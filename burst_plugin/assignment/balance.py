"""How evenly the work under a mask is spread over ranks, and which tokens each rank should hold.

Causal documents a, b, c and d over two ranks; digits are the work of eight chunks, and below them their ranks:

    documents     a a a a b b c d
    work          1 3 5 7 1 3 1 1
    contiguous    0 0 0 0 1 1 1 1    16 and 6
    in chunks     0 1 1 0 0 1 0 1    the heaviest first: 10 and 12
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from burst_plugin.assignment.chunks import assign_chunks
from burst_plugin.assignment.documents import assign_documents
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.ring.systems.both_sides import work_of_ranks
from burst_plugin.sequence.layout import LAYOUTS, Run, Tokens, even_length, positions, token_count
from burst_plugin.sequence.mask import Mask, work_before
from burst_plugin.topology import Groups, Topology
from burst_plugin.types import BOTH, SIDES, Rows, Side, merged, row_count

GOOD = 1.05  # an imbalance below this is not worth more bytes
_CHUNKS = (4, 8, 16, 32)  # per rank, to try
_SHORTEST = 128  # tokens of a chunk, which is what a kernel works on at a time
_MOST_CHUNKS = 4096  # of all ranks: which of more meet takes too long to find
# In pairs of a query and a key: what a row costs, with four query heads to one of keys and 400 TFLOP/s.
_VISITED = 128  # in a visit, besides its pairs: blocks that are half full, and merging
_SENT_INTER = 2000  # at 50 GB/s
_SENT_INTRA = 250  # at 400 GB/s
_BARE = 0.2  # of computing or sending, whichever is shorter, is not hidden behind the other


def work_by_rank(table: RouteTable, attending: Attending, local: Side) -> list[int]:
    """Return how many (query, key) pairs every rank works on if side `local` stays: its queries', or its keys'."""
    by_rank = _by_rank(table.runs(attending.of(local)), _work_before(attending, (local,)))
    return list(map(int, by_rank[0]))


def imbalance(table: RouteTable, attending: Attending) -> float:
    """Return the most over the mean of the ranks' work, whichever side moves; 1 is even, as is no work at all."""
    sides = () if table.moving == {BOTH} else _staying(table, attending.mask)
    shares = [work_by_rank(table, attending, local) for local in sides]
    if BOTH in table.moving:
        shares.append(work_of_ranks(table, attending))
    return max(map(_uneven, shares))


def choose_tokens(table: RouteTable, length: int, mask: Mask, equal_sizes: bool = False) -> Tokens:
    """Return the assignment of tokens to ranks for a sequence that attends to itself within `mask`.

    The candidates are the layouts that suit the mask. If ranks have even work in none of these, also its documents
    assigned to nodes and ranks; and, if that is not even either, chunks assigned by their work. Of these the one that
    takes the least time, by an estimate. `equal_sizes` leaves out candidates by which ranks hold unequal numbers of
    tokens.

    Raises ValueError if that leaves none.
    """
    costs = Costs(table, length, mask)
    least = _candidates(costs, equal_sizes)
    if not least:
        raise ValueError(
            f"{table.cp_ranks} ranks cannot hold equally many of {length} tokens; "
            f"{even_length(length, table.cp_ranks)} would do"
        )
    times: dict[Tokens, float] = {}
    for tokens in sorted(least, key=least.__getitem__):
        if least[tokens] > min(times.values(), default=math.inf):  # so have all others, and none takes less
            break
        times[tokens] = costs.time(tokens)
    return min(times, key=times.__getitem__)


@dataclass
class Costs:
    """What assignments of a sequence cost that attends to itself within `mask`."""

    table: RouteTable
    length: int
    mask: Mask

    @cached_property
    def work_before(self) -> Callable[[Tensor], Tensor]:
        """Return a function from positions to the pairs of all tokens before each, by sides that may stay."""
        plain = Tokens(self.length)
        return _work_before(Attending(plain, plain, self.mask), _staying(self.table, self.mask))

    def shares(self, tokens: Tokens) -> Tensor:
        """Return the work of every rank, float64 [sides, ranks]; that of all batch rows divided by their number."""
        return _by_rank(self.table.runs(tokens), self.work_before).double() / (self.mask.rows or 1)

    def time(self, tokens: Tokens) -> float:
        """Return for how long the slowest rank computes and sends, in pairs of a query and a key."""
        attending, ring = Attending(tokens, tokens, self.mask), self.table.ring_topology
        visited = torch.tensor(self.table.rows_visited(attending), dtype=torch.float64, device="cpu")
        computes = float((self.shares(tokens).amax(0) + _VISITED * visited).max())
        required = self.table.pairs(attending).required("kv")
        if self.mask.documents is None or self.mask.trees:  # what many ranks require a ring may pass on
            inter, intra = self.table.most_rows_moved(attending)
        else:
            most = max(map(token_count, self.table.runs(tokens)))
            all_rows = (most * (ring.nodes - 1), most * ring.nodes * (ring.ranks_per_node - 1))  # to all ranks
            inter, intra = all_rows if required is None else min(all_rows, most_rows_moved(ring, required))
        shorter, longer = sorted((computes, float(max(_SENT_INTER * inter, _SENT_INTRA * intra))))
        return longer + _BARE * shorter

    def assignments(self) -> Iterator[Tokens]:
        """Yield documents assigned to nodes and ranks, and then more and more chunks, by work alone."""
        ring, degree = self.table.ring_topology, self.table.cp_ranks // self.table.ring_ranks
        if self.mask.documents is not None:
            regions = self.mask.of_row(0).beside_trees(self.length, self.length)
            edges = {edge for region in regions for edge in (region.q_start, region.q_stop)}
            bounds = sorted(edges.union(self.mask.documents, (0, self.length)))
            yield assign_documents(self.work_before, bounds, ring, degree)
        finest = max(_CHUNKS[0], min(self.length // _SHORTEST, _MOST_CHUNKS) // self.table.cp_ranks)
        for number in (number for number in _CHUNKS if number <= finest):
            holders = assign_chunks(self.work_before, self.length, ring.ranks, degree, per_rank=number)
            yield Tokens(self.length, holders=holders)


def most_rows_moved(topology: Topology, required: Sequence[Mapping[int, Rows]]) -> tuple[int, int]:
    """Return the most keys that a rank sends or receives: (between nodes, inside a node).

    They are sent as by the schedule `direct`: to another node once, and there on by the owner's counterpart. Where no
    two ranks of a node require the same block of another it does without counterparts; here they always count.
    `required` are the rows of each owner's block that every rank works on.
    """
    sent_inter, received_inter, sent_intra, received_intra = ([0] * topology.ranks for _ in range(4))
    for node in range(topology.nodes):
        by_owner: dict[int, list[tuple[int, Rows]]] = {}  # the ranks of the node that require rows of it
        for rank in topology.node_peers(topology.rank(node, 0)):
            for owner, rows in required[rank].items():
                by_owner.setdefault(owner, []).append((rank, rows))
        for owner, requiring in by_owner.items():
            source, crossing = topology.rank(node, topology.local_rank(owner)), 0
            if source != owner:
                crossing = row_count(merged(chain.from_iterable(rows for _, rows in requiring)))
                sent_inter[owner] += crossing
                received_inter[source] += crossing
            for rank, rows in requiring:
                if rank != source:
                    passed_on = crossing or row_count(rows)
                    sent_intra[source] += passed_on
                    received_intra[rank] += passed_on
    return max(sent_inter + received_inter), max(sent_intra + received_intra)


def _candidates(costs: Costs, equal_sizes: bool) -> dict[Tokens, float]:
    """Return the layouts that suit the mask and, if ranks have even work in none of these, other assignments.

    Each with the most work of any rank, on the side of which that is more.
    """
    most_work: dict[Tokens, float] = {}

    def add(tokens: Tokens) -> bool:
        """Add a candidate unless it is not allowed. Return whether it is even."""
        if equal_sizes and len({count for block in costs.table.group_blocks(tokens) for count in block.counts}) > 1:
            return False
        shares = costs.shares(tokens)
        most_work[tokens] = float(shares.max())
        return all(_uneven(share) <= GOOD for share in shares.tolist())

    suitable = [Tokens(costs.length, layout=name) for name, layout in LAYOUTS.items() if layout.suits(costs.mask)]
    some_are_even = [add(tokens) for tokens in suitable]
    if not any(some_are_even):
        any(add(_of_members(tokens, costs.table.groups)) for tokens in costs.assignments())  # until one is even
    return most_work


def _of_members(tokens: Tokens, groups: Groups) -> Tokens:
    """Return an assignment that has neighbours in groups as one to the members that groups have."""
    if not groups.apart or tokens.holders is None:
        return tokens
    ranks = [rank for group in range(groups.ring_size) for rank in groups.members(group)]
    return replace(tokens, holders=tuple(ranks[rank] for rank in tokens.holders))


def _staying(table: RouteTable, mask: Mask) -> tuple[Side, ...]:
    """Return the sides that may stay where they are: under a prefix tree queries, unless they are asked to move."""
    return ("q",) if mask.trees and not table.moving & {"q", BOTH} else SIDES


def _work_before(attending: Attending, sides: Sequence[Side]) -> Callable[[Tensor], Tensor]:
    """Return a function from positions [N] to the pairs of all tokens before each, int64 [sides, N]."""
    lengths = (attending.q.length, attending.kv.length)
    of_sides = [work_before(attending.mask, lengths, side) for side in sides]
    return lambda places: torch.stack([before(places) for before in of_sides])


def _by_rank(runs: Sequence[Sequence[Run]], before: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the work of every rank, int64 [sides, ranks]."""
    if any(run.stride > 1 for held in runs for run in held):
        start = torch.cat([positions(held) for held in runs])
        stop, counts = start + 1, list(map(token_count, runs))
    else:
        spans = [(run.start, run.start + run.length) for held in runs for run in held]
        start, stop = torch.tensor(spans, dtype=torch.int64, device="cpu").view(-1, 2).T.contiguous()
        counts = list(map(len, runs))
    rank = torch.arange(len(runs), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    pairs = before(stop) - before(start)
    return pairs.new_zeros(len(pairs), len(runs)).index_add_(1, rank, pairs)


def _uneven(shares: Sequence[float]) -> float:
    return max(shares) * len(shares) / sum(shares) if any(shares) else 1.0
