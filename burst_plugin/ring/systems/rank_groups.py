"""Groups of ranks that exchange heads (`ulysses`) or blocks (`mesh`): their ranks and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.comm.transport import Channel, Message
from burst_plugin.sequence.layout import Run, token_count
from burst_plugin.topology import Topology, Traffic


class Span(NamedTuple):
    """A range of `length` rows of a member: from row `local` on in its own order, from `joint` on in the group's."""

    local: int
    joint: int
    length: int


class GroupBlock(NamedTuple):
    """The tokens that a group of ranks holds together, in the order of positions, and where each member's rows are.

    runs: the tokens.
    spans: by member, the ranges of its rows.
    counts: by member, the number of its rows.
    """

    runs: tuple[Run, ...]
    spans: tuple[tuple[Span, ...], ...]
    counts: tuple[int, ...]  # of rows that every member brings

    @property
    def length(self) -> int:
        """Return the number of rows of the whole group."""
        return token_count(self.runs)


def group_block(held: Sequence[tuple[Run, ...]]) -> GroupBlock:
    """Return the rows of all ranks of a group together, sorted by position; a group of one keeps its order.

    held: by member, the tokens that it holds, as runs.
    """
    pieces = []
    for member, runs in enumerate(held):
        starts = accumulate((run.length for run in runs), initial=0)
        pieces += [(run, member, start) for run, start in zip(runs, starts, strict=False)]
    if len(held) > 1:
        pieces.sort()
    joint_runs: list[Run] = []
    spans: list[list[Span]] = [[] for _ in held]
    at = 0
    for run, member, start in pieces:
        spans[member].append(Span(start, at, run.length))
        at += run.length
        last = joint_runs[-1] if joint_runs and len(held) > 1 else None
        if last is not None and last.stride == run.stride and last.start + last.length * last.stride == run.start:
            joint_runs[-1] = last._replace(length=last.length + run.length)
        else:
            joint_runs.append(run)
    counts = tuple(sum(span.length for span in each) for each in spans)
    return GroupBlock(tuple(joint_runs), tuple(map(tuple, spans)), counts)


def member_rows(block: GroupBlock, place: int) -> Tensor:
    """Return the places of every member's rows among the group's rows, [members, S], int64, on the CPU.

    The member at `place` comes last; all members have equally many rows.
    """
    members = [*(member for member in range(len(block.spans)) if member != place), place]
    rows = torch.empty(len(members), block.counts[place], dtype=torch.int64, device="cpu")
    for found, member in zip(rows, members, strict=True):
        for local, joint, length in block.spans[member]:
            torch.arange(joint, joint + length, out=found[local : local + length], device=found.device)
    return rows


@dataclass(frozen=True)
class RankGroup:
    """A rank's group: its members are the context-parallel ranks `peers`, and this rank is the member at `place`.

    Members share the heads between them or, if the group `gathers`, get each other's blocks of all heads.
    """

    topology: Topology
    peers: Sequence[int]
    place: int
    gathers: bool = False

    @property
    def degree(self) -> int:
        """Return the number of members."""
        return len(self.peers)

    @property
    def head_shares(self) -> int:
        """Return into how many shares the group cuts the heads, one per rank; 1 where it gathers blocks instead."""
        return 1 if self.gathers else self.degree

    @property
    def ring_place(self) -> int:
        """Return this rank's place in a group that gathers blocks, where each place has a ring of its own; else 0."""
        return self.place if self.gathers else 0

    @property
    def nodes(self) -> int:
        """Return the number of nodes that the members of the group are on."""
        return len({self.topology.node(peer) for peer in self.peers})

    @property
    def others(self) -> list[int]:
        """Return the places in the group of its members other than this rank."""
        return [member for member in range(self.degree) if member != self.place]

    def heads_of(self, heads: int) -> slice:
        """Return which of `heads` heads this rank works on, as a slice; all heads where the group gathers blocks."""
        if self.gathers:
            return slice(0, heads)
        return slice(self.place * heads // self.degree, (self.place + 1) * heads // self.degree)

    def spread(self, mine: Tensor, others: float) -> Tensor:
        """Return a tensor with a number for each of all heads, from `mine`, the numbers of this rank's heads.

        mine: [H / degree]. others: the value for all heads but this rank's.
        """
        all_heads = mine.new_full((len(mine) * self.degree,), others)
        all_heads[self.heads_of(len(all_heads))] = mine
        return all_heads

    @cached_property
    def _channels(self) -> dict[Traffic, list[Channel]]:
        """Return the channel to every member, by traffic."""
        links = [self.topology.link(self.peers[self.place], peer) for peer in self.peers]
        return {traffic: [Channel(traffic, link) for link in links] for traffic in Traffic}

    def message(self, traffic: Traffic, member: int, data: Tensor) -> Message:
        """Return a message of the bytes `data` to or from the member at place `member` of the group."""
        return Message(self.peers[member], self._channels[traffic][member], data)
