"""Keys selected by score over a ring: equal to the definition, and to the bit on any number of ranks.

`BURST_SOAK=3000 bash tests/run.sh tests/sparse` draws that many calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from burst_plugin import Causal, ContextParallel, Full, PerHeadGroup, PerRow, Strategy, Tokens, Topology, VirtualRing
from burst_plugin.sparse import best_keys, index_scores, select_keys
from burst_plugin.sparse import selection as room
from tests.support.indexers import calls_on_ranks, drawn_selection
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import last_lines, run_ranks

SOAK = int(os.environ.get("BURST_SOAK", "0")) or 60
Three = tuple[Tensor, Tensor, Tensor]


def _wrong(numbers: range) -> list[int]:
    """The drawn calls that give other keys than the definition, or in another order."""
    drawn = [(number, drawn_selection(number)) for number in numbers]
    return [number for number, call in drawn if not torch.equal(call.found(), call.expected())]


@pytest.mark.timeout(120 + SOAK)
def test_drawn_selections_are_those_of_the_definition() -> None:
    assert _wrong(range(SOAK)) == []


def _own_block_only(score: Callable[..., None], self: Any, owner: int, *rest: Any) -> None:
    if owner == self._rank:
        score(self, owner, *rest)


def _own_block_twice(score: Callable[..., None], self: Any, owner: int, *rest: Any) -> None:
    for _ in range(1 + (owner == self._rank)):
        score(self, owner, *rest)


@pytest.mark.parametrize("fault", [_own_block_only, _own_block_twice])
def test_keys_of_one_rank_alone_and_a_key_selected_twice_are_found(fault: Callable[..., None]) -> None:
    score = room.RankSelection.score
    with mock.patch.object(room.RankSelection, "score", lambda self, *rest: fault(score, self, *rest)):
        assert len(_wrong(range(60))) > 20


def test_ties_broken_by_rank_are_found() -> None:
    def as_they_came(scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        scores, places = scores.sort(stable=True, dim=1, descending=True)
        return scores, positions.gather(1, places)

    with mock.patch.object(best_keys, "in_order", as_they_came):
        assert len(_wrong(range(200))) > 10


def _tensors(length: int, heads: int = 8, size: int = 64, batch: int = 2) -> Three:
    """Random ones in float32, with every key there three times."""
    generator = torch.Generator().manual_seed(length)
    q, k, weights = (
        torch.randn(shape, generator=generator)
        for shape in ((batch, length, heads, size), (batch, length, size), (batch, length, heads))
    )
    return q, k[:, torch.randint(0, length // 3, (length,), generator=generator)], weights


def test_rounded_scores_select_the_same_on_any_number_of_ranks() -> None:
    tensors = _tensors(600)
    one = select_keys(*tensors, 100, VirtualRing(Topology(1, 1)))
    for topology in (Topology(1, 2), Topology(1, 3), Topology(2, 4)):
        for layout in ("zigzag", "contiguous", "striped"):
            found = select_keys(*tensors, 100, VirtualRing(topology, Strategy(layout=layout)))
            assert torch.equal(found, one), (topology, layout)


def test_products_round_alike_wherever_in_a_tile_they_are(caplog: pytest.LogCaptureFixture) -> None:
    for dtype in (torch.float32, torch.float64):
        for heads, size in ((1, 8), (3, 40), (16, 64), (64, 128)):
            tiles = index_scores.ScoreTiles(heads, dtype, torch.device("cpu"))
            q, k, weights = torch.randn(1, heads, size), torch.randn(1, size), torch.randn(1, heads)
            for queries, keys in ((tiles.queries, tiles.keys), (1, 1), (tiles.queries, 3)):
                scores = tiles.of_queries(q.expand(queries, -1, -1), weights.expand(queries, -1))
                found = scores(k.expand(keys, -1))
                assert found.shape == (queries, keys)
                assert torch.equal(found, tiles.of_queries(q, weights)(k).expand_as(found)), (dtype, heads, size)
    assert not caplog.records


def test_a_shape_whose_products_depend_on_their_place_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def uneven(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = matmul(x, y)
        found[:, -4:] *= 1 + 1e-6
        return found

    matmul = torch.Tensor.__matmul__
    with mock.patch.object(torch.Tensor, "__matmul__", uneven):
        index_scores.warn_unless_alike.__wrapped__((64, 8, 60), torch.float32, torch.device("cpu"))
    assert "products of 64 x 8 by 8 x 60 in torch.float32 on cpu round differently" in caplog.text


def _on_ranks(rank: int, numbers: range) -> list[int]:
    """Which drawn calls give other keys on real ranks than the definition."""
    wrong = []
    for number, call, cp, tokens in calls_on_ranks(drawn_selection, numbers):
        local = (cp.shard(x, 1, tokens) for x in call.tensors)
        options = {"mask": call.mask, "tokens": tokens, "scale": call.scale, "tag": number}
        found = select_keys(*local, call.top_k, cp, **options)  # type: ignore[arg-type]
        if not torch.equal(found, cp.shard(call.expected(), 1, tokens)):
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_select_as_the_definition_does(ranks: int) -> None:
    assert run_ranks(_on_ranks, ranks, range(1000, 1030)) == [[]] * ranks


def _again(rank: int) -> tuple[bool, int, int]:
    """Whether a checkpoint's second run selects the same, and the bytes of two runs, kept and not."""
    sent, found = [], list[Tensor]()
    for keeps in ("none", "all"):
        cp = ContextParallel(dist.group.WORLD, keep_attention=keeps)
        q, k, weights = (cp.shard(x) for x in _tensors(96))

        def layer(q: Tensor, cp: ContextParallel = cp, k: Tensor = k, weights: Tensor = weights) -> Tensor:
            found.append(select_keys(q, k, weights, 7, cp))
            return q.sin()  # whose input is computed again

        checkpoint(layer, q.requires_grad_(), use_reentrant=False).sum().backward()
        sent.append(sum(n for of_link in cp.traffic().values() for n in of_link.values()))
    return len(found) == 4 and all(torch.equal(found[0], each) for each in found), sent[0], sent[1]


