"""Groups of heads that select blocks of their own: exact, and rows are sent to whom selected them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_plugin import (
    Causal,
    ContextParallel,
    Full,
    Mask,
    PerHeadGroup,
    Scores,
    SlidingWindow,
    Strategy,
    Topology,
    VirtualRing,
    burst_attention,
    selected_blocks,
)
from burst_plugin.comm.buffers import LABEL_BYTES
from tests.support.reference import Problem, Result, errors, reference, reference_lse
from tests.support.selections import moba, nsa

BLOCK, LENGTH = 8, 96


def attend(ring: VirtualRing, problem: Problem, mask: Mask, **options: Any) -> tuple[Result, Tensor]:
    """What the ring gives, and lse; every rank sent what its schedule counts."""
    inputs = [None if x is None else x.clone().requires_grad_() for x in (*problem[:3], *problem[4:6])]
    q, k, v, sink, bias = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    out, lse = ring.attention(q, k, v, mask=mask, sink=sink, bias=bias, **options)
    grads = iter(torch.autograd.grad(out, [x for x in inputs if x is not None], problem.dout))
    for rank in range(ring.network.ranks):
        assert ring.traffic(rank) == ring.expected_traffic(rank)
    return Result(out.detach(), *(None if x is None else next(grads) for x in inputs)), lse


@pytest.mark.parametrize("select", [moba, nsa])
@pytest.mark.parametrize(
    ("topology", "strategy"),
    [
        ((2, 2), Strategy(layout="zigzag")),
        ((1, 4), Strategy(layout="contiguous", schedule="direct", backward="q")),
        ((2, 2), Strategy(layout="zigzag", ulysses_degree=2)),
        ((2, 2), Strategy(layout="zigzag", mesh_degree=2)),
        ((1, 3), Strategy(layout="contiguous", forward="q", backward="kv")),
    ],
    ids=str,
)
def test_selections_are_exact(topology: tuple[int, int], strategy: Strategy, select: Any) -> None:
    problem = Problem.draw(LENGTH, (4, 2), dtype=torch.float64)
    selected = select(problem.q, problem.k, BLOCK, 3)
    assert not torch.equal(selected[:, 0], selected[:, 1]), "groups differ"
    assert not torch.equal(selected[0], selected[1]), "batch rows differ"
    mask = selected_blocks(selected, BLOCK)
    found, lse = attend(VirtualRing(Topology(*topology), strategy), problem, mask)
    assert max(errors(found, reference(problem, mask)).values()) < 1e-13
    torch.testing.assert_close(lse, reference_lse(problem, mask))


def test_with_sink_slopes_and_bias() -> None:
    """Each group has its own heads of them."""
    problem = Problem.draw(48, (4, 2), dtype=torch.float64).with_sink().with_bias((1, 4))
    mask, scores = selected_blocks(moba(problem.q, problem.k, 8, 2), 8), Scores(alibi_slopes=(0.1, 0.2, 0.3, 0.4))
    found, _ = attend(VirtualRing(Topology(1, 2), Strategy(backward="kv")), problem, mask, scores=scores)
    assert max(errors(found, reference(problem, mask, scores)).values()) < 1e-13


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (4, 4)], ids=str)
def test_groups_may_share_keys_or_have_several(heads: tuple[int, int]) -> None:
    """With a mask per query head, or with several key/value heads per mask."""
    problem = Problem.draw(32, heads, dtype=torch.float64)
    masks = [SlidingWindow(4), Causal(), SlidingWindow(9) & SlidingWindow(None, 3), SlidingWindow(2)]
    for mask in (PerHeadGroup(tuple(masks)), PerHeadGroup((Causal(), SlidingWindow(5))), PerHeadGroup((Causal(),))):
        found, _ = attend(VirtualRing(Topology(1, 2)), problem, mask)
        assert max(errors(found, reference(problem, mask)).values()) < 1e-13


def test_blocks_that_select_nothing_give_zeros() -> None:
    problem = Problem.draw(32, (2, 2), dtype=torch.float64)
    selected = torch.eye(4, dtype=torch.bool).repeat(2, 1, 1)
    selected[1, 2] = False
    mask = selected_blocks(selected, 8)
    found, lse = attend(VirtualRing(Topology(1, 2)), problem, mask)
    assert max(errors(found, reference(problem, mask)).values()) < 1e-13
    for x in (found.out, found.dq, found.dk, found.dv):
        assert bool((x[:, 16:24, 1] == 0).all())
        assert bool((x[:, 16:24, 0] != 0).any())
    assert bool(torch.isneginf(lse[:, 1, 16:24]).all())


def rows_selected_from(selected: Tensor, ranks: int, owner: int) -> list[int]:
    """Rows of keys of one rank that others selected: for each of them, and each group of heads, that selected any."""
    held = selected.shape[-1] // ranks
    rows = [
        BLOCK * int(group[rank * held : (rank + 1) * held, owner * held : (owner + 1) * held].any(0).sum())
        for group in selected
        for rank in range(ranks)
        if rank != owner
    ]
    return [n for n in rows if n]


@pytest.mark.parametrize("schedule", ["direct", "auto"])
def test_what_is_sent_are_the_rows_that_are_selected(schedule: str) -> None:
    """Forward keys and values, backward these and their gradients, of each group's own heads."""
    ranks, dim, batch = 6, 8, 2
    problem = Problem.draw(2 * LENGTH, (4, 2), dim)
    selected = moba(problem.q, problem.k, BLOCK, 3)[0]
    strategy = Strategy(layout="contiguous", schedule=schedule, forward="kv", backward="kv")
    ring = VirtualRing(Topology(1, ranks), strategy)
    attend(ring, problem, selected_blocks(selected, BLOCK))
    row = batch * 2 * dim * 4  # keys and values of one head, float32
    rows = [rows_selected_from(selected, ranks, owner) for owner in range(ranks)]
    assert 0 < sum(map(sum, rows)) < 0.25 * 2 * 2 * LENGTH * (ranks - 1)  # a quarter of what a ring sends
    sent = [ring.traffic(owner)["intra"] for owner in range(ranks)]
    assert [each["gather"] for each in sent] == [2 * (row * sum(n) + LABEL_BYTES * len(n)) for n in rows]
    assert sum(each["reduce"] for each in sent) == sum(row * sum(n) + LABEL_BYTES * len(n) for n in rows)


