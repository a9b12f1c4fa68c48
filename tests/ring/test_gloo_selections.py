"""Blocks that are selected at run time, by each rank for its own queries, over real processes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import Causal, ContextParallel, Full, Mask, PerHeadGroup, burst_attention, selected_blocks
from tests.support.ranks import last_lines, run_ranks
from tests.support.reference import Problem, Result, errors, reference
from tests.support.selections import moba

PAGE = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE.split("## Blocks selected at run time")[1], re.S)[0]
BLOCK, TOP = 8, 3


def _as_on_the_page(rank: int, problem: Problem, layout: str) -> tuple[Mask, Result, bool]:
    """The mask that this rank made, and the whole result."""
    cp = ContextParallel(dist.group.WORLD, layout=layout)
    names: dict[str, Any] = {"cp": cp, "seq_len": problem.q.shape[1]}
    local = [cp.shard(x).requires_grad_() for x in problem[:3]]
    names.update(zip(("local_q", "local_k", "local_v"), local, strict=True))
    exec(EXAMPLE.replace("= 64, ", f"= {BLOCK}, ").replace("topk(8)", f"topk({TOP})"), names)
    grads = torch.autograd.grad(names["out"], local, cp.shard(problem.dout))
    whole = Result(*(cp.unshard(x.detach()) for x in (names["out"], *grads)))
    return names["mask"], whole, cp.traffic() == cp.expected_traffic()


@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (4, "contiguous")])
def test_the_example_of_the_page_is_exact(ranks: int, layout: str) -> None:
    assert EXAMPLE.count("= 64, ") == EXAMPLE.count("topk(8)") == 1
    problem = Problem.draw(128, (4, 2))
    expected = selected_blocks(moba(problem.q, problem.k, BLOCK, TOP), BLOCK)
    truth = reference(problem, expected)
    for mask, whole, is_counted in run_ranks(_as_on_the_page, ranks, problem, layout):
        assert mask == expected
        assert max(errors(whole, truth).values()) < 2e-6
        assert is_counted


def _unlike(rank: int, kind: str) -> None:
    cp = ContextParallel(dist.group.WORLD)
    selected = torch.ones(2, 64, 64, dtype=torch.bool)
    if rank and kind == "a block":
        selected[1, 50, 7] = False
    mask = selected_blocks(selected[:1] if rank and kind == "groups" else selected, 2)
    if rank and kind == "no selection":
        mask = Causal()
    if kind == "another size":
        mask = PerHeadGroup((Full(), selected_blocks(selected[0, :60, :60], 2)))
    x = torch.zeros(1, 64, 4, 8)
    q = torch.zeros(1, 64, 3, 8) if rank and kind == "heads" else x
    try:
        burst_attention(q, x[:, :, : q.shape[2]], x[:, :, : q.shape[2]], cp, mask=mask)
    finally:
        assert cp.traffic()["intra"]["gather"] == 0 or kind == "a block", "which is in the second group"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a block", "mask: Both.one: BlockMask.allowed at entry 50 differs at entry 7: rank 0: 1; rank 1: 0"),
        ("groups", "q_heads differs: rank 0: 2; rank 1: 4"),
        ("no selection", "q_heads differs: rank 0: 2; rank 1: 4"),
        ("heads", "the mask is for 2 groups of heads, into which 3 query heads"),
        ("another size", "BlockMask of 60 x 60 blocks of 2 does not fit 128 queries"),
    ],
)
def test_a_selection_that_differs_is_one_error_on_every_rank(kind: str, message: str) -> None:
    for line in last_lines(partial(_unlike, kind=kind), 2):
        assert re.match(f"ValueError: .*{message}", line), line
