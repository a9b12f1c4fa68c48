"""Layers that carry a state, on rings in one process and over gloo: outputs, final states and gradients of one rank.

The truth is each layer's definition in float64, token after token (`tests.support.recurrences`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin import ContextParallel, Documents, PrefixTree, Strategy, Tokens, Topology, VirtualRing, recurrent
from burst_plugin.recurrent import heads, segments
from burst_plugin.recurrent.kernels.convolution import causal_convolution
from burst_plugin.recurrent.kernels.decay import DecayChunks
from burst_plugin.recurrent.kernels.delta_rule import delta_rule
from burst_plugin.recurrent.kernels.state_space import state_space
from burst_plugin.recurrent.pieces import START
from burst_plugin.sequence.mask import Mask
from tests.support.ranks import run_ranks
from tests.support.recurrences import DEFINITIONS, draw

LAYERS: dict[str, Callable[..., Any]] = {
    "delta_rule": recurrent.gated_delta_rule,
    "delta_rule_by_channel": recurrent.gated_delta_rule,
    "state_space": recurrent.state_space,
    "selective_scan": recurrent.selective_scan,
    "decay_attention": recurrent.decay_attention,
    "linear_unit": recurrent.affine_scan,
    "rwkv": recurrent.rwkv,
    "mlstm": recurrent.mlstm,
}
BY_HEADS = ("delta_rule", "delta_rule_by_channel", "state_space", "decay_attention")
IN_ONE_PASS = ("selective_scan", "linear_unit")  # outputs are added to afterwards
PARAMETERS = ("A", "log_decay", "bonus", "weight", "bias")  # of which each rank has all, and a part of the gradient
TOPOLOGIES = ((1, 4), (2, 2), (4, 1), (2, 4))
LENGTHS = (1, 17, 2, 400, 3, 5, 1, 133, 9, 1, 62, 4, 22)  # of 13 documents
SIZES = {"groups": 8, "heads": 8, "keys": 5, "values": 6}


@pytest.fixture(params=["one after another", "at once"])
def hidden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether states of some heads travel while others are computed, as where ranks have many tokens."""
    if request.param == "at once":
        monkeypatch.setattr(heads, "MANY_TOKENS", 0)
    return bool(request.param == "at once")


def _bounds(lengths: Sequence[int]) -> tuple[int, ...]:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return tuple(bounds)


