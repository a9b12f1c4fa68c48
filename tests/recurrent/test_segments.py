"""Kernels whose offsets are 32-bit integers run on parts of pieces: what they are given, results, calls, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin import ContextParallel, Documents, Tokens, recurrent
from burst_plugin.recurrent import segments
from burst_plugin.recurrent.delta_pairs import pair_by_kernel
from burst_plugin.recurrent.kernels.convolution import causal_convolution
from burst_plugin.recurrent.kernels.delta_rule import delta_rule
from burst_plugin.recurrent.kernels.state_space import state_space
from burst_plugin.recurrent.segments import in_segments
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import run_ranks

HEADS, KEYS, VALUES = 4, 3, 5
KERNELS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"delta_rule": delta_rule, "state_space": state_space}
LIMIT = 200


@pytest.fixture(autouse=True)
def _fine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "STEP", 4)
    monkeypatch.setattr(segments, "CHUNK", 4)


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """Return x [N, L, ...] with heads before tokens in memory, or as one token that stands for all."""
    if layout == "heads first" and x.dim() > 2:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x[:, :1].expand_as(x) if layout == "expanded" else x


def _drawn(kind: str, rows: int, tokens: int, layout: str = "tokens first") -> list[Tensor]:
    """Return a kernel's tensors, and the states that rows begin with."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=draw, dtype=torch.float64)

    if kind == "delta_rule":
        xs = [0.3 * drawn(tokens, HEADS, KEYS), 0.3 * drawn(tokens, HEADS, KEYS), drawn(tokens, HEADS, VALUES)]
        xs += [-drawn(tokens, HEADS).abs(), drawn(tokens, HEADS).sigmoid()]
        state = drawn(HEADS, KEYS, VALUES)
    else:
        xs = [drawn(tokens, HEADS, VALUES), drawn(tokens, HEADS).abs()]
        xs += [drawn(tokens, 2, KEYS), drawn(tokens, 2, KEYS)]
        state = drawn(HEADS, VALUES, KEYS)
    xs = [_laid_out(x, layout) for x in xs]
    if kind == "state_space":
        xs.insert(2, -torch.rand(HEADS, generator=draw, dtype=torch.float64))
    return [*xs, state]


def _results(compute: Callable[..., Any], xs: Sequence[Tensor], begins: bool) -> list[Tensor]:
    """Return outputs, the states that leave, and all gradients of drawn ones of both."""
    leaves = [x.detach().requires_grad_() for x in xs]
    both = compute(*leaves[:-1], leaves[-1] if begins else None)
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in both]
    return [*both, *torch.autograd.grad(both, leaves[: None if begins else -1], grads)]


