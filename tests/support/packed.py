"""Packed documents as they come in training, and what of them crosses nodes."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from math import sqrt

from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.sequence.layout import token_count
from burst_plugin.topology import Link, Topology
from burst_plugin.types import row_count

LENGTH, COUNT = 1 << 17, 64


def log_normal(seed: int, sigma: float) -> tuple[int, ...]:
    """Where 64 documents of lognormal lengths begin that fill 128K tokens, and the end."""
    drawn = random.Random(seed)
    ends = list(accumulate(drawn.lognormvariate(0, sigma) for _ in range(COUNT)))
    return (0, *(round(LENGTH * end / ends[-1]) for end in ends))


def rounded(starts: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """The same with lengths that are multiples of `unit`, one at least."""
    return (0, *accumulate(unit * max(1, round((stop - start) / unit)) for start, stop in pairwise(starts)))


def rows_crossing(table: RouteTable, attending: Attending) -> int:
    """Rows of keys that all ranks send to other nodes, by the schedule that the table takes."""
    lengths = [token_count(held) for held in table.runs(attending.kv)]
    return sum(
        lengths[transfer.block] if transfer.rows is None else row_count(transfer.rows)
        for transfer in table.schedule(PassKey(attending, "kv", False)).gather
        if transfer.link is Link.INTER
    )


def fewest_crossing(starts: tuple[int, ...], topology: Topology, most: float = 1.05) -> float:
    """Rows of keys that cross in any assignment by which nodes have at most `most` times their share of the work.

    Of a document of n tokens a node requires all keys up to its last query there, p of them. Order the nodes by p:
    the last i hold all that is behind the p of the others, which is i times what a node may hold at most, in tokens,
    n - p, and in pairs of queries, (n * n - p * p) / 2. In all they require the sum of p, and hold n themselves,
    which is the p of the last node.
    """
    lengths = [stop - start for start, stop in pairwise(starts)]
    work = most * sum(n * (n + 1) / 2 for n in lengths) / topology.nodes
    tokens, rows = starts[-1] / topology.nodes, 0.0
    for n in lengths:
        for others in range(1, topology.nodes):
            rows += max(0.0, n - others * tokens, sqrt(max(0.0, n * (n + 1) - 2 * others * work)))
    return rows
