"""Long pieces computed in segments, for kernels of other libraries whose offsets are 32-bit integers.

mamba-ssm, and flash-linear-attention before 0.6, count elements of a tensor in int32: from 2**31 elements on, which a
piece of some hundred thousand tokens has, they read and write elsewhere (state-spaces/mamba#1015,
fla-org/flash-linear-attention#1080). causal-conv1d counts in uint32. A segment goes on from the state that the one
before it leaves, or takes the tokens before it along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from burst_plugin.recurrent.ways import Kernel

OFFSETS = 2**31  # elements of a tensor that a kernel can count
STEP = 256  # a multiple of the tokens in a chunk of the libraries' kernels
_CHUNK = 64  # the fewest tokens for which kernels keep a state


def in_segments(kernel: Kernel) -> Kernel:
    """Return a kernel that runs `kernel` on as many tokens at a time as its offsets reach.

    kernel: `kernel(*tensors, initial_state)`, of pieces [N, L, ...]; tensors with one dim have no tokens. Returns
        outputs [N, L, ...] and the states that leave pieces, as many numbers as `initial_state`.
    """

    def run(*arguments: Tensor | None) -> tuple[Tensor, Tensor]:
        *tensors, state = arguments
        most = _most_tokens([x for x in tensors if x is not None and x.dim() > 1])
        first = next(x for x in tensors if x is not None)
        count, tokens = first.shape[:2]
        if count * tokens <= most:
            return kernel(*arguments)
        outputs, states = [], []
        for row in range(count):
            entering = None if state is None else state[row : row + 1]
            of_row = []
            for start in range(0, tokens, most):
                pieces = (_segment(x, row, start, start + most) for x in tensors)
                out, entering = kernel(*pieces, entering)
                of_row.append(out)
            outputs.append(torch.cat(of_row, 1))
            states.append(entering)
        return torch.cat(outputs), torch.cat(states)  # type: ignore[arg-type]

    return run


def looking_back(function: Callable[[list[Tensor]], Tensor], xs: Sequence[Tensor], width: int) -> Tensor:
    """Return function(xs), [1, T, ...], computed on as many tokens at a time as offsets of kernels reach.

    function: causal, looks back at most `width` tokens. xs: [1, T, ...].
    """
    tokens = xs[0].shape[1]
    most = max(1, ((OFFSETS - 1) // max(1, *(x.stride(1) for x in xs)) - width) // STEP) * STEP
    if tokens <= most:
        return function([*xs])
    outputs = []
    for start in range(0, tokens, most):
        before = min(start, width)
        out = function([x[:, start - before : start + most] for x in xs])
        outputs.append(out[:, before:])
    return torch.cat(outputs, 1)


def _segment(x: Tensor | None, row: int, start: int, stop: int) -> Tensor | None:
    return x if x is None or x.dim() == 1 else x[row : row + 1, start:stop]


def _most_tokens(tensors: list[Tensor]) -> int:
    """Return the most tokens, a multiple of `STEP`, whose tensors and states have fewer than `OFFSETS` elements."""
    widest = max(x.stride(1) for x in tensors)
    heads = max(x.shape[2] for x in tensors)
    widths = sorted(x.shape[3] for x in tensors if x.dim() == 4)[-2:]
    of_states = heads * widths[0] * widths[-1] // _CHUNK
    return max(1, (OFFSETS - 1) // max(1, widest, of_states) // STEP) * STEP
