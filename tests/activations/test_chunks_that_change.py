"""Chunked losses, MLPs and heads under hooks and checkpoints, with changes between forward and backward.

Gradients are those of plain autograd under the same hooks, or the backward pass raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from burst_plugin import ContextParallel, burst_attention
from burst_plugin.activations import Head, linear_cross_entropy, token_log_probs
from burst_plugin.activations.chunked_heads import Linear, chunked_heads
from burst_plugin.activations.chunked_mlp import ChunkedForward, chunked_mlp
from burst_plugin.activations.recomputed_chunks import linear
from burst_plugin.activations.replaced_forward import restore_forward
from burst_plugin.activations.snapshot import Snapshot, leave_out_hooks

WIDTH, TOKENS, CHUNK = 8, 12, 5
LABELS = torch.arange(TOKENS) % WIDTH


class Block(torch.nn.Module):
    """A frozen layer with a hook, a trained adapter with attributes as in PEFT, a buffer, and a mode that matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.hook = self.base.register_forward_hook(lambda module, args, out: out * 2)
        self.adapter = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("gain", torch.rand(WIDTH, dtype=torch.float64) + 0.5)
        self.merged_adapters: list[str] = []
        self.active_adapters, self.disable_adapters, self.scaling = ["a"], False, {"a": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.base(x)) * self.gain
        if not self.disable_adapters and not self.merged_adapters:
            out = out + self.scaling[self.active_adapters[0]] * self.adapter(out)
        return out if self.training else out / 3


class Case:
    """One kind of chunks: `chunked` and `whole` compute the same numbers of a block's output."""

    def __init__(self, chunked: Callable[[Block, Tensor], Tensor], whole: Callable[[Block, Tensor], Tensor]) -> None:
        self.chunked, self.whole = chunked, whole


def _as_function(block: Block) -> Callable[[Tensor], Tensor]:
    return lambda x: block(x)


def _trained(block: Block) -> list[Tensor]:
    return [each for each in block.parameters() if each.requires_grad]


def _log_probs(head: Head, x: Tensor) -> Tensor:
    return torch.stack(token_log_probs(x, head, LABELS))


