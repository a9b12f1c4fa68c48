"""Chunks of a sequence, assigned to ranks by their work: the heaviest first, each to the rank with the least.

Causal documents a, b, c and d over two nodes of two ranks, three chunks each; digits are the work of their queries:

    documents     a a a a b b b b c c d d
    work          1 3 5 7 1 3 5 7 1 3 1 3
    by work       0 1 2 3 3 2 1 0 0 1 2 3    all ranks require keys of a and b, of which each node holds a half
    nodes first   0 1 1 0 2 3 3 2 2 3 0 1    a and d in one node, b and c in the other: nothing crosses

Where it does not work out like this, a node boundary cuts two documents, since nodes get even work too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from burst_plugin.topology import Topology
from burst_plugin.types import Side


def assign_chunks(
    work: Mapping[Side, Tensor],
    topology: Topology,
    degree: int,
    per_rank: int,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the rank of every chunk of a sequence; all ranks get equally many chunks, and about equal work.

    Args:
        work: by each side that may stay where it is, how many (query, key) pairs the queries ("q") or keys ("kv")
            before each position have, int64 [S + 1].
        topology: the nodes and ranks of the ring. A rank of the ring is a group of `degree` ranks, 1 without groups;
            a group has the work of all its chunks.
        per_rank: the number of chunks for each rank. All chunks are of about equal lengths.
        cu_seqlens: bounds of documents, 0 first; if given, chunks are assigned to nodes first, so that documents stay
            inside nodes, and then to the ranks of each node.
    """
    per_group, length = per_rank * degree, len(work["q"]) - 1
    count = topology.ranks * per_group
    weights = torch.stack([work_by_chunk(of_side, count) for of_side in work.values()])
    chunks = list(range(count))
    if cu_seqlens is None or topology.nodes == 1:
        groups = _by_work(chunks, topology.ranks, weights)
    else:
        early = topology.ranks * degree if length % count else 0  # tokens by which chunks may begin sooner than here
        nodes = _by_document(chunks_of_documents(chunks, cu_seqlens, length, early), topology.nodes, weights)
        groups = [group for held in nodes for group in _by_work(held, topology.ranks_per_node, weights)]
    ranks = [0] * count
    for group, held in enumerate(groups):
        for number, chunk in enumerate(held):
            ranks[chunk] = group * degree + number % degree
    return tuple(ranks)


def _by_work(chunks: Sequence[int], count: int, weights: Tensor) -> list[list[int]]:
    """Return equally many chunks for each of `count` holders: the heaviest first, each for the one with least work.

    The side with the most work counts, so that work is even whichever side stays local.
    """
    loads, total = weights.new_zeros(len(weights), count), weights.sum(0).tolist()
    per_holder = len(chunks) // count
    held = [list[int]() for _ in range(count)]
    for chunk in sorted(chunks, key=lambda chunk: -total[chunk]):
        weight = weights[:, chunk : chunk + 1]
        then = (loads + weight).amax(0).tolist()
        with_room = [number for number in range(count) if len(held[number]) < per_holder]
        number = min(with_room, key=then.__getitem__)
        loads[:, number] += weight[:, 0]
        held[number].append(chunk)
    return held


def chunks_of_documents(
    chunks: Sequence[int], cu_seqlens: Sequence[int], length: int, early: int = 0
) -> list[list[int]]:
    """Return the chunks of every document that has any: a chunk belongs to the document in which it begins.

    So only its beginning, less than a chunk, lies elsewhere: some keys that all its queries require. The
    queries of its end would require all its keys. Chunks may begin up to `early` tokens sooner than they would if all
    were of one length.
    """
    begins = [max(0, chunk * length // len(chunks) - early) for chunk in chunks]
    return [list(held) for _, held in groupby(chunks, lambda chunk: bisect_right(cu_seqlens, begins[chunk]))]


def _by_document(documents: Sequence[Sequence[int]], count: int, weights: Tensor) -> list[list[int]]:
    """Return equally many chunks for each of `count` holders, one after the other.

    Each gets chunks of the heaviest documents left and of the lightest, as many of either as make work even.
    """
    total = weights.sum(0).tolist()
    falling = sorted(documents, key=lambda document: -sum(total[chunk] for chunk in document))
    order = [chunk for document in falling for chunk in _ends_first(document)]
    before = [0, *accumulate(total[chunk] for chunk in order)]  # the work of all chunks before each
    first, end, held = 0, len(order), []
    per_holder = len(total) // count
    for number in range(count):
        share = (before[end] - before[first]) / (count - number)
        off_by = []  # by the number of heavy chunks, the others being light
        for heavy in range(per_holder + 1):
            light = per_holder - heavy
            work = before[first + heavy] - before[first] + before[end] - before[end - light]
            off_by.append(abs(work - share))
        heavy = off_by.index(min(off_by))
        light_start = end - (per_holder - heavy)
        held.append(sorted(order[first : first + heavy] + order[light_start:end]))
        first, end = first + heavy, light_start
    return held


def _ends_first(document: Sequence[int]) -> list[int]:
    """Return its last chunk, the first, the last but one, ...: if causal, pairs with equal work for both sides."""
    left, order = list(document), []
    while left:
        order.append(left.pop())
        if left:
            order.append(left.pop(0))
    return order


def work_by_chunk(work: Tensor, chunks: int) -> Tensor:
    """Return the work of every chunk, [chunks], from the cumulative work before each token, [S + 1]."""
    return work[torch.arange(chunks + 1, device=work.device) * (len(work) - 1) // chunks].diff()
