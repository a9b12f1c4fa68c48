"""Tiles: exactly the work of a visit, as few as possible, evenly spread."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import Causal, Full
from burst_plugin.layout import LAYOUTS, Run
from burst_plugin.mask import CAUSAL, FULL, Band, Mask, Tile, tiles


class Window:
    """`left` back and `right` ahead: not a public mask yet, but tiles already are able to hold it."""

    def __init__(self, left: int, right: int) -> None:
        self._reach = (-left, right)

    def reach(self) -> tuple[int | None, int | None]:
        return self._reach


def painted(found: tuple[Tile, ...], rows: int, columns: int, whole_rows: bool = True) -> torch.Tensor:
    """How often every (query, key) pair is in a tile."""
    count = torch.zeros(rows, columns, dtype=torch.int)
    for tile in found:
        ahead = torch.arange(tile.k_stop - tile.k_start) - torch.arange(tile.q_stop - tile.q_start).unsqueeze(1)
        inside = torch.ones_like(ahead, dtype=torch.bool)
        if tile.band.lower is not None:
            inside &= ahead >= tile.band.lower
        if tile.band.upper is not None:
            inside &= ahead <= tile.band.upper
        assert not whole_rows or inside.any(1).all(), f"{tile} has a row that attends to nothing"
        assert int(inside.sum()) == tile.work
        count[tile.q, tile.k] += inside
    return count


def allowed(mask: Mask, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    ahead = keys - queries.unsqueeze(1)
    lowest, highest = mask.reach()
    inside = torch.ones_like(ahead, dtype=torch.bool)
    if lowest is not None:
        inside &= ahead >= lowest
    if highest is not None:
        inside &= ahead <= highest
    return inside


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_tiles_are_exactly_the_mask(name: str, mask: Mask, ranks: int) -> None:
    layout, size = LAYOUTS[name], 2 * ranks * 3
    work = [0] * ranks
    for queries in range(ranks):
        for keys in range(ranks):
            found = tiles(mask, layout.runs(queries, ranks, size), layout.runs(keys, ranks, size))
            assert {tile.band for tile in found} <= {FULL, CAUSAL}
            assert len(found) <= 1, "full and causal visits join into one tile"
            positions = [layout.positions(rank, ranks, size) for rank in (queries, keys)]
            expected = allowed(mask, *positions)
            assert torch.equal(painted(found, *expected.shape), expected.int())
            work[queries] += sum(tile.work for tile in found)
    if name != "contiguous" or mask == Full():
        assert max(work) - min(work) <= max(work) * (0 if name == "zigzag" else 0.5)


def test_zigzag_work_is_equal_and_contiguous_is_not() -> None:
    def imbalance(name: str) -> float:
        runs = [LAYOUTS[name].runs(rank, 8, 1024) for rank in range(8)]
        work = [sum(tile.work for k in runs for tile in tiles(Causal(), q, k)) for q in runs]
        return max(work) / (sum(work) / len(work))

    assert imbalance("zigzag") == 1.0
    assert imbalance("striped") < 1.01
    assert imbalance("contiguous") > 1.8


@pytest.mark.parametrize("start", range(-9, 10))
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 4), (3, 7), (7, 3)])
def test_runs_of_any_length_and_offset(start: int, rows: int, columns: int) -> None:
    queries, keys = Run(20, rows), Run(20 + start, columns)
    found = tiles(Causal(), (queries,), (keys,))
    assert {tile.band for tile in found} <= {FULL, CAUSAL}
    expected = allowed(Causal(), torch.arange(rows) + 20, torch.arange(columns) + 20 + start)
    assert torch.equal(painted(found, rows, columns), expected.int())


@pytest.mark.parametrize("start", range(-9, 10, 3))
@pytest.mark.parametrize("mask", [Window(3, 0), Window(2, 2), Window(1, 0)], ids=["left", "both", "least"])
def test_bands_hold_windows(start: int, mask: Window) -> None:
    found = tiles(mask, (Run(20, 6),), (Run(20 + start, 8),))
    count = torch.zeros(6, 8, dtype=torch.int)
    for tile in found:
        ahead = torch.arange(tile.k_stop - tile.k_start) - torch.arange(tile.q_stop - tile.q_start).unsqueeze(1)
        low = -99 if tile.band.lower is None else tile.band.lower
        high = 99 if tile.band.upper is None else tile.band.upper
        count[tile.q, tile.k] += (ahead >= low) & (ahead <= high)
    assert torch.equal(count, allowed(mask, torch.arange(6) + 20, torch.arange(8) + 20 + start).int())


@pytest.mark.parametrize("mask", [Window(2, 0), Window(1, 1), Window(0, 0), Window(5, -1)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bands_are_exact_in_every_layout(name: str, mask: Window) -> None:
    ranks, size = 4, 32
    for queries in range(ranks):
        for keys in range(ranks):
            found = tiles(mask, *(LAYOUTS[name].runs(rank, ranks, size) for rank in (queries, keys)))
            positions = [LAYOUTS[name].positions(rank, ranks, size) for rank in (queries, keys)]
            expected = allowed(mask, *positions)
            assert torch.equal(painted(found, *expected.shape, whole_rows=False), expected.int())


def test_unlike_strides_are_refused() -> None:
    with pytest.raises(ValueError, match="unlike strides"):
        tiles(Full(), (Run(0, 4, 1),), (Run(0, 4, 2),))


def test_a_tile_reads_well() -> None:
    assert Tile(0, 4, 2, 6, Band(None, 0)).rows("kv") == slice(2, 6)
    assert Tile(0, 4, 2, 6, CAUSAL).work == 10
