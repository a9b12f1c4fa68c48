"""How evenly a sequence is dealt out to ranks under a mask, and how it is dealt out best.

Causal documents a, b, c and d over two ranks; digits are the work of eight chunks, and who holds them:

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
from burst_plugin.sequence.chunks import dealt
from burst_plugin.sequence.layout import Tokens, even_length, positions, token_count
from burst_plugin.sequence.masks import Mask
from burst_plugin.sequence.regions import work_by_token
from burst_plugin.types import SIDES, Side

__all__ = ["choose_tokens", "imbalance", "work_by_rank"]

GOOD = 1.05  # an imbalance below this is not worth more bytes
_CHUNKS = (4, 8, 16, 32)  # per rank, to try
_SHORTEST = 128  # tokens of a chunk, which is what a kernel works on at a time
_MOST_CHUNKS = 4096  # of all ranks: who meets whom among more takes too long to find
# In pairs of a query and a key: what a row costs, with four query heads to one of keys and 400 TFLOP/s.
_VISITED = 128  # in a visit, besides its pairs: blocks that are half full, and merging
_SENT_INTER = 2000  # at 50 GB/s
_SENT_INTRA = 250  # at 400 GB/s
_BARE = 0.2  # of computing or sending, whichever is shorter, is not hidden behind the other


def work_by_rank(table: RouteTable, attending: Attending, home: Side) -> list[int]:
    """How many (query, key) pairs every rank works on if side `home` stays: those of its queries, or of its keys."""
    return _shares(table, attending.of(home), _work(attending, home))


def imbalance(table: RouteTable, attending: Attending) -> float:
    """Most over mean of the ranks' work, whichever side travels; 1 is even, and what nobody works on is even."""
    return max(_uneven(work_by_rank(table, attending, home)) for home in SIDES)


def choose_tokens(table: RouteTable, length: int, mask: Mask, alike: bool = False) -> Tokens:
    """The way to deal out a sequence that attends to itself within `mask`.

    Zigzag or contiguous; if ranks have even work in neither, also in chunks that are dealt out by their work, and in
    chunks that leave documents inside nodes. Of those the one that takes the least time, by an estimate. `alike`
    leaves out those by which ranks hold unequal numbers.
    """
    plain = Attending(Tokens(length), Tokens(length), mask)
    work = {home: _work(plain, home) for home in SIDES}
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
    """Zigzag and contiguous; if neither is even, more and more chunks until ranks have even work; and nodes first.

    Each with the work of every rank, on the side for which it has more.
    """
    length, ring = plain.q.length, table.ring_topology
    found: dict[Tokens, list[int]] = {}

    def add(tokens: Tokens) -> bool:
        """Unless it is not allowed; whether it is even."""
        if alike and len(set(map(token_count, table.shards(tokens)))) > 1:
            return False
        shares = [_shares(table, tokens, work[home]) for home in SIDES]
        found[tokens] = list(map(max, *shares))
        return all(_uneven(share) <= GOOD for share in shares)

    plainly_even = [add(Tokens(length, layout=layout)) for layout in ("zigzag", "contiguous")]
    if any(plainly_even):
        return found
    finest = max(_CHUNKS[0], min(length // _SHORTEST, _MOST_CHUNKS) // table.cp_ranks)
    for documents in dict.fromkeys((None, plain.mask.documents if ring.nodes > 1 else None)):
        for number in takewhile(lambda number: number <= finest, _CHUNKS):
            holders = dealt(work, ring, table.cp_ranks // ring.ranks, number, documents)
            if add(Tokens(length, holders=holders)):
                break
    return found


def _time(table: RouteTable, attending: Attending, work: Mapping[Side, Tensor]) -> float:
    """For how long the slowest rank computes and sends, in pairs of a query and a key."""
    pairs = zip(*(_shares(table, attending.of(home), work[home]) for home in SIDES), strict=True)
    batch = attending.mask.rows or 1  # work is that of all batch rows, if they differ
    visited = table.rows_visited(attending)
    computes: float = max(max(both) / batch + _VISITED * rows for both, rows in zip(pairs, visited, strict=True))
    inter, intra = table.most_rows_moved(attending)
    shorter, longer = sorted((computes, max(_SENT_INTER * inter, _SENT_INTRA * intra)))
    return longer + _BARE * shorter


def _work(attending: Attending, home: Side) -> Tensor:
    """The work of all tokens before each, [S + 1]."""
    lengths = (attending.q.length, attending.kv.length)
    return torch.nn.functional.pad(work_by_token(attending.mask, lengths, home).cumsum(0), (1, 0))


def _shares(table: RouteTable, tokens: Tokens, work: Tensor) -> list[int]:
    """The work of every rank."""
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
