"""Attention that checkpoints keep: the same gradients, and the ring runs forward once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from burst_plugin import ContextParallel, Documents, PerHeadGroup, Scores, SlidingWindow, Strategy, burst_attention
from burst_plugin.activations import kept_attention
from burst_plugin.activations.kept_attention import follow_checkpoint_function
from burst_plugin.sequence.masks import Causal, Mask
from tests.support.ranks import run_ranks

TOKENS, HEADS, DIM = 64, 4, 8
WIDTH = HEADS * DIM
Wrapped = Callable[..., Tensor]

ATTENTION_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
REENTRANT = functools.partial(checkpoint, use_reentrant=True)
NON_REENTRANT = functools.partial(checkpoint, use_reentrant=False)


def _plain(function: Wrapped, *args: Any) -> Tensor:
    return function(*args)


def _selective(*operations: Any) -> Wrapped:
    context = functools.partial(create_selective_checkpoint_contexts, list(operations))
    return functools.partial(checkpoint, use_reentrant=False, context_fn=context)


class Layers:
    """Two layers of attention with sinks, each in a checkpoint, on shards of one sequence in float64."""

    def __init__(self, strategy: Strategy, mask: Mask = Causal(), **attention: Any) -> None:
        self.cp = ContextParallel(dist.group.WORLD, strategy=strategy)
        self.mask, self.attention = mask, attention
        drawn = torch.Generator().manual_seed(3)
        weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=drawn) / 6 for _ in range(2)]
        sinks = [torch.randn(HEADS, dtype=torch.float64, generator=drawn) for _ in range(2)]
        self.weights, self.sinks = ([torch.nn.Parameter(x) for x in each] for each in (weights, sinks))
        self.x = self.cp.shard(torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, generator=drawn))
        self.x.requires_grad_()

    def layer(self, x: Tensor, weight: Tensor, sink: Tensor) -> Tensor:
        heads = (x @ weight).view(1, -1, HEADS, DIM)
        kv = heads[:, :, : HEADS // 2].contiguous()
        out = burst_attention(heads, kv, kv, self.cp, mask=self.mask, sink=sink, **self.attention)
        return x + out.reshape(x.shape)

    def forward(self, wrapped: Wrapped, x: Tensor | None = None) -> Tensor:
        x = self.x if x is None else x
        for weight, sink in zip(self.weights, self.sinks, strict=True):
            x = wrapped(self.layer, x, weight, sink)
        return x.square().sum()

    def grads(self) -> list[Tensor]:
        """Take the gradients so far."""
        leaves = (self.x, *self.weights, *self.sinks)
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def sent_bytes(self) -> int:
        """Take the bytes sent so far; they have to be those that the schedules count."""
        sent = self.cp.traffic()
        assert sent == self.cp.expected_traffic()
        self.cp.reset_traffic()
        return sum(count for link in sent.values() for count in link.values())


def _worst(grads: list[Tensor], expected: list[Tensor]) -> float:
    assert len(grads) == len(expected)
    return max(float((x - y).norm() / y.norm()) for x, y in zip(grads, expected, strict=True))


def _step(layers: Layers, wrapped: Wrapped) -> tuple[list[Tensor], int]:
    layers.forward(wrapped).backward()
    return layers.grads(), layers.sent_bytes()


def _forward_bytes(layers: Layers) -> int:
    with torch.no_grad():
        layers.forward(_plain)
    return layers.sent_bytes()


def _against_plain(rank: int, strategy: Strategy, wrapped: Wrapped, mask: Mask, attention: Any) -> Any:
    """Return the worst error of gradients, and what a step sends: plainly, in checkpoints, and one forward pass."""
    layers = Layers(strategy, mask, **attention)
    expected, plain = _step(layers, _plain)
    forward = _forward_bytes(layers)
    grads, sent = _step(layers, wrapped)
    return _worst(grads, expected), plain, sent, forward


STRATEGIES = {
    "zigzag": Strategy(keep_attention="all"),
    "striped, q moves": Strategy(keep_attention="all", layout="striped", backward="q", forward="q"),
    "two levels": Strategy(keep_attention="all", ranks_per_node=2, parts=2),
    "direct": Strategy(keep_attention="all", schedule="direct"),
    "both": Strategy(keep_attention="all", forward="both", backward="both", layout="contiguous"),
}


@pytest.mark.parametrize("wrapped", [REENTRANT, NON_REENTRANT], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_sends_what_one_forward_and_one_backward_pass_send(name: str, wrapped: Wrapped) -> None:
    mask: Mask = Documents((0, 24, 64)) & Causal() if name == "direct" else Causal()
    for error, plain, sent, forward in run_ranks(_against_plain, 4, STRATEGIES[name], wrapped, mask, {}):
        assert error == 0.0
        assert sent == plain
        assert forward > 0


@pytest.mark.parametrize("share", ["none", 0.0])
def test_without_it_the_ring_runs_forward_twice(share: float | str) -> None:
    strategy = Strategy(keep_attention=share)
    for error, plain, sent, forward in run_ranks(_against_plain, 2, strategy, NON_REENTRANT, Causal(), {}):
        assert error == 0.0
        assert sent == plain + forward


def _after_inference(rank: int, options: dict[str, Any]) -> float:
    """Return the error of gradients after a forward pass in inference mode, through the same checkpoints."""
    layers = Layers(Strategy(**options))
    layers.forward(_plain).backward()
    expected = layers.grads()
    with torch.inference_mode():
        layers.forward(REENTRANT)
    layers.forward(REENTRANT).backward()
    return _worst(layers.grads(), expected)


@pytest.mark.parametrize("options", [{"keep_attention": "all"}, {"keep_attention": 0.5, "offload": True}])
def test_checkpoints_may_run_in_inference_mode(options: dict[str, Any]) -> None:
    assert max(run_ranks(_after_inference, 2, options)) < 1e-14


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_a_share_of_the_sequence_is_kept(layout: str, share: float) -> None:
    strategy = Strategy(keep_attention=share, layout=layout)
    for error, plain, sent, forward in run_ranks(_against_plain, 4, strategy, REENTRANT, Causal(), {}):
        assert error < 1e-13
        assert sent <= plain + forward


@pytest.mark.parametrize("share", ["all", 0.5])
@pytest.mark.parametrize(
    ("mask", "attention"),
    [
        (SlidingWindow(9), {}),
        (Documents((0, 5, 33, 64)) & Causal(), {"scores": Scores(softcap=5.0)}),
        (Causal(), {"scores": Scores(dropout=0.25, seed=7)}),
        (PerHeadGroup((SlidingWindow(9), SlidingWindow(20))) & Causal(), {}),
    ],
    ids=["window", "documents, softcap", "dropout", "groups of heads"],
)
def test_whatever_attention_is_asked_for(mask: Mask, attention: dict[str, Any], share: float | str) -> None:
    strategy = Strategy(keep_attention=share, kernel="reference")
    for error, *_ in run_ranks(_against_plain, 2, strategy, NON_REENTRANT, mask, attention):
        assert error < 1e-13


@pytest.mark.parametrize("share", ["all", 0.5])
def test_heads_are_exchanged_again_but_the_ring_is_not_run(share: float | str) -> None:
    strategy = Strategy(keep_attention=share, ulysses_degree=2)
    outcomes = run_ranks(_against_plain, 4, strategy, NON_REENTRANT, Causal(), {})
    for error, plain, sent, forward in outcomes:
        assert error < 1e-13
        assert plain < sent <= plain + forward
    assert sum(sent for _, _, sent, _ in outcomes) < sum(plain + forward for _, plain, _, forward in outcomes)


@pytest.mark.parametrize("share", ["all", 0.5])
def test_blocks_are_not_gathered_again_where_all_is_kept(share: float | str) -> None:
    strategy = Strategy(keep_attention=share, mesh_degree=2)
    outcomes = run_ranks(_against_plain, 4, strategy, NON_REENTRANT, Causal(), {})
    for error, plain, sent, forward in outcomes:
        assert error < 1e-13
        assert sent == plain if share == "all" else plain < sent <= plain + forward
    assert sum(sent for _, _, sent, _ in outcomes) < sum(plain + forward for _, plain, _, forward in outcomes)


def _several_in_flight(rank: int, wrapped: Wrapped) -> Any:
    """Three microbatches whose backward passes come in another order, as in pipelines."""
    layers = Layers(Strategy(keep_attention="all"))
    found = []
    for each in (_plain, wrapped):
        inputs = [(layers.x.detach() * scale).requires_grad_() for scale in (1.0, 2.0, 3.0)]
        losses = [layers.forward(each, x) for x in inputs]
        for number in (1, 0, 2):
            losses[number].backward()
        found.append(([x.grad for x in inputs] + layers.grads(), layers.sent_bytes()))
    (expected, plain), (grads, sent) = found
    return _worst(grads, expected), sent - plain


@pytest.mark.parametrize("wrapped", [REENTRANT, NON_REENTRANT], ids=["reentrant", "not reentrant"])
def test_several_microbatches_may_be_in_flight(wrapped: Wrapped) -> None:
    assert run_ranks(_several_in_flight, 2, wrapped) == [(0.0, 0)] * 2


def _nested(rank: int, outer: Wrapped, inner: Wrapped) -> Any:
    layers = Layers(Strategy(keep_attention="all"))
    expected, plain = _step(layers, _plain)
    outer(lambda x: layers.forward(inner, x), layers.x).backward()
    return _worst(layers.grads(), expected), layers.sent_bytes() - plain


@pytest.mark.parametrize("inner", [REENTRANT, NON_REENTRANT], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("outer", [REENTRANT, NON_REENTRANT], ids=["in reentrant", "in not reentrant"])
def test_checkpoints_may_be_nested(outer: Wrapped, inner: Wrapped) -> None:
    assert run_ranks(_nested, 2, outer, inner) == [(0.0, 0)] * 2


def _through_a_graph_twice(rank: int, wrapped: Wrapped) -> Any:
    layers = Layers(Strategy(keep_attention="all"))
    expected, _ = _step(layers, _plain)
    loss = layers.forward(wrapped)
    loss.backward(retain_graph=True)
    first = layers.grads()
    loss.backward()
    return _worst(first, expected), _worst(layers.grads(), expected)


@pytest.mark.parametrize("wrapped", [REENTRANT, NON_REENTRANT], ids=["reentrant", "not reentrant"])
def test_a_retained_graph_may_be_gone_through_twice(wrapped: Wrapped) -> None:
    assert run_ranks(_through_a_graph_twice, 2, wrapped) == [(0.0, 0.0)] * 2


def _policies(rank: int) -> Any:
    """Return errors and bytes beyond those of a plain step, by what a selective checkpoint saves."""
    layers = Layers(Strategy())
    expected, plain = _step(layers, _plain)
    forward, mm = _forward_bytes(layers), torch.ops.aten.mm.default
    found = []
    for saved in ((ATTENTION_OP,), (ATTENTION_OP, mm), (mm,)):
        grads, sent = _step(layers, _selective(*saved))
        found.append((_worst(grads, expected), sent - plain))
    return found, forward


def test_a_selective_checkpoint_that_saves_attention_is_obeyed() -> None:
    for found, forward in run_ranks(_policies, 2):
        assert found == [(0.0, 0), (0.0, 0), (0.0, forward)]


def _derived(rank: int) -> Any:
    """A checkpoint of someone's own, which gets the function that it runs."""

    class Module:
        @staticmethod
        def own(function: Wrapped, *args: Any) -> Tensor:
            return checkpoint(lambda *again: function(*again), *args, use_reentrant=True)

    follow_checkpoint_function(Module, "own")  # type: ignore[arg-type]
    layers = Layers(Strategy(keep_attention="all"))
    expected, plain = _step(layers, _plain)
    grads, sent = _step(layers, Module.own)
    return _worst(grads, expected), sent - plain