def _whole_log_probs(block: Block, x: Tensor) -> Tensor:
    log_p = block(x).log_softmax(-1)
    return torch.stack((log_p.gather(-1, LABELS[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))


@cache
def _cp() -> ContextParallel:
    return ContextParallel(None)


def _attend(block: Block, number: int, x: Tensor, linear: Linear) -> Tensor:
    heads = block(x).view(1, TOKENS, 2, WIDTH // 2)[:, :, number : number + 1]
    return burst_attention(heads, heads.square(), heads.sin(), _cp()).flatten(2)


def _in_heads(block: Block, x: Tensor, **options: Any) -> Tensor:
    return chunked_heads(partial(_attend, block), x, _trained(block), chunks=2, **options)


def _all_heads(block: Block, x: Tensor) -> Tensor:
    return torch.cat([_attend(block, number, x, linear) for number in range(2)], -1)


def _cross_entropy(block: Block, x: Tensor) -> Tensor:
    return F.cross_entropy(block(x), LABELS, reduction="none")


CASES = {
    "loss": Case(lambda block, x: linear_cross_entropy(x, Head(block, chunk=CHUNK), LABELS), _cross_entropy),
    "loss of a function": Case(
        lambda block, x: linear_cross_entropy(
            x, Head(_as_function(block), chunk=CHUNK, parameters=_trained(block)), LABELS
        ),
        _cross_entropy,
    ),
    "log-probabilities": Case(lambda block, x: _log_probs(Head(block, chunk=CHUNK), x), _whole_log_probs),
    "mlp": Case(
        lambda block, x: chunked_mlp(block, x, list(block.parameters()), chunk=CHUNK), lambda block, x: block(x)
    ),
    "mlp of a function": Case(
        lambda block, x: chunked_mlp(_as_function(block), x, _trained(block), chunk=CHUNK),
        lambda block, x: block(x),
    ),
    "mlp of a method": Case(
        lambda block, x: chunked_mlp(block.forward, x, _trained(block), chunk=CHUNK, module=block),
        lambda block, x: block(x),
    ),
    "heads": Case(lambda block, x: _in_heads(block, x, module=block), _all_heads),
    "heads of a function": Case(_in_heads, _all_heads),
}

Function = Callable[[Block, Tensor], Tensor]
Wrapper = Callable[[Function, Block, Tensor], Tensor]


def _under(context: Callable[[], AbstractContextManager[Any]]) -> Wrapper:
    def run(function: Function, block: Block, x: Tensor) -> Tensor:
        with context():
            return function(block, x)

    return run


def _checkpointed(reentrant: bool) -> Wrapper:
    return lambda function, block, x: checkpoint(function, block, x, use_reentrant=reentrant)


def _nested(outer: Wrapper, inner: Wrapper) -> Wrapper:
    return lambda function, block, x: outer(partial(inner, function), block, x)


_CLONING = _under(lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x))
PLAIN: dict[str, Wrapper] = {
    "none": _under(nullcontext),
    "identity hooks": _under(lambda: saved_tensors_hooks(lambda x: x, lambda x: x)),
    "cloning hooks": _CLONING,
    "save_on_cpu": _under(save_on_cpu),
    "non-reentrant": _checkpointed(False),
    "non-reentrant in non-reentrant": _nested(_checkpointed(False), _checkpointed(False)),
    "save_on_cpu in cloning hooks": _nested(_CLONING, _under(save_on_cpu)),
    "non-reentrant in save_on_cpu": _nested(_under(save_on_cpu), _checkpointed(False)),
    "save_on_cpu in non-reentrant": _nested(_checkpointed(False), _under(save_on_cpu)),
}
REENTRANT: dict[str, Wrapper] = {
    "reentrant": _checkpointed(True),
    "reentrant in non-reentrant": _nested(_checkpointed(False), _checkpointed(True)),
    "save_on_cpu in reentrant": _nested(_checkpointed(True), _under(save_on_cpu)),
}


@torch.no_grad()
def _scale(tensor: Tensor) -> None:
    tensor.mul_(1.5)


def _replace_base(block: Block) -> None:
    block.base.weight = torch.nn.Parameter(block.base.weight / 2, requires_grad=False)


def _replace_gain(block: Block) -> None:
    block.gain = block.gain / 2


def _add_hook(block: Block) -> None:
    block.adapter.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


NOTHING: Callable[[Block], object] = lambda block: None  # noqa: E731
CHANGES: dict[str, tuple[Callable[[Block], object], str]] = {
    "eval": (lambda block: block.eval(), "Block runs in chunks, .* training=False, which was True"),
    "trained weight": (lambda block: _scale(block.adapter.weight), r"adapter.weight \[8, 8\] .*modified in place"),
    "frozen weight": (lambda block: _scale(block.base.weight), r"parameter base.weight \[8, 8\] .*modified in place"),
    "buffer": (lambda block: _scale(block.gain), r"buffer gain \[8\] .*modified in place"),
    "another frozen weight": (_replace_base, "has another parameter base.weight than in the forward pass"),
    "another buffer": (_replace_gain, "has another buffer gain than in the forward pass"),
    "merged": (lambda block: block.merged_adapters.append("a"), r"merged_adapters=\['a'\], which was \[\]"),
    "disabled": (lambda block: setattr(block, "disable_adapters", True), "disable_adapters=True, which was False"),
    "scaled": (lambda block: block.scaling.update(a=3.0), r"scaling=\{'a': 3.0\}, which was \{'a': 2.0\}"),
    "removed hook": (lambda block: block.hook.remove(), "has other hooks on base than in the forward pass"),
    "added hook": (_add_hook, "has other hooks on adapter than in the forward pass"),
}


def _gradients(function: Function, wrapper: Wrapper, change: Callable[[Block], object]) -> list[Tensor] | str:
    """Return the gradients of the input and the trained parameters, or the error of the backward pass."""
    block = Block()
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64).requires_grad_()
    rows = x[0] if function not in _OF_BATCHES else x
    out = wrapper(function, block, rows * 1.0)
    change(block)
    try:
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in (x, *_trained(block))]


_OF_BATCHES = [each for name, case in CASES.items() if "heads" in name for each in (case.chunked, case.whole)]