class _Counted:
    """A kernel of a library, which counts elements from the first to the last one of each tensor that it is given."""

    def __init__(self, kernel: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.kernel, self.most, self.shapes = kernel, 0, list[tuple[int, ...]]()

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        xs = [x for x in arguments[:-1] if x.dim() > 1]
        self.shapes.append(tuple(xs[0].shape[:2]))
        for x in xs:
            reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            self.most = max(self.most, reach + 1, x.numel())
        out, state = self.kernel(*arguments)
        self.most = max(self.most, xs[0].shape[0] * -(-xs[0].shape[1] // segments.CHUNK) * state[0].numel())
        return out, state


@pytest.mark.parametrize("begins", [False, True], ids=["from zero", "from states"])
@pytest.mark.parametrize("layout", ["tokens first", "heads first", "expanded"])
@pytest.mark.parametrize("shape", [(1, 37), (3, 37), (5, 4), (9, 1), (2, 8)], ids=str)
@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_are_given_no_more_than_they_can_count(
    kind: str, shape: tuple[int, int], layout: str, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs, kernel = _drawn(kind, *shape, layout), _Counted(KERNELS[kind])
    expected = _results(KERNELS[kind], xs, begins)
    monkeypatch.setattr(segments, "OFFSETS", LIMIT)
    found = _results(in_segments(kernel), xs, begins)
    again = _results(lambda *each: checkpoint(in_segments(kernel), *each, use_reentrant=False), xs, begins)

    assert kernel.most < LIMIT
    assert len(kernel.shapes) > 1
    for one, other, true in zip(found, again, expected, strict=True):
        torch.testing.assert_close(one, true, rtol=1e-12, atol=1e-12)
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KERNELS)
def test_what_can_be_counted_is_computed_at_once(kind: str) -> None:
    xs, kernel = _drawn(kind, 3, 37, "heads first"), _Counted(KERNELS[kind])
    in_segments(kernel)(*xs)

    assert kernel.shapes == [(3, 37)]


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_rows_share_calls(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each row would have gradients of the size of all rows each."""
    tokens, most = 2**12 // rows, 2**11 - 4
    xs = _drawn("delta_rule", rows, tokens)
    monkeypatch.setattr(segments, "OFFSETS", 2**11 * HEADS * VALUES)
    kernel, saved = _Counted(_copied), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        _results(in_segments(kernel), xs, True)

    assert len(kernel.shapes) == -(-rows // max(1, most // tokens)) * -(-tokens // most) <= 3
    assert len(saved) == 5 * len(kernel.shapes)


class _Copy(torch.autograd.Function):
    """A kernel in no more memory than outputs, states and gradients take."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, g, beta)
        return v.clone(), v.new_zeros((len(v), v.shape[2], q.shape[3], v.shape[3]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ones_like(x) for x in ctx.saved_tensors)


def _copied(*arguments: Tensor | None) -> tuple[Tensor, Tensor]:
    out, state = _Copy.apply(*arguments[:5])  # type: ignore[no-untyped-call]
    return out, state if arguments[5] is None else state + arguments[5]


@pytest.mark.parametrize("rows", [1, 3])
def test_segments_take_little_more_memory(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the outputs, and above gradients that of one tensor, which are joined one after another."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(rows, 1024, 8, 32, generator=draw, requires_grad=True) for _ in range(3)]
    xs += [torch.randn(rows, 1024, 8, generator=draw, requires_grad=True) for _ in range(2)]
    monkeypatch.setattr(segments, "OFFSETS", 208 * 8 * 32 * 32 // segments.CHUNK + 1)
    kernel, size = _Counted(_copied), xs[0].nbytes
    with LiveBytes() as forward:
        out, _ = in_segments(kernel)(*xs, None)
    grad = torch.ones_like(out)
    with LiveBytes() as backward:
        torch.autograd.backward(out, grad)

    assert len(kernel.shapes) == 5 * rows
    assert forward.peak < 2.2 * size
    assert backward.peak < 4.2 * size


def test_maps_of_states_join_no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = _drawn("delta_rule", 1, 400)[:-1]
    expected = pair_by_kernel(delta_rule, *xs)
    peaks = []
    for offsets in (2**31, 100 * HEADS * (KEYS + VALUES)):
        monkeypatch.setattr(segments, "OFFSETS", offsets)
        kernel = _Counted(_copied)
        with LiveBytes() as live:
            pair_by_kernel(kernel, *xs)
        peaks.append(live.peak)
    found = pair_by_kernel(delta_rule, *xs)

    assert len(kernel.shapes) > 4
    assert peaks[1] < peaks[0]
    for one, true in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("heads", "groups", "states", "least"),
    [(256, 8, 256, 65_280), (128, 8, 128, 209_664), (80, 2, 128, 381_184), (128, 2, 128, 246_528)],
    ids=["Nemotron-H 56B", "Nemotron-H 8B", "Mamba-2 2.7B", "Granite 4"],
)
def test_state_spaces_are_not_cut_long_before_their_offsets_end(
    heads: int, groups: int, states: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels keep a state for each chunk of 128 tokens; half as many tokens are well on the safe side.

    least: tokens from which the largest tensor of the kernel has 2**31 elements.
    """
    monkeypatch.undo()

    def calls(tokens: int) -> int:
        both = torch.empty(1, tokens, heads * 64 + groups * states, device="meta")
        x, B = both[..., : heads * 64].unflatten(-1, (heads, 64)), both[..., heads * 64 :]
        B = B.unflatten(-1, (groups, states))
        kernel = _Counted(lambda x, *_: (x, x.new_zeros((1, heads, 64, states))))
        in_segments(kernel)(x, x[..., 0], B, B, None)
        return len(kernel.shapes)

    assert calls(least // 2 - 256) == 1
    assert calls(least + 256) > 1


class _Noted(torch.autograd.Function):
    """A tensor as it is, noting how many tokens each pass has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passes: list[tuple[str, int]]) -> Tensor:
        ctx.passes = passes
        passes.append(("forward", x.shape[1]))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.passes.append(("backward", grad.shape[1]))
        return grad, None


def _looking_back(rank: int, offsets: int, width: int) -> tuple[list[tuple[str, int]], list[Tensor]]:
    """Return how many tokens each pass of a function has on a rank, and its outputs and gradients."""
    segments.OFFSETS = offsets
    cp = ContextParallel(dist.group.WORLD)
    tokens = Tokens(42, holders=(0, 1, 2), bounds=(0, 40, 42, 42))
    mask = Documents((*range(0, 42, 2), 42))
    draw = torch.Generator().manual_seed(0)
    x = cp.shard(torch.randn(1, 42, 5, generator=draw, dtype=torch.float64), 1, tokens).requires_grad_()
    weight = torch.randn(5, width + 1, generator=draw, dtype=torch.float64, requires_grad=True)
    passes: list[tuple[str, int]] = []

    def convolve(x: Tensor) -> Tensor:
        return causal_convolution(_Noted.apply(x, passes), weight)  # type: ignore[no-untyped-call]

    out = recurrent.with_tokens_before(convolve, x, width, recurrent.Placement(cp, mask, tokens))
    return passes, [out.detach(), *torch.autograd.grad(out, [x, weight], torch.cos(out.detach()))]


@pytest.mark.parametrize("width", [0, 3])
def test_ranks_call_functions_that_look_back_equally_often(width: int) -> None:
    """They may communicate, as parameters in shards do; a rank may have many pieces, few, or none."""
    at_once = run_ranks(_looking_back, 3, 2**31, width)
    in_turn = run_ranks(_looking_back, 3, 20 * 5, width)

    assert [len(passes) for passes, _ in at_once] == [2, 2, 2]
    kinds = [[kind for kind, _ in passes] for passes, _ in in_turn]
    assert kinds[0] == kinds[1] == kinds[2]
    assert len(kinds[0]) > 4
    assert max(count for passes, _ in in_turn for _, count in passes) < 20
    for (_, found), (_, expected) in zip(in_turn, at_once, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
