"""One rank's call: what is remembered of it, what ranks compare, and what it returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Full,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    burst_attention,
)
from burst_plugin.comm.call_identity import CallId
from burst_plugin.compute.passes import TileAttention
from burst_plugin.compute.shapes import Shapes
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from burst_plugin.ring import plan
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Inputs, Request
from tests.support.reference import Problem, Result, errors, reference, relative

SHAPES = Shapes(2, 16, 16, 4, 2, 8, 8, torch.float32)
SLOPES = (0.5, 0.25, 0.1, 0.0)


def plans(ring: VirtualRing, inputs: list[Inputs], request: Request) -> list[Plan]:
    """What every rank of a ring makes of its tensors."""
    each = zip(ring.rank_states, inputs, strict=True)
    return [make_plan(rank_state, mine, request, {}) for rank_state, mine in each]


def plan_of(request: Request, **changes: Any) -> Plan:
    """That of the first of two ranks; `changes` are those of `Inputs`."""
    q, k, v = Problem.draw(8, (4, 2))[:3]
    ring = VirtualRing(Topology(1, 2), Strategy(kernel="reference"))
    return plans(ring, [Inputs(q, k, v)._replace(**changes)] * 2, request)[0]


def test_positions_are_made_once_for_calls_of_one_kind_and_are_bounded_for_others() -> None:
    ring = VirtualRing(Topology(1, 4), Strategy(kernel="reference"))
    made = mock.Mock(side_effect=plan.positions)

    def both_passes(length: int) -> int:
        made.reset_mock()
        q, k, v = (x.requires_grad_() for x in Problem.draw(length, (4, 2))[:3])
        ring.attention(q, k, v, mask=Full(), scores=Scores(dropout=0.1, seed=1))[0].sum().backward()
        return int(made.call_count)

    with mock.patch.object(plan, "positions", made):
        assert [both_passes(32), both_passes(32)] == [4 * 4, 0], "by each rank, those of each"
        for length in (24, 48, 16):
            assert [both_passes(length) for _ in range(3)][-1] == 0
            for state in ring.rank_states:
                assert length <= sum(map(len, state.positions.known.values())) <= 2 * length


def test_calls_that_are_not_alike_are_not_mixed_up() -> None:
    """One `ContextParallel` for calls that differ in one thing each, there and back again."""
    cp, scaled = ContextParallel(), Scores(softcap=1.0)
    cases: list[tuple[Problem, Scores]] = [
        (Problem.draw(12, (4, 2)), Scores()),
        (Problem.draw(12, (4, 2)).with_sink(), Scores()),
        (Problem.draw(12, (4, 2)).with_bias((2, 4)), Scores()),
        (Problem.draw(12, (4, 2)).with_bias((2, 4)).with_sink(), Scores()),
        (Problem.draw(12, (4, 2), dtype=torch.float64), Scores()),
        (Problem(*(x[:1] for x in Problem.draw(12, (4, 2))[:4])), Scores()),
        (Problem.draw(12, (4, 4)), Scores()),
        (Problem.draw(12, (4, 2), (8, 6)), Scores()),
        (Problem.draw(12, (4, 2)), scaled),
        (Problem.draw(12, (4, 2)), replace(scaled, scale=0.1)),
        (Problem.draw(12, (4, 2)), Scores(alibi_slopes=SLOPES)),
        (Problem.draw(12, (4, 2)), Scores(dropout=0.4, seed=1)),
        (Problem.draw(12, (4, 2)), Scores(dropout=0.4, seed=2)),
    ]
    for problem, scores in [*cases, *cases[::-1]]:
        inputs = [None if x is None else x.clone().requires_grad_() for x in (*problem[:3], *problem[4:6])]
        q, k, v, sink, bias = inputs
        assert q is not None
        assert k is not None
        assert v is not None
        out = burst_attention(q, k, v, cp, scores=scores, sink=sink, bias=bias)
        grads = iter(torch.autograd.grad(out, [x for x in inputs if x is not None], problem.dout, allow_unused=True))
        result = Result(out.detach(), *(None if x is None else next(grads) for x in inputs))
        truth = reference(problem, Causal(), scores)
        for name, x, y in zip(Result._fields, result, truth, strict=True):
            if x is not None and y is not None:
                torch.testing.assert_close(x.double(), y, atol=2e-6, rtol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert len(cp.plans) == len(cases) - 1, "a seed makes no new kind of call"


def test_calls_with_other_masks_are_not_mixed_up() -> None:
    cp, problem = ContextParallel(), Problem.draw(8, (2, 2))
    for mask in (Causal(), Full(), Causal()):
        assert relative(burst_attention(*problem[:3], cp, mask=mask), reference(problem, mask).out) < 1e-6


def test_sequences_dealt_out_otherwise_are_not_mixed_up() -> None:
    ring, problem, starts = VirtualRing(Topology(1, 2)), Problem.draw(16, (2, 2)), (0, 6, 16)
    mask = Causal() & Documents(starts)
    for tokens in (None, Tokens(16, starts), Tokens(16, layout="striped"), None):
        out, _ = ring.attention(*problem[:3], mask=mask, tokens=tokens)
        torch.testing.assert_close(out.double(), reference(problem, mask).out, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("forward", ["q", "kv"])
def test_what_is_asked_for_is_what_is_returned(forward: str) -> None:
    cp, (q, k, v) = ContextParallel(strategy=Strategy(forward=forward)), Problem.draw(12, (4, 2))[:3]
    mask = Documents((0, 3, 12))
    scores = torch.einsum("bihd,bjhd->hbij", q, k.repeat_interleave(2, 2)) * 8**-0.5
    inside = torch.block_diag(torch.ones(3, 3), torch.ones(9, 9)).bool()
    largest = scores.masked_fill(~inside, -torch.inf).amax((1, 2, 3))
    for _ in range(2):
        out = burst_attention(q, k, v, cp, mask=mask)
        one, lse = burst_attention(q, k, v, cp, mask=mask, return_lse=True)
        other, found = burst_attention(q, k, v, cp, mask=mask, return_max_logits=True)
        all_three = burst_attention(q, k, v, cp, mask=mask, return_lse=True, return_max_logits=True)
        torch.testing.assert_close(found, largest)
        for x, y in zip((one, other, *all_three), (out, out, out, lse, found), strict=True):
            assert torch.equal(x, y)


def test_the_largest_score_may_be_negative() -> None:
    x = torch.ones(1, 6, 2, 4)
    _, largest = burst_attention(x, -x, x, ContextParallel(), return_max_logits=True)
    assert largest.tolist() == [-2.0, -2.0]


def test_calls_are_forgotten_after_many_kinds() -> None:
    cp, x = ContextParallel(), torch.zeros(1, 4, 1, 4)
    for window in range(150):
        burst_attention(x, x, x, cp, mask=SlidingWindow(window))
    assert len(cp.plans) <= 64


def test_a_bias_keeps_the_queries_at_home() -> None:
    """Queries would be the cheaper side to send, but the rows of a bias belong to them."""
    problem = Problem.draw(24, (2, 2), dtype=torch.float64).with_bias((2, 2))
    ring = VirtualRing(Topology(2, 2), Strategy(forward="auto"))
    q, k, v, bias = (x.clone().requires_grad_() for x in (*problem[:3], problem.bias) if x is not None)
    out, _ = ring.attention(q, k, v, bias=bias)
    dq, dk, dv, dbias = torch.autograd.grad(out, (q, k, v, bias), problem.dout)
    found = errors(Result(out.detach(), dq, dk, dv, None, dbias), reference(problem, Causal()))
    assert max(found.values()) < 1e-13, found
    assert ring.rank_states[0].choices["backward"] == "kv"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_bias_may_have_a_type_of_its_own(dtype: torch.dtype) -> None:
    problem = Problem.draw(24, (2, 2)).with_bias((1, 1))
    assert problem.bias is not None
    bias = problem.bias.to(dtype).requires_grad_()
    out, _ = VirtualRing(Topology(1, 2)).attention(*problem[:3], bias=bias)
    (dbias,) = torch.autograd.grad(out, bias, problem.dout)
    assert dbias.dtype is dtype
    truth = reference(problem._replace(bias=bias.detach().float()), Causal())
    assert truth.dbias is not None
    torch.testing.assert_close(dbias.double(), truth.dbias, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("scores", [Scores(), Scores(alibi_slopes=SLOPES), Scores(dropout=0.3, seed=0)], ids=str)
@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(1, 2)], ids=str)
def test_a_narrow_window_in_a_long_sequence(scores: Scores, topology: Topology) -> None:
    """Cut into many squares on a diagonal for kernels that need it, and left whole for those that do not."""
    problem, mask = Problem.draw(80, (4, 2), dtype=torch.float64), SlidingWindow(3, 2)
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out, _ = VirtualRing(topology).attention(q, k, v, mask=mask, scores=scores)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    found = errors(Result(out.detach(), *grads), reference(problem, mask, scores))
    assert max(found.values()) < 1e-13, found


def test_every_rank_chooses_from_the_same_shapes() -> None:
    """Ranks of uneven lengths: one with more queries than keys must not choose another side to send."""
    ring, tokens = VirtualRing(Topology(1, 4), Strategy(forward="auto", layout="contiguous")), (Tokens(6), Tokens(7))
    routes, inputs = ring.rank_states[0].route_table, []
    for rank in range(4):
        q, k = (sum(run.length for run in routes.runs(t)[rank]) for t in tokens)
        inputs.append(Inputs(torch.zeros(1, q, 2, 4), *(torch.zeros(1, k, 2, 4) for _ in range(2))))
    made = plans(ring, inputs, Request(mask=Full(), tokens=tokens))
    assert len({x.q.shape[1] for x in inputs}) > 1
    assert len({(plan.shapes, plan.forward.moving, plan.backward.moving) for plan in made}) == 1
    assert len({plan.digest for plan in made}) == 1


@pytest.mark.parametrize(
    ("request_", "changes"),
    [
        (Request(mask=Full()), {}),
        (Request(scores=Scores(softcap=1.0)), {}),
        (Request(scores=Scores(seed=1)), {}),
        (Request(tokens=(Tokens(16, (0, 4, 16)), None)), {}),
        (Request(tokens=(None, Tokens(16, (0, 4, 16)))), {}),
        (Request(), {"sink": torch.zeros(4)}),
        (Request(), {"bias": torch.zeros(1, 1, 8, 16)}),
    ],
    ids=str,
)
def test_what_ranks_have_to_agree_on_is_in_the_signature_and_in_labels(
    request_: Request, changes: dict[str, Any]
) -> None:
    one, other = plan_of(Request()), plan_of(request_, **changes)
    assert one.signature != other.signature
    labels = [plan.label("forward", CallId(1)) for plan in (one, other, plan_of(Request()))]
    assert labels[0] is not None
    assert labels[1] is not None
    assert labels[2] is not None
    assert not torch.equal(labels[0], labels[1])
    assert torch.equal(labels[0], labels[2])


def test_ranks_agree_without_dropout_whether_a_seed_of_zero_is_said_or_not() -> None:
    assert plan_of(Request()).signature == plan_of(Request(scores=Scores(seed=0))).signature


def test_a_seed_makes_nothing_anew_but_masks_and_labels() -> None:
    """Dropout has another one at every call of every layer."""
    ring, (q, k, v, *_), known = VirtualRing(Topology(2, 2)), Problem.draw(8, (4, 2)), {}
    requests = [Request(scores=Scores(dropout=0.1, seed=seed)) for seed in (3, 4, 3)]
    one, other, again = (make_plan(ring.rank_states[0], Inputs(q, k, v), each, known) for each in requests)
    assert [plan.scores.seed for plan in (one, other, again)] == [3, 4, 3]
    assert again == one
    assert one.forward is other.forward is again.forward
    assert one.backward is other.backward is again.backward
    for direction in ("forward", "backward"):
        labels = [plan.label(direction, CallId(1)) for plan in (one, other)]
        assert labels[0] is not None
        assert labels[1] is not None
        assert not torch.equal(*labels)


@pytest.mark.parametrize(("degree", "computed"), [(1, False), (2, True)])
def test_a_bias_without_a_gradient_is_given_none(
    degree: int, computed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless heads are exchanged, among ranks of which others may want theirs."""
    done: list[int] = []
    original = TileAttention.add_to_dbias

    def counted(self: TileAttention, dbias: torch.Tensor | None, *where: Any) -> None:
        done.extend([1] if dbias is not None else [])
        original(self, dbias, *where)

    monkeypatch.setattr(TileAttention, "add_to_dbias", counted)
    problem = Problem.draw(16, (4, 2)).with_bias((1, 4))
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    ring = VirtualRing(Topology(1, 2), Strategy(ulysses_degree=degree))
    out, _ = ring.attention(q, k, v, bias=problem.bias)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    found = errors(Result(out.detach(), *grads), reference(problem, Causal()))
    assert max(error for name, error in found.items() if name != "dbias") < 1e-6
    assert bool(done) == computed


