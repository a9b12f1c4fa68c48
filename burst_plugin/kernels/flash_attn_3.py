"""flash-attention 3, for Hopper: the operators that importing `flash_attn_interface` registers.

`flash_attn_3::fwd` and `::bwd` (hopper/flash_api.cpp). Their arguments are unchanged from v2.8.0 on, unlike the
arguments of the Python functions around them; the results of `bwd` differ too, so gradients are taken from the
tensors that it gets. A side without a bound is -1. Releases whose `bwd` returns 8 tensors, up to v2.8.3, accept
`deterministic` and ignore it (hopper/flash_bwd_launch_template.h); releases that return 5 honour it.

What a build has left out, such as softcap or a head dim (FLASH_ATTENTION_DISABLE_... in hopper/setup.py), it says
when it is called, so that each use is tried out first.

`fwd` takes q and k of up to 192 with a v of up to 128 (MLA's); not every `bwd` does. So that is first compared with a
v that is filled up, which is half as wide again, as are out and its gradient.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from burst_plugin.kernels import library
from burst_plugin.kernels.flash import Ask, FlashKernel, sequence_options
from burst_plugin.kernels.limits import HALVES, Limits
from burst_plugin.kernels.protocol import Case, Lengths, Queries
from burst_plugin.kernels.reference import ReferenceKernel
from burst_plugin.kernels.trial import problem_of

_MODULE = "flash_attn_interface"
_RETURNS_IF_DETERMINISTIC = 5
_UNLIKE = (192, 128)  # head dims of q and k, and of v
_TRUSTED = ReferenceKernel()
_LOG = logging.getLogger(__name__)


class FlashAttn3Kernel(FlashKernel):
    """The kernel of flash-attention 3, for Hopper: 16-bit types, windows, softcap, grouped heads, packed sequences.

    fills_up: whether v is padded to the head dim of q and k even where the library has kernels for both as they are,
        which is for q and k of 129 to 192 with v of up to 128; None: if a trial finds these kernels faulty.
    """

    name = "flash_attn_3"
    limits = Limits(
        "cuda",
        HALVES,
        dims=((256, 256),),
        capability=((9, 0), (9, 0)),
        library="flash-attention 3 (`flash_attn_interface`)",
    )
    features = FlashKernel.features | {"softcap", "varlen"}

    def __init__(self, fills_up: bool | None = None) -> None:
        self._fills_up = fills_up

    def refuse_library(self, case: Case) -> str | None:
        if "deterministic" in case.features and max(case.qk_dim, case.v_dim) > 192:
            return "it is deterministic for head dims up to 192 only"
        found = library.find(_MODULE)
        if isinstance(found, str):
            return found
        missing = [name for name in ("fwd", "bwd") if not hasattr(torch.ops.flash_attn_3, name)]
        if missing:
            return f"{_MODULE} registers no operator flash_attn_3::{missing[0]}"
        returns = len(torch.ops.flash_attn_3.bwd.default._schema.returns)
        if "deterministic" in case.features and returns != _RETURNS_IF_DETERMINISTIC:
            return "this release is not deterministic when asked to be; install one newer than v2.8.3"
        return problem_of(self, _TRUSTED, case)  # tried out now, before there are messages under way

    def _dims_of(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        dims = k.shape[-1], v.shape[-1]
        if self._fills_up or not _may_be_unlike(*dims):
            return self._dims(*dims)
        takes_unlike = self._fills_up is False or _takes_unlike(k.device.type, k.dtype)
        return _UNLIKE if takes_unlike else self._dims(*dims)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        library.load(_MODULE)
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **_options(ask), num_splits=1)
        return out, lse

    def call_forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, ask: Ask, lengths: Lengths
    ) -> tuple[Tensor, Tensor]:
        library.load(_MODULE)
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **sequence_options(lengths), **_options(ask), num_splits=1)
        return out, lse

    def call_backward(self, queries: Queries, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor, Tensor]:
        return _gradients(queries, k, v, _options(ask) | {"deterministic": ask.deterministic})

    def call_backward_varlen(
        self, queries: Queries, k: Tensor, v: Tensor, ask: Ask, lengths: Lengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = sequence_options(lengths) | _options(ask) | {"deterministic": ask.deterministic}
        return _gradients(queries, k, v, options)


_AS_IT_IS, _FILLED_UP = FlashAttn3Kernel(fills_up=False), FlashAttn3Kernel(fills_up=True)


def _may_be_unlike(qk_dim: int, v_dim: int) -> bool:
    """Return whether `fwd` has kernels for such dims, filled up to `_UNLIKE` (`mha_fwd` in hopper/flash_api.cpp)."""
    return 128 < qk_dim <= 192 and v_dim <= 128


def _takes_unlike(device: str, dtype: torch.dtype) -> bool:
    """Return whether gradients of `_UNLIKE` are right, too: tried out once for each GPU and type."""
    for kv_heads in (2, 1):
        problem = problem_of(_AS_IT_IS, _FILLED_UP, Case(device, dtype, 2, kv_heads, *_UNLIKE))
        if problem is not None:
            warn_once(problem)
            return False
    return True


@cache
def warn_once(problem: str) -> None:
    """Log why v is filled up, once in a process."""
    _LOG.warning("flash_attn_3 gets v filled up to the head dim of q and k, which is slower (without: %s)", problem)


def _gradients(queries: Queries, k: Tensor, v: Tensor, options: dict[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    library.load(_MODULE)
    q, dout, out, lse = queries
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, dq, dk, dv, **options)
    return dq, dk, dv


def _options(ask: Ask) -> dict[str, object]:
    return {
        "softmax_scale": ask.scale,
        "is_causal": False,  # causal is a window too
        "window_size_left": -1 if ask.left is None else ask.left,
        "window_size_right": -1 if ask.right is None else ask.right,
        "softcap": ask.softcap,
    }
