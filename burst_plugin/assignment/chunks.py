"""Chunks of a sequence, assigned to ranks by their work: the heaviest first, each to the rank with the least."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def assign_chunks(
    work_before: Callable[[Tensor], Tensor], length: int, ranks: int, degree: int, per_rank: int
) -> tuple[int, ...]:
    """Return the rank of every chunk, `per_rank` chunks of about equal lengths for each rank.

    Work is that of the side of which there would be more, so that it is even whichever side stays local.

    Args:
        work_before: from positions [N] to the pairs of all tokens before each, int64 [sides that may stay, N].
        length: of the sequence, in tokens.
        ranks: of the ring, which are groups of `degree` ranks. A group has the work of all its chunks.
    """
    per_group = per_rank * degree
    count = ranks * per_group
    weights = work_before(torch.arange(count + 1, device="cpu") * length // count).diff()
    total = weights.sum(0).tolist()
    loads, held = weights.new_zeros(len(weights), ranks), [0] * ranks  # by group: its work, and how many chunks
    chunk_to_rank = [0] * count
    for chunk in sorted(range(count), key=lambda chunk: -total[chunk]):
        weight = weights[:, chunk : chunk + 1]
        most = (loads + weight).amax(0).tolist()
        group = min((group for group in range(ranks) if held[group] < per_group), key=most.__getitem__)
        chunk_to_rank[chunk] = group * degree + held[group] % degree
        loads[:, group] += weight[:, 0]
        held[group] += 1
    return tuple(chunk_to_rank)
