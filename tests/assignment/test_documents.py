"""Causal documents assigned to nodes and ranks: what the page draws, and any documents, lengths and groups."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest

from burst_plugin import Tokens, Topology
from burst_plugin.assignment.document_costs import DocumentCosts
from burst_plugin.assignment.documents import assign_documents
from burst_plugin.sequence.layout import in_chunks, positions, token_count


def held_by(tokens: Tokens, ranks: int) -> list[list[int]]:
    """The positions of every rank."""
    assert tokens.holders is not None
    layout = in_chunks(tokens.holders, tokens.bounds)
    return [positions(layout.runs(rank, ranks, tokens)).tolist() for rank in range(ranks)]


def test_it_deals_as_its_page_draws() -> None:
    tokens = assign_documents([(0, 8), (8, 12), (12, 14), (14, 16)], 16, Topology(1, 2))
    ranks = [int(rank) for rank in "0001110011110100"]
    assert held_by(tokens, 2) == [[at for at in range(16) if ranks[at] == rank] for rank in range(2)]
    pairs = [*[9] * 8, *[5] * 4, *[3] * 4]
    assert [sum(pairs[at] for at in held) for held in held_by(tokens, 2)] == [54, 50]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("nodes", "per_node", "degree"), [(1, 4, 1), (2, 3, 1), (4, 1, 1), (3, 2, 2), (1, 1, 4)])
def test_every_token_is_held_and_ranks_hold_equally_many(
    seed: int, nodes: int, per_node: int, degree: int, spread: bool
) -> None:
    """Documents with gaps between them, down to a few tokens in all, and ranks without any."""
    drawn, topology, ranks = random.Random(seed), Topology(nodes, per_node), nodes * per_node * degree
    bounds = list(accumulate(drawn.choice((0, 1, 3, 20, 200)) for _ in range(2 * drawn.randrange(1, 9))))
    length = bounds[-1] + drawn.randrange(1, 30)
    documents = list(zip(bounds[::2], bounds[1::2], strict=True))
    tokens = assign_documents(documents, length, topology, degree, spread)
    held = held_by(tokens, ranks)
    assert sorted(at for places in held for at in places) == list(range(length))
    assert [len(places) for places in held] == [
        (rank + 1) * length // ranks - rank * length // ranks for rank in range(ranks)
    ]


def test_members_of_a_group_share_what_it_gets() -> None:
    documents = list(pairwise(range(0, 4097, 512)))
    groups = held_by(assign_documents(documents, 4096, Topology(2, 2)), 4)
    members = held_by(assign_documents(documents, 4096, Topology(2, 2), degree=2), 8)
    assert [sorted(one + other) for one, other in zip(members[::2], members[1::2], strict=True)] == groups


def test_documents_that_fit_are_in_one_node_each() -> None:
    """Of eight each of two nodes has two long and two short ones."""
    starts = [0, *accumulate((200, 600, 600, 200, 600, 200, 200, 600))]
    nodes = [set(places) for places in held_by(assign_documents(list(pairwise(starts)), 3200, Topology(2, 2)), 4)]
    whole = [len(range(*each)) for each in pairwise(starts) if (nodes[0] | nodes[1]).issuperset(range(*each))]
    assert sorted(whole) == [200, 200, 600, 600]


def test_a_document_for_all_nodes_is_dealt_from_the_outside_in() -> None:
    tokens = assign_documents([(0, 4096)], 4096, Topology(2, 2))
    assert tokens.holders == (0, 1, 2, 3, 2, 1, 0)
    assert tokens.bounds == (0, 512, 1024, 1536, 2560, 3072, 3584, 4096)


def test_a_short_document_is_cut_in_two_and_the_smaller_part_comes_first() -> None:
    """Of 3960, 100 and 3940 tokens: so 40 keys cross."""
    tokens = assign_documents([(0, 3960), (3960, 4060), (4060, 8000)], 8000, Topology(2, 1))
    assert (tokens.holders, tokens.bounds) == ((1, 0), (0, 4000, 8000))


def test_a_document_of_two_nodes_may_be_sent_by_all_their_ranks() -> None:
    """Of three of 4000 tokens two nodes of two ranks share one; work stays even."""
    documents, topology = list(pairwise((0, 4000, 8000, 12000))), Topology(2, 2)
    most, holders = [], []
    for spread in (False, True):
        tokens = assign_documents(documents, 12000, topology, spread=spread)
        runs = in_chunks(tokens.holders or (), tokens.bounds)
        costs = DocumentCosts(topology, [runs.runs(rank, 4, tokens) for rank in range(4)], documents)
        assert costs.work().max() < 1.05 * costs.work().double().mean()
        most.append(costs.most_rows_moved()[0])
        of_documents = [{at // 4000 for at in held} for held in held_by(tokens, 4)]
        holders.append(max(sum(number in each for each in of_documents) for number in range(3)))
    assert (holders[0] < 4, holders[1]) == (True, 4)
    assert most[1] < 0.6 * most[0]


def test_runs_are_few() -> None:
    """A run for every document, one for every cut, and one more where it is cut from the outside in."""
    starts = [0, *accumulate(random.Random(0).randrange(100, 4000) for _ in range(50))]
    tokens = assign_documents(list(pairwise(starts)), starts[-1], Topology(2, 4))
    layout = in_chunks(tokens.holders or (), tokens.bounds)
    runs = [run for rank in range(8) for run in layout.runs(rank, 8, tokens)]
    assert token_count(runs) == starts[-1]
    assert len(runs) <= 50 + 2 * 2 * 8
