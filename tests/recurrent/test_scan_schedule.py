"""The schedule of a scan, as data: what goes where, how often, and how many bytes that is."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from burst_plugin import Documents, Tokens
from burst_plugin.recurrent.pieces import Pieces, cut_into_pieces
from burst_plugin.recurrent.scan_schedule import ScanSchedule, scan_schedule
from burst_plugin.sequence.layout import LAYOUTS
from burst_plugin.sequence.mask import Mask

STATE = 32 * 128 * 128 * 4  # bytes, of a gated delta net of 32 heads of 128
TOKEN = 24_704  # bytes that heads take in and out for a token, in bfloat16: q, k of 16 heads, v and out of 32, gates


def _pieces(ranks: int, length: int, layout: str = "zigzag", mask: Mask | None = None) -> Pieces:
    tokens = Tokens(length)
    return cut_into_pieces([LAYOUTS[layout].runs(rank, ranks, tokens) for rank in range(ranks)], 1, length, mask)


def _of(pieces: Pieces, per_node: int = 8, finals: bool = False) -> ScanSchedule:
    return scan_schedule(pieces, per_node, finals=finals)


def _sent(schedule: ScanSchedule) -> Counter[int]:
    """Return the bytes that each rank sends in both passes: gradients of states go back, those of transitions not."""
    sent: Counter[int] = Counter()
    for move in (move for step in schedule.rounds for move in step.moves):
        sent[move.src] += STATE
        if move.value.kind != "transition":
            sent[move.dst] += STATE
    return sent


def test_a_chain_of_two_sends_one_state() -> None:
    schedule = _of(_pieces(2, 8, "contiguous"))

    assert schedule.format() == "0: bias 0: 0 -> 1\n1: "
    assert schedule.needs_pair == (True, False)
    assert schedule.is_entered == (False, True)


def test_documents_of_one_rank_send_nothing() -> None:
    schedule = _of(_pieces(2, 8, "contiguous", Documents((0, 4, 8))))

    assert not schedule.sends
    assert not any(schedule.is_entered)


def test_what_begins_a_document_has_no_transition() -> None:
    pieces = _pieces(4, 64, "contiguous", Documents((0, 20, 64)))
    schedule = _of(pieces)
    begins = [number for number, piece in enumerate(pieces.every) if piece.start in (0, 20)]

    sent = [move.value for step in schedule.rounds for move in step.moves if move.value.kind == "transition"]
    assert not any(value.span in begins for value in sent)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_bytes_are_a_tenth_of_an_exchange_of_heads(ranks: int, layout: str) -> None:
    tokens = 8192
    heads = 2 * TOKEN * tokens * (ranks - 1) / ranks

    assert max(_sent(_of(_pieces(ranks, ranks * tokens, layout))).values()) < heads / 10


def test_bytes_do_not_depend_on_the_length() -> None:
    assert _sent(_of(_pieces(8, 8 * 1024))) == _sent(_of(_pieces(8, 8 * 1024 * 1024)))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64, 256])
def test_hops_are_twice_the_depth_of_a_tree(ranks: int) -> None:
    schedule = _of(_pieces(ranks, 1024 * ranks), per_node=ranks)

    assert sum(bool(step.moves) for step in schedule.rounds) <= 2 * (2 * ranks - 1).bit_length()


def test_nodes_are_left_as_rarely_as_there_are_groups_of_pieces() -> None:
    pieces = _pieces(16, 16 * 1024)
    chain = sorted(pieces.every, key=lambda piece: piece.start)
    nodes = [piece.rank // 4 for piece in chain]
    groups = 1 + sum(one != other for one, other in pairwise(nodes))

    between = [
        move for step in _of(pieces, per_node=4).rounds for move in step.moves if move.src // 4 != move.dst // 4
    ]
    assert len(between) <= 3 * (groups - 1)  # a pair up, and a state down, for each but the first


def test_final_states_reach_all_ranks() -> None:
    pieces = _pieces(5, 50, "contiguous")
    has = {pieces.every[pieces.last_of_row[0]].rank}
    for moves in _of(pieces, finals=True).final_moves:
        assert {move.src for move in moves} <= has
        has |= {move.dst for move in moves}

    assert has == set(range(5))


def _between_nodes(schedule: ScanSchedule, per_node: int) -> Counter[tuple[str, int]]:
    """Return by kind of value and rank how many heads, as a share of all, leave the rank's node."""
    sent: Counter[tuple[str, int]] = Counter()
    for move in (move for step in schedule.rounds for move in step.moves):
        if move.src // per_node != move.dst // per_node:
            sent[move.value.kind, move.src] += 1
    return sent


def test_every_rank_of_a_node_sends_its_share_of_a_state_and_no_transition() -> None:
    schedule = scan_schedule(_pieces(8, 8 * 1024), 2, shares=2)

    passed = _between_nodes(schedule, 2)
    assert set(passed) == {("bias", rank) for rank in range(8)}
    assert [passed["bias", rank] for rank in range(8)] == [1, 1, 2, 2, 2, 2, 1, 1]  # of each share, there and back


def test_documents_of_two_pieces_send_one_message() -> None:
    documents = Documents((0, 64, 96, 160, 192, 256, 320, 384, 448, 512))  # one is on ranks 1 and 2, of two nodes
    schedule = scan_schedule(_pieces(8, 512, "contiguous", documents), 2, shares=2)

    assert [(m.src, m.dst, m.value.share) for step in schedule.rounds for m in step.moves] == [(1, 2, -1)]


def test_on_many_nodes_hops_are_few_and_ranks_send_shares() -> None:
    schedule = scan_schedule(_pieces(128, 128 * 1024), 8, shares=8)

    assert len(schedule.rounds) <= 16
    assert max(_between_nodes(schedule, 8).values()) <= 6
    assert {move.value.share for step in schedule.rounds for move in step.moves} == {-1, *range(8)}
