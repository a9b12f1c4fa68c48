"""Rollouts folded into a tree, and back."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from burst_plugin import PrefixTree
from burst_plugin.trajectories import fold, unfold
from tests.support.rollouts import draw_rollouts


def test_the_example_of_the_module() -> None:
    ids, position_ids, tree, edges = fold([[7, 7, 3, 4], [7, 7, 3, 4, 9], [7, 7, 5, 5]])
    assert ids.tolist() == [[7, 7, 3, 4, 9, 5, 5]]
    assert position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3]]
    assert tree == PrefixTree((-1, 0, 0), (2, 3, 2))
    assert edges.queries.tolist() == [0, 1, 2, 3, 1, 5]
    assert edges.tokens.tolist() == [7, 3, 4, 9, 5, 5]
    assert edges.counts.tolist() == [3, 2, 2, 1, 1, 1]
    assert [path.tolist() for path in edges.paths] == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 5, 6]]
    found = unfold(edges.tokens, edges)
    assert [x.tolist() for x in found] == [[7, 3, 4], [7, 3, 4, 9], [7, 5, 5]]


@pytest.mark.parametrize("seed", range(30))
def test_drawn_rollouts_are_on_their_paths_and_no_beginning_is_there_twice(seed: int) -> None:
    rollouts = draw_rollouts(seed, most=12)
    ids, position_ids, tree, edges = fold(rollouts)
    beginnings = {tuple(x[:n].tolist()) for x in rollouts for n in range(1, len(x) + 1)}
    assert ids.shape == position_ids.shape == (1, len(beginnings))
    assert tree.length == len(beginnings)
    assert len(edges.queries) == len(beginnings) - tree.parents.count(-1)
    for rollout, path in zip(rollouts, edges.paths, strict=True):
        assert torch.equal(ids[0, path], rollout)
        assert torch.equal(position_ids[0, path], torch.arange(len(rollout)))
    for x, rollout, path in zip(unfold(edges.queries, edges), rollouts, edges.paths, strict=True):
        assert torch.equal(x, path[:-1])
        assert len(x) == len(rollout) - 1
    assert all(tree.parents.count(node) != 1 for node in range(len(tree.parents))), "nodes end where paths part"
    assert fold([x.tolist() for x in rollouts]).tree == tree


def test_an_edge_gets_the_sum_of_its_rollouts_gradients() -> None:
    edges = fold([[1, 2, 3], [1, 2, 4], [1, 2]]).edges
    values = torch.zeros(len(edges.queries), requires_grad=True)
    torch.cat([(number + 1) * x for number, x in enumerate(unfold(values, edges))]).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [6, 1, 2]
    assert torch.equal(edges.counts, torch.tensor([3, 1, 1]))


def test_long_rollouts_are_folded_in_less_than_a_second() -> None:
    """64 rollouts of 8192 tokens, 8 of each prompt of 6554: 0.02 s on a core that has nothing else to do."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, (8, 6554), generator=generator)
    answers = torch.randint(1000, (64, 1638), generator=generator)
    rollouts = [torch.cat([prompts[number // 8], answer]) for number, answer in enumerate(answers)]
    began = time.process_time()
    folded = fold(rollouts)
    assert time.process_time() - began < 1
    assert folded.ids.shape[1] <= 8 * 6554 + 64 * 1638


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        ([], "there are no rollouts to fold"),
        ([[1, 2], []], "rollout 1 has no token"),
        ([[1, -100]], "rollout 0 has -100 among its token ids"),
        ([torch.tensor([[1, 2]])], r"rollout 0 is Tensor \[1, 2\].*of one dimension"),
        ([torch.tensor([1.0, 2.0])], "rollout 0 is Tensor .* of torch.float32"),
        ([["a"]], "rollout 0, ..., is not valid: entry 0 is 'a', not a whole number"),
        ("abc", "rollouts='abc' is not valid; give each rollout as a list"),
        (7, "rollouts=7 is not valid"),
        ([3, 4], "rollout 0, 3, is not valid"),
    ],
)
def test_what_are_no_rollouts_is_refused(rollouts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fold(rollouts)


def test_values_of_other_edges_are_refused() -> None:
    edges = fold([[1, 2, 3]]).edges
    with pytest.raises(ValueError, match=r"unfold takes a value for each of 2 edges, got Tensor \[3\]"):
        unfold(torch.zeros(3), edges)
