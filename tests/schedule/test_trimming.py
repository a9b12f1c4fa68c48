"""Blocks that shed rows on their way: what is sent, and that it is exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from burst_plugin import Causal, Strategy, Tokens, Topology
from burst_plugin.planning import simulator
from burst_plugin.planning.links import Links, Load
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.schedule.rings import SCHEDULES, flat_ring, two_level_ring
from burst_plugin.schedule.schedule import Schedule, ScheduleError, Transfer
from burst_plugin.schedule.trimming import mirrored, rows_moved
from burst_plugin.sequence.required_rows import RequiredRows
from burst_plugin.types import SIDES, Rows, Side, row_count, rows_within, without

ROWS = 8
FIRST, SECOND = ((0, ROWS // 2),), ((ROWS // 2, ROWS),)
SHEDDING = sorted(set(SCHEDULES) - {"tasp"})


def _of(
    topology: Topology, moving: Side, reduces: bool, schedule: str = "auto", parts: int = 1
) -> tuple[Schedule, RequiredRows]:
    """Return the schedule of a causal mask in zigzag, once it is proved exact, and what it is for."""
    tokens, table = Tokens(ROWS * topology.ranks), RouteTable(topology, Strategy(schedule=schedule))
    attending = Attending(tokens, tokens, Causal())
    required = table.pairs(attending).required(moving, if_most=True)
    assert required is not None
    return table.schedule(attending, moving, reduces, parts).validate(required), required


@pytest.mark.parametrize("schedule", SHEDDING)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("moving", SIDES)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_zigzag_sends_three_quarters_of_all_rows(ranks: int, moving: Side, parts: int, schedule: str) -> None:
    lengths = [ROWS] * (ranks * parts)
    expected = ranks * parts * (ranks - 1) * ROWS * 3 // 4
    for reduces in (False, True):
        shed, _ = _of(Topology(1, ranks), moving, reduces, schedule, parts)
        assert rows_moved(shed, lengths) == expected
        assert rows_moved(replace(shed, gather=shed.reduce), lengths) == expected * reduces


@pytest.mark.parametrize("moving", SIDES)
@pytest.mark.parametrize("shape", [(2, 1), (2, 4), (4, 2)])
def test_between_nodes_blocks_stay_whole(shape: tuple[int, int], moving: Side) -> None:
    """The link that a pass waits for would carry as much as before."""
    topology = Topology(*shape)
    assert _of(topology, moving, True)[0] == RouteTable(topology, Strategy()).dense(True)


def test_rings_with_ways_of_their_own_stay_whole() -> None:
    topology = Topology(1, 4)
    assert _of(topology, "kv", True, "tasp")[0] == RouteTable(topology, Strategy(schedule="tasp")).dense(True)


def test_the_way_of_a_block() -> None:
    schedule, _ = _of(Topology(1, 4), "kv", True)
    assert [(t.src, t.dst, t.rows) for t in schedule.gather if t.block == 2] == [
        (2, 1, None),
        (1, 0, None),
        (0, 3, FIRST),
    ]
    ways = [(t.src, t.dst, t.rows) for t in schedule.reduce if t.block == 2]
    assert ways == [(1, 0, None), (0, 2, SECOND), (0, 3, FIRST), (3, 2, FIRST)]


@pytest.mark.parametrize("ranks", [4, 8])
def test_no_pass_gets_much_longer(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward none does; backward one that waits for links alone may, by a tenth, and one that computes does not."""
    of_whole_blocks = simulator._messages

    def of_their_rows(schedule: Schedule, load: Load, links: Links) -> Any:
        messages, rates = of_whole_blocks(schedule, load, links)
        for message, t in zip(messages, sorted(schedule.transfers, key=lambda t: (t.due, t.traffic)), strict=True):
            message.nbytes = message.left_bytes = message.nbytes * rows_of(t) / ROWS
        return messages, rates

    monkeypatch.setattr(simulator, "_messages", of_their_rows)
    for reduces, visit_s, most in ((False, 0.0, 1.0), (True, 0.0, 1.1), (True, 4.0, 1.0)):
        dense = RouteTable(Topology(1, ranks), Strategy()).dense(reduces)
        shed, _ = _of(Topology(1, ranks), "kv", reduces)
        load = Load(1.0, 2.0 * reduces, visit_s)
        before, after = (simulator.simulate(each, load, Links(1.0, 1.0)).time_s for each in (dense, shed))
        assert after <= most * before * (1 + 1e-9)


def rows_of(t: Transfer) -> int:
    return ROWS if t.rows is None else row_count(t.rows)


def test_counted_from_the_other_end_twice_it_is_the_same() -> None:
    for topology in (Topology(1, 2), Topology(1, 5), Topology(2, 4)):
        for make in (flat_ring, two_level_ring):
            schedule = make(topology)
            assert mirrored(schedule).validate() != schedule or topology.ranks == 2
            assert mirrored(mirrored(schedule)) == schedule


@pytest.mark.parametrize("kind", ["gather", "reduce"])
@pytest.mark.parametrize("rows", [((0, ROWS // 2 - 1),), ((1, ROWS),), ()])
def test_a_schedule_that_sheds_too_much_is_found(kind: str, rows: Rows) -> None:
    schedule, required = _of(Topology(1, 5), "kv", True)
    transfers = getattr(schedule, kind)
    for number, t in enumerate(transfers):
        wrong = (*transfers[:number], t._replace(rows=rows), *transfers[number + 1 :])
        with pytest.raises(ScheduleError, match=r"rows|incomplete|no partial result"):
            replace(schedule, **{kind: wrong}).validate(required)


def test_results_that_do_not_go_home_are_found() -> None:
    schedule, required = _of(Topology(1, 5), "kv", True)
    for number, t in enumerate(schedule.reduce):
        if t.rows == SECOND:
            left = (*schedule.reduce[:number], *schedule.reduce[number + 1 :])
            with pytest.raises(ScheduleError, match=f"the result of block {t.block} ends incomplete"):
                replace(schedule, reduce=left).validate(required)


def test_results_of_rows_that_a_rank_does_not_have_are_found() -> None:
    """A rank adds up those of the rows that it was sent: all of a block where it was sent one half do not fit."""
    schedule, required = _of(Topology(1, 4), "kv", True)
    whole = [t._replace(rows=None) if t.block == 2 and 3 in (t.src, t.dst) else t for t in schedule.reduce]
    whole.remove(next(t for t in whole if t.block == 2 and t.rows == SECOND))
    with pytest.raises(ScheduleError, match="rank 3 adds up other rows of block 2"):
        replace(schedule, reduce=tuple(whole)).validate(required)


def test_rows_among_others() -> None:
    assert rows_within(((2, 4),), None) == ((2, 4),)
    assert rows_within(((2, 4), (9, 10)), ((1, 5), (8, 12))) == ((1, 3), (5, 6))


def test_rows_without_others() -> None:
    assert without(((0, 4), (6, 9)), ((1, 2), (3, 7))) == ((0, 1), (2, 3), (7, 9))
    assert without(((2, 4),), ((0, 9),)) == ()
    assert without(((2, 4),), ((0, 2), (4, 9))) == ((2, 4),)
