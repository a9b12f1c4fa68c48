"""Attention on a few heads of a layer at a time: projected, exchanged, attended to, and let go again.

Queries, keys and values of all heads never exist at once, nor do their gradients or the ring's buffers for them. The
forward pass keeps the layer's input and the attention outputs of every chunk of heads; the backward pass
projects one chunk again, differentiates it, and goes on to the next (Untied Ulysses, arXiv 2602.21196). The ring does
not run forward again for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_plugin.activations.kept_attention import KeptCalls
from burst_plugin.activations.recomputed_chunks import (
    GradientSums,
    Surroundings,
    check_all_are_listed,
    gradients_of,
    linear,
    summed_linear,
    trained_among,
    wide_dtype,
)
from burst_plugin.activations.snapshot import Snapshot

Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
Attend = Callable[[int, Tensor, Linear], Tensor]
_UNLISTED = "use head_chunk=0, or list it in `parameters` of `chunked_heads`"


def chunked_heads(
    attend: Attend,
    hidden: Tensor,
    parameters: Sequence[Tensor],
    *,
    chunks: int,
    module: torch.nn.Module | None = None,
) -> Tensor:
    """Return the attention outputs of all heads of a layer, one chunk of heads at a time, forward and backward.

        heads = chunked_heads(attend, hidden, list(projections.parameters()), chunks=4)
        out = output_projection(heads)

    Args:
        attend: takes the number of a chunk, the hidden states, and a function to use in place of `F.linear`; returns
            the output of `burst_attention` for the heads of that chunk, [..., heads of the chunk * D]. It is called
            again in the backward pass, with the random state and under the autocast of the forward pass, and has to
            make the same calls of attention.
        hidden: [..., H]; every chunk gets all of it.
        parameters: all tensors besides `hidden` that `attend` differentiates. Tensors that need no gradient may be
            among them, and a tensor may be listed twice, as tied weights are.
        chunks: the number of chunks.
        module: the module that `attend` runs; by default the modules that it refers to. The backward pass compares
            their tensors, attributes and hooks with the forward pass.

    Returns:
        [..., heads * D], the chunks side by side.

    Raises:
        ValueError: in the backward pass, if `attend` uses a trained tensor that is not listed.
        RuntimeError: in the backward pass, if a tensor that `attend` reads, trained or not, has been modified in
            place since, or if a module has other tensors, another mode, other adapters or other hooks than in the
            forward pass.
    """
    trained = trained_among(parameters)
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        read = Snapshot.of(attend, parameters, module)
        out: Tensor = _HeadsByChunk.apply(attend, chunks, read, hidden, *trained)  # type: ignore[no-untyped-call]
        return out
    return torch.cat([attend(number, hidden, linear) for number in range(chunks)], -1)


class _HeadsByChunk(torch.autograd.Function):
    """One step of autograd for all chunks."""

    @staticmethod
    def forward(ctx: Any, attend: Attend, chunks: int, read: Snapshot, hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.attend, ctx.trained, ctx.surroundings = attend, trained, Surroundings.of(hidden, read)
        ctx.kept = [KeptCalls() for _ in range(chunks)]
        all_heads: Tensor | None = None
        for number, kept in enumerate(ctx.kept):
            with kept.first_run():
                out = attend(number, hidden, linear)
            width = out.shape[-1]
            if all_heads is None:
                all_heads = out.new_empty((*out.shape[:-1], width * chunks))
            all_heads[..., number * width : (number + 1) * width] = out
            del out
        assert all_heads is not None  # there is one chunk at least
        # Saved by autograd, so that a checkpoint around the layer can drop and recompute them.
        ctx.save_for_backward(hidden, *(x for kept in ctx.kept for x in kept.release()))
        return all_heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *saved = ctx.saved_tensors
        wants_hidden, sums = ctx.needs_input_grad[3], GradientSums(ctx.trained)
        total = torch.zeros_like(hidden, dtype=wide_dtype(hidden.dtype)) if wants_hidden else None
        with ctx.surroundings.again(), sums.collecting():
            for number, (kept, grad) in enumerate(zip(ctx.kept, grad_out.chunk(len(ctx.kept), -1), strict=True)):
                kept.restore(saved)
                sums.add(_differentiate(ctx, number, hidden, grad, total))
                kept.release()
        return None, None, None, None if total is None else total.to(hidden.dtype), *sums.cast()


def _differentiate(ctx: Any, number: int, hidden: Tensor, grad: Tensor, total: Tensor | None) -> list[Tensor | None]:
    """Compute a chunk again; add the gradient of hidden states to `total`, and return the gradients of parameters.

    A function of its own, so that the graph of a chunk is gone before the graph of the next is made.
    """
    hidden = hidden.detach().requires_grad_(total is not None)
    with torch.enable_grad(), ctx.kept[number].second_run():
        out = ctx.attend(number, hidden, linear if total is None else partial(_linear, total, hidden))
    if not number:
        check_all_are_listed(out, [hidden, *ctx.trained], "attention on a few heads at a time", _UNLISTED)
    inputs = [*ctx.trained] if total is None else [hidden, *ctx.trained]
    grads: list[Tensor | None] = gradients_of(out, inputs, grad)
    of_hidden = None if total is None else grads.pop(0)
    if total is not None and of_hidden is not None:  # from operations other than `linear`
        total += of_hidden
    return grads


def _linear(total: Tensor, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)`. If x is `hidden`, the backward pass adds its gradient to `total`.

    Autograd, which gets no gradient then, would add up the gradients of several projections in new tensors, each
    rounded, three at once.
    """
    if x is not hidden or torch.is_autocast_enabled(x.device.type):
        return linear(x, weight, bias)
    return summed_linear(x, weight, bias, x_sum=lambda: total)
