"""Blocks of keys selected by their best key: equal to the definition, and to the bit on any number of ranks.

`BURST_SOAK=3000 bash tests/run.sh tests/sparse` draws that many calls.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from burst_plugin import Causal, ContextParallel, Documents, Full, PrefixTree, Strategy, Tokens, Topology, VirtualRing
from burst_plugin.sparse import best_keys, blocks, index_scores, keys_of_blocks, select_blocks, selection
from tests.support.indexers import calls_on_ranks, drawn_blocks
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import last_lines, run_ranks

SOAK = int(os.environ.get("BURST_SOAK", "0")) or 60


def _wrong(numbers: range) -> list[int]:
    """The drawn calls that give other blocks than the definition, or in another order."""
    drawn = [(number, drawn_blocks(number)) for number in numbers]
    return [number for number, call in drawn if not torch.equal(call.found(), call.expected())]


@pytest.mark.timeout(120 + SOAK)
def test_drawn_selections_are_those_of_the_definition() -> None:
    assert _wrong(range(SOAK)) == []


class _Changed(best_keys.BestKeys):
    """Takes keys into account otherwise than it should."""

    def __init__(self, best: best_keys.BestKeys) -> None:
        self.best = best
        self._seen = dict[tuple[int, int], bool]()

    def positions(self) -> Tensor:
        return self.best.positions()

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.best.kept

    def merge(self, *kept: Sequence[Tensor]) -> None:
        self.best.merge(*kept)


class _FirstPart(_Changed):
    """Of a block that comes in parts, the first one counts alone, which is that of the query's own rank."""

    def add(self, rows: slice, scores: Tensor, positions: Tensor, allowed: Tensor | None) -> None:
        assert allowed is not None
        allowed = allowed.clone()
        for row, column in allowed.nonzero().tolist():
            key = (rows.start + row, int(positions[column]))
            allowed[row, column] = not self._seen.setdefault(key, False)
            self._seen[key] = True
        self.best.add(rows, scores, positions, allowed)


class _Behind(_Changed):
    """Keys are behind others of the same score; all scores are whole numbers."""

    def add(self, rows: slice, scores: Tensor, positions: Tensor, allowed: Tensor | None) -> None:
        self.best.add(rows, scores - 1e-3, positions, allowed)


def test_a_maximum_over_the_own_part_of_a_block_is_found() -> None:
    places = blocks.BlockSelection.places
    with mock.patch.object(blocks.BlockSelection, "places", lambda self: _FirstPart(places(self))):
        assert len(_wrong(range(40))) > 5


def test_a_block_selected_twice_is_found() -> None:
    places = blocks.BlockSelection.places
    with mock.patch.object(blocks.BlockSelection, "places", lambda self: places(self, False)):
        assert len(_wrong(range(40))) > 5


def test_ties_broken_by_rank_are_found() -> None:
    def own_first(self: Any, owner: int, keys: Tensor, best: best_keys.BestKeys) -> None:
        score(self, owner, keys, best if owner == self._rank else _Behind(best))

    score = blocks.BlockSelection.score
    with mock.patch.object(blocks.BlockSelection, "score", own_first):
        assert len(_wrong(range(40))) > 5


