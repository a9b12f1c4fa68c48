"""A schedule as a grid of text: rows are ranks, columns are steps.

two_level_ring, 2x2 (nodes x ranks per node)
           step   0   1   2   3   4
node 0   rank 0  0/ |*2   3 | 1  /0       *    a block that came from another node
         rank 1  1/ |*3   2 | 0  /1       |    the next block is one of another node than the last
node 1   rank 2  2/ |*0   1 | 3  /2       0/   a rank's own block, and /0 the tail of the work on it
         rank 3  3/ |*1   0 | 2  /3       .    no visit
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from burst_plugin.topology import Link, Traffic

if TYPE_CHECKING:
    from burst_plugin.schedule.schedule import Schedule

__all__ = ["draw"]


def draw(schedule: Schedule) -> str:
    """Return the grid, and below it the most blocks that any rank sends over either link."""
    width = len(str(schedule.ranks * schedule.parts - 1))  # digits of a block
    crossed = {(t.dst, t.block) for t in schedule.gather if t.link is Link.INTER}
    steps = "".join(f"  {step:>{width + 1}}" for step in range(len(schedule.visits[0])))
    lines = [f"{schedule.name}, {schedule.topology}", f"{'step':>{14 + width}}{steps}"]
    for rank in range(len(schedule.visits)):
        is_first = schedule.topology.local_rank(rank) == 0
        node = f"node {schedule.topology.node(rank)}" if is_first else ""
        lines.append(f"{node:<9}rank {rank:<{width}}" + _row(schedule, rank, crossed, width))
    for traffic in Traffic:
        sent = Counter((t.src, t.link) for t in schedule.transfers if t.traffic is traffic)
        most = [max((count for (_, link), count in sent.items() if link is of), default=0) for of in Link]
        lines.append(f"{traffic.value}: a rank sends at most {most[0]} blocks intra-node, {most[1]} inter-node")
    return "\n".join(lines)


def _row(schedule: Schedule, rank: int, crossed: set[tuple[int, int]], width: int) -> str:
    """Return the visits of a rank."""
    row, last_node = "", None
    for block, is_tail in zip(schedule.visits[rank], schedule.tail_visits(rank), strict=True):
        node = schedule.topology.node(rank if block is None else schedule.owner(block))
        row += "  " if last_node in (None, node) else " |"
        row += _cell(schedule, rank, block, is_tail, crossed).rjust(width + 1)
        last_node = node
    return row


def _cell(schedule: Schedule, rank: int, block: int | None, is_tail: bool, crossed: set[tuple[int, int]]) -> str:
    if block is None:
        return "."
    if schedule.tail_share and schedule.owner(block) == rank:
        return f"/{block}" if is_tail else f"{block}/"
    return f"*{block}" if (rank, block) in crossed else str(block)
