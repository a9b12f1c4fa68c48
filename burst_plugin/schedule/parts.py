"""A schedule for blocks that are cut into parts: in every phase all visits of one part precede the next's.

Two parts, and a phase of two visits (`a'`: the second part of block a):

    steps of the whole    | 0       1       | 2       3       |
    visits                | a       b       | c       d       |
    in two parts          | a   b   a'  b'  | c   d   c'  d'  |

Steps are shorter by the same factor. What crosses between nodes is sent part by part, so that links are never idle
where they are the bottleneck, and what arrives last is worked on in 1 / parts of the time.

Parts that go around rings of their own (`Schedule.ring_of_part`) are sent all at once instead, since their links are
different ones: operands when a phase begins, partial results when it has ended. In a ring each rank does what the
rank in its position does in the schedule of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burst_plugin.schedule.schedule import Schedule, Transfer

__all__ = ["in_parts"]


def in_parts(schedule: Schedule, parts: int) -> Schedule:
    """Return the schedule for blocks cut into `parts` (drawn at the top of this file)."""
    if parts == 1:
        return schedule
    visit_steps = len(schedule.visits[0])
    own_rings = schedule.ring_of_part is not None
    rings: list[Sequence[int]] = [range(schedule.ranks)] * parts
    if schedule.ring_of_part is not None:
        rings = [schedule.ring_of_part(schedule.topology, part) for part in range(parts)]
    places = _places(schedule, parts)

    def new_step(step: int, part: int) -> int:
        start, length, offset = places[step]
        return start + part * length + offset

    def moved(t: Transfer, part: int, behind: int) -> Transfer:
        """Return the transfer of one part; partial results, `behind` 1, leave and arrive after a step's work."""
        turn = behind * (parts - 1) if own_rings else part
        issue, due = (new_step(step - behind, turn) + behind for step in (t.issue, t.due))
        ring = rings[part]
        block = schedule.block(ring[t.block], part)
        return t._replace(block=block, src=ring[t.src], dst=ring[t.dst], issue=issue, due=due)

    visits: list[list[int | None]] = [[None] * (parts * visit_steps) for _ in schedule.visits]
    for (rank, whole), (part, ring) in product(enumerate(schedule.visits), enumerate(rings)):
        for step, block in enumerate(whole):
            if block is not None:
                visits[ring[rank]][new_step(step, part)] = schedule.block(ring[block], part)
    return replace(
        schedule,
        parts=parts,
        phases=tuple(new_step(start, 0) for start in schedule.phases),
        visits=tuple(map(tuple, visits)),
        gather=tuple(moved(t, part, 0) for t in schedule.gather for part in range(parts)),
        reduce=tuple(moved(t, part, 1) for t in schedule.reduce for part in range(parts)),
    )


def _places(schedule: Schedule, parts: int) -> list[tuple[int, int, int]]:
    """Return by step: the first step of its phase in parts, the phase's length, the step's place in it."""
    visit_steps = len(schedule.visits[0])
    last = max([visit_steps, *(t.due for t in schedule.transfers)]) + 1
    places = []
    for start, stop in pairwise([*schedule.phases, visit_steps, last + 1]):
        places += [(parts * start, stop - start, step - start) for step in range(start, stop)]
    return places
