"""Tiles: exactly the work of a visit, as few as possible, evenly spread; and bands cut into simpler ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from burst_plugin import Causal, Documents, Full, Keys, Mask, SlidingWindow, Tokens
from burst_plugin.sequence.layout import LAYOUTS, Run, positions
from burst_plugin.sequence.mask import Region, allowed
from burst_plugin.sequence.tiles import Regions, Tile, cut, split_tail, tiles_of
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, Band, merged, union

MOST = 65535  # pieces of a tile


def tiles(mask: Mask, lengths: tuple[int, int], queries: Sequence[Run], keys: Sequence[Run]) -> tuple[Tile, ...]:
    """The work of queries on keys."""
    return tiles_of(Regions(mask.regions(*lengths)), queries, keys)


def painted_tiles(found: tuple[Tile, ...], rows: int, columns: int) -> torch.Tensor:
    """How often every (query, key) pair is in a tile."""
    count = torch.zeros(rows, columns, dtype=torch.int)
    for tile in found:
        height, width = tile.shape
        ahead = torch.arange(width) - torch.arange(height).unsqueeze(1)
        inside = torch.ones_like(ahead, dtype=torch.bool)
        if tile.band.lower is not None:
            inside &= ahead >= tile.band.lower
        if tile.band.upper is not None:
            inside &= ahead <= tile.band.upper
        assert inside.any(1).all(), f"{tile} has a row that attends to nothing"
        assert inside.any(0).all(), f"{tile} has a column that nothing attends to"
        assert int(inside.sum()) * tile.pieces == tile.work
        for piece in range(tile.pieces):
            q, k = tile.q_start + piece * height, tile.k_start + piece * width
            count[q : q + height, k : k + width] += inside
    return count


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_tiles_are_exactly_the_mask(name: str, mask: Mask, ranks: int) -> None:
    layout, tokens = LAYOUTS[name], Tokens(2 * ranks * 3)
    work = [0] * ranks
    for queries in range(ranks):
        for keys in range(ranks):
            runs = [layout.runs(rank, ranks, tokens) for rank in (queries, keys)]
            found = tiles(mask, (tokens.length, tokens.length), *runs)
            assert {tile.band for tile in found} <= {FULL, CAUSAL}
            assert len(found) <= 1, "full and causal visits join into one tile"
            expected = allowed(mask, (tokens.length, tokens.length), *(positions(r) for r in runs))
            assert torch.equal(painted_tiles(found, *expected.shape), expected.int())
            work[queries] += sum(tile.work for tile in found)
    if name != "contiguous" or mask == Full():
        assert max(work) - min(work) <= max(work) * (0 if name == "zigzag" else 0.5)


@pytest.mark.parametrize("start", range(-9, 10))
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 4), (3, 7), (7, 3)])
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(0, None)], ids=["causal", "anticausal"])
def test_runs_of_any_length_and_offset(start: int, rows: int, columns: int, mask: Mask) -> None:
    queries, keys = Run(20, rows), Run(20 + start, columns)
    found = tiles(mask, (60, 60), (queries,), (keys,))
    assert {tile.band for tile in found} <= {FULL, CAUSAL, ANTICAUSAL}
    expected = allowed(mask, (60, 60), positions([queries]), positions([keys]))
    assert torch.equal(painted_tiles(found, rows, columns), expected.int())


@pytest.mark.parametrize("window", [(3, 0), (2, 2), (1, 0), (0, 0), (40, 0), (5, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [32, 37])
def test_windows_are_exact_in_every_layout_whole_and_cut(name: str, window: tuple[int, int], size: int) -> None:
    mask, ranks, tokens = SlidingWindow(*window), 4, Tokens(size)
    for queries in range(ranks):
        for keys in range(ranks):
            runs = [LAYOUTS[name].runs(rank, ranks, tokens) for rank in (queries, keys)]
            found = tiles(mask, (size, size), *runs)
            expected = allowed(mask, (size, size), *(positions(r) for r in runs)).int()
            assert torch.equal(painted_tiles(found, *expected.shape), expected)
            for most in (MOST, 2):
                pieces = tuple(piece for tile in found for piece in cut(tile, most))
                assert {tile.band for tile in pieces} <= {FULL, CAUSAL, ANTICAUSAL}
                assert max((tile.pieces for tile in pieces), default=0) <= most
                assert torch.equal(painted_tiles(pieces, *expected.shape), expected)


def test_a_window_is_cut_into_two_staircases() -> None:
    """The drawing at the top of `tiles.py`: four squares down each diagonal, whatever the length."""
    (window,) = tiles(SlidingWindow(4), (16, 16), (Run(0, 16),), (Run(0, 16),))
    assert window == Tile(0, 16, 0, 16, Band(-4, 0))
    assert list(cut(window, MOST)) == [
        Tile(4, 16, 0, 12, ANTICAUSAL, pieces=3),
        Tile(0, 16, 0, 16, CAUSAL, pieces=4),
    ]


@pytest.mark.parametrize("band", [Band(-4, 0), Band(-4, 3), Band(2, 2)])
def test_pieces_are_of_the_same_batch_rows(band: Band) -> None:
    assert {piece.batch for piece in cut(Tile(0, 18, 0, 17, band, batch=(1, 3)), MOST)} == {(1, 3)}


@pytest.mark.parametrize("length", [1 << 14, 1 << 20])
def test_the_number_of_pieces_does_not_grow_with_the_length(length: int) -> None:
    (window,) = tiles(SlidingWindow(4095), (length, length), (Run(0, length),), (Run(0, length),))
    pieces = list(cut(window, MOST))
    assert len(pieces) <= 6
    assert sum(piece.work for piece in pieces) == window.work == 4096 * length - 4096 * 4095 // 2


@pytest.mark.parametrize("tail_share", [0.25, 0.5])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), SlidingWindow(0, None), SlidingWindow(9, 3), Causal() & Documents((0, 31, 64, 100, 128))],
    ids=str,
)
def test_head_and_tail_do_all_the_work_of_a_visit(mask: Mask, name: str, tail_share: float) -> None:
    runs = LAYOUTS[name].runs(1, 2, Tokens(128))
    found = tiles(mask, (128, 128), runs, runs)
    head, tail = split_tail(found, tail_share)
    painted = painted_tiles(found, 64, 64)
    assert torch.equal(painted_tiles(head, 64, 64) + painted_tiles(tail, 64, 64), painted)
    share = sum(tile.work for tile in tail) / sum(tile.work for tile in found)
    assert abs(share - tail_share) <= 1 / 8, "as near as a cut at a multiple of an eighth of the keys comes"


def test_head_and_tail_of_a_causal_square() -> None:
    """The drawing of `split_tail`: half of the keys are a quarter of the work."""
    head = (Tile(0, 8, 0, 8, CAUSAL), Tile(8, 16, 0, 8))
    assert split_tail([Tile(0, 16, 0, 16, CAUSAL)], 0.25) == (head, (Tile(8, 16, 8, 16, CAUSAL),))


def test_a_tail_split_counts_and_keeps_batch_rows() -> None:
    """Three rows with keys on the left weigh more than one row with keys on the right."""
    left, right = Tile(0, 8, 0, 8, batch=(0, 3)), Tile(0, 8, 8, 16, batch=(3, 4))
    assert split_tail([left, right], 0.25) == ((left,), (right,))
    whole = Tile(0, 16, 0, 16, CAUSAL, batch=(1, 2))
    assert {tile.batch for half in split_tail([whole], 0.25) for tile in half} == {(1, 2)}


def test_what_cannot_be_cut_has_no_tail() -> None:
    one = (Tile(0, 1, 0, 1),)
    assert split_tail(one, 0.25) == (one, ())
    assert split_tail((), 0.5) == ((), ())
    assert split_tail([Tile(0, 16, 0, 16)], 0.0) == ((Tile(0, 16, 0, 16),), ())


def test_documents_give_a_tile_each_and_nothing_between_them() -> None:
    mask, tokens = Causal() & Documents((0, 8, 24)), Tokens(24, (0, 8, 24))
    runs = [LAYOUTS["zigzag"].runs(rank, 2, tokens) for rank in range(2)]
    assert tiles(mask, (24, 24), runs[0], runs[0]) == (Tile(0, 4, 0, 4, CAUSAL), Tile(4, 12, 4, 12, CAUSAL))
    assert tiles(mask, (24, 24), runs[0], runs[1]) == (Tile(2, 4, 0, 4), Tile(8, 12, 4, 12))


def test_bands_over_one_rectangle() -> None:
    """Of a mask of one's own: near keys, and far ones."""
    near, far = Region(0, 8, 0, 8, -1, 0), Region(0, 8, 0, 8, None, -4)
    for regions in ((near, far), (far, near)):
        tiles = tiles_of(Regions(regions), [Run(0, 8)], [Run(0, 8)])
        assert sum(tile.work for tile in tiles) == 8 + 7 + 4 + 3 + 2 + 1


