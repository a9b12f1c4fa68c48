"""Whether a schedule is exact: every visit once, with its operands there, and every contribution added up once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from burst_plugin.topology import Link, Traffic
from burst_plugin.types import Rows, union

if TYPE_CHECKING:
    from burst_plugin.schedule.schedule import Required, Schedule, Transfer

__all__ = ["ScheduleError", "validate"]

_NEVER = 1 << 62  # a step after all others


class ScheduleError(ValueError):
    """A schedule that would lose or repeat data, or read it before it arrives."""


def validate(schedule: Schedule, required: Required | None) -> None:
    """Raise ScheduleError, naming the first rank, step and block at fault, unless the schedule is exact.

    Each rank visits every block, or each that is `required`, once, and its own once more if there is a tail split;
    required rows arrive; links are those of the topology; nothing is read or sent before it arrives, and nothing is
    sent to a rank that has it; every contribution to any row reaches its owner once, and is added up with others to
    the same rows.
    """
    _check_visits(schedule, required)
    for kind, transfers in ((Traffic.GATHER, schedule.gather), (Traffic.REDUCE, schedule.reduce)):
        for t in transfers:
            _check_transfer(schedule, t, kind, required)
    if required is not None:
        _check_rows(schedule, required)
    _check_gather(schedule)
    if schedule.reduces:
        _check_reduce(schedule, required)


def _check_visits(schedule: Schedule, required: Required | None) -> None:
    for rank, visits in enumerate(schedule.visits):
        owners = range(schedule.ranks) if required is None else required[rank]
        expected = [schedule.block(owner, part) for part in range(schedule.parts) for owner in owners]
        if schedule.tail_share:
            expected += [block for block in expected if schedule.owner(block) == rank]
        if sorted(block for block in visits if block is not None) != sorted(expected):
            raise ScheduleError(f"{schedule.name}: rank {rank} does not visit every block exactly once: {visits}")


def _check_transfer(schedule: Schedule, t: Transfer, kind: Traffic, required: Required | None) -> None:
    name, topology = schedule.name, schedule.topology
    link = topology.link(t.src, t.dst)
    if t.traffic is not kind or t.src == t.dst or t.issue >= t.due or t.link is not link:
        raise ScheduleError(f"{name}: impossible transfer {t}")
    are_counterparts = topology.local_rank(t.src) == topology.local_rank(t.dst)
    if schedule.by_link and t.link is Link.INTER and not are_counterparts:
        raise ScheduleError(f"{name}: no communicator for {t}: by link, only counterparts have one")
    if t.rows is not None and required is None:
        raise ScheduleError(f"{name}: rows of a block, and nothing says which are required: {t}")


def _check_rows(schedule: Schedule, required: Required) -> None:
    """Check that of a block just those rows come to a rank, or to a rank of another node, that are required there."""
    for t in schedule.gather:
        owner, topology = schedule.owner(t.block), schedule.topology
        is_near = topology.link(owner, t.dst) is Link.INTRA
        ranks = (t.dst,) if is_near else topology.node_peers(t.dst)  # elsewhere what all ranks of the node require
        needed = union([required[rank][owner] for rank in ranks if owner in required[rank]])
        if t.rows is not None and needed != t.rows:
            raise ScheduleError(f"{schedule.name}: not the rows that are required: {t}")


def _check_gather(schedule: Schedule) -> None:
    """Follow the operands of every block from its owner to where they are read."""
    name = schedule.name
    blocks = range(schedule.ranks * schedule.parts)
    held_from = {(schedule.owner(block), block): 0 for block in blocks}  # by rank and block: a step
    for t in sorted(schedule.gather, key=lambda t: (t.issue, t.due)):
        if held_from.get((t.src, t.block), _NEVER) > t.issue:
            raise ScheduleError(f"{name}: rank {t.src} sends block {t.block} before it has it: {t}")
        if (t.dst, t.block) in held_from:
            raise ScheduleError(f"{name}: rank {t.dst} is sent block {t.block} twice: {t}")
        held_from[t.dst, t.block] = t.due
    for rank, visits in enumerate(schedule.visits):
        for step, block in enumerate(visits):
            if block is not None and held_from.get((rank, block), _NEVER) > step:
                raise ScheduleError(f"{name}: rank {rank} visits block {block} at step {step} without it")


def _check_reduce(schedule: Schedule, required: Required | None) -> None:
    """Follow partial results to their owners; a set of contributions is one integer, a bit per visit of a block."""
    name, pieces = schedule.name, _Pieces(schedule, required)
    rows_of = {(t.dst, t.block): t.rows for t in schedule.gather}  # by rank and block, of its operands
    expected: Counter[int] = Counter()  # by piece of a block: all contributions
    added = defaultdict[int, list[tuple[int, int, int]]](list)  # by step: rank, piece, contributions
    leaving = defaultdict[int, list["Transfer"]](list)  # by step, after what is added
    for rank, visits in enumerate(schedule.visits):
        for step, (block, is_tail) in enumerate(zip(visits, schedule.tail_visits(rank), strict=True)):
            if block is not None:
                bit = 1 << (rank + is_tail * schedule.ranks)
                for piece in pieces.of(block, rows_of.get((rank, block))):
                    added[step + 1].append((rank, piece, bit))
                    expected[piece] |= bit
    for t in schedule.reduce:
        leaving[t.issue].append(t)
    held: dict[tuple[int, int], int] = {}  # by rank and piece: contributions
    for step in sorted({*added, *leaving, *(t.due for t in schedule.reduce)}):
        for rank, piece, contributions in added[step]:
            if held.get((rank, piece), 0) & contributions:
                block = piece // pieces.most
                raise ScheduleError(
                    f"{name}: a contribution to block {block} is counted twice, rank {rank}, step {step}"
                )
            held[rank, piece] = held.get((rank, piece), 0) | contributions
        for t in leaving[step]:
            if t.dst != schedule.owner(t.block) and t.rows != rows_of.get((t.dst, t.block)):
                raise ScheduleError(f"{name}: rank {t.dst} adds up other rows of block {t.block}: {t}")
            for piece in pieces.of(t.block, t.rows):
                if (t.src, piece) not in held:
                    raise ScheduleError(f"{name}: rank {t.src} has no partial result to send: {t}")
                added[t.due].append((t.dst, piece, held.pop((t.src, piece))))
    for (rank, piece), contributions in held.items():
        block = piece // pieces.most
        if rank != schedule.owner(block) or contributions != expected[piece]:
            raise ScheduleError(f"{name}: the result of block {block} ends incomplete at rank {rank}")


class _Pieces:
    """All blocks in pieces: rows from one at which some transfer, or what is required, begins or ends to the next.

    A piece is a number, `block * most + number`, where no block has more than `most`.
    """

    def __init__(self, schedule: Schedule, required: Required | None) -> None:
        ends = defaultdict[int, set[int]](set)  # by block
        for t in schedule.transfers:
            if t.rows is not None:
                ends[t.block].update(chain(*t.rows))
        for owner, rows in chain(*(owners.items() for owners in required or ())):
            for block in range(owner, schedule.ranks * schedule.parts, schedule.ranks) if rows else ():
                ends[block].update(chain(*(rows or ())))
        self._starts = {block: sorted(found)[:-1] or [0] for block, found in ends.items()}
        self.most = max(map(len, self._starts.values()), default=1)
        self._known: dict[tuple[int, Rows | None], Sequence[int]] = {}

    def of(self, block: int, rows: Rows | None) -> Sequence[int]:
        """Return the pieces of these rows of a block, None for all."""
        if self.most == 1:
            return (block,)
        if (block, rows) not in self._known:
            self._known[block, rows] = [
                block * self.most + number
                for number, start in enumerate(self._starts.get(block, [0]))
                if rows is None or any(first <= start < stop for first, stop in rows)
            ]
        return self._known[block, rows]
