"""Chunks assigned by their work: even, and with documents inside nodes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate, pairwise

import pytest
import torch

from burst_plugin import Causal, Documents, Tokens, Topology
from burst_plugin.assignment import chunks
from burst_plugin.assignment.chunks import assign_chunks
from burst_plugin.sequence.layout import in_chunks
from burst_plugin.sequence.mask import work_by_token
from burst_plugin.types import SIDES


def drawn(seed: int, number: int, tokens: int, mean: float) -> tuple[int, ...]:
    """Where documents of long-tailed numbers of whole chunks begin, and the end."""
    drawing, starts = random.Random(seed), [0]
    while starts[-1] < number * tokens:
        length = tokens * max(1, round(mean * drawing.lognormvariate(-0.5, 1.0)))
        starts.append(min(starts[-1] + length, number * tokens))
    return tuple(starts)


def work_of(starts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Of causal documents, as `assign_chunks` takes it."""
    mask, lengths = Causal() & Documents(starts), (starts[-1], starts[-1])
    return {side: torch.nn.functional.pad(work_by_token(mask, lengths, side).cumsum(0), (1, 0)) for side in SIDES}


def test_it_assigns_what_its_page_draws() -> None:
    starts = (0, 4, 8, 10, 12)
    by_token = {"q": [1, 3, 5, 7, 1, 3, 5, 7, 1, 3, 1, 3], "kv": [7, 5, 3, 1, 7, 5, 3, 1, 3, 1, 3, 1]}
    work = {side: torch.tensor([0, *accumulate(each)]) for side, each in by_token.items()}
    assert assign_chunks(work, Topology(2, 2), 1, 3) == (0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3)
    assert assign_chunks(work, Topology(2, 2), 1, 3, starts) == (0, 1, 1, 0, 2, 3, 3, 2, 2, 3, 0, 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nodes_first", [False, True])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 4), Topology(4, 1), Topology(3, 2)], ids=str)
@pytest.mark.parametrize("degree", [1, 2])
def test_every_rank_gets_as_many_chunks(seed: int, nodes_first: bool, topology: Topology, degree: int) -> None:
    number, starts = 4, drawn(seed, topology.ranks * degree * 4, 8, 6)
    holders = assign_chunks(work_of(starts), topology, degree, number, starts if nodes_first else None)
    assert Counter(holders) == dict.fromkeys(range(topology.ranks * degree), number)


@pytest.mark.parametrize("seed", range(5))
def test_nodes_get_even_work_and_cut_two_documents_at_each_boundary(seed: int) -> None:
    """Of 4 nodes with 128 chunks each: within the work of two of the heaviest chunks."""
    topology, tokens = Topology(4, 8), 16
    starts = drawn(seed, 512, tokens, 8)
    work = work_of(starts)
    holders = assign_chunks(work, topology, 1, 16, starts)
    nodes = [rank // 8 for rank in holders]
    documents = [nodes[start // tokens : stop // tokens] for start, stop in pairwise(starts) if start < stop]
    assert sum(len(set(document)) - 1 for document in documents) <= 2 * (topology.nodes - 1)
    total = sum(work[side][::tokens].diff() for side in SIDES)
    by_node = torch.zeros(4, dtype=torch.int64).index_add(0, torch.tensor(nodes), total)
    assert (by_node - by_node.double().mean()).abs().max() <= 2 * total.max()
    alone = [rank // 8 for rank in assign_chunks(work, topology, 1, 16)]
    spread = sum(len(set(alone[start // tokens : stop // tokens])) - 1 for start, stop in pairwise(starts))
    assert spread > 50, "without nodes first most documents are in all nodes"


@pytest.mark.parametrize("nodes_first", [False, True])
def test_ranks_get_even_work_whichever_side_is_home(nodes_first: bool) -> None:
    starts = drawn(1, 512, 16, 8)
    work = work_of(starts)
    holders = torch.tensor(assign_chunks(work, Topology(4, 8), 1, 16, starts if nodes_first else None))
    for side in SIDES:
        by_rank = torch.zeros(32, dtype=torch.int64).index_add(0, holders, work[side][::16].diff())
        assert by_rank.max() <= 1.1 * by_rank.double().mean()


def test_a_chunk_goes_with_the_document_in_which_it_begins() -> None:
    """Chunks of 8 tokens."""
    for starts, expected in (
        ((0, 32, 64), [4, 4]),
        ((0, 29, 64), [4, 4]),
        ((0, 33, 64), [5, 3]),
        ((0, 9, 11, 64), [2, 6]),
        ((0, 1, 2, 64), [1, 7]),
    ):
        assert [len(held) for held in chunks.chunks_of_documents(range(8), starts, 64)] == expected


def test_chunks_that_begin_sooner_do_not_begin_in_the_document_before() -> None:
    """Of a length that does not divide: by as many tokens as there are ranks at most, see `in_chunks`."""
    length, number, topology = 8 * 2 * 33, 16, Topology(2, 4)
    for boundary in range(length // 2 - 20, length // 2 + 20):
        starts = (0, boundary, length)
        holders = assign_chunks(work_of(starts), topology, 1, number, starts)
        begins = sorted(
            run.start
            for rank in range(8)
            for run in in_chunks(holders).runs(rank, 8, Tokens(length, holders=holders))
        )
        nominal = [chunk * length // len(holders) for chunk in range(len(holders))]
        assert all(any(0 <= place - begin <= 8 for place in nominal) for begin in begins)
        cut = chunks.chunks_of_documents(range(len(holders)), starts, length, 8)
        assert nominal[cut[1][0]] - 8 >= boundary


def test_empty_documents_and_few_tokens_are_assigned() -> None:
    starts = (0, 0, 3, 3, 5, 9, 9)
    holders = assign_chunks(work_of(starts), Topology(2, 2), 1, 4, starts)
    assert Counter(holders) == dict.fromkeys(range(4), 4)


def test_documents_that_are_alike_go_to_a_node_each() -> None:
    starts = (0, 32, 64)
    assert assign_chunks(work_of(starts), Topology(2, 1), 1, 4, starts) == (1, 1, 1, 1, 0, 0, 0, 0)


def test_one_node_has_no_use_for_documents() -> None:
    starts = drawn(0, 64, 8, 6)
    work = work_of(starts)
    assert assign_chunks(work, Topology(1, 4), 1, 16, starts) == assign_chunks(work, Topology(1, 4), 1, 16)