def test_full_rectangles_join() -> None:
    mask = Documents((0, 8, 16)) & Keys(((0, 6), (6, 16)))
    assert tiles(mask, (16, 16), (Run(0, 16),), (Run(0, 16),)) == (Tile(0, 8, 0, 8), Tile(8, 16, 8, 16))


def test_ranges_of_rows_are_merged() -> None:
    assert merged([(12, 16), (2, 8), (0, 4)]) == ((0, 8), (12, 16))
    assert merged([(2, 4), (0, 9), (9, 11)]) == ((0, 11),)
    assert merged([]) == ()
    assert union([((0, 2),), ((5, 6), (1, 3))]) == ((0, 3), (5, 6))
    assert union([((0, 2),), None]) is None


def test_regions_are_found_whatever_their_order_and_length() -> None:
    """A long region, short ones that end before it, and one that starts where the queries do."""
    long, short, late = Region(0, 20, 0, 2), Region(4, 6, 5, 9), Region(12, 14, 5, 9)
    regions = Regions([late, short, long])
    assert list(regions.at(0, 3)) == [long]
    assert list(regions.at(5, 5)) == [long, short]
    assert list(regions.at(6, 12)) == [long, late]
    assert list(regions.at(14, 19)) == [long]
    assert list(regions.at(20, 30)) == []


