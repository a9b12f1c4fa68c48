"""Chunks of a sequence, dealt out to ranks by their work: the heaviest first, to whom has the least.

Causal documents a, b, c and d over two nodes of two ranks, three chunks each; digits are the work of their queries:

    documents     a a a a b b b b c c d d
    work          1 3 5 7 1 3 5 7 1 3 1 3
    by work       0 1 2 3 3 2 1 0 0 1 2 3    all ranks need keys of a and b, of which each node holds a half
    nodes first   0 1 1 0 2 3 3 2 2 3 0 1    a and d in one node, b and c in the other: nothing crosses

Where it does not work out like this, a node boundary cuts two documents, since nodes get even work too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, groupby, zip_longest

import torch
from torch import Tensor

from burst_plugin.topology import Topology
from burst_plugin.types import SIDES, Side

__all__ = ["dealt"]


def dealt(
    work: Mapping[Side, Tensor], topology: Topology, degree: int, number: int, documents: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Which rank holds which chunk, `number` per rank.

    Args:
        work: by side, pairs of all tokens before each, int64 [S + 1].
        topology: of the ring, whose ranks are groups of `degree` ranks. A group has the work of all its chunks.
        documents: where they begin, and the end; with it nodes come first.
    """
    each, length = number * degree, len(work["q"]) - 1
    weights = torch.stack([_by_chunk(work[side], topology.ranks * each) for side in SIDES])
    chunks = list(range(topology.ranks * each))
    if documents is None or topology.nodes == 1:
        groups = _by_work(chunks, topology.ranks, weights)
    else:
        early = topology.ranks * degree if length % len(chunks) else 0  # by which chunks may begin sooner than here
        nodes = _by_document(_cut(chunks, documents, length, early), topology.nodes, weights)
        groups = [group for held in nodes for group in _by_work(held, topology.ranks_per_node, weights)]
    holders = [0] * len(chunks)
    for group, held in enumerate(groups):
        for place, chunk in enumerate(held):
            holders[chunk] = group * degree + place % degree
    return tuple(holders)


def _by_work(chunks: Sequence[int], count: int, weights: Tensor) -> list[list[int]]:
    """As many to each of `count`, the heaviest first, to whom has the least work.

    Work is that of the side for which there would be more, so that it is even whichever side is home.
    """
    load, total = weights.new_zeros(len(weights), count), weights.sum(0).tolist()
    room, held = [len(chunks) // count] * count, [list[int]() for _ in range(count)]
    for chunk in sorted(chunks, key=lambda chunk: -total[chunk]):
        weight = weights[:, chunk : chunk + 1]
        then = (load + weight).amax(0).tolist()
        number = min((number for number in range(count) if room[number]), key=then.__getitem__)
        load[:, number] += weight[:, 0]
        room[number] -= 1
        held[number].append(chunk)
    return held


def _cut(chunks: Sequence[int], documents: Sequence[int], length: int, early: int = 0) -> list[list[int]]:
    """The chunks of every document that has any: a chunk is of the document in which it begins.

    So what a document has elsewhere is its beginning, less than a chunk: some keys that all its queries need. The
    queries of its end would need all its keys. Chunks may begin up to `early` tokens sooner than they would if they
    were of one length.
    """
    begins = [max(0, chunk * length // len(chunks) - early) for chunk in chunks]
    return [list(held) for _, held in groupby(chunks, lambda chunk: bisect_right(documents, begins[chunk]))]


def _by_document(documents: Sequence[Sequence[int]], count: int, weights: Tensor) -> list[list[int]]:
    """As many chunks to each of `count`, one after the other: of the heaviest documents left, and of the lightest.

    As many of either as make work even too.
    """
    total = weights.sum(0).tolist()
    falling = sorted(documents, key=lambda document: -sum(map(total.__getitem__, document)))
    order = [chunk for document in falling for chunk in _ends_first(document)]
    before = [0, *accumulate(map(total.__getitem__, order))]
    first, end, held = 0, len(order), []
    for number in range(count):
        room, share = len(total) // count, (before[end] - before[first]) / (count - number)
        works = [  # of so many heavy ones, the rest light ones
            before[first + heavy] - before[first] + before[end] - before[end - (room - heavy)]
            for heavy in range(room + 1)
        ]
        heavy = min(range(room + 1), key=lambda heavy: abs(works[heavy] - share))
        held.append(sorted(order[first : first + heavy] + order[end - (room - heavy) : end]))
        first, end = first + heavy, end - (room - heavy)
    return held


def _ends_first(document: Sequence[int]) -> list[int]:
    """Its last chunk, the first, the last but one, ...: of causal ones pairs with like work for both sides."""
    half = len(document) // 2
    pairs = chain.from_iterable(zip_longest(reversed(document[half:]), document[:half]))
    return [chunk for chunk in pairs if chunk is not None]


def _by_chunk(work: Tensor, chunks: int) -> Tensor:
    """The work of every chunk."""
    return work[torch.arange(chunks + 1) * (len(work) - 1) // chunks].diff()