def _differences(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / max(1e-9, b.norm())) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_gradients_under_hooks_and_checkpoints_are_those_of_plain_autograd(name: str) -> None:
    expected = _gradients(CASES[name].whole, PLAIN["none"], NOTHING)
    for wrapped, wrapper in (PLAIN | REENTRANT).items():
        found = _gradients(CASES[name].chunked, wrapper, NOTHING)
        assert isinstance(found, list), (wrapped, found)
        assert _differences(found, expected) < 1e-12, wrapped  # type: ignore[arg-type]


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", CASES)
def test_what_has_changed_by_the_backward_pass_is_named(name: str, what: str) -> None:
    change, message = CHANGES[what]
    for wrapped, wrapper in PLAIN.items():
        found = _gradients(CASES[name].chunked, wrapper, change)
        assert isinstance(found, str), wrapped
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(found)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", CASES)
def test_reentrant_checkpoints_recompute_what_has_changed(name: str, what: str) -> None:
    """As without chunks: such a checkpoint runs its function again as a whole."""
    change, _ = CHANGES[what]
    for wrapped, wrapper in REENTRANT.items():
        found, expected = (_gradients(each, wrapper, change) for each in (CASES[name].chunked, CASES[name].whole))
        assert isinstance(found, list), (wrapped, found)
        assert _differences(found, expected) < 1e-12, wrapped  # type: ignore[arg-type]


def test_hooks_outside_chunks_and_of_chunks_may_go_before_the_backward_pass() -> None:
    """The backward pass runs a module's `forward` again without the module's own hooks."""

    def replaced(block: Block, x: Tensor) -> Tensor:
        handle = block.register_forward_hook(lambda module, args, out: out * 3)
        block.base.forward = ChunkedForward(block.base, 2)  # type: ignore[method-assign]
        block.forward = ChunkedForward(block, CHUNK)  # type: ignore[method-assign]
        out: Tensor = block(x)
        handle.remove()
        restore_forward(block.base)
        return out

    found = _gradients(replaced, PLAIN["none"], NOTHING)
    assert isinstance(found, list), found
    expected = _gradients(lambda block, x: block(x) * 3, PLAIN["none"], NOTHING)
    assert _differences(found, expected) < 1e-12  # type: ignore[arg-type]


@pytest.mark.parametrize("home", ["harmless.profiler", "mine"])
def test_hooks_that_are_left_out_may_go_before_the_backward_pass(home: str) -> None:
    leave_out_hooks("harmless.")

    def replaced(block: Block, x: Tensor) -> Tensor:
        def hook(number: int, *_: object) -> None:
            """Change nothing."""

        hook.__module__ = home
        handle = block.base.register_forward_hook(partial(hook, 1))
        block.forward = ChunkedForward(block, CHUNK)  # type: ignore[method-assign]
        out: Tensor = block(x)
        handle.remove()
        return out

    found = _gradients(replaced, PLAIN["none"], NOTHING)
    assert isinstance(found, list) == (home != "mine"), found


IN_GLOBALS = Block()


class _Owner:
    """Not a module: what it holds is found through its methods."""

    def __init__(self) -> None:
        self.block = Block()

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


def _by_default(x: Tensor, blocks: dict[str, list[Block]] | None = None) -> Tensor:
    assert blocks is not None
    return blocks["only"][0].forward(x)


@pytest.mark.parametrize("place", ["globals", "object", "partial", "closure", "tensor"])
def test_what_a_function_reads_is_found_where_it_refers_to_it(place: str) -> None:
    owner, block = _Owner(), Block()
    functions: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "globals": (lambda x: IN_GLOBALS(x), IN_GLOBALS.gain),
        "object": (owner.run, owner.block.gain),
        "partial": (partial(_by_default, blocks={"only": [block]}), block.gain),
        "closure": (lambda x: _by_default(x, {"only": [block]}), block.gain),
        "tensor": (lambda x: x * block_gain, block_gain := torch.rand(WIDTH, dtype=torch.float64)),
    }
    function, tensor = functions[place]
    snapshot = Snapshot.of(function, [])
    snapshot.check()
    _scale(tensor)
    with pytest.raises(RuntimeError, match=r"\[8\] of what runs in chunks, .* was modified in place"):
        snapshot.check()
