"""The short causal convolution that layers with a state have before it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve each channel along the sequence with the tokens before it, and zeros before the first.

    `x` is [N, T, C], `weight` [C, W], whose last column is the token's own, `bias` [C]; `activation` is None, "silu"
    or "swish", two names of one function. Returns [N, T, C] in the type of `x`.

    Raises ValueError for other activations.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'activation is {activation!r}, not None, "silu" or "swish"')
    if not x.numel():
        return x
    channels, width = weight.shape
    out = F.conv1d(F.pad(x.mT, (width - 1, 0)), weight.unsqueeze(1), bias, groups=channels).mT
    return out if activation is None else F.silu(out)