def test_every_pass_of_every_call_has_a_label_of_its_own() -> None:
    plan = plan_of(Request())
    named = [*(CallId(number) for number in (1, 2, 3)), CallId(1, "layer 1"), CallId(1, "layer 2")]
    labels = [plan.label(direction, which) for which in named for direction in ("forward", "backward")]
    assert len({bytes(label.tolist()) for label in labels if label is not None}) == 10


def test_parts_have_to_divide_the_heads() -> None:
    ring, (q, k, v, *_) = VirtualRing(Topology(1, 2), Strategy(parts=3)), Problem.draw(16, (8, 4))
    with pytest.raises(ValueError, match=r"parts=3 does not divide the 4 key/value heads .* use one of \[1, 2, 4\]"):
        ring.attention(q, k, v)


def test_keys_with_documents_of_their_own_are_not_padded_like_queries() -> None:
    problem, mask = Problem.draw(16, (4, 2)), Documents((0, 8, 16), (5, 8), (0, 8, 16))
    inputs = [x.clone().requires_grad_() for x in problem[:3]]
    out, _ = VirtualRing(Topology(2, 2)).attention(*inputs, mask=mask)
    grads = torch.autograd.grad(out, inputs, problem.dout)
    found = errors(Result(out.detach(), *grads), reference(problem, mask))
    assert max(found.values()) < 2e-6, found


def test_slopes_need_common_positions() -> None:
    ring, problem = VirtualRing(Topology(1, 2), Strategy(kernel="reference")), Problem.draw(8, (4, 2))
    shifted = Documents((0, 4, 8), None, (0, 2, 8))
    with pytest.raises(ValueError, match="alibi_slopes need positions that count alike for queries and keys"):
        ring.attention(*problem[:3], mask=shifted, scores=Scores(alibi_slopes=SLOPES))


def test_a_pass_that_was_left_half_way_is_the_last_one_of_its_ring() -> None:
    ring, problem = VirtualRing(Topology(1, 2)), Problem.draw(8, (2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCpuKernel, "forward", mock.Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            ring.attention(*problem[:3])
    with pytest.raises(RuntimeError, match=r"was left half way \(MemoryError: no room\).*make a new process group"):
        ring.attention(*problem[:3])
    cp = ContextParallel()  # nobody sends it anything
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCpuKernel, "forward", mock.Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            burst_attention(*problem[:3], cp)
    assert burst_attention(*problem[:3], cp).shape == problem.q.shape
