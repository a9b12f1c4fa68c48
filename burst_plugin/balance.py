"""How evenly a sequence is dealt out to ranks under a mask, and how it is dealt out best.

Causal documents a, b, c and d over two ranks; digits are the work of eight chunks, and who holds them:

    documents     a a a a b b c d
    work          1 3 5 7 1 3 1 1
    contiguous    0 0 0 0 1 1 1 1    16 and 6
    in chunks     0 1 1 0 0 1 0 1    the heaviest first: 10 and 12
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from burst_plugin.layout import Tokens, even_length, positions, token_count
from burst_plugin.mask import Mask
from burst_plugin.region import work_by_token
from burst_plugin.routes import Attending, RouteTable
from burst_plugin.sides import SIDES, Side

__all__ = ["choose_tokens", "imbalance", "work_by_rank"]

GOOD = 1.05  # an imbalance below this is not worth more bytes
_CHUNKS = (4, 8, 16)  # per rank, to try
_SHORTEST = 128  # tokens of a chunk, which is what a kernel works on at a time
# In pairs of a query and a key: what a row costs, with four query heads to one of keys and 400 TFLOP/s.
_VISITED = 128  # in a visit, besides its pairs: blocks that are half full, and merging
_SENT_INTER = 2000  # at 50 GB/s
_SENT_INTRA = 250  # at 400 GB/s


def work_by_rank(table: RouteTable, attending: Attending, home: Side) -> list[int]:
    """How many (query, key) pairs every rank works on if side `home` stays: those of its queries, or of its keys."""
    return _shares(table, attending.of(home), _work(attending, home))


def imbalance(table: RouteTable, attending: Attending) -> float:
    """Most over mean of the ranks' work, whichever side travels; 1 is even, and what nobody works on is even."""
    return max(_uneven(work_by_rank(table, attending, home)) for home in SIDES)


def choose_tokens(table: RouteTable, length: int, mask: Mask, alike: bool = False) -> Tokens:
    """The way to deal out a sequence that attends to itself within `mask`.

    Zigzag or contiguous; if ranks have even work in neither, also in chunks that are dealt out by their work. Of
    those that take the least time, by an estimate, the one that computes and sends the least. `alike` leaves out
    those by which ranks hold unequal numbers.
    """
    plain = Attending(Tokens(length), Tokens(length), mask)
    work = {home: _work(plain, home) for home in SIDES}
    candidates = _candidates(table, length, work, alike)
    if not candidates:
        raise ValueError(
            f"{table.cp_ranks} ranks cannot hold equally many of {length} tokens; "
            f"{even_length(length, table.cp_ranks)} would do"
        )
    times = {tokens: _times(table, Attending(tokens, tokens, mask), work) for tokens in candidates}
    limit = GOOD * min(map(max, times.values()))
    return min(
        (tokens for tokens in candidates if max(times[tokens]) <= limit), key=lambda tokens: sum(times[tokens])
    )


def _candidates(table: RouteTable, length: int, work: Mapping[Side, Tensor], alike: bool) -> list[Tokens]:
    """Zigzag and contiguous, then more and more chunks until ranks have even work."""

    def allowed(tokens: Tokens) -> bool:
        return not alike or len(set(map(token_count, table.shards(tokens)))) == 1

    def is_even(tokens: Tokens) -> bool:
        return all(_uneven(_shares(table, tokens, work[home])) <= GOOD for home in SIDES)

    found = [*filter(allowed, (Tokens(length, layout=layout) for layout in ("zigzag", "contiguous")))]
    even = any(map(is_even, found))
    for number in _CHUNKS:
        if even or (number > _CHUNKS[0] and length < number * _SHORTEST * table.cp_ranks):
            break
        in_chunks = Tokens(length, holders=_dealt(table, work, number))
        if allowed(in_chunks):
            found.append(in_chunks)
            even = is_even(in_chunks)
    return found


def _times(table: RouteTable, attending: Attending, work: Mapping[Side, Tensor]) -> tuple[float, float]:
    """For how long the slowest rank computes, and sends; in pairs of a query and a key."""
    pairs = zip(*(_shares(table, attending.of(home), work[home]) for home in SIDES), strict=True)
    batch = attending.mask.rows or 1  # work is that of all batch rows, if they differ
    visited = table.rows_visited(attending)
    computes = max(max(both) / batch + _VISITED * rows for both, rows in zip(pairs, visited, strict=True))
    inter, intra = table.most_rows_sent(attending)
    return computes, max(_SENT_INTER * inter, _SENT_INTRA * intra)


def _dealt(table: RouteTable, work: Mapping[Side, Tensor], number: int) -> tuple[int, ...]:
    """Which rank holds which chunk, `number` chunks per rank: the heaviest first, to whom has the least work.

    Work is that of the side for which a rank would have more then, so that it is even whichever side is home. A team
    has that of all its chunks.
    """
    degree = table.cp_ranks // table.ring_ranks
    weights = torch.stack([_by_chunk(work[side], table.cp_ranks * number) for side in SIDES])
    load, room = weights.new_zeros(len(SIDES), table.ring_ranks), [number * degree] * table.ring_ranks
    holders = [0] * weights.shape[1]
    for chunk in weights.sum(0).argsort(descending=True, stable=True).tolist():
        then = (load + weights[:, chunk : chunk + 1]).amax(0).tolist()
        team = min((team for team in range(len(room)) if room[team]), key=then.__getitem__)
        load[:, team] += weights[:, chunk]
        room[team] -= 1
        holders[chunk] = team * degree + room[team] % degree
    return tuple(holders)


def _by_chunk(work: Tensor, chunks: int) -> Tensor:
    """Work by token, summed up."""
    bounds = torch.arange(chunks + 1, device=work.device) * len(work) // chunks
    return torch.nn.functional.pad(work.cumsum(0), (1, 0))[bounds].diff()


def _work(attending: Attending, home: Side) -> Tensor:
    return work_by_token(attending.mask, (attending.q.length, attending.kv.length), home)


def _shares(table: RouteTable, tokens: Tokens, work: Tensor) -> list[int]:
    return [int(work[positions(runs)].sum()) for runs in table.runs(tokens)]


def _uneven(shares: list[int]) -> float:
    return max(shares) * len(shares) / sum(shares) if any(shares) else 1.0