def test_a_band_that_just_holds_everything_is_full() -> None:
    runs = ((Run(4, 3),), (Run(1, 3),))
    assert tiles(SlidingWindow(5), (8, 8), *runs) == (Tile(0, 3, 0, 3),)
    assert tiles(SlidingWindow(4), (8, 8), *runs) == (
        Tile(0, 1, 0, 3),
        Tile(1, 3, 0, 2, ANTICAUSAL),
        Tile(1, 3, 2, 3),
    )
    assert tiles(SlidingWindow(3), (8, 8), *runs) == (Tile(0, 3, 0, 3, ANTICAUSAL),)


def test_pieces_stay_in_their_batch_rows() -> None:
    window = Tile(0, 16, 0, 16, Band(-4, 0), batch=(1, 3))
    assert {piece.batch for piece in cut(window, MOST)} == {(1, 3)}


def test_runs_between_each_other() -> None:
    """As groups hold them of a striped sequence: the first run ends behind the end of the second."""
    runs = [Run(0, 12, 2), Run(1, 11, 2)]
    for mask in (Keys(((22, 23),)), Keys(((0, 3), (17, 18))), SlidingWindow(3), Causal()):
        painted = allowed(mask, (23, 23), torch.arange(23), torch.arange(23))
        assert sum(tile.work for tile in tiles(mask, (23, 23), runs, runs)) == int(painted.sum())


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(5), Causal() & Documents(tuple(range(0, 65, 4)))], ids=str)
def test_runs_in_any_order(mask: Mask) -> None:
    """As a group of ranks 0 and 1 of 8 striped ones has them after a cut: those of rank 1 begin anew."""
    keys = [Run(16, 1, 8), Run(32, 1, 8), Run(48, 2, 8), Run(1, 1, 8), Run(17, 5, 8)]
    queries = [Run(40, 3, 8), Run(3, 8, 8), Run(0, 5, 8)]
    found = tiles(mask, (64, 64), queries, keys)
    expected = allowed(mask, (64, 64), positions(queries), positions(keys))
    assert torch.equal(painted_tiles(found, *expected.shape), expected.int())


def test_unlike_strides_are_refused() -> None:
    with pytest.raises(ValueError, match="different strides"):
        tiles(Full(), (8, 8), (Run(0, 4, 1),), (Run(0, 4, 2),))


def test_a_tile_reads_well() -> None:
    assert Tile(0, 4, 2, 6, Band(None, 0)).rows("kv") == slice(2, 6)
    assert Tile(0, 4, 2, 6, CAUSAL).work == 10
    assert Tile(0, 8, 0, 8, CAUSAL, pieces=2).work == 20
    assert Tile(0, 6, 0, 9, CAUSAL, pieces=3).shape == (2, 3)
