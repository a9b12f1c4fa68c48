"""Long pieces computed in segments, for kernels of other libraries whose offsets are 32-bit integers.

mamba-ssm, and flash-linear-attention before 0.6, count elements of a tensor in int32: from 2**31 elements on, which a
piece of some hundred thousand tokens has, they read and write elsewhere (state-spaces/mamba#1015,
fla-org/flash-linear-attention#1080), and 0.6 where it finds maps of states (`fla.ops.cp`). causal-conv1d counts in
uint32. A segment goes on from the state that the one before it leaves, or takes the tokens before it along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from burst_plugin.recurrent.ways import Kernel

OFFSETS = 2**31  # elements of a tensor that a kernel can count
STEP = 256  # a multiple of the tokens in a chunk of the libraries' kernels
CHUNK = 64  # the fewest tokens for which kernels keep a state


def countable_tokens(elements: int) -> int:
    """Return how many tokens with so many elements each a kernel can count, a multiple of `STEP`."""
    return max(1, (OFFSETS - 1) // elements // STEP) * STEP


def in_segments(kernel: Kernel) -> Kernel:
    """Return a kernel that runs `kernel` on as many rows and tokens at a time as its offsets reach.

    kernel: `kernel(*tensors, initial_state)`, of pieces [N, L, ...]; tensors with one dim have no tokens. Returns
        outputs [N, L, ...] and the states that leave pieces, as many numbers as `initial_state`.
    """

    def run(*arguments: Tensor | None) -> tuple[Tensor, Tensor]:
        xs = [x for x in arguments[:-1] if x is not None and x.dim() > 1]
        (count, tokens), most = xs[0].shape[:2], _most_tokens(xs)
        chunks = -(-tokens // CHUNK)  # of a row, each with a state, however short it is
        rows = max(1, most // (chunks * CHUNK))
        if count <= rows and tokens <= most:
            return kernel(*arguments)
        results = [_one_after_another(kernel, each, most) for each in _cut(arguments, rows, 0)]
        return _joined([out for out, _ in results], 0), _joined([state for _, state in results], 0)

    return run


def looking_back(
    function: Callable[[list[Tensor]], Tensor], xs: Sequence[Tensor], width: int, longest: int = 0
) -> Tensor:
    """Return function(xs), [B, T, ...], computed on as many tokens at a time as offsets of kernels reach.

    function: causal, looks back at most `width` tokens. xs: [B, T, ...].
    longest: the most tokens that any rank has. Ranks call `function`, which may communicate, equally often.
    """
    count, tokens = xs[0].shape[:2]
    widest = max(max(x.stride(1), x.shape[2:].numel()) for x in xs)
    most = max(STEP, (countable_tokens(widest) - width) // STEP * STEP)
    longest = max(longest, tokens)
    if count * longest <= most:
        return function([*xs])
    if count > 1:
        rows = zip(*(torch.split(x, 1) for x in xs), strict=True)
        return torch.cat([looking_back(function, row, width, longest) for row in rows])
    outputs = []
    for start in range(0, longest, most):
        first = min(start, tokens)
        before = min(first, max(1, width))  # at least a token, where none is left
        out = function([_dense(x[:, first - before : start + most]) for x in xs])
        outputs.append(out[:, before:])
    return torch.cat(outputs, 1)


def _one_after_another(kernel: Kernel, arguments: Sequence[Tensor | None], most: int) -> tuple[Tensor, Tensor]:
    """Return what `kernel` does, run on at most `most` tokens at a time."""
    *tensors, state = arguments
    outputs = []
    for segment in _cut(tensors, most, 1):
        out, state = kernel(*(None if x is None else _dense(x) for x in segment), state)
        outputs.append(out)
    return _joined(outputs, 1), state  # type: ignore[return-value]


def _cut(xs: Sequence[Tensor | None], size: int, dim: int) -> list[tuple[Tensor | None, ...]]:
    """Return parts of tensors, of at most `size` along `dim`; parameters are in every part.

    The gradient of a split is one concatenation, where that of a slice would be as large as its tensor.
    """
    first = next(x for x in xs if x is not None and x.dim() > 1)
    parts = -(-first.shape[dim] // size)
    if parts == 1:
        return [tuple(xs)]
    cuts = [(x,) * parts if x is None or x.dim() == 1 else torch.split(x, size, dim) for x in xs]
    return list(zip(*cuts, strict=True))


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat([*parts], dim) if len(parts) > 1 else parts[0]


def _dense(x: Tensor) -> Tensor:
    """Return x [N, L, ...] so that each token ends in memory before the next one begins; a parameter as is."""
    if x.dim() == 1:
        return x
    last = sum((size - 1) * stride for size, stride in zip(x.shape[2:], x.stride()[2:], strict=True))
    return x if x.stride(1) > last else x.contiguous()


def _most_tokens(xs: Sequence[Tensor]) -> int:
    """Return the most tokens whose tensors and states can be counted, see `countable_tokens`."""
    heads = max(x.shape[2] for x in xs)
    widest = max(max(x.stride(1), x.shape[2:].numel()) for x in xs)
    # The first one is as wide as states are high: q or k of a delta rule, x of a state space.
    of_states = heads * xs[0].shape[3] * max(x.shape[3] for x in xs[1:] if x.dim() == 4) // CHUNK
    of_chunks = heads * CHUNK  # of the products of a chunk's tokens with each other
    return countable_tokens(max(widest, of_states, of_chunks))
