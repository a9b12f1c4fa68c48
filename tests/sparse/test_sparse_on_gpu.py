"""Scores on a GPU: alike wherever in a tile they are, and selections alike on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import Strategy, Topology, VirtualRing
from burst_plugin.sparse import index_scores, select_keys

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.mark.parametrize(("heads", "size"), [(1, 64), (4, 128), (16, 128), (32, 128), (64, 128)])
def test_products_round_alike_wherever_in_a_tile_they_are(heads: int, size: int) -> None:
    device = torch.device("cuda")
    tiles = index_scores.ScoreTiles(heads, torch.float32, device)
    for seed in range(8):
        generator = torch.Generator(device).manual_seed(seed)
        q, k, weights = (
            torch.randn(shape, generator=generator, device=device)
            for shape in ((1, heads, size), (1, size), (1, heads))
        )
        scores_of = tiles.of_queries(q.expand(tiles.queries, -1, -1), weights.expand(tiles.queries, -1))
        assert len(scores_of(k.expand(tiles.keys, -1)).unique()) == 1


def test_selections_are_the_same_on_any_number_of_ranks() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, weights = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((2, 5000, 16, 128), (2, 5000, 128), (2, 5000, 16))
    )
    one = select_keys(q, k, weights, 512, VirtualRing(Topology(1, 1)))
    for layout in ("zigzag", "contiguous", "striped"):
        ring = VirtualRing(Topology(2, 4), Strategy(layout=layout))
        assert torch.equal(select_keys(q, k, weights, 512, ring), one), layout
