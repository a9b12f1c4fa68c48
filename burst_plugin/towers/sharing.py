"""How images, frames or clips, the items that a tower encodes one by one, are divided among ranks, by their work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def shared_out(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide items among ranks by their work; return for each rank the numbers of its items, ascending.

    `work` has a number for each item, in any unit. Items are given out one by one, the largest first, each to the
    rank with the least work so far: no rank has more than 4/3 of the best possible maximum (Graham 1969).
    """
    least = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(work)), key=lambda n: (-work[n], n)):
        done, rank = heapq.heappop(least)
        shares[rank].append(number)
        heapq.heappush(least, (done + work[number], rank))
    return [sorted(numbers) for numbers in shares]


def work_of(patches: int, width: int) -> float:
    """Return the work of one image of `patches` patches in one layer of this `width`, in proportion to FLOPs.

    Projections and an MLP of four times the width take 24 * patches * width**2 FLOPs, attention 4 * patches**2 *
    width.
    """
    return patches * (6.0 * width + patches)
