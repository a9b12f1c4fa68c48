"""Whether a schedule is exact: every visit once, with its operands there, and every contribution added up once."""

from __future__ import annotations

from collections import Counter, defaultdict
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
    sent to a rank that has it; every contribution reaches its owner once.
    """
    _check_visits(schedule, required)
    for kind, transfers in ((Traffic.GATHER, schedule.gather), (Traffic.REDUCE, schedule.reduce)):
        for t in transfers:
            _check_transfer(schedule, t, kind, required)
    _check_gather(schedule)
    if schedule.reduces:
        _check_reduce(schedule)


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
    if t.rows is not None and (required is None or _required_rows(schedule, t, required) != t.rows):
        raise ScheduleError(f"{name}: not the rows that are required: {t}")


def _required_rows(schedule: Schedule, t: Transfer, required: Required) -> Rows | None:
    """Return what the rank requires, inside the owner's node; elsewhere what all ranks of that node do."""
    topology, owner = schedule.topology, schedule.owner(t.block)
    rank = t.dst if t.traffic is Traffic.GATHER else t.src
    if topology.link(owner, rank) is Link.INTRA:
        return required[rank].get(owner)
    return union(required[peer][owner] for peer in topology.node_peers(rank) if owner in required[peer])


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


def _check_reduce(schedule: Schedule) -> None:
    """Follow partial results to their owners; a set of contributions is one integer, a bit per visit of a block."""
    name = schedule.name
    expected: Counter[int] = Counter()  # by block: all contributions
    added = defaultdict[int, list[tuple[int, int, int]]](list)  # by step: rank, block, contributions
    leaving = defaultdict[int, list["Transfer"]](list)  # by step, after what is added
    for rank, visits in enumerate(schedule.visits):
        for step, (block, is_tail) in enumerate(zip(visits, schedule.tail_visits(rank), strict=True)):
            if block is not None:
                bit = 1 << (rank + is_tail * schedule.ranks)
                added[step + 1].append((rank, block, bit))
                expected[block] |= bit
    for t in schedule.reduce:
        leaving[t.issue].append(t)
    held: dict[tuple[int, int], int] = {}  # by rank and block: contributions
    for step in sorted({*added, *leaving, *(t.due for t in schedule.reduce)}):
        for rank, block, contributions in added[step]:
            if held.get((rank, block), 0) & contributions:
                raise ScheduleError(
                    f"{name}: a contribution to block {block} is counted twice, at rank {rank}, step {step}"
                )
            held[rank, block] = held.get((rank, block), 0) | contributions
        for t in leaving[step]:
            if (t.src, t.block) not in held:
                raise ScheduleError(f"{name}: rank {t.src} has no partial result to send: {t}")
            added[t.due].append((t.dst, t.block, held.pop((t.src, t.block))))
    for (rank, block), contributions in held.items():
        if rank != schedule.owner(block) or contributions != expected[block]:
            raise ScheduleError(f"{name}: the result of block {block} ends incomplete at rank {rank}")
