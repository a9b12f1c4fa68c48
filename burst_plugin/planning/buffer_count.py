"""How many buffers a schedule needs, counted while the executor runs it on empty tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from burst_plugin.comm.buffers import Buffer, BufferPool, Packing
from burst_plugin.comm.transport import Message, Pending, Transport
from burst_plugin.compute.accumulators import SUM, Accumulator, Given, Storage, Tensors
from burst_plugin.ring.executor import RingPass, SendRecvPlan
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.schedule.steps import RankSchedule
from burst_plugin.topology import Topology, Traffic
from burst_plugin.types import Rows, Side, row_count

_CPU = torch.device("cpu")
_KINDS = (0, 1)  # of buffers: of operands, of partial results


class Held(NamedTuple):
    """How many communication buffers a rank holds at once, beside its own tensors.

    operands, results: buffers of blocks' operands, and of blocks' partial results. With the heads in parts, a block
        is one part of a rank's.
    """

    operands: int
    results: int


def most_held(schedule: Schedule) -> Held:
    """Return the most operands and the most partial results that any rank holds at once while it runs `schedule`.

    The two may be held at different times, and by different ranks.
    """
    held = [dict(together) for together in _held_together(schedule, _rows(schedule))]
    operands, results = (
        max(sum(count for size, count in together.items() if size % 2 == kind) for together in held)
        for kind in _KINDS
    )
    return Held(operands, results)


def most_bytes(schedule: Schedule, operand_bytes: float, result_bytes: float) -> float:
    """Return the most bytes of operands and partial results together that any rank holds at once in `schedule`.

    operand_bytes, result_bytes: of one whole block; with the heads in parts, of one part of it.

    The pool keeps all buffers that were in use at one time, whatever their sizes (`BufferPool`).
    """
    rows = _rows(schedule)
    per_row = operand_bytes / rows, result_bytes / rows
    held = _held_together(schedule, rows)
    return max(sum(size // 2 * per_row[size % 2] * count for size, count in together) for together in held)


def _rows(schedule: Schedule) -> int:
    """Return how many rows blocks have, as far as transfers of some rows tell."""
    return max((stop for t in schedule.transfers for _, stop in t.rows or ()), default=1)


def _held_together(schedule: Schedule, rows: int) -> set[frozenset[tuple[int, int]]]:
    """Return the sets of buffers that ranks hold at one time: (size, number of buffers)."""
    pools = [_counted(schedule.of_rank(rank), schedule.reduces, rows) for rank in range(schedule.ranks)]
    return set[frozenset[tuple[int, int]]]().union(*(pool.held for pool in pools))


def as_many_buffers(topology: Topology) -> Topology:
    """Return a small cluster whose schedules need as many buffers as `topology`'s, if every block is required.

    From a few nodes and ranks per node on the number of buffers no longer grows, but counting them takes time that
    grows with the third power of the number of ranks.
    """
    return Topology(min(topology.nodes, 4), min(topology.ranks_per_node, 6))


def _counted(schedule: RankSchedule, reduces: bool, rows: int) -> CountingPool:
    """Return the pool of a rank after a run of its schedule, in which every step adds to results that travel.

    Blocks have `rows` rows. The size of a buffer is twice its rows, and one more if it is of partial results.
    """

    def packing(traffic: Traffic, block: int, some: Rows | None) -> Packing:
        length = rows if some is None else row_count(some)
        return _Size(length, 2 * length + (traffic is Traffic.REDUCE))

    pool = CountingPool()
    visited = [step.visit for step in schedule.steps if step.visit is not None]
    parts = [_Empty()] * (1 + max(map(schedule.part, visited), default=0))
    own = [part.accumulator("q", Given(())) for part in parts]
    send_recv = SendRecvPlan("forward", "q", _CPU, schedule, range(schedule.ranks), packing)
    ring = RingPass(send_recv, _NullTransport(pool), parts, own)
    for visit in ring.steps():
        if visit is not None and reduces:
            visit.accumulator.settle()
    return pool


class _Size(Packing):
    """A message of some rows, without tensors."""

    def __init__(self, rows: int, nbytes: int) -> None:
        super().__init__([])
        self._rows, self.nbytes = rows, nbytes

    @property
    def length(self) -> int:
        return self._rows


class CountingPool(BufferPool):
    """A buffer pool that counts leased buffers by bytes: how many are leased `now`, and the `most` at one time.

    `held` is the set of all states of `now` after a lease, each as a frozenset of (size, number): which buffers are
    held together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.held: set[frozenset[tuple[int, int]]] = {frozenset()}

    def lease(self, nbytes: int, device: torch.device) -> Buffer:
        """Return a buffer of `nbytes`, and count it."""
        self.now[nbytes] += 1
        self.most[nbytes] = max(self.most[nbytes], self.now[nbytes])
        self.held.add(frozenset(self.now.items()))
        return super().lease(nbytes, device)

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back, and count it no longer."""
        self.now[buffer.data.numel()] -= 1
        super().release(buffer)


class _NullTransport(Transport):
    """Carries nothing: every message has arrived when it is posted."""

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        return []


class _Empty:
    """A part of the heads without tensors; see `MovingHeads`."""

    def outgoing(self, side: Side) -> Tensors:
        """Return (): there is nothing to send."""
        return ()

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        """Return an accumulator of a side, of no tensors."""
        return Accumulator(SUM, storage, tensors)