def _drawn(kind: str, seed: int, batch: int, tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    found = draw(kind, torch.Generator().manual_seed(seed), batch, tokens, **SIZES)
    return {name: x.to(dtype).requires_grad_() for name, x in found.items()}


def _error(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Relative to the truth, or where that is next to nothing to what it is made of."""
    size = torch.maximum(expected.double().norm(), 1e-6 * scale.double().norm())
    return float(((found.double() - expected.double()).norm() / size).detach())


def _grads(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]


def _scaled(kind: str, state: Any) -> Tensor:
    """A final state as one tensor; what has an exponent without it."""
    if kind not in ("rwkv", "mlstm"):
        return state.flatten()
    *parts, most = state
    factor = most.double().exp()
    return torch.cat(
        [(x.double() * factor.view(*most.shape, *(1,) * (x.dim() - most.dim()))).flatten() for x in parts]
    )


class _Truth(NamedTuple):
    """What a layer's definition gives: outputs, final state, and the gradients of drawn ones of the outputs."""

    out: Tensor
    last: Tensor
    dout: Tensor
    grads: list[Tensor]


@cache
def _truth(kind: str, seed: int, batch: int, bounds: tuple[int, ...], dtype: torch.dtype) -> _Truth:
    rounded = _drawn(kind, seed, batch, bounds[-1], dtype)
    xs = {name: x.detach().double().requires_grad_() for name, x in rounded.items()}
    out, last = DEFINITIONS[kind](**xs, bounds=bounds)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return _Truth(out.detach(), _scaled(kind, last).detach(), dout, _grads(out, list(xs.values()), dout))


def _worst(kind: str, ring: VirtualRing, mask: Mask | None, bounds: tuple[int, ...], **drawn: Any) -> float:
    """The largest error of out, final state and gradients on a ring in one process."""
    which = kind, drawn.get("seed", 0), drawn.get("batch", 2)
    dtype = drawn.get("dtype", torch.float64)
    xs, truth = _drawn(*which, bounds[-1], dtype), _truth(*which, bounds, dtype)
    place = recurrent.Placement(ring, mask=mask, tokens=drawn.get("tokens"))
    out, final = LAYERS[kind](**xs, place=place, return_final_state=True)
    dout = truth.dout
    both = zip(_grads(out, list(xs.values()), dout), truth.grads, strict=True)
    errors = [_error(out, truth.out, dout), _error(_scaled(kind, final), truth.last, dout)]
    assert all(ring.traffic(each.rank) == ring.expected_traffic(each.rank) for each in ring.rank_states)
    return max([*errors, *(_error(found, expected, dout) for found, expected in both)])


@pytest.mark.parametrize("nodes_and_ranks", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "auto"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_equal_their_definitions(kind: str, layout: str, nodes_and_ranks: tuple[int, int]) -> None:
    ring = VirtualRing(Topology(*nodes_and_ranks), Strategy(layout="zigzag" if layout == "auto" else layout))
    bounds, tokens = _bounds(LENGTHS), None
    mask = Documents(bounds)
    if layout == "auto":
        ranks = nodes_and_ranks[0] * nodes_and_ranks[1]
        holders = [number % ranks for number in random.Random(3).sample(range(3 * ranks), 3 * ranks)]
        tokens = Tokens(bounds[-1], holders=tuple(holders))

    assert _worst(kind, ring, None, (0, 70)) < 1e-11
    assert _worst(kind, ring, mask, bounds, tokens=tokens) < 1e-11


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize("kind", BY_HEADS)
def test_heads_are_exchanged_in_place_of_states(kind: str, layout: str) -> None:
    ring = VirtualRing(Topology(2, 4), Strategy(layout=layout, recurrent="heads"))

    assert _worst(kind, ring, Documents((0, 3, 50, 70)), (0, 3, 50, 70)) < 1e-11


def test_one_head_may_serve_several_ranks() -> None:
    ring = VirtualRing(Topology(1, 4), Strategy(recurrent="heads"))
    xs = _drawn("state_space", 0, 1, 30)
    xs["B"], xs["C"] = (xs[name][:, :, :2].detach().requires_grad_() for name in ("B", "C"))
    out = recurrent.state_space(**xs, place=recurrent.Placement(ring))
    expected, _ = DEFINITIONS["state_space"](**xs)

    assert _error(out, expected, expected) < 1e-11
    for found, truth in zip(
        _grads(out, list(xs.values()), out.detach()), _grads(expected, list(xs.values()), out.detach()), strict=True
    ):
        assert _error(found, truth, expected) < 1e-11


@pytest.mark.parametrize("kind", LAYERS)
def test_float32_is_as_exact_as_the_kernel_on_one_rank(kind: str) -> None:
    own = _worst(kind, VirtualRing(Topology(1, 1)), None, (0, 130), dtype=torch.float32)
    on_ring = _worst(kind, VirtualRing(Topology(2, 4)), None, (0, 130), dtype=torch.float32)

    assert on_ring < max(2e-6, 2 * own)


@pytest.mark.parametrize("kind", LAYERS)
def test_bfloat16_is_as_exact_as_the_kernel_on_one_rank(kind: str) -> None:
    bounds = (0, 70, 75, 400)
    own, on_ring = (
        _worst(kind, VirtualRing(Topology(*sizes)), Documents(bounds), bounds, dtype=torch.bfloat16)
        for sizes in ((1, 1), (2, 4))
    )

    assert on_ring < (1.4 if kind in IN_ONE_PASS else 1.2) * own


def test_gradients_of_parameters_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _worst("state_space", VirtualRing(Topology(1, 1)), None, (0, 400), dtype=torch.bfloat16)
    in_one_pass = partial(recurrent.state_space, kernel=state_space)
    monkeypatch.setitem(LAYERS, "state_space", in_one_pass)

    assert _worst("state_space", VirtualRing(Topology(2, 4)), None, (0, 400), dtype=torch.bfloat16) < 1.4 * own


KERNELS = {"delta_rule": delta_rule, "delta_rule_by_channel": delta_rule, "state_space": state_space}


@pytest.mark.parametrize("kind", KERNELS)
def test_long_pieces_are_computed_in_segments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of libraries count elements in 32 bits, which pieces of some hundred thousand tokens exceed."""
    elements, tokens = [], []

    def kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
        xs = [x for x in arguments[:-1] if x.dim() > 1]
        elements.extend(x.shape[1] * x.stride(1) for x in xs)
        tokens.append(xs[0].shape[1])
        assert all(x.shape[0] == 1 or x.shape[0] * x.stride(0) < segments.OFFSETS for x in xs)
        return KERNELS[kind](*arguments)

    monkeypatch.setattr(segments, "STEP", 4)
    monkeypatch.setattr(segments, "OFFSETS", 1000)
    monkeypatch.setitem(LAYERS, kind, partial(LAYERS[kind], kernel=kernel))

    assert _worst(kind, VirtualRing(Topology(1, 1)), None, (0, 70)) < 1e-11
    assert _worst(kind, VirtualRing(Topology(2, 2)), Documents((0, 20, 400)), (0, 20, 400)) < 1e-11
    assert max(elements) < segments.OFFSETS
    assert len(tokens) > 50


def test_long_convolutions_are_computed_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = _drawn("causal_convolution", 0, 2, 41)
    x, weight = xs["x"], xs["weight"]
    place = recurrent.Placement(VirtualRing(Topology(1, 2)), mask=Documents((0, 2, 30, 41)))
    lengths = []

    def convolve(x: Tensor) -> Tensor:
        lengths.append(x.shape[1])
        return causal_convolution(x, weight)

    expected = recurrent.with_tokens_before(convolve, x, weight.shape[-1] - 1, place)
    monkeypatch.setattr(segments, "STEP", 4)
    monkeypatch.setattr(segments, "OFFSETS", 20 * x.shape[2])
    lengths.clear()
    out = recurrent.with_tokens_before(convolve, x, weight.shape[-1] - 1, place)

    assert len(lengths) > 4
    assert max(lengths) < 20
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


def _drawn_case(number: int) -> float:
    """The error of a case that is drawn: layout, documents, rows, ranks, way."""
    draws = random.Random(number)
    kind, length = draws.choice(list(LAYERS)), draws.choice([1, 3, 20, 65])
    nodes, per_node = draws.choice([(1, 2), (1, 3), *TOPOLOGIES])
    cuts = sorted(draws.sample(range(1, length), min(length - 1, draws.choice([0, 1, 5]))))
    bounds, layout, tokens = (0, *cuts, length), draws.choice(["zigzag", "contiguous", "striped", "chunks"]), None
    if layout == "chunks":
        layout, ranks = "zigzag", nodes * per_node
        holders = [*range(ranks), *(draws.randrange(ranks) for _ in range(draws.randrange(2 * ranks)))]
        draws.shuffle(holders)
        ends = sorted(draws.randrange(length + 1) for _ in holders[1:])
        tokens = Tokens(length, holders=tuple(holders), bounds=(0, *ends, length))
    can_share = kind in BY_HEADS and 8 % (nodes * per_node) == 0
    way = draws.choice(["state", "auto", "heads"] if can_share else ["state", "auto"])
    ring = VirtualRing(Topology(nodes, per_node), Strategy(layout=layout, recurrent=way), seed=number)
    mask = Documents(bounds) if cuts else None
    return _worst(kind, ring, mask, bounds, tokens=tokens, seed=number, batch=draws.choice([1, 2]))


def test_drawn_calls_equal_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MANY_TOKENS", 0)
    assert [number for number in range(150) if not _drawn_case(number) < 1e-11] == []


@pytest.mark.parametrize("nodes_and_ranks", [(2, 2), (4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("kind", ["delta_rule", "state_space"])
def test_branches_of_a_tree_begin_with_the_state_of_their_parent(kind: str, nodes_and_ranks: tuple[int, int]) -> None:
    tree = PrefixTree((-1, 0, 1, 0, 3, 3), (9, 17, 5, 16, 4, 9))
    xs = _drawn(kind, 0, 1, tree.length)
    place = recurrent.Placement(VirtualRing(Topology(*nodes_and_ranks)), mask=tree)
    out = LAYERS[kind](**xs, place=place)
    before, expected = tree.before().tolist(), torch.zeros_like(out)
    for token in range(tree.length):
        path = [token]
        while before[path[0]] != START:
            path.insert(0, before[path[0]])
        of_path = {name: x[:, path] if x.dim() > 1 else x for name, x in xs.items()}
        alone, _ = DEFINITIONS[kind](**of_path)
        expected = expected.index_copy(1, torch.tensor([token]), alone[:, -1:])
    leaves = list(xs.values())

    assert _error(out, expected, expected) < 1e-11
    for found, truth in zip(_grads(out, leaves, out.detach()), _grads(expected, leaves, out.detach()), strict=True):
        assert _error(found, truth, expected) < 1e-11


def test_convolutions_look_back_over_ranks() -> None:
    xs = _drawn("causal_convolution", 0, 2, 41)
    place = recurrent.Placement(VirtualRing(Topology(2, 2)), mask=Documents((0, 2, 30, 41)))
    out = recurrent.causal_convolution(**xs, place=place, activation="silu")
    expected = DEFINITIONS["causal_convolution"](**xs, activation="silu", bounds=(0, 2, 30, 41))
    leaves = list(xs.values())

    assert _error(out, expected, expected) < 1e-11
    for found, truth in zip(_grads(out, leaves, out.detach()), _grads(expected, leaves, out.detach()), strict=True):
        assert _error(found, truth, expected) < 1e-11


def _over_gloo(rank: int, kind: str, bounds: tuple[int, ...], options: dict[str, Any]) -> list[float]:
    tokens, whole = Tokens(bounds[-1]), _drawn(kind, 0, 2, bounds[-1])
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, **options)
    local = {
        name: (x.detach() if name in PARAMETERS and x.dim() < 3 else cp.shard(x.detach(), 1, tokens)).requires_grad_()
        for name, x in whole.items()
    }
    place = recurrent.Placement(cp, mask=Documents(bounds), tokens=tokens, tag="layer 3")
    out, final = LAYERS[kind](**local, place=place, return_final_state=True)
    expected, last = DEFINITIONS[kind](**whole, bounds=bounds)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = dict(zip(local, _grads(out, list(local.values()), cp.shard(dout, 1, tokens)), strict=True))
    truths = dict(zip(whole, _grads(expected, list(whole.values()), dout), strict=True))
    errors = [
        _error(out, cp.shard(expected, 1, tokens), dout),
        _error(_scaled(kind, final), _scaled(kind, last), dout),
    ]
    for name, grad in grads.items():
        if local[name].shape == whole[name].shape and name in PARAMETERS:
            dist.all_reduce(grad)
            errors.append(_error(grad, truths[name], dout))
        else:
            errors.append(_error(grad, cp.shard(truths[name], 1, tokens), dout))
    assert cp.traffic() == cp.expected_traffic()
    return errors


@pytest.mark.parametrize("options", [{}, {"recurrent": "heads"}, {"ulysses_degree": 2}], ids=str)
@pytest.mark.parametrize("kind", ["delta_rule", "state_space", "mlstm"])
@pytest.mark.usefixtures("hidden")
def test_layers_over_gloo(kind: str, options: dict[str, Any]) -> None:
    if kind not in BY_HEADS and options.get("recurrent") == "heads":
        options = {"layout": "contiguous"}
    found = run_ranks(_over_gloo, 4, kind, (0, 2, 30, 41), options)

    assert max(error for errors in found for error in errors) < 1e-11


def _with_an_empty_rank(rank: int) -> float:
    """Two tokens on four ranks: those without any have a part in the backward pass all the same."""
    cp, tokens, whole = ContextParallel(dist.group.WORLD), Tokens(2), _drawn("state_space", 0, 1, 2)
    local = {name: x if name == "A" else cp.shard(x, 1, tokens) for name, x in whole.items()}
    place = recurrent.Placement(cp, tokens=tokens)
    out = recurrent.state_space(
        **{
            **local,
            "x": recurrent.causal_convolution(
                local["x"].flatten(2), torch.ones(local["x"].shape[2:].numel(), 3, dtype=torch.float64), place=place
            ).view_as(local["x"]),
        },
        place=place,
    )
    out.sum().backward()
    assert whole["x"].grad is not None
    dist.all_reduce(whole["x"].grad)
    convolved = DEFINITIONS["causal_convolution"](
        (x := whole["x"].detach().requires_grad_()).flatten(2),
        torch.ones(x.shape[2:].numel(), 3, dtype=torch.float64),
    ).view_as(x)
    expected, _ = DEFINITIONS["state_space"](**{**whole, "x": convolved})
    expected.sum().backward()
    assert x.grad is not None
    return _error(whole["x"].grad, x.grad, x.grad)


@pytest.mark.usefixtures("hidden")
def test_ranks_without_tokens_take_part() -> None:
    assert max(run_ranks(_with_an_empty_rank, 4)) < 1e-11


def _convolved(kind: str, xs: dict[str, Tensor], place: recurrent.Placement) -> list[Tensor]:
    """Return the gradients of a layer whose inputs are convolved one by one."""
    leaves = {name: x.detach().requires_grad_() for name, x in xs.items()}
    inputs, weight = dict(leaves), torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64)
    for name, x in leaves.items():
        if x.dim() > 1:
            of_channels = weight.expand(x.shape[2:].numel(), -1)
            inputs[name] = recurrent.causal_convolution(x.flatten(2), of_channels, place=place).view(x.shape)
    return list(torch.autograd.grad(LAYERS[kind](**inputs, place=place).square().sum(), list(leaves.values())))


def _on_a_rank_without_tokens(rank: int, kind: str, documents: tuple[int, ...]) -> float:
    """The error of gradients on ranks with 3, 3 and no tokens. All have the same backward passes, or would wait."""
    cp, tokens = ContextParallel(dist.group.WORLD), Tokens(6, holders=(0, 1, 2), bounds=(0, 3, 6, 6))
    whole, mask = _drawn(kind, 0, 1, 6), Documents(documents)
    local = {name: x if x.dim() == 1 else cp.shard(x, 1, tokens) for name, x in whole.items()}
    grads = _convolved(kind, local, recurrent.Placement(cp, mask, tokens))
    truth = _convolved(kind, whole, recurrent.Placement(ContextParallel(hierarchy=[1]), mask))
    for grad in grads:
        if grad.dim() == 1:
            dist.all_reduce(grad)
    exact = [x if x.dim() == 1 else cp.shard(x, 1, tokens) for x in truth]
    return max((_error(*each, each[1]) for each in zip(grads, exact, strict=True) if each[1].numel()), default=0.0)


@pytest.mark.parametrize("documents", [(0, 3, 6), (0, 6)])
@pytest.mark.parametrize("kind", ["delta_rule", "state_space", "mlstm", "rwkv"])
def test_ranks_without_tokens_have_all_backward_passes(kind: str, documents: tuple[int, ...]) -> None:
    assert max(run_ranks(_on_a_rank_without_tokens, 3, kind, documents)) < 1e-11


def _recomputed_without_tokens(rank: int, kind: str) -> None:
    """One token on two ranks, in a checkpoint, whose second run is collective: the empty rank has one, too."""
    cp, tokens, whole = ContextParallel(dist.group.WORLD, keep_attention="none"), Tokens(1), _drawn(kind, 0, 1, 1)
    local = {
        name: (x if x.dim() == 1 else cp.shard(x, 1, tokens)).detach().requires_grad_() for name, x in whole.items()
    }

    def layer(*xs: Tensor) -> Any:
        return LAYERS[kind](**dict(zip(local, xs, strict=True)), place=recurrent.Placement(cp, tokens=tokens))

    checkpoint(layer, *local.values(), use_reentrant=False).sum().backward()
    assert all(x.grad is not None for x in local.values())


@pytest.mark.parametrize("kind", ["delta_rule", "rwkv"])
def test_ranks_without_tokens_recompute_checkpoints(kind: str) -> None:
    run_ranks(_recomputed_without_tokens, 2, kind, timeout_s=20.0)


class _Watched(torch.autograd.Function):
    """The first tensor as it is, noting in both passes whether a pass of the ring is in flight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel, found: list[bool]) -> Tensor:
        ctx.cp, ctx.found = cp, found
        found.append(cp.rank_state.is_in_pass)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.found.append(ctx.cp.rank_state.is_in_pass)
        return grad, None, None


def _passes_in_progress(rank: int, way: str) -> list[bool]:
    """Whether messages are on their way whenever heads of Mamba-2 are computed, part after part, and back."""
    cp = ContextParallel(dist.group.WORLD, recurrent=way)
    tokens, whole = Tokens(64), _drawn("state_space", 0, 1, 64)
    local = {name: x if name == "A" else cp.shard(x, 1, tokens) for name, x in whole.items()}
    found: list[bool] = []

    def kernel(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return state_space(_Watched.apply(x, cp, found), *others)

    out = recurrent.state_space(**local, place=recurrent.Placement(cp, tokens=tokens), kernel=kernel)
    assert not cp.rank_state.is_in_pass
    out.sum().backward()
    assert not cp.rank_state.is_in_pass
    return found


def test_states_travel_while_other_heads_are_computed(hidden: bool) -> None:
    forward, backward = [False, True], [True, False]
    assert run_ranks(_passes_in_progress, 2, "state") == [forward + backward if hidden else [False] * 2] * 2


def _passes_during_stages(rank: int) -> list[bool]:
    """Whether a pass runs while a layer with one head, which has no parts, computes what needs no entering state."""
    cp, found = ContextParallel(dist.group.WORLD, recurrent="state"), []
    whole = {name: x if x.dim() == 1 else x[:, :, :1] for name, x in _drawn("decay_attention", 0, 1, 64).items()}
    whole["log_decay"] = whole["log_decay"][:1]
    local = {name: x if x.dim() == 1 else cp.shard(x) for name, x in whole.items()}
    inside = DecayChunks.inside

    def watched(chunks: DecayChunks) -> Tensor:
        found.append(cp.rank_state.is_in_pass)
        return inside(chunks)

    with mock.patch.object(DecayChunks, "inside", watched):
        recurrent.decay_attention(**local, place=recurrent.Placement(cp, tokens=Tokens(64)))
    return found


def test_states_travel_between_stages(hidden: bool) -> None:
    assert run_ranks(_passes_during_stages, 2) == [[hidden]] * 2


def test_heads_travel_while_others_are_computed(hidden: bool) -> None:
    assert run_ranks(_passes_in_progress, 2, "heads") == [[True] * 4 if hidden else [False] * 2] * 2


def _fails_once(rank: int, way: str, part: int) -> float:
    """The error of outputs after a call in which computing a later part of the heads has failed on every rank."""
    cp = ContextParallel(dist.group.WORLD, recurrent=way)
    tokens, whole = Tokens(64), _drawn("state_space", 0, 1, 64)
    local = {name: x if name == "A" else cp.shard(x, 1, tokens) for name, x in whole.items()}
    place, calls = recurrent.Placement(cp, tokens=tokens), 0

    def kernel(*tensors: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls == part:
            raise MemoryError("out of memory")
        return state_space(*tensors)

    with pytest.raises(MemoryError) as kept:  # which holds the frames
        recurrent.state_space(**local, place=place, kernel=kernel)
    out = recurrent.state_space(**local, place=place, kernel=kernel)
    expected = cp.shard(DEFINITIONS["state_space"](**whole)[0], 1, tokens)
    assert kept.value
    return _error(out, expected, expected)


@pytest.mark.parametrize(("way", "part"), [("state", 2), ("heads", 1), ("heads", 2)])
def test_a_call_may_follow_one_that_failed_half_way(way: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MANY_TOKENS", 0)
    assert max(run_ranks(_fails_once, 2, way, part)) < 1e-11


def _kept(rank: int, keep: str) -> tuple[float, int, int]:
    """A checkpoint computes a layer again: what its forward passes send, and the error of its gradients."""
    cp, tokens, whole = (
        ContextParallel(dist.group.WORLD, keep_attention=keep),
        Tokens(41),
        _drawn("delta_rule", 0, 1, 41),
    )
    local = {name: cp.shard(x.detach(), 1, tokens).requires_grad_() for name, x in whole.items()}
    place = recurrent.Placement(cp, tokens=tokens)

    def layer(v: Tensor, **others: Tensor) -> Tensor:
        flat = recurrent.causal_convolution(v.flatten(2), torch.ones(48, 3, dtype=torch.float64), place=place)
        return recurrent.gated_delta_rule(v=flat.view_as(v), **others, place=place)

    out = torch.utils.checkpoint.checkpoint(layer, **local, use_reentrant=False)
    once = sum(cp.traffic()["intra"].values())
    grads = dict(zip(local, _grads(out, list(local.values()), out.detach()), strict=True))
    again = cp.traffic()["intra"]["gather"]
    expected, _ = DEFINITIONS["delta_rule"](
        **{
            **whole,
            "v": DEFINITIONS["causal_convolution"](whole["v"].flatten(2), torch.ones(48, 3)).view_as(whole["v"]),
        }
    )
    truths = _grads(expected, list(whole.values()), expected.detach())
    errors = [
        _error(grads[name], cp.shard(truth, 1, tokens), expected) for name, truth in zip(whole, truths, strict=True)
    ]
    return max(errors), once, again


@pytest.mark.parametrize("keep", ["all", "none"])
@pytest.mark.usefixtures("hidden")
def test_checkpoints_keep_what_was_received(keep: str) -> None:
    found = run_ranks(_kept, 2, keep)

    assert max(error for error, _, _ in found) < 1e-11
    times = {again / once for _, once, again in found if once}
    assert times == {1.0 if keep == "all" else 2.0}


def _checkpointed(rank: int, kind: str) -> float:
    """Where no state enters what one rank holds, and nothing follows the layer in the checkpoint."""
    cp, tokens, whole = ContextParallel(dist.group.WORLD, layout="contiguous"), Tokens(24), _drawn(kind, 0, 1, 24)
    local = {n: x if n in PARAMETERS else cp.shard(x.detach(), 1, tokens).requires_grad_() for n, x in whole.items()}
    place = recurrent.Placement(cp, tokens=tokens)
    out = torch.utils.checkpoint.checkpoint(LAYERS[kind], **local, place=place, use_reentrant=False)
    grads = dict(zip(local, _grads(out, list(local.values()), out.detach()), strict=True))
    expected, _ = DEFINITIONS[kind](**whole)
    truths = dict(zip(whole, _grads(expected, list(whole.values()), expected.detach()), strict=True))
    cut = [name for name in whole if name not in PARAMETERS]
    return max(_error(grads[name], cp.shard(truths[name], 1, tokens), expected) for name in cut)


@pytest.mark.parametrize("kind", ["delta_rule", "state_space"])
@pytest.mark.usefixtures("hidden")
def test_checkpoints_of_a_layer_alone_keep_ranks_in_step(kind: str) -> None:
    assert max(run_ranks(_checkpointed, 2, kind)) < 1e-11


@pytest.mark.parametrize("options", [{}, {"layout": "striped"}, {"recurrent": "heads"}], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.usefixtures("hidden")
def test_rows_go_on_from_the_states_that_are_given(kind: str, options: dict[str, Any]) -> None:
    xs = {name: x.detach() for name, x in _drawn(kind, 4, 2, 70).items()}
    expected, last = DEFINITIONS[kind](**xs)
    parts: list[dict[str, Tensor]] = [
        {name: x[:, part] if x.shape[:2] == (2, 70) else x for name, x in xs.items()}
        for part in (slice(0, 30), slice(30, 70))
    ]
    ring = VirtualRing(Topology(2, 2), Strategy(**options))
    _, state = LAYERS[kind](**parts[0], place=recurrent.Placement(ring), return_final_state=True)
    states = [state] if isinstance(state, Tensor) else list(state)
    place = recurrent.Placement(ring, mask=Documents((0, 3, 40)), initial=[x.double() for x in states])
    begun = recurrent.Placement(ring, initial=states)
    out, final = LAYERS[kind](**parts[1], place=begun, return_final_state=True)

    assert _error(out, expected[:, 30:], expected) < 1e-11
    assert _error(_scaled(kind, final), _scaled(kind, last), expected) < 1e-11
    by_document, _ = LAYERS[kind](**parts[1], place=place, return_final_state=True)
    assert _error(by_document[:, :3], expected[:, 30:33], expected) < 1e-11  # and the other one begins so, too
    second = {name: x[:, 3:] if x.shape[:2] == (2, 40) else x for name, x in parts[1].items()}
    assert _error(by_document[:, 3:], LAYERS[kind](**second, place=begun), expected) < 1e-11


@pytest.mark.parametrize("kind", LAYERS)
def test_training_may_follow_inference(kind: str) -> None:
    ring = VirtualRing(Topology(1, 4))
    with torch.inference_mode():
        LAYERS[kind](**_drawn(kind, 0, 1, 70), place=recurrent.Placement(ring))

    assert _worst(kind, ring, None, (0, 70), batch=1) < 1e-11


@pytest.mark.parametrize("bounds", [(0, 5), (0, 5, 40)], ids=str)
def test_documents_of_another_length_are_refused(bounds: tuple[int, ...]) -> None:
    place = recurrent.Placement(VirtualRing(Topology(1, 2)), mask=Documents(bounds))
    with pytest.raises(ValueError, match=f"ends at {bounds[-1]}, but the sequence has 16 tokens"):
        recurrent.affine_scan(**_drawn("linear_unit", 0, 1, 16), place=place)


def test_nothing_may_be_left_of_a_state() -> None:
    place = recurrent.Placement(VirtualRing(Topology(1, 4)))
    xs = _drawn("decay_attention", 0, 1, 32)
    xs["log_decay"] = torch.full_like(xs["log_decay"], -torch.inf).requires_grad_()
    out = recurrent.decay_attention(**xs, place=place)

    assert _error(out, (xs["q"] * xs["k"]).sum(-1, keepdim=True) * xs["v"], out) < 1e-11
    assert all(bool(grad.isfinite().all()) for grad in _grads(out, list(xs.values()), out.detach()))


def _refused(rank: int, kind: str) -> str:
    cp, xs = ContextParallel(dist.group.WORLD), _drawn(kind, 0, 1, 8)
    place = recurrent.Placement(cp, tokens=Tokens(16))
    if rank == 1:
        name = next(iter(xs)) if kind not in ("delta_rule", "state_space") else {"delta_rule": "v"}.get(kind, "x")
        xs[name] = xs[name][..., :-1] if kind == "selective_scan" else xs[name].flatten(1)
    try:
        LAYERS[kind](**xs, place=place)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", LAYERS)
def test_shapes_that_do_not_fit_are_refused_on_every_rank(kind: str) -> None:
    found = run_ranks(_refused, 2, kind)

    assert all("do not fit" in text or "all of them are [batch, tokens" in text for text in found), found


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    ring = VirtualRing(Topology(1, 3), Strategy(recurrent="heads"))
    with pytest.raises(ValueError, match="8 heads cannot be shared between 3 ranks; use recurrent='state'"):
        recurrent.gated_delta_rule(**_drawn("delta_rule", 0, 1, 9), place=recurrent.Placement(ring))
