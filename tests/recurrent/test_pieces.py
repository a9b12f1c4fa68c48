"""Pieces: which tokens of a document a rank holds together, and which piece each one continues."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import Documents, PerRow, PrefixTree, Tokens, key_padding
from burst_plugin.recurrent.pieces import START, Pieces, cut_into_pieces
from burst_plugin.sequence.layout import LAYOUTS, Layout, in_chunks
from burst_plugin.sequence.mask import Mask


def _pieces(layout: Layout, ranks: int, length: int, mask: Mask | None = None, rows: int = 1) -> Pieces:
    tokens = Tokens(length)
    return cut_into_pieces([layout.runs(rank, ranks, tokens) for rank in range(ranks)], rows, length, mask)


def _listed(pieces: Pieces) -> list[tuple[int, int, int, int]]:
    """Return (rank, start, length, before) of each piece."""
    return [(each.rank, each.start, each.length, each.before) for each in pieces.every]


def test_the_example_of_the_page() -> None:
    found = _listed(_pieces(LAYOUTS["zigzag"], 2, 8, Documents((0, 3, 8))))

    assert found == [(0, 0, 2, START), (0, 6, 2, 3), (1, 2, 1, 0), (1, 3, 3, START)]


def test_neighbouring_runs_of_a_rank_are_one_piece() -> None:
    found = _listed(_pieces(LAYOUTS["zigzag"], 2, 8))

    assert found == [(0, 0, 2, START), (0, 6, 2, 2), (1, 2, 4, 0)]


def test_tokens_of_a_striped_layout_are_pieces_of_their_own() -> None:
    found = _listed(_pieces(LAYOUTS["striped"], 2, 4))

    assert found == [(0, 0, 1, START), (0, 2, 1, 2), (1, 1, 1, 0), (1, 3, 1, 1)]


def test_rows_have_documents_and_offsets_of_their_own() -> None:
    pieces = _pieces(LAYOUTS["contiguous"], 2, 6, PerRow((Documents((0, 6)), Documents((0, 4, 6)))), rows=2)

    assert _listed(pieces) == [(0, 0, 3, START), (0, 0, 3, START), (1, 3, 3, 0), (1, 3, 1, 1), (1, 4, 2, START)]
    assert [each.offset for each in pieces.every] == [0, 3, 0, 3, 4]
    assert pieces.last_of_row == (2, 4)


def test_a_row_begins_after_its_padding() -> None:
    valid = torch.tensor([[False, False, True, True], [True, True, True, False]])
    found = _listed(_pieces(LAYOUTS["contiguous"], 1, 4, key_padding(valid), rows=2))

    assert found == [(0, 0, 2, START), (0, 2, 2, START), (0, 0, 4, START)]


def test_branches_continue_the_piece_that_ends_with_their_parent() -> None:
    tree = PrefixTree((-1, 0, 0), (3, 2, 3))
    pieces = _pieces(LAYOUTS["contiguous"], 2, 8, tree)

    assert _listed(pieces) == [(0, 0, 3, START), (0, 3, 1, 0), (1, 4, 1, 1), (1, 5, 3, 0)]
    assert pieces.after[0] == (1, 3)


def test_a_rank_may_hold_nothing() -> None:
    pieces = _pieces(in_chunks((0, 2, 1), (0, 2, 4, 4)), 3, 4)

    assert [len(pieces.of_rank(rank)) for rank in range(3)] == [1, 0, 1]


def test_a_mask_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the mask has 2 batch rows, but there are 3"):
        _pieces(LAYOUTS["zigzag"], 1, 4, PerRow((Documents((0, 4)), Documents((0, 2, 4)))), rows=3)
