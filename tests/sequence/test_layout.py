from __future__ import annotations

import pytest
import torch

from burst_plugin import Tokens
from burst_plugin.sequence.layout import (
    LAYOUTS,
    Layout,
    Run,
    cut_runs,
    even_length,
    in_chunks,
    positions,
    token_count,
)


def positions_by_rank(layout: Layout | str, ranks: int, tokens: Tokens) -> list[list[int]]:
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    return [positions(layout.runs(rank, ranks, tokens)).tolist() for rank in range(ranks)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ],
)
def test_the_layouts_of_the_docstring(name: str, expected: list[list[int]]) -> None:
    assert positions_by_rank(name, 2, Tokens(8)) == expected


def test_documents_are_spread_over_all_ranks_one_after_another() -> None:
    assert positions_by_rank("zigzag", 2, Tokens(8, (0, 4, 8))) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert positions_by_rank("zigzag", 2, Tokens(16, (0, 4, 4, 16))) == [
        [0, 3, 4, 5, 6, 13, 14, 15],
        [1, 2, 7, 8, 9, 10, 11, 12],
    ]


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ((0, 1, 1, 0), [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ((1, 1, 0, 0, 0, 1), [[2, 3, 4, 5], [0, 1, 6, 7]]),
        ((1, 0), [[4, 5, 6, 7], [0, 1, 2, 3]]),
    ],
)
def test_chunks_go_to_their_holders(holders: tuple[int, ...], expected: list[list[int]]) -> None:
    """The second: four tokens in three chunks are 1, 1 and 2, whoever holds them."""
    assert positions_by_rank(in_chunks(holders), 2, Tokens(8)) == expected


def test_chunks_side_by_side_are_one_run() -> None:
    layout = in_chunks((0, 0, 1, 0))
    assert layout.runs(0, 2, Tokens(12)) == (Run(0, 4), Run(10, 2))
    assert layout.runs(1, 2, Tokens(12)) == (Run(4, 6),)


def test_chunks_of_any_lengths_go_to_their_holders() -> None:
    """The second: a chunk is empty, and so is a rank; what is side by side is one run."""
    assert positions_by_rank(in_chunks((0, 1, 0), (0, 3, 7, 8)), 2, Tokens(8)) == [[0, 1, 2, 7], [3, 4, 5, 6]]
    layout = in_chunks((0, 1, 0, 2), (0, 3, 3, 8, 8))
    assert [layout.runs(rank, 3, Tokens(8)) for rank in range(3)] == [(Run(0, 8),), (), ()]


CHUNKS = {ranks: in_chunks((*range(ranks), *range(0, ranks, 2), *reversed(range(ranks)))) for ranks in (1, 2, 3, 8)}


@pytest.mark.parametrize("name", [*LAYOUTS, "chunks"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [1, 5, 48, 67])
def test_unshard_undoes_shard_and_positions_say_what_a_shard_is(name: str, ranks: int, dim: int, size: int) -> None:
    layout, tokens = LAYOUTS.get(name, CHUNKS[ranks]), Tokens(size)
    shape = [5, 7, 9]
    shape[dim] = size
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [layout.shard(x, dim, (rank, ranks), tokens) for rank in range(ranks)]
    assert torch.equal(layout.unshard(shards, dim, tokens), x)
    places = positions_by_rank(layout, ranks, tokens)
    for place, shard in zip(places, shards, strict=True):
        assert torch.equal(shard, x.index_select(dim, torch.tensor(place, dtype=torch.int64)))
    assert sorted(token for place in places for token in place) == list(range(size)), "nothing is dropped or repeated"
    lengths = [len(place) for place in places]
    assert max(lengths) - min(lengths) <= 2, "as even as can be, but for a token a chunk"


@pytest.mark.parametrize("name", [*LAYOUTS, "chunks"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_next_even_length_gives_all_ranks_as_many_tokens(name: str, ranks: int) -> None:
    for length in range(1, 40):
        even = even_length(length, ranks)
        assert length <= even < length + 2 * ranks
        layout = LAYOUTS.get(name, CHUNKS[ranks])
        held = [token_count(layout.runs(rank, ranks, Tokens(even))) for rank in range(ranks)]
        assert len(set(held)) == 1


def test_a_rank_may_hold_nothing() -> None:
    assert positions_by_rank("contiguous", 4, Tokens(2)) == [[], [0], [], [1]]
    assert positions_by_rank("striped", 4, Tokens(2)) == [[0], [1], [], []]
    assert LAYOUTS["striped"].shard(torch.zeros(2, 3), 0, (3, 4), Tokens(2)).shape == (0, 3)


def test_runs_of_some_rows() -> None:
    runs = (Run(10, 4), Run(30, 4))
    assert cut_runs(runs, ((1, 3), (6, 8))) == (Run(11, 2), Run(32, 2))
    assert cut_runs(runs, ((2, 5),)) == (Run(12, 2), Run(30, 1))
    assert cut_runs((Run(1, 6, 4),), ((2, 4),)) == (Run(9, 2, 4),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "a sequence has 1 token or more"),
        ((8, (0, 5, 3, 8)), "must not decrease, but document 1 runs from 5 to 3"),
        ((8, (0, 5)), "ends at 5, but the sequence has 8 tokens"),
        ((8, (1, 8)), "must begin with 0"),
        ((8, None, "spiral"), "use one of: zigzag, striped, contiguous"),
        ((8, None, "zigzag", (0, 1)), r"Tokens\(holders=...\) has layout= as well"),
        ((8, (0, 8), None, (0, 1)), "has cu_seqlens= as well"),
        ((8, None, None, (0, 2)), "every rank from 0 up holds a chunk"),
        ((8, None, None, ()), "every rank from 0 up holds a chunk"),
        ((8, None, None, None, (0, 8)), "every rank from 0 up holds a chunk"),
        ((8, None, None, (0, 1), ()), "give where each of the 2 chunks begins, 0 first, and their end, 8"),
        ((8, None, None, (0, 1), (0, 8)), r"Tokens\(bounds=\(0, 8\)\) is not valid; give where"),
        ((8, None, None, (0, 1), (0, 4, 9)), r"Tokens\(bounds=\(0, 4, 9\)\) is not valid; give where"),
        ((8, None, None, (0, 1, 0), (0, 5, 4, 8)), r"Tokens\(bounds=\(0, 5, 4, 8\)\) is not valid; give where"),
    ],
)
def test_tokens_that_make_no_sequence_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokens(*arguments)


def test_tokens_show_what_is_given_and_all_of_it() -> None:
    """Ranks compare what is shown."""
    assert repr(Tokens(8)) == str(Tokens(8)) == "Tokens(length=8)"
    assert str(Tokens(8, holders=tuple(range(20)))) == f"Tokens(length=8, holders={tuple(range(20))})"
    bounded = Tokens(8, holders=(0, 1), bounds=(0, 3, 8))
    assert str(bounded) == "Tokens(length=8, holders=(0, 1), bounds=(0, 3, 8))"
    assert bounded not in (Tokens(8, holders=(0, 1)), Tokens(8, holders=(0, 1), bounds=(0, 4, 8)))
    assert hash(bounded) != hash(Tokens(8, holders=(0, 1), bounds=(0, 4, 8)))


def test_a_tensor_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 7 tokens along dim 1, but Tokens"):
        LAYOUTS["zigzag"].shard(torch.zeros(2, 7), 1, (0, 2), Tokens(8))
