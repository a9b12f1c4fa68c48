"""Passes that move both sides, in different visits: DistFlashAttention's schedule.

The keys and values of a rank go half way round the ring; the queries of ranks beyond that come to it instead. Of 6
ranks, what travels for a pair of blocks, and where to:

                       keys of rank     0     1     2     3     4     5
    queries of rank 0                   0     q1    q2    k0    k0    k0      k0: these keys come to rank 0
                    3                   k3    k3    k3    3     q4    q5      q4: these queries go to rank 4

A pass has two halves, each with a plan and a ring of its own, whose schedule has the visits that its side travels
for. They are run together, step by step, and their results are accumulated together.

Source: DistFlashAttn (arXiv 2310.03294), section 3.2: of consecutive tokens under a causal mask, ranks whose queries
have few keys before them take over work of ranks that have many.
"""

from __future__ import annotations

from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.schedule.steps import Required
from burst_plugin.types import SIDES, Side


def half_of_visits(required: Required | None, moving: Side, ranks: int) -> Required:
    """Return the required rows of just the visits that side `moving` travels for, if both sides move.

    required: the rows that each rank works on in all visits, by owner; None if every rank requires every block. Keys
        and values travel to the ranks up to half way round the ring of `ranks`, queries for the rest.
    """
    if required is None:
        required = [dict.fromkeys(range(ranks))] * ranks

    def travels(rank: int, owner: int) -> bool:
        distance = (rank - owner) % ranks
        return 2 * distance <= ranks if moving == "kv" else 0 < 2 * distance < ranks

    return [{owner: rows for owner, rows in owners.items() if travels(r, owner)} for r, owners in enumerate(required)]


def work_of_ranks(table: RouteTable, attending: Attending) -> list[int]:
    """Return how many (query, key) pairs each rank of the ring works on if both sides move, by rank.

    Pairs in each batch row count where rows have masks of their own; else one row counts for all.
    """
    pairs, work_of = table.pairs(attending), [0] * table.ring_ranks
    for moving in SIDES:
        for rank, owners in enumerate(half_of_visits(pairs.required(moving), moving, table.ring_ranks)):
            tiles = [tile for owner in owners for tile in pairs.of_visit(moving, owner, rank)]
            work_of[rank] += sum(tile.work * (tile.batch[1] - tile.batch[0] if tile.batch else 1) for tile in tiles)
    return work_of
