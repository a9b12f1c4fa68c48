"""Rows of features reach the ranks that hold their tokens, and their gradients come back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from burst_plugin import Strategy, Tokens, Topology, VirtualRing
from burst_plugin.sequence.layout import positions
from burst_plugin.towers.rows import to_holders
from burst_plugin.towers.sharing import shared_out, work_of


def _case(number: int) -> tuple[VirtualRing, list[torch.Tensor], list[torch.Tensor]]:
    """A ring, the rows that ranks have encoded, and those whose tokens they hold."""
    draws = random.Random(number)
    nodes, per_node = draws.choice([(1, 1), (1, 2), (1, 3), (2, 2), (2, 4)])
    ring = VirtualRing(Topology(nodes, per_node), Strategy(layout=draws.choice(["zigzag", "contiguous", "striped"])))
    length, batch = draws.choice([8, 40, 97]), draws.choice([1, 2])
    is_image = torch.rand(batch, length, generator=torch.Generator().manual_seed(number)) < draws.choice([0, 0.3, 1])
    rows = (is_image.flatten().cumsum(0) - 1).view(batch, length)
    states = ring.rank_states
    held = []
    for runs in states[0].route_table.shards(Tokens(length)):
        at = positions(runs)
        held.append(rows[:, at][is_image[:, at]])
    cuts = sorted(draws.randrange(int(is_image.sum()) + 1) for _ in range(draws.randrange(12)))
    units = [torch.arange(a, b) for a, b in zip([0, *cuts], [*cuts, int(is_image.sum())], strict=True)]
    shares = shared_out([float(len(unit)) for unit in units], len(states))
    encoded = [torch.cat([torch.empty(0, dtype=torch.int64), *(units[n] for n in share)]) for share in shares]
    return ring, encoded, held


def test_drawn_rows_reach_their_tokens_and_gradients_come_back() -> None:
    for number in range(200):
        ring, encoded, held = _case(number)
        sent, wanted = torch.cat(encoded), torch.cat(held)
        x = torch.randn(len(sent), 3, dtype=torch.float64, requires_grad=True)
        whole = torch.empty_like(x).index_copy(0, sent, x.detach())
        found = to_holders(ring, x, encoded, held)
        dout = torch.randn_like(found)
        (grad,) = torch.autograd.grad(found, x, dout)
        assert torch.equal(found, whole[wanted]), number
        assert torch.equal(grad, torch.empty_like(dout).index_copy(0, wanted, dout)[sent]), number
        stay = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(encoded, held, strict=True))
        traffic = [ring.traffic(state.rank) for state in ring.rank_states]
        assert traffic == [ring.expected_traffic(state.rank) for state in ring.rank_states]
        payload = 2 * 3 * 8 * (len(sent) - stay)
        total = sum(n for of_rank in traffic for of_link in of_rank.values() for n in of_link.values())
        assert payload <= total <= payload + 64 * 2 * len(traffic) ** 2  # labels of messages


def test_rows_that_do_not_fit_are_refused() -> None:
    ring = VirtualRing(Topology(1, 2))
    rows = [torch.arange(0, 2), torch.arange(2, 4)]
    with pytest.raises(ValueError, match="3 rows for 4 tokens"):
        to_holders(ring, torch.zeros(3, 2), [rows[0], torch.tensor([2])], rows)
    with pytest.raises(ValueError, match="some twice"):
        to_holders(ring, torch.zeros(4, 2), [rows[0], rows[0]], rows)


def _least(work: Sequence[float], ranks: int) -> float:
    """Work that the busiest rank has at least: the mean, or that of images which have to share a rank.

    Of k * ranks + 1 images, k + 1 are on one rank; those have at least the work of the smallest.
    """
    falling = sorted(work, reverse=True)
    together = [sum(falling[k * ranks - k : k * ranks + 1]) for k in range(len(work) // ranks + 1)]
    return max(sum(work) / ranks, *together[: -(-len(work) // ranks)])


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
@pytest.mark.parametrize(
    "patches",
    [
        lambda draws: draws.choice([64, 128, 256, 400, 1024]),
        lambda draws: draws.choice([256, 1024]),
        lambda draws: int(64 * 2 ** draws.uniform(0, 6)),  # photos of 112 to 896 pixels
        lambda draws: int(64 * 2 ** draws.uniform(0, 8)),  # many batches have one that is more than a rank's share
        lambda draws: 256,  # numbers of which are not divisible by ranks
    ],
)
def test_the_busiest_rank_has_little_more_than_the_mean(ranks: int, patches: Callable[[random.Random], int]) -> None:
    """With four images per rank or more it has at most 1.1 of the mean, wherever images allow that."""
    draws = random.Random(0)
    for _ in range(100):
        work = [work_of(patches(draws), 1024) for _ in range(draws.randrange(4 * ranks, 8 * ranks + 1))]
        shares = shared_out(work, ranks)
        assert sorted(n for share in shares for n in share) == list(range(len(work)))
        busiest, mean = max(sum(work[n] for n in share) for share in shares), sum(work) / ranks
        least = _least(work, ranks)
        assert busiest <= 1.1 * (mean if least <= 1.1 * mean else least)