X = torch.zeros(1, 8, 4, 4)


@pytest.mark.parametrize(
    ("masks", "change", "message"),
    [
        (
            3,
            {},
            "the mask is for 3 groups of heads, into which 4 query heads and 4 key/value heads cannot be cut; give",
        ),
        (8, {}, "the mask is for 8 groups of heads, into which 4 query heads"),
        (
            2,
            {"scores": Scores(dropout=0.5, seed=0), "mask": PerHeadGroup((Full(), Causal()))},
            "dropout=0.5 depends on the number of a head, and the mask's 2 groups",
        ),
        (2, {"scores": Scores(alibi_slopes=(1.0,) * 3)}, "got 3 alibi_slopes for 4 query heads"),
        (2, {"sink": torch.zeros(6)}, r"sink must be floating point [4], one logit per query head"),
        (2, {"bias": torch.zeros(1, 3, 8, 8)}, "bias must be floating point [1 or batch, 1 or query heads"),
        (2, {"softmax_scale": 1.0, "scores": Scores(scale=1.0)}, "which mean the same; give one"),
        (2, {"k": X[:, :, :3]}, "do not fit together"),
        (2, {"q": None}, "q is None, not a tensor"),
    ],
)
def test_what_cannot_be_cut_by_heads_is_refused(masks: int, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        burst_attention(
            **{"q": X, "k": X, "v": X, "mask": PerHeadGroup((Full(),) * masks), **change}, cp=ContextParallel()
        )


def test_groups_of_one_mask_are_one_call_of_it_with_dropout_too() -> None:
    problem, scores = Problem.draw(32, (4, 2), dtype=torch.float64), Scores(dropout=0.3, seed=7)
    plain = VirtualRing(Topology(1, 2))
    expected, _ = attend(plain, problem, SlidingWindow(9), scores=scores)
    for groups in (1,):
        ring = VirtualRing(Topology(1, 2))
        found, _ = attend(ring, problem, PerHeadGroup((SlidingWindow(9),) * groups), scores=scores)
        pairs = [(one, other) for one, other in zip(found, expected, strict=True) if one is not None]
        assert len(pairs) == 4
        assert all(torch.equal(one, other) for one, other in pairs)
        assert ring.traffic(0) == plain.traffic(0)


def test_no_group_is_run_before_all_can_be() -> None:
    """The second group's mask is for another batch."""
    ring, problem = VirtualRing(Topology(1, 2)), Problem.draw(16, (2, 2))
    selected = torch.ones(3, 1, 2, 2, dtype=torch.bool)
    mask = PerHeadGroup((Causal(), selected_blocks(selected, 8)))
    with pytest.raises(ValueError, match="the mask is for 3 batch rows, but q, k, v have 2"):
        ring.attention(*problem[:3], mask=mask)
    assert ring.traffic(0)["intra"]["gather"] == 0


def test_all_that_is_asked_for_has_all_heads() -> None:
    problem = Problem.draw(16, (4, 2), dtype=torch.float64)
    mask = PerHeadGroup((Causal(), SlidingWindow(3)))
    found = burst_attention(*problem[:3], ContextParallel(), mask=mask, return_lse=True, return_max_logits=True)
    assert isinstance(found, tuple)
    out, lse, largest = found
    torch.testing.assert_close(out, reference(problem, mask).out)
    torch.testing.assert_close(lse, reference_lse(problem, mask))
    assert largest.shape == (4,)