def test_a_function_of_ones_own_may_be_followed() -> None:
    assert run_ranks(_derived, 2) == [(0.0, 0)] * 2


def _largest_scores(rank: int, share: float | str) -> Any:
    """What attention returns besides is the same again."""
    layers, seen = Layers(Strategy(keep_attention=share)), []

    def layer(x: Tensor, weight: Tensor, sink: Tensor) -> Tensor:
        heads = (x @ weight).view(1, -1, HEADS, DIM)
        out, lse, largest = burst_attention(
            heads, heads, heads, layers.cp, return_lse=True, return_max_logits=True, sink=sink
        )
        seen.append((lse.detach().clone(), largest.detach().clone()))
        return out.reshape(x.shape)

    REENTRANT(layer, layers.x, layers.weights[0], layers.sinks[0]).sum().backward()
    (lse, largest), (lse_again, largest_again) = seen
    return float((lse - lse_again).abs().max()), float((largest - largest_again).abs().max())


@pytest.mark.parametrize("share", ["all", 0.5])
def test_lse_and_largest_scores_are_given_again(share: float | str) -> None:
    for found in run_ranks(_largest_scores, 2, share):
        assert max(found) < 1e-13


@pytest.mark.parametrize("wrapped", [REENTRANT, NON_REENTRANT], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("share", ["none", 0.5, "all"])
def test_lse_and_largest_scores_may_be_changed_in_place(share: float | str, wrapped: Wrapped) -> None:
    """What is kept, and what the backward pass reads, are others."""
    cp = ContextParallel(keep_attention=share)
    given = torch.randn(3, 1, 8, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def layer(in_place: bool, qkv: Tensor) -> Tensor:
        out, lse, largest = burst_attention(*qkv, cp, return_lse=True, return_max_logits=True)
        if in_place:
            lse.sub_(1.0)
            largest.mul_(2.0)
        else:
            lse, largest = lse - 1.0, largest * 2.0
        return out * lse.exp().transpose(1, 2).unsqueeze(-1) * largest[:, None]

    def grad(run: Wrapped, in_place: bool) -> Tensor:
        qkv = given.clone().requires_grad_()
        run(functools.partial(layer, in_place), qkv).square().sum().backward()
        assert qkv.grad is not None
        return qkv.grad

    torch.testing.assert_close(grad(wrapped, True), grad(_plain, False))


# ---------------------------------------------------------------------------------------------------- what is refused


def _mistakes(rank: int, mistake: str) -> str:
    layers, runs = Layers(Strategy(keep_attention="all")), []

    def layer(x: Tensor, weight: Tensor, sink: Tensor) -> Tensor:
        runs.append(1)
        heads = (x @ weight).view(1, -1, HEADS, DIM)
        mask = SlidingWindow(3) if mistake == "another mask" and len(runs) > 1 else Causal()
        for _ in range(2 if mistake == "one more" and len(runs) > 1 else 1):
            out = burst_attention(heads, heads, heads, layers.cp, sink=sink, mask=mask)
        if mistake == "in place":
            with torch.no_grad():
                out.mul_(2.0)
        return out.reshape(x.shape)

    try:
        REENTRANT(layer, layers.x, layers.weights[0], layers.sinks[0]).sum().backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("another mask", "computes another attention call again than it kept: mask differ"),
        ("one more", "makes call 2 to other ranks again, but made 1 the first time"),
        ("in place", "was modified in place inside a checkpoint"),
    ],
)
def test_calls_that_are_not_the_same_again_are_refused(mistake: str, said: str) -> None:
    for error in run_ranks(_mistakes, 2, mistake):
        assert said in error


