"""How evenly the work under a mask is spread over ranks, and which tokens each rank should hold.

Causal documents a, b, c and d over two ranks; digits are the work of eight chunks, and below them their ranks:

    documents     a a a a b b c d
    work          1 3 5 7 1 3 1 1
    contiguous    0 0 0 0 1 1 1 1    16 and 6
    in chunks     0 1 1 0 0 1 0 1    the heaviest first: 10 and 12
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import takewhile

import torch
from torch import Tensor

from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.sequence.chunks import assign_chunks
from burst_plugin.sequence.layout import LAYOUTS, Tokens, even_length, positions, token_count
from burst_plugin.sequence.masks import Mask
from burst_plugin.sequence.regions import work_by_token
from burst_plugin.types import SIDES, Side

__all__ = ["choose_tokens", "imbalance", "work_by_rank"]

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
    return _shares(table, attending.of(local), _work(attending, local))


def imbalance(table: RouteTable, attending: Attending) -> float:
    """Return the most over the mean of the ranks' work, whichever side moves; 1 is even, as is no work at all."""
    return max(_uneven(work_by_rank(table, attending, local)) for local in SIDES)


def choose_tokens(table: RouteTable, length: int, mask: Mask, alike: bool = False) -> Tokens:
    """Return the assignment of tokens to ranks for a sequence that attends to itself within `mask`.

    The candidates are the layouts that suit the mask; if ranks have even work in none of these, also chunks assigned
    by their work, and chunks that leave documents inside nodes. Of these the one that takes the least time, by an
    estimate. `alike` leaves out candidates by which ranks hold unequal numbers of tokens.

    Raises ValueError if that leaves none.
    """
    plain = Attending(Tokens(length), Tokens(length), mask)
    work = {local: _work(plain, local) for local in SIDES}
    candidates = _candidates(table, plain, work, alike)
    if not candidates:
        raise ValueError(
            f"{table.cp_ranks} ranks cannot hold equally many of {length} tokens; "
            f"{even_length(length, table.cp_ranks)} would do"
        )
    batch = mask.rows or 1  # work is that of all batch rows, if they differ
    least = {tokens: max(shares) / batch for tokens, shares in candidates.items()}
    times: dict[Tokens, float] = {}
    for tokens in sorted(candidates, key=least.__getitem__):
        if least[tokens] > min(times.values(), default=math.inf):  # so have all others, and none takes less
            break
        times[tokens] = _time(table, Attending(tokens, tokens, mask), work)
    return min(times, key=times.__getitem__)


def _candidates(
    table: RouteTable, plain: Attending, work: Mapping[Side, Tensor], alike: bool
) -> dict[Tokens, list[int]]:
    """Return the layouts that suit the mask; if none is even, more and more chunks until work is; and nodes first.

    Each with the work of every rank, on the side of which it has more.
    """
    length, ring = plain.q.length, table.ring_topology
    found: dict[Tokens, list[int]] = {}

    def add(tokens: Tokens) -> bool:
        """Add a candidate unless it is not allowed. Return whether it is even."""
        if alike and len(set(map(token_count, table.shards(tokens)))) > 1:
            return False
        shares = [_shares(table, tokens, work[local]) for local in SIDES]
        found[tokens] = list(map(max, *shares))
        return all(_uneven(share) <= GOOD for share in shares)

    suitable = [name for name, layout in LAYOUTS.items() if layout.suits(plain.mask)]
    some_are_even = [add(Tokens(length, layout=name)) for name in suitable]
    if any(some_are_even):
        return found
    finest = max(_CHUNKS[0], min(length // _SHORTEST, _MOST_CHUNKS) // table.cp_ranks)
    for cu_seqlens in dict.fromkeys((None, plain.mask.documents if ring.nodes > 1 else None)):
        for per_rank in takewhile(lambda number: number <= finest, _CHUNKS):
            holders = assign_chunks(work, ring, table.cp_ranks // ring.ranks, per_rank, cu_seqlens)
            if add(Tokens(length, holders=holders)):
                break
    return found


def _time(table: RouteTable, attending: Attending, work: Mapping[Side, Tensor]) -> float:
    """Return for how long the slowest rank computes and sends, in pairs of a query and a key."""
    batch = attending.mask.rows or 1  # work is that of all batch rows, if they differ
    shares = zip(*(_shares(table, attending.of(local), work[local]) for local in SIDES), strict=True)
    computes = 0.0
    for both, visited in zip(shares, table.rows_visited(attending), strict=True):
        computes = max(computes, max(both) / batch + _VISITED * visited)
    inter, intra = table.most_rows_moved(attending)
    shorter, longer = sorted((computes, max(_SENT_INTER * inter, _SENT_INTRA * intra)))
    return longer + _BARE * shorter


def _work(attending: Attending, local: Side) -> Tensor:
    """Return the work of all tokens before each, [S + 1]."""
    lengths = (attending.q.length, attending.kv.length)
    return torch.nn.functional.pad(work_by_token(attending.mask, lengths, local).cumsum(0), (1, 0))


def _shares(table: RouteTable, tokens: Tokens, work: Tensor) -> list[int]:
    """Return the work of every rank."""
    shares = []
    for runs in table.runs(tokens):
        if any(run.stride > 1 for run in runs):
            held = positions(runs)
            shares.append(int((work[held + 1] - work[held]).sum()))
        else:
            ends = torch.tensor([(run.start, run.start + run.length) for run in runs], dtype=torch.int64).view(-1, 2)
            shares.append(int(work[ends].diff(dim=1).sum()))
    return shares


def _uneven(shares: list[int]) -> float:
    return max(shares) * len(shares) / sum(shares) if any(shares) else 1.0