def _tensors(length: int, heads: int = 4, size: int = 64, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Random ones in float32, with every key there three times."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(batch, length, heads, size, generator=generator)
    k = torch.randn(batch, length, size, generator=generator)
    return q, k[:, torch.randint(0, length // 3, (length,), generator=generator)]


def test_rounded_scores_select_the_same_on_any_number_of_ranks() -> None:
    tensors = _tensors(600)
    one = select_blocks(*tensors, 16, 5, VirtualRing(Topology(1, 1)))
    for topology in (Topology(1, 2), Topology(1, 3), Topology(2, 4)):
        for layout in ("zigzag", "contiguous", "striped"):
            found = select_blocks(*tensors, 16, 5, VirtualRing(topology, Strategy(layout=layout)))
            assert torch.equal(found, one), (topology, layout)


def _on_ranks(rank: int, numbers: range) -> list[int]:
    """Which drawn calls give other blocks on real ranks than the definition."""
    wrong = []
    for number, call, cp, tokens in calls_on_ranks(drawn_blocks, numbers):
        block, top_k, forced = call.numbers
        q, k = (cp.shard(x, 1, tokens) for x in call.tensors)
        found = select_blocks(q, k, block, top_k, cp, forced=forced, mask=call.mask, tokens=tokens, tag=number)
        if not torch.equal(found, cp.shard(call.expected(), 2, tokens)):
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_select_as_the_definition_does(ranks: int) -> None:
    assert run_ranks(_on_ranks, ranks, range(1000, 1020)) == [[]] * ranks


def test_attention_on_blocks_is_that_on_their_keys() -> None:
    """Out and gradients of two groups of heads against a mask of queries by keys, in float64."""
    length, block, mask = 53, 4, Causal() & Documents((0, 17, 30, 53))
    index, ring = _tensors(length, heads=2, size=8, batch=1), VirtualRing(Topology(1, 3))
    starts = select_blocks(*index, block, 2, ring, mask=mask)
    q, k, v = (torch.randn(1, length, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out, _ = ring.attention(q, k, v, mask=mask, selection=keys_of_blocks(starts, block, length))
    at = torch.arange(length)
    documents = torch.bucketize(at, torch.tensor([17, 30]), right=True)
    is_same = (documents[:, None] == documents) & (at[:, None] >= at)
    first = torch.tensor([0, 17, 30])[documents]
    own = at - (at - first) % block
    keeps = (starts.unsqueeze(-1) == own).any(3) & is_same  # [1, 2, S, S]
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) * 8**-0.5
    weights = scores.masked_fill(~keeps.repeat_interleave(2, 1), -torch.inf).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    dout = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def _refused(rank: int) -> None:
    cp = ContextParallel(dist.group.WORLD)
    q, k = (cp.shard(x) for x in _tensors(96))
    select_blocks(q, k, 16 + rank, 5, cp)


def test_ranks_that_differ_are_refused_together() -> None:
    lines = last_lines(_refused, 2)
    assert all("rank 0: block=16; rank 1: block=17" in line and "ValueError" in line for line in lines), lines


def test_what_does_not_fit_is_refused() -> None:
    ring, (q, k) = VirtualRing(Topology(1, 2)), _tensors(24)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("block=0 is not valid; give how many keys a block has", {"block": 0}),
        ("block=2.5 is not valid", {"block": 2.5}),
        ("top_k=0 is not valid; give how many blocks", {"top_k": 0}),
        ("forced=-1 is not valid", {"forced": -1}),
        ("among earlier tokens only; give Causal", {"mask": Full()}),
        ("not supported with a prefix tree", {"mask": PrefixTree((-1, 0, 0), (8, 8, 8))}),
    ]
    for text, options in cases:
        with pytest.raises(ValueError, match=text):
            select_blocks(q, k, **{"block": 4, "top_k": 2, "cp": ring, **options})


def test_nothing_is_as_large_as_queries_by_keys() -> None:
    """On rank 3 of 8 at 128K tokens; blocks of 2 ranks, since all are alike."""
    ranks, length, heads, count = 8, 131_072, 4, 16
    state, rows = VirtualRing(Topology(1, ranks)).rank_states[3], length // ranks
    asked = selection.SelectionOptions(blocks.BlockSelection, count, Causal(), Tokens(length), 1.0, 128, 1)

    given = selection.Indexed(torch.zeros(1, rows, heads, 32), torch.zeros(1, rows, 32))
    held = selection.key_shards({}, state, (Tokens(length), Tokens(length)), Causal())
    call = selection.SelectionCall(held, Tokens(length), Causal(), count, 1.0, given, asked)
    with mock.patch.dict(index_scores.SHAPES, {"cpu": index_scores.USUAL_SHAPE}):
        part = blocks.BlockSelection(state, call, given)
    for owner in (3, 0):  # what fake tensors cannot tell is known by then
        part.parts(owner)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        best = part.places()
        for owner in (3, 0):
            part.score(owner, given.k, best)
        assert best.positions().shape == (rows * heads, count)
    kept = rows * heads * count * (8 + 4)  # the best so far, and what is returned
    assert kept < live.peak < kept + 160 * 2**20 < length * rows / 2