def test_recomputation_selects_the_same_and_sends_nothing_where_attention_is_kept() -> None:
    for same, twice, once in run_ranks(_again, 2):
        assert same
        assert twice == 2 * once > 0


def _refused(rank: int, what: str) -> None:
    cp = ContextParallel(dist.group.WORLD)
    q, k, weights = (cp.shard(x) for x in _tensors(96))
    top_k, mask = (7 + rank, Causal()) if what == "top_k" else (7, Causal())
    if what == "shape" and rank == 1:
        weights = weights[..., :3]
    select_keys(q, k, weights, top_k, cp, mask=mask)


@pytest.mark.parametrize(("what", "text"), [("top_k", "rank 0: top_k=7; rank 1: top_k=8"), ("shape", "do not fit")])
def test_ranks_that_differ_are_refused_together(what: str, text: str) -> None:
    lines = last_lines(_refused, 2, what)
    assert all(text in line and "ValueError" in line for line in lines), lines


def test_what_does_not_fit_is_refused() -> None:
    ring, (q, k, weights) = VirtualRing(Topology(1, 2)), _tensors(24)
    cases: list[tuple[str, Three, dict[str, Any]]] = [
        ("do not fit", (q, k[..., 1:], weights), {}),
        ("floating point tensor of 3 dimensions", (q, k.long(), weights), {}),
        ("give both one type", (q, k.double(), weights), {}),
        ("top_k=0 is not valid", (q, k, weights), {"top_k": 0}),
        ("scale=-1.0 is not valid", (q, k, weights), {"scale": -1.0}),
        ("mask has 3 batch rows", (q, k, weights), {"mask": PerRow((Full(),) * 3)}),
        ("groups of heads", (q, k, weights), {"mask": PerHeadGroup((Full(), Causal()))}),
        ("holds 20 of 20 tokens", (q, k, weights), {"tokens": Tokens(20)}),
    ]
    for text, tensors, options in cases:
        with pytest.raises(ValueError, match=text):
            select_keys(*tensors, options.pop("top_k", 3), ring, **options)
    with pytest.raises(ValueError, match="give a ContextParallel"):
        select_keys(q, k, weights, 3, None)  # type: ignore[arg-type]


def test_nothing_is_as_large_as_queries_by_keys() -> None:
    """On rank 3 of 8 at 128K tokens; blocks of 2 ranks, since all are alike."""
    ranks, length, heads, count = 8, 131_072, 4, 2048
    state, rows = VirtualRing(Topology(1, ranks)).rank_states[3], length // ranks
    with (
        mock.patch.dict(index_scores.SHAPES, {"cpu": index_scores.USUAL_SHAPE}),
        FakeTensorMode(),
        LiveBytes() as live,
    ):
        given = room.Indexed(torch.randn(1, rows, heads, 32), torch.randn(1, rows, 32), torch.randn(1, rows, heads))
        blocks = room.key_shards({}, state, (Tokens(length), Tokens(length)), Causal())
        asked = room.SelectionOptions(room.RankSelection, count, Causal(), Tokens(length))
        call = room.SelectionCall(blocks, Tokens(length), Causal(), count, 1.0, given, asked)
        part = room.RankSelection(state, call, given)
        best = best_keys.best_keys(rows, count, torch.float32, torch.device("cpu"))
        for owner in (3, 0):
            part.score(owner, given.k, best)
        assert best.positions().shape == (rows, count)
    kept = rows * count * (8 + 4)  # the best so far, and what is returned
    assert kept < live.peak < kept + 160 * 2**20 < length * rows / 2
