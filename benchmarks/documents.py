"""Packed documents on an emulated cluster: how long they are, and what has to cross a NIC for them."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import torch

from benchmarks import RefusedError
from benchmarks.contenders import Case
from benchmarks.contenders.burst import Burst
from burst_plugin.compute.shapes import hop_bytes_by_traffic
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.ring.routes import RouteTable
from burst_plugin.sequence.layout import positions
from burst_plugin.types import Direction


def drawn_documents(case: Case, mean: int, random: Random | None = None) -> tuple[int, ...]:
    """Draw log-normal lengths, of the case's sigma, of documents that fill its tokens, in multiples of 2 * ranks."""
    unit, random, sigma = 2 * case.ranks, random or Random(0), case.sigma or 0.0
    if case.seq % 2:
        raise RefusedError(f"--documents needs an even number of tokens per rank, not --seq {case.seq}")
    if mean < unit:
        raise RefusedError(f"--documents {mean} is too short to cut into 2 * {case.ranks} ranks; use {unit} or more")
    left, lengths = case.ranks * case.seq // unit, []
    while left:
        drawn = random.lognormvariate(math.log(mean / unit) - sigma**2 / 2, sigma)
        lengths.append(min(max(1, round(drawn)), left))
        left -= lengths[-1]
    return tuple(length * unit for length in lengths)


def least_nic_bytes(case: Case, ours: Burst, direction: Direction) -> float:
    """Return the bytes that the busiest NIC has to send, or to receive, for packed documents as `ours` assigns them.

    A row leaves by its owner's NIC, once for each other node that requires it; what comes to a node its NICs share
    evenly. Sums go back the same way. Ranks that exchange heads share what they send.
    """
    nodes, width, strategy = case.nodes, case.ranks_per_node, ours.strategy
    table = RouteTable(case.topology, strategy)
    moving = choose_moving_side(strategy, direction, case.shapes)
    there, back = hop_bytes_by_traffic(case.shapes._replace(q_len=1, kv_len=1), direction, moving)
    holders = torch.empty(case.ranks * case.seq, dtype=torch.int64)
    for rank, runs in enumerate(table.shards(ours.tokens(case, table))):
        holders[positions(runs)] = rank
    leave, come = torch.zeros(case.ranks, dtype=torch.float64), torch.zeros(nodes, dtype=torch.float64)
    for node in range(nodes):
        inside, needed = holders // width == node, torch.zeros(len(holders), dtype=torch.bool)
        for start, stop in pairwise(case.cu_seqlens):
            held = start + inside[start:stop].nonzero().flatten()
            if len(held):  # causal: keys up to its last query, or queries from its first key on
                needed[start if moving == "kv" else held[0] : held[-1] if moving == "kv" else stop] = True
        needed &= ~inside
        leave += holders[needed].bincount(minlength=case.ranks)
        come[node] = needed.sum()
    own, of_node = leave.view(-1, strategy.degree).mean(1), leave.view(nodes, width).mean(1)
    ways = ((there, back), (back, there))  # of what a rank owns, and of what it is lent: to send, and to receive
    return max(max(x * own.max(), (x * of_node + y * come / width).max()) for x, y in ways).item()
