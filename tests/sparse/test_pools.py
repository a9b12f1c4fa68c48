"""Pools of keys: equal to the definition, and to the bit on any number of ranks.

`BURST_SOAK=3000 bash tests/run.sh tests/sparse` draws that many calls.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Full,
    PrefixTree,
    Strategy,
    Topology,
    VirtualRing,
    key_padding,
)
from burst_plugin.sparse import keys_of_pools, pool, pools, select_pools
from tests.support.indexers import calls_on_ranks, drawn_pools, gated_mean, listed_keys
from tests.support.ranks import last_lines, run_ranks

SOAK = int(os.environ.get("BURST_SOAK", "0")) or 60


def _wrong(numbers: range) -> list[int]:
    """The drawn calls that select other pools than the definition, or in another order, or list other keys."""
    wrong = []
    for number in numbers:
        call = drawn_pools(number)
        if not all(map(torch.equal, call.found(), call.expected())):
            wrong.append(number)
    return wrong


@pytest.mark.timeout(120 + SOAK)
def test_drawn_selections_are_those_of_the_definition() -> None:
    assert _wrong(range(SOAK)) == []


def test_pools_that_begin_elsewhere_are_found() -> None:
    """Planted: pools that go on over the begin of a document, as transformers has them."""
    with mock.patch.object(pools.BlockStarts, "are_last", lambda self, places: places % self._size == self._size - 1):
        assert len(_wrong(range(40))) > 5


def test_keys_of_the_own_tokens_alone_are_found() -> None:
    """Planted: tokens of a pool that another rank holds are taken for zeros."""
    with mock.patch("burst_plugin.recurrent.halo._forward", _without_halo):
        assert len(_wrong(range(40))) > 5


def _without_halo(plan: Any, call: Any, xs: Any) -> Any:
    yield from ()
    return [x.new_zeros((plan.pieces * plan.width, *x.shape[1:])) for x in xs]


def _drawn(length: int, heads: int = 4, size: int = 64, batch: int = 2) -> list[Tensor]:
    """Queries, keys, gates and weights, random ones in float32."""
    generator = torch.Generator().manual_seed(length)
    shapes = (batch, length, heads, size), *[(batch, length, size)] * 2, (batch, length, heads)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_rounded_scores_select_the_same_on_any_number_of_ranks() -> None:
    q, k, gate, weights = _drawn(600)

    def selected(ring: VirtualRing) -> Tensor:
        return select_pools(q, pool(gated_mean, [k, gate], 16, ring), weights, 16, 5, ring)

    one = selected(VirtualRing(Topology(1, 1)))
    for topology in (Topology(1, 2), Topology(1, 3), Topology(2, 4)):
        for layout in ("zigzag", "contiguous", "striped"):
            assert torch.equal(selected(VirtualRing(topology, Strategy(layout=layout))), one), (topology, layout)


def test_gradients_of_pools_go_to_the_ranks_of_their_tokens() -> None:
    """In float64, of documents shorter than a pool, and of pools that several ranks hold."""
    length, size, mask = 40, 7, Causal() & Documents((0, 16, 21, 40))
    k, gate = (torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    starts = [0, 7, 21, 28]
    expected = torch.stack([gated_mean([x[:, a : a + size] for x in (k, gate)]) for a in starts], 1)
    dout = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, (k, gate), dout)
    for topology in (Topology(1, 1), Topology(1, 3), Topology(2, 4)):
        found = pool(gated_mean, [k, gate], size, VirtualRing(topology), mask=mask)
        last = [start + size - 1 for start in starts]
        torch.testing.assert_close(found[:, last], expected, rtol=1e-12, atol=1e-12)
        assert found.count_nonzero() == 2 * 3 * len(starts)
        for ours, theirs in zip(torch.autograd.grad(found[:, last], (k, gate), dout), truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def _on_ranks(rank: int, numbers: range) -> list[int]:
    """Which drawn calls give other pools on real ranks than the definition."""
    wrong = []
    for number, call, cp, tokens in calls_on_ranks(drawn_pools, numbers):
        q, k, gate, weights = (cp.shard(x, 1, tokens) for x in call.tensors)
        (size, top_k), options = call.numbers, {"mask": call.mask, "tokens": tokens}
        keys = pool(call.pooled, [k, gate], size, cp, **options, tag=("keys", number))
        starts = select_pools(q, keys, weights, size, top_k, cp, **options, tag=number)
        listed = listed_keys(keys_of_pools(starts, size, cp, **options), tokens.length)
        expected = (cp.shard(x, 1, tokens) for x in call.expected())
        if not all(map(torch.equal, (starts, listed), expected)):
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_select_as_the_definition_does(ranks: int) -> None:
    assert run_ranks(_on_ranks, ranks, range(1000, 1020)) == [[]] * ranks


def test_keys_of_pools_alone_are_sent() -> None:
    q, k, _, weights = _drawn(64, batch=1)
    ring = VirtualRing(Topology(1, 4))
    select_pools(q, k, weights, 8, 2, ring)
    sent = sum(nbytes for state in ring.rank_states for nbytes in state.expected_bytes.values())
    of_keys = 3 * k.numel() // 8 * 4
    assert of_keys <= sent < 1.1 * of_keys


def _refused(rank: int) -> None:
    cp = ContextParallel(dist.group.WORLD)
    q, k, _, weights = (cp.shard(x) for x in _drawn(96))
    select_pools(q, k, weights, 16 + rank, 5, cp)


def test_ranks_that_differ_are_refused_together() -> None:
    lines = last_lines(_refused, 2)
    assert all("rank 0: block=16; rank 1: block=17" in line and "ValueError" in line for line in lines), lines


def test_what_does_not_fit_is_refused() -> None:
    ring, (q, k, gate, weights) = VirtualRing(Topology(1, 2)), _drawn(24)
    tree = PrefixTree((-1, 0, 0), (8, 8, 8))
    at = torch.arange(24)
    hole = key_padding(torch.stack([at >= 3, (at < 12) | (at >= 15)]))
    for text, options in (
        ("size=0 is not valid; give how many tokens a pool has", {"size": 0}),
        ("size=2.5 is not valid", {"size": 2.5}),
        ("top_k=0 is not valid; give how many pools", {"top_k": 0}),
        ("among earlier tokens only; give Causal", {"mask": Full()}),
        ("not supported with a prefix tree", {"mask": tree}),
        ("padding ends at token 15 of batch row 1, in the middle of a document", {"mask": Causal() & hole}),
    ):
        with pytest.raises(ValueError, match=text):
            select_pools(q, k, weights, **{"size": 4, "top_k": 2, "cp": ring, **options})
    select_pools(q, k, weights, 4, 2, ring, mask=Causal() & hole & Documents((0, 15, 24)))
    cases = (
        ("size=0 is not valid", {"size": 0}),
        ("a prefix tree", {"mask": tree}),
        ("padding ends", {"mask": hole}),
    )
    for text, options in cases:
        with pytest.raises(ValueError, match=text):
            pool(gated_mean, [k, gate], **{"size": 4, "cp": ring, **options})
