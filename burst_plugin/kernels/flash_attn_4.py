"""flash-attention 4 (the package flash-attn-4), written in the CuTe DSL and compiled when first used.

`_flash_attn_fwd` and `_flash_attn_bwd` in flash_attn/cute/interface.py. A side without a bound is None. Older
releases return two tensors from the forward function, newer ones four. Early betas take options that they compute
wrongly: a softcap up to 4.0.0b8, deterministic gradients up to b12, long sequences on Blackwell up to b17, and
tensors that are expanded, after others that are not, up to b25 (flash-attention#2745). dq is laid out for head dims
in multiples of 32, and written for multiples of 16 (#2896): wrong on Hopper, without a kernel on Blackwell.
"""

from __future__ import annotations

import re
from inspect import signature

import torch
from torch import Tensor

from burst_plugin.kernels import library
from burst_plugin.kernels.flash import Ask, FlashKernel
from burst_plugin.kernels.limits import HALVES, Limits
from burst_plugin.kernels.protocol import Case, Queries
from burst_plugin.kernels.reference import ReferenceKernel
from burst_plugin.kernels.shaping import round_up
from burst_plugin.kernels.trial import problem_of

_MODULE = "flash_attn.cute.interface"
_FIRST_BETA = 26
_TRUSTED = ReferenceKernel()
_DIMS = 32  # of which head dims have to be multiples
_LEAST_DIM = 64  # the least with gradients in its own tests


class FlashAttn4Kernel(FlashKernel):
    """The kernel of flash-attention 4, for Hopper and Blackwell: 16-bit types, windows, softcap, grouped heads.

    q and k of a head dim up to 192 with v up to 128 are computed without padding v to the head dim of q and k.
    """

    name = "flash_attn_4"
    limits = Limits(
        "cuda",
        HALVES,
        dims=((128, 128), (192, 128)),
        capability=((9, 0), (11, 0)),
        library="flash-attn-4, 4.0.0b26 or newer",
    )
    features = FlashKernel.features | {"softcap"}
    tall = False  # no test of flash-attn-4 has gradients of a window with more rows than keys

    def refuse_library(self, case: Case) -> str | None:
        module = library.find(_MODULE)
        if isinstance(module, str):
            return module
        version = _version()
        beta = re.match(r"4\.0\.0b(\d+)(\.dev)?", version)  # builds from source are named after the next beta
        if beta is not None and int(beta[1]) - bool(beta[2]) < _FIRST_BETA:
            return f"flash-attn-4 {version} has errors that 4.0.0b{_FIRST_BETA} has not; install a newer one"
        if version in ("", "0.0.0"):
            return f"{_MODULE} is there, but not of which version; install flash-attn-4 4.0.0b26 or newer"
        for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
            function = getattr(module, name, None)
            missing = {*_options(_NOTHING)} - {*(() if function is None else signature(function).parameters)}
            if missing:
                return f"{_MODULE}.{name} does not take {', '.join(sorted(missing))}; install a newer flash-attn-4"
        unlike_dims = len(set(self._dims(case.qk_dim, case.v_dim))) > 1
        if unlike_dims and case.query_heads != case.kv_heads and torch.cuda.get_device_capability()[0] == 9:
            return "on Hopper it has no gradients of grouped heads where v has another head dim (flash_bwd_sm90.py)"
        return problem_of(self, _TRUSTED, case)  # tried out, and compiled, before there are messages under way

    def _dims(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        largest = round_up(max(qk_dim, v_dim, _LEAST_DIM), _DIMS)
        return (largest, largest) if largest <= 128 else (192, 128)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        out, lse, *_ = library.load(_MODULE)._flash_attn_fwd(q, k, v, **_options(ask), return_lse=True)
        return out, lse

    def call_backward(self, queries: Queries, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor, Tensor]:
        q, dout, out, lse = queries
        backward = library.load(_MODULE)._flash_attn_bwd
        dq, dk, dv, *_ = backward(q, k, v, out, dout, lse, **_options(ask), deterministic=ask.deterministic)
        return dq, dk, dv


def _version() -> str:
    """Return the package's version; "" for a checkout that is not installed, or a flash-attn 2 that contains it."""
    from importlib import metadata  # which imports the standard library's parsers of mail and archives

    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return ""


_NOTHING = Ask(1.0, 0.0, None, None, False)


def _options(ask: Ask) -> dict[str, object]:
    return {
        "softmax_scale": ask.scale,
        "causal": False,  # causal is a window too
        "window_size_left": ask.left,
        "window_size_right": ask.right,
        "softcap": ask.softcap,
    }
