from __future__ import annotations

import pytest
import torch

from burst_plugin.layout import LAYOUTS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ],
)
def test_the_layouts_of_the_docstring(name: str, expected: list[list[int]]) -> None:
    assert [LAYOUTS[name].positions(rank, 2, 8).tolist() for rank in range(2)] == expected


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unshard_undoes_shard_and_positions_say_what_a_shard_is(name: str, ranks: int, dim: int) -> None:
    layout, size = LAYOUTS[name], 2 * ranks * 3
    shape = [5, 7, 9]
    shape[dim] = size
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [layout.shard(x, dim, rank, ranks) for rank in range(ranks)]
    assert torch.equal(layout.unshard(shards, dim), x)
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, x.index_select(dim, layout.positions(rank, ranks, size)))
    every = torch.cat([layout.positions(rank, ranks, size) for rank in range(ranks)])
    assert torch.equal(every.sort().values, torch.arange(size))


@pytest.mark.parametrize(
    ("name", "seq_len", "message"),
    [
        ("zigzag", 12, "divides by 8, got 12: pad or cut the sequence to 16 or 8 tokens"),
        ("zigzag", 4, "divides by 8, got 4: pad or cut the sequence to 8 tokens"),
        ("striped", 6, "divides by 4, got 6: pad or cut the sequence to 8 or 4 tokens"),
        ("contiguous", 0, "got 0"),
    ],
)
def test_a_length_that_does_not_divide_is_refused(name: str, seq_len: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LAYOUTS[name].shard(torch.zeros(seq_len), 0, 0, 4)