@pytest.mark.parametrize("share", [-0.1, 1.5, "some", True, None, float("nan")])
def test_shares_that_are_none_are_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=r"keep_attention=.* is not valid; use 'none', 'all', or a share"):
        Strategy(keep_attention=share)


def _one_keeps(rank: int) -> str:
    try:
        cp = ContextParallel(dist.group.WORLD, strategy=Strategy(keep_attention="all" if rank else "none"))
        x = torch.zeros(1, 8, 2, 8)
        burst_attention(x, x, x, cp)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_that_keep_different_shares_are_refused() -> None:
    for error in run_ranks(_one_keeps, 2):
        assert "keep_attention" in error


@pytest.mark.parametrize("options", [{"keep_attention": "all"}, {"offload": True}])
def test_checkpoints_of_a_release_that_is_not_known_are_refused(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch 2.14 before it was known: what is followed was there, and no longer used."""
    monkeypatch.setattr(kept_attention, "are_followed", kept_attention.are_followed.__wrapped__)
    ContextParallel(**options).close()
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda function, x, **_: function(x))
    with pytest.raises(ValueError, match=r"keep_attention and offload are not supported with torch \d"):
        ContextParallel(**options)
    ContextParallel().close()


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters, reason="an option since torch 2.14"
)
@pytest.mark.parametrize("respects", [True, False])
def test_hooks_see_what_a_selective_checkpoint_saves_if_it_is_told_so(respects: bool) -> None:
    ContextParallel().close()
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x, packed = torch.ones(3, 3, requires_grad=True), list[Tensor]()

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        options: Any = {"context_fn": context, "respect_saved_tensors_hooks": respects}
        out = checkpoint(lambda x: (x @ x).exp(), x, use_reentrant=False, **options)
    assert any(torch.equal(each, x @ x) for each in packed) == respects
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(grad, torch.autograd.grad((x @ x).exp().sum(), x)[0])


def _first_ring_inside(rank: int) -> float:
    """The difference of a gradient from one without a checkpoint, whose first run makes the first ring."""

    def attend(x: Tensor) -> Tensor:
        return burst_attention(x, x, x, ContextParallel(None))

    grads = []
    for run in (REENTRANT, _plain):
        x = torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, HEADS, DIM).requires_grad_()
        run(attend, x).square().sum().backward()
        grads.append(x.grad)
    return float((grads[0] - grads[1]).norm() / grads[1].norm())


def test_the_first_ring_may_be_made_inside_a_checkpoint() -> None:
    assert run_ranks(_first_ring_inside, 1)[0] < 1e-6
