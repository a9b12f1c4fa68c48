"""Scores on a GPU, and toys on CPUs: alike wherever in a tile they are; and selections on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import Strategy, Topology, VirtualRing
from burst_plugin.sparse import index_scores, select_keys

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
SHAPES = [(1, 64), (4, 128), (16, 128), (32, 128), (64, 128)]


@pytest.mark.parametrize(
    ("kind", "heads", "size"),
    [
        pytest.param("cpu", 4, 128, id="toy"),
        *(pytest.param("cuda", *shape, marks=GPU, id="x".join(map(str, shape))) for shape in SHAPES),
    ],
)
def test_products_round_alike_wherever_in_a_tile_they_are(kind: str, heads: int, size: int) -> None:
    device = torch.device(kind)
    tiles = index_scores.ScoreTiles(heads, torch.float32, device)
    for seed in range(8):
        generator = torch.Generator(device).manual_seed(seed)
        q, k, weights = (
            torch.randn(shape, generator=generator, device=device)
            for shape in ((1, heads, size), (1, size), (1, heads))
        )
        scores_of = tiles.of_queries(q.expand(tiles.queries, -1, -1), weights.expand(tiles.queries, -1))
        assert len(scores_of(k.expand(tiles.keys, -1)).unique()) == 1


@pytest.mark.parametrize(
    ("kind", "tokens"), [pytest.param("cpu", 200, id="toy"), pytest.param("cuda", 5000, marks=GPU, id="cuda")]
)
def test_selections_are_the_same_on_any_number_of_ranks(kind: str, tokens: int) -> None:
    generator = torch.Generator(kind).manual_seed(0)
    q, k, weights = (
        torch.randn(shape, generator=generator, device=kind, dtype=torch.bfloat16)
        for shape in ((2, tokens, 16, 128), (2, tokens, 128), (2, tokens, 16))
    )
    one = select_keys(q, k, weights, tokens // 10, VirtualRing(Topology(1, 1)))
    for layout in ("zigzag", "contiguous", "striped"):
        ring = VirtualRing(Topology(2, 4), Strategy(layout=layout))
        assert torch.equal(select_keys(q, k, weights, tokens // 10, ring), one), layout
