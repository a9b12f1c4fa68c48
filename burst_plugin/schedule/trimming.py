"""Blocks that shed rows on their way through a node: what no later rank requires stays behind.

A causal mask in zigzag, 4 ranks; keys and values of rank j are required whole by the ranks before j, and in their
first half by those behind it. A ring that takes them downwards carries them whole as far as rank 0, and then halves:

    block of rank 2    2 -> 1 -> 0 -> 3              whole, whole, half
    results of it           1 -> 0 -> 3 -> 2         whole, half, half
                                 0 ------> 2         the other half, to which rank 3 adds nothing

Over all ranks 75 % of the bytes are left, of operands and of results. The link from rank 1 to rank 0 carries as much
as before, so that no pass gets shorter; and a pass that waits for links alone may take a tenth longer backward, since
what goes to an owner shares its link with what comes around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from burst_plugin.schedule.schedule import Required, Schedule, Transfer
from burst_plugin.types import Rows, row_count, union, without

__all__ = ["mirrored", "rows_moved", "shedding", "trimmed"]

_WORTH_IT = 0.9  # of the rows that are sent where all blocks are whole


def shedding(dense: Schedule, required: Required, lengths: Sequence[int]) -> Schedule | None:
    """Return the schedule with blocks that shed rows, in the direction of the ring in which these shed more.

    None where that saves little, and where parts go different ways, or not all blocks go to all ranks. Between nodes
    links are what a pass waits for, and of these the busiest one would carry as much as before: None there, too.

    Args:
        dense: a schedule of whole blocks, not in parts, in which every rank visits every block.
        required: of every rank, the rows of every block that it works on.
        lengths: rows of every block.
    """
    if dense.topology.nodes > 1 or dense.ring_of_part is not None:
        return None
    if any(len(owners) < dense.ranks for owners in required):
        return None
    candidates = [trimmed(way, required, lengths) for way in (dense, mirrored(dense))]
    best = min(candidates, key=lambda schedule: rows_moved(schedule, lengths))
    return best if rows_moved(best, lengths) <= _WORTH_IT * rows_moved(dense, lengths) else None


def mirrored(schedule: Schedule) -> Schedule:
    """Return the schedule with ranks counted from the last one, so that blocks travel the other way round."""
    last = schedule.ranks - 1

    def turned(t: Transfer) -> Transfer:
        return t._replace(block=last - t.block, src=last - t.src, dst=last - t.dst)

    return replace(
        schedule,
        visits=tuple(
            tuple(None if block is None else last - block for block in visits) for visits in schedule.visits[::-1]
        ),
        gather=tuple(map(turned, schedule.gather)),
        reduce=tuple(map(turned, schedule.reduce)),
    )


def trimmed(schedule: Schedule, required: Required, lengths: Sequence[int]) -> Schedule:
    """Return a schedule of whole blocks with transfers of the rows that are still required where they go.

    Partial results of rows that are required no more go straight to their owner.

    Args:
        required: of every rank, the rows of every block that it visits.
        lengths: rows of every block.
    """
    carried = _carried(schedule, required)

    def limited(t: Transfer, rows: Rows) -> Transfer:
        return t._replace(rows=None if rows == ((0, lengths[t.block]),) else rows)

    def results(t: Transfer) -> Iterator[Transfer]:
        rows = carried[t.src, t.block]
        to_owner = () if t.dst == t.block else without(rows, carried[t.dst, t.block])
        if to_owner:
            link = schedule.topology.link(t.src, t.block)
            yield limited(t._replace(dst=t.block, link=link), to_owner)
        yield limited(t, without(rows, to_owner))

    return replace(
        schedule,
        gather=tuple(limited(t, carried[t.dst, t.block]) for t in schedule.gather),
        reduce=tuple(each for t in schedule.reduce for each in results(t)),
    )


def _carried(schedule: Schedule, required: Required) -> dict[tuple[int, int], Rows]:
    """Return by rank and block the rows that have to come there: for that rank, and those that it sends them to."""
    carried: dict[tuple[int, int], Rows] = {
        (rank, owner): rows or () for rank, owners in enumerate(required) for owner, rows in owners.items()
    }
    for t in sorted(schedule.gather, key=lambda t: t.issue, reverse=True):
        if t.src != t.block:
            carried[t.src, t.block] = union([carried[t.src, t.block], carried[t.dst, t.block]]) or ()
    return carried


def rows_moved(schedule: Schedule, lengths: Sequence[int]) -> int:
    """Return how many rows all ranks together send to gather blocks of these lengths."""
    return sum(lengths[t.block] if t.rows is None else row_count(t.rows) for t in schedule.gather)
