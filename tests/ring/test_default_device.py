"""What the ring makes is on a device of its own choice, whatever PyTorch's default is by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Keys,
    Mask,
    PrefixTree,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    selected_blocks,
    shard_batch,
)
from burst_plugin.assignment.balance import choose_tokens
from burst_plugin.inference import KVCache
from tests.support.reference import Problem

CASES: dict[str, tuple[dict[str, Any], Mask, Scores]] = {
    "zigzag": ({}, Causal(), Scores()),
    "striped, slopes": ({"layout": "striped"}, Causal(), Scores(alibi_slopes=(0.1, 0.2, 0.3, 0.4))),
    "documents of any length": ({"layout": "auto"}, Causal() & Documents((0, 7, 9, 30, 64)), Scores()),
    "documents whose heads are exchanged": (
        {"layout": "auto", "ulysses_degree": 2},
        Causal() & Documents((0, 7, 9, 30, 64)),
        Scores(),
    ),
    "chunks of unlike work": ({"layout": "auto"}, Causal() & Keys(((0, 5), (40, 60))), Scores(softcap=2.0)),
    "a tree": ({}, PrefixTree((-1, 0, 0), (20, 30, 14)) & SlidingWindow(9), Scores(dropout=0.2, seed=0)),
    "blocks": ({}, selected_blocks(torch.ones(2, 8, 8, dtype=torch.bool).tril(), 8), Scores()),
}


def attended(name: str) -> list[Tensor]:
    """Return out, lse and the gradients of a case, planned anew."""
    options, mask, scores = CASES[name]
    q, k, v, dout = (x.clone().requires_grad_() for x in PROBLEM)
    ring = VirtualRing(Topology(2, 2), Strategy(**options))
    chosen = options.get("layout") == "auto"
    tokens = choose_tokens(ring.rank_states[0].route_table, 64, mask) if chosen else Tokens(64)
    out, lse = ring.attention(q, k, v, mask=mask, scores=scores, tokens=tokens)
    out.backward(dout.detach())
    return [out.detach(), lse, *(x.grad for x in (q, k, v) if x.grad is not None)]


PROBLEM = Problem.draw(64, (4, 2), dtype=torch.float64)[:4]


@pytest.mark.parametrize("name", CASES)
def test_attention_is_planned_the_same_under_any_default_device(name: str) -> None:
    with torch.device("meta"):
        found = attended(name)
    assert all(torch.equal(one, other) for one, other in zip(found, attended(name), strict=True))


def test_so_are_turns_and_batches() -> None:
    def run() -> list[Tensor]:
        cp = ContextParallel(layout="auto")
        cache = KVCache(cp, 1, windows=[7])
        outs = []
        for start, stop in ((0, 40), (40, 41), (41, 44)):
            turn = cache.begin([stop - start] * 2)
            new = (turn.take(x[:, start:stop]) for x in PROBLEM[:3])
            outs += [cache.gather(cache.attend(0, *new)), turn.positions, turn.valid]
        batch = {"input_ids": IDS, "position_ids": POSITIONS}
        cut = shard_batch(batch, cp)
        return [*outs, cut["input_ids"], cut["position_ids"]]

    with torch.device("meta"):
        found = run()
    assert all(torch.equal(one, other) for one, other in zip(found, run(), strict=True))


IDS = torch.arange(16)[None]
POSITIONS = torch.tensor([[*range(5), *range(11)]])


def test_positions_are_on_the_default_device_unless_one_is_named() -> None:
    with torch.device("meta"):
        assert ContextParallel().positions(8).is_meta
    assert ContextParallel().positions(8).device.type == "cpu"
