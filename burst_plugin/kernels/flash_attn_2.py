"""flash-attention 2 (the package flash-attn), 2.7 or newer.

`_flash_attn_forward` and `_flash_attn_backward` in flash_attn/flash_attn_interface.py, and for packed sequences
`_flash_attn_varlen_forward` and `_flash_attn_varlen_backward`, unchanged from 2.7.0 to 2.8.3.
A side without a bound is -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_plugin.kernels import library
from burst_plugin.kernels.flash import Ask, FlashAttention2, sequence_options
from burst_plugin.kernels.limits import HALVES, Limits
from burst_plugin.kernels.protocol import Case, Lengths, Queries

_MODULE = "flash_attn.flash_attn_interface"


class FlashAttn2Kernel(FlashAttention2):
    """The kernel of the package flash-attn: 16-bit types, windows, softcap, grouped heads, packed sequences."""

    name = "flash_attn_2"
    limits = Limits(
        "cuda", HALVES, dims=((256, 256),), capability=((8, 0), (12, 1)), library="flash-attn 2.7 or newer"
    )
    features = FlashAttention2.features | {"softcap"}

    def refuse_library(self, case: Case) -> str | None:
        found = library.find(_MODULE)
        if isinstance(found, str):
            return found
        version = str(getattr(library.load("flash_attn"), "__version__", "2.7"))
        return f"it needs flash-attn 2.7 or newer, not {version}" if library.older(version, (2, 7)) else None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        out, lse, *_ = library.load(_MODULE)._flash_attn_forward(q, k, v, **_options(ask), return_softmax=False)
        return out, lse

    def call_forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, ask: Ask, lengths: Lengths
    ) -> tuple[Tensor, Tensor]:
        forward = library.load(_MODULE)._flash_attn_varlen_forward
        out, lse, *_ = forward(q, k, v, **sequence_options(lengths), **_options(ask), return_softmax=False)
        return out, lse

    def call_backward(self, queries: Queries, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor, Tensor]:
        q, dout, out, lse = queries
        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        library.load(_MODULE)._flash_attn_backward(
            *(dout, q, k, v, out, lse, *grads), **_options(ask), deterministic=ask.deterministic
        )
        return grads[0], grads[1], grads[2]

    def call_backward_varlen(
        self, queries: Queries, k: Tensor, v: Tensor, ask: Ask, lengths: Lengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, dout, out, lse = queries
        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        options = {**sequence_options(lengths), **_options(ask), "deterministic": ask.deterministic}
        library.load(_MODULE)._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, **options)
        return grads[0], grads[1], grads[2]


def _options(ask: Ask) -> dict[str, object]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": ask.scale,
        "causal": False,  # causal is a window too
        "window_size_left": -1 if ask.left is None else ask.left,
        "window_size_right": -1 if ask.right is None else ask.right,
        "softcap": ask.softcap,
        "alibi_slopes": None,
    }
