"""A rank's messages in one direction of a call, step by step, with all that is looked up for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch

from burst_plugin.comm.buffers import Packing
from burst_plugin.comm.transport import Channel
from burst_plugin.schedule.steps import RankSchedule, Step, Transfer
from burst_plugin.topology import Traffic
from burst_plugin.types import Direction, Rows, Side


class P2POp(NamedTuple):
    """A message of a rank, with all that is looked up for it."""

    transfer: Transfer
    peer: int  # as the transport knows it
    channel: Channel
    packing: Packing


class Batch(NamedTuple):
    """Messages of one step that are due together."""

    due: int
    sends: tuple[P2POp, ...]
    recvs: tuple[P2POp, ...]


@dataclass(frozen=True, eq=False, repr=False)
class SendRecvPlan:
    """A rank's schedule and its messages, made once for all calls of a kind.

    moving: the side whose blocks are sent.
    device: where they are.
    peers: the number by which the transport knows each rank of the schedule.
    packing: how operands (gather) or partial results (reduce) of these rows of a block are laid out.
    """

    direction: Direction
    moving: Side
    device: torch.device
    schedule: RankSchedule
    peers: Sequence[int]
    packing: Callable[[Traffic, int, Rows | None], Packing]

    @cached_property
    def batches(self) -> tuple[tuple[Batch, ...], ...]:
        """Return the messages by step, those that are due together in one batch."""
        return tuple(self._of_step(step) for step in self.schedule.steps)

    def _of_step(self, step: Step) -> tuple[Batch, ...]:
        schedule, by_due = self.schedule, dict[int, tuple[list[P2POp], list[P2POp]]]()
        for t in step.issue:
            sends = t.src == schedule.rank
            posts = by_due.setdefault(t.due, ([], []))[0 if sends else 1]
            channel = Channel(t.traffic, t.link, schedule.by_link)
            peer = self.peers[t.dst if sends else t.src]
            posts.append(P2POp(t, peer, channel, self.packing(t.traffic, t.block, t.rows)))
        return tuple(Batch(due, tuple(sends), tuple(recvs)) for due, (sends, recvs) in by_due.items())

    @cached_property
    def in_flight(self) -> tuple[Counter[Channel], ...]:
        """Return, by step, the bytes that are not due before the next one, each spread over the steps it may take."""
        found = tuple(Counter[Channel]() for _ in self.schedule.steps)
        for step, batch in ((step, batch) for step, batches in enumerate(self.batches) for batch in batches):
            both = _bytes_of(batch.sends, batch.due - step) | _bytes_of(batch.recvs, batch.due - step)  # at once
            for each in found[step : batch.due]:
                each.update(both)
        return found

    @cached_property
    def rows(self) -> dict[int, Rows | None]:
        """Return the rows that this rank receives, by block: see `RankSchedule.rows`."""
        return self.schedule.rows

    @cached_property
    def has_messages(self) -> bool:
        """Return whether this rank sends or receives anything."""
        return any(step.issue for step in self.schedule.steps)

    @cached_property
    def sent_bytes(self) -> Counter[Channel]:
        """Return what a pass sends."""
        sent: Counter[Channel] = Counter()
        for batch in chain.from_iterable(self.batches):
            for post in batch.sends:
                sent[post.channel] += post.packing.nbytes
        return sent


def _bytes_of(posts: Sequence[P2POp], steps: int) -> Counter[Channel]:
    """Return the bytes of messages by channel, for each of so many steps."""
    found: Counter[Channel] = Counter()
    for post in posts:
        found[post.channel] += post.packing.nbytes // steps
    return found
