"""Chunks assigned by their work: even, whichever side stays."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from burst_plugin import Causal, Documents
from burst_plugin.assignment.chunks import assign_chunks
from burst_plugin.sequence.mask import work_before, work_by_token
from burst_plugin.types import SIDES


def drawn(seed: int, number: int, tokens: int, mean: float) -> tuple[int, ...]:
    """Where documents of long-tailed numbers of whole chunks begin, and the end."""
    drawing, starts = random.Random(seed), [0]
    while starts[-1] < number * tokens:
        length = tokens * max(1, round(mean * drawing.lognormvariate(-0.5, 1.0)))
        starts.append(min(starts[-1] + length, number * tokens))
    return tuple(starts)


def assign(starts: tuple[int, ...], ranks: int, degree: int, per_rank: int) -> tuple[int, ...]:
    """Return the ranks of chunks of causal documents."""
    of_sides = [work_before(Causal() & Documents(starts), (starts[-1], starts[-1]), side) for side in SIDES]
    return assign_chunks(
        lambda places: torch.stack([before(places) for before in of_sides]), starts[-1], ranks, degree, per_rank
    )


def test_the_heaviest_chunks_come_first() -> None:
    """Of 4, 4, 2 and 2 chunks of a document, on either side and together."""
    queries, keys = [1, 3, 5, 7, 1, 3, 5, 7, 1, 3, 1, 3], [7, 5, 3, 1, 7, 5, 3, 1, 3, 1, 3, 1]
    work = torch.nn.functional.pad(torch.tensor([queries, keys]).cumsum(1), (1, 0))
    assert assign_chunks(lambda places: work[:, places], 12, 4, 1, 3) == (0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [4, 6, 8])
@pytest.mark.parametrize("degree", [1, 2])
def test_every_rank_gets_as_many_chunks(seed: int, ranks: int, degree: int) -> None:
    starts = drawn(seed, ranks * degree * 4, 8, 6)
    assert Counter(assign(starts, ranks, degree, 4)) == dict.fromkeys(range(ranks * degree), 4)


def test_ranks_get_even_work_whichever_side_is_home() -> None:
    starts = drawn(1, 512, 16, 8)
    chunk_to_rank = torch.tensor(assign(starts, 32, 1, 16))
    for side in SIDES:
        work = work_by_token(Causal() & Documents(starts), (starts[-1], starts[-1]), side).view(-1, 16).sum(1)
        by_rank = torch.zeros(32, dtype=torch.int64).index_add(0, chunk_to_rank, work)
        assert by_rank.max() <= 1.1 * by_rank.double().mean()


@pytest.mark.parametrize("starts", [(0, 0, 3, 3, 5, 9, 9), (0, 1, 3)])
def test_empty_documents_and_fewer_tokens_than_chunks_are_assigned(starts: tuple[int, ...]) -> None:
    assert Counter(assign(starts, 4, 1, 4)) == dict.fromkeys(range(4), 4)
