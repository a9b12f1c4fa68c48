"""An MLP on chunks of tokens: its intermediate [tokens, ffn] never exists whole, in neither direction.

Tokens do not meet in an MLP, nor in a norm, which runs in chunks by the same functions. The forward pass keeps
nothing but the input; the backward pass computes one chunk again, differentiates it, and goes on to the next
(Blockwise Parallel Transformer, arXiv 2305.19370; TiledMLP in ALST, 2506.13996). Parameter gradients are summed over
chunks in float32 and reach autograd once, so that hooks which reduce them over ranks run once for each parameter, as
without chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_plugin.activations.recomputed_chunks import (
    GradientSums,
    Surroundings,
    adds_nothing_itself,
    check_all_are_listed,
    gradients_of,
    in_one_call,
    is_unit,
    trained_among,
)
from burst_plugin.activations.replaced_forward import ReplacedForward
from burst_plugin.activations.snapshot import Snapshot
from burst_plugin.checks import shown, whole_number

_UNLISTED = "use mlp_chunk=0, or list it in `parameters` of `chunked_mlp`"


@dataclass(frozen=True)
class _Call:
    """The function to run, and its chunks; see `chunked_mlp`."""

    mlp: Callable[[Tensor], Tensor]
    chunk: int
    adds_itself: Callable[[Tensor], bool]
    token_dims: int

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the tokens of `x` in chunks [1, chunk, H] or, for two dimensions, [chunk, H]; views of a dense x."""
        ones = (1,) * (x.dim() - 1 - self.token_dims)
        return torch.split(x.reshape(*ones, -1, *x.shape[-self.token_dims :]), self.chunk, -1 - self.token_dims)

    def begin(self, hidden: Tensor) -> Tensor:
        """Return room for the output of all tokens, without a graph, in which only the first chunk is computed."""
        out = self._checked(self.pieces(hidden)[0])
        output = out.new_empty((*hidden.shape[:-1], out.shape[-1]))  # no view, so that a model may add to it in place
        rows = out.reshape(-1, out.shape[-1])
        output.view(-1, out.shape[-1])[: len(rows)] = rows
        return output

    def finish(self, hidden: Tensor, whole: Tensor) -> Tensor:
        """Compute the other chunks of the output that `begin` returned; return it."""
        table, pieces = whole.view(-1, whole.shape[-1]), self.pieces(hidden)
        start = pieces[0].shape[:-1].numel()
        for piece in pieces[1:]:
            rows = self._checked(piece).reshape(-1, whole.shape[-1])
            table[start : start + len(rows)] = rows
            start += len(rows)
        return whole

    def _checked(self, piece: Tensor) -> Tensor:
        out = self.mlp(piece)
        if not isinstance(out, Tensor) or out.shape[:-1] != piece.shape[:-1]:
            got = shown(out) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"an MLP in chunks returned {got} for {list(piece.shape)}, expected one tensor with a row for each "
                "token: it cannot be cut into chunks of tokens; use mlp_chunk=0"
            )
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked_mlp(
    mlp: Callable[[Tensor], Tensor],
    hidden: Tensor,
    parameters: Sequence[Tensor],
    *,
    chunk: int,
    adds_itself: Callable[[Tensor], bool] = adds_nothing_itself,
    token_dims: int = 1,
    module: torch.nn.Module | None = None,
) -> Tensor:
    """Return `mlp(hidden)`, computed on at most `chunk` tokens at a time, forward and backward.

        out = chunked_mlp(block.mlp, hidden, list(block.mlp.parameters()), chunk=4096)

    Args:
        mlp: takes and returns one tensor, with a row for each token. It is called again in the backward pass, with
            the random state and under the autocast of the forward pass. A unit of `fully_shard` is called once, and
            its `forward` for the chunks, with the unit's own parameters.
        hidden: [B, S, H], [S, B, H] or [tokens, H]; the only activation kept for the backward pass.
        parameters: all tensors that `mlp` differentiates besides its argument. Those that need no gradient may be
            among them, and one may be there twice, as tied weights are.
        chunk: the most tokens, of all B rows together, in one call, which gets them as [1, chunk, H], or [chunk, H]
            if `hidden` has two dimensions.
        adds_itself: takes a parameter, and returns whether the backward pass of `mlp` adds its gradient up by itself,
            in a buffer of its own; the gradient that autograd gets is then meaningless, and is passed on unchanged.
        token_dims: how many of the last dimensions one token has: 2 for [B, S, heads, D], cut into
            [1, chunk, heads, D].
        module: the module that `mlp` runs, if `mlp` is a function; by default the modules that it refers to. The
            backward pass compares their tensors, attributes and hooks with those of the forward pass.

    Raises ValueError for a chunk that is not a positive number, and if `mlp` returns anything but a row per token. In
    the backward pass, raises ValueError if `mlp` uses a trained tensor that is not listed, and RuntimeError if a
    tensor that `mlp` reads, trained or not, has been modified in place since, or if a module has other tensors,
    another mode, other adapters or other hooks than in the forward pass.
    """
    chunk = whole_number("chunk={}", chunk, "use a positive number of tokens", least=1)
    if is_unit(mlp):
        unit: Any = mlp

        def computed(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            whole = list(unit.parameters())
            of_rows: Tensor = chunked_mlp(
                forward, x, whole, chunk=chunk, adds_itself=adds_itself, token_dims=token_dims
            )
            return of_rows

        out: Tensor = in_one_call(unit, hidden, computed)
        return out
    trained = trained_among(parameters)
    differentiates = torch.is_grad_enabled() and (hidden.requires_grad or bool(trained))
    call = _Call(mlp, chunk, adds_itself, token_dims)
    if differentiates:
        read = Snapshot.of(mlp, parameters, module)
        begun: Tensor = _MLPByChunk.apply(call, read, hidden, *trained)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            call.finish(hidden, begun)
        return begun
    return call.finish(hidden, call.begin(hidden))


class _MLPByChunk(torch.autograd.Function):
    """One step of autograd for all chunks, whose forward computes only the first one.

    Activation checkpoints of PyTorch that are not reentrant end a layer's recomputation as soon as it has saved its
    last tensor, which for most layers is the input of their MLP. So the other chunks are not computed in vain.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, read: Snapshot, hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.call, ctx.trained, ctx.surroundings = call, trained, Surroundings.of(hidden, read)
        ctx.save_for_backward(hidden)
        return call.begin(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        call, sums = ctx.call, GradientSums(ctx.trained, ctx.call.adds_itself)
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        rows, start = grad_hidden.view(-1, hidden.shape[-1]), 0
        with ctx.surroundings.again(), sums.collecting():
            for piece, grad in zip(call.pieces(hidden), call.pieces(grad_out), strict=True):
                of_piece, *of_trained = _differentiate(ctx, piece, grad, check=not start)
                sums.add(of_trained)
                stop = start + piece.shape[:-1].numel()
                rows[start:stop] = 0 if of_piece is None else of_piece.reshape(-1, hidden.shape[-1])
                start = stop
        return None, None, grad_hidden if ctx.needs_input_grad[2] else None, *sums.cast()


def _differentiate(ctx: Any, piece: Tensor, grad: Tensor, *, check: bool) -> list[Tensor | None]:
    """Compute one chunk again; return the gradients of its tokens, None if not wanted, and of each parameter.

    A function of its own, so that the graph of a chunk is gone before the graph of the next is made.
    """
    trained, wants_piece = ctx.trained, ctx.needs_input_grad[2]
    piece = piece.detach().requires_grad_(wants_piece)
    with torch.enable_grad():
        out = ctx.call.mlp(piece)
    if check:
        check_all_are_listed(out, [piece, *trained], "an MLP in chunks", _UNLISTED)
    if not out.requires_grad:
        return [None] * (1 + len(trained))
    inputs = [piece, *trained] if wants_piece else [*trained]
    found = gradients_of(out, inputs, grad)
    return [*found] if wants_piece else [None, *found]


class ChunkedForward(ReplacedForward):
    """Runs the `forward` of one module on at most `chunk` tokens at a time.

        mlp.forward = ChunkedForward(mlp, chunk=4096)

    few_at_once: whether a call with no more tokens than a chunk runs as it would without chunks.
    """

    few_at_once = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler may keep what is to be computed again
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` in chunks. Raise ValueError for a second tensor, which would have to be cut too."""
        if any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
            raise ValueError(
                f"{type(self.module).__name__} in chunks got more than one tensor, of which one can be cut; "
                "use mlp_chunk=0"
            )
        if self.few_at_once and hidden_states.shape[:-1].numel() <= self.chunk:
            return self.earlier(hidden_states, *args, **kwargs)

        def run(piece: Tensor) -> Tensor:
            out: Tensor = self.earlier(piece, *args, **kwargs)
            return out

        parameters = list(self.module.parameters())
        return chunked_mlp(run, hidden_states, parameters, chunk=self.chunk, module=self.module)
