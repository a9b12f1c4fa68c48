"""How evenly a layout spreads the work of a mask over ranks, and which layout does so best."""

from __future__ import annotations

from torch import Tensor

from burst_plugin.layout import LAYOUTS, Tokens, even_length, positions, token_count
from burst_plugin.mask import Mask
from burst_plugin.region import work_by_token
from burst_plugin.routes import Attending, RouteTable
from burst_plugin.sides import SIDES, Side

__all__ = ["choose_tokens", "imbalance", "work_by_rank"]

GOOD = 1.05  # an imbalance below this is not worth more bytes


def work_by_rank(table: RouteTable, attending: Attending, home: Side) -> list[int]:
    """How many (query, key) pairs every rank works on if side `home` stays: those of its queries, or of its keys."""
    return _shares(table, attending.of(home), _work(attending, home))


def imbalance(table: RouteTable, attending: Attending) -> float:
    """Most over mean of the ranks' work, whichever side travels; 1 is even, and what nobody works on is even."""
    return max(_uneven(work_by_rank(table, attending, home)) for home in SIDES)


def choose_tokens(table: RouteTable, length: int, mask: Mask, alike: bool = False) -> Tokens:
    """The way to deal out a sequence that attends to itself within `mask`.

    Of the layouts whose imbalance is good, or else of the most even ones, the one that sends the fewest rows over the
    scarcer link. Documents are also tried one by one. `alike` leaves out those by which ranks hold unequal numbers.
    """
    plain = Attending(Tokens(length), Tokens(length), mask)
    work = {home: _work(plain, home) for home in SIDES}
    splits = (None,) if mask.documents is None else (mask.documents, None)
    candidates = [Tokens(length, split, layout) for layout in LAYOUTS for split in splits]
    if alike:
        candidates = [tokens for tokens in candidates if len(set(map(token_count, table.shards(tokens)))) == 1]
        if not candidates:
            raise ValueError(
                f"in no layout do {table.cp_ranks} ranks hold equally many of {length} tokens; "
                f"{even_length(length, table.cp_ranks)} would do"
            )
    uneven = {tokens: max(_uneven(_shares(table, tokens, pairs)) for pairs in work.values()) for tokens in candidates}
    limit = max(GOOD, min(uneven.values()))
    return min(
        (tokens for tokens in candidates if uneven[tokens] <= limit),
        key=lambda tokens: table.most_rows_sent(Attending(tokens, tokens, mask)),
    )


def _work(attending: Attending, home: Side) -> Tensor:
    return work_by_token(attending.mask, (attending.q.length, attending.kv.length), home)


def _shares(table: RouteTable, tokens: Tokens, work: Tensor) -> list[int]:
    return [int(work[positions(runs)].sum()) for runs in table.runs(tokens)]


def _uneven(shares: list[int]) -> float:
    return max(shares) * len(shares) / sum(shares) if any(shares) else 1.0
