"""A stand-in for the package `flash_attn`, which needs a GPU: its functions as of release 2.8, on a kernel object.

Libraries bind these functions once, when they are imported. So there is one stand-in per process, and the kernel in
use is an attribute of it: a session sets its own before either pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.contenders.kernels import backward, forward, tile, typed, write
from burst_plugin.kernels import How, Kernel, Queries

NAME = "flash_attn"
_QKV = ("q", "k", "v")
_ENDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_BUFFERS = ("dout", *_QKV, "out", "softmax_lse", "dq", "dk", "dv")
_HOW = ("dropout_p", "softmax_scale", "causal")
_REFUSED = ("softcap", "alibi_slopes")
_WINDOW = ("window_size_left", "window_size_right")
# Arguments in flash_attn's order, as far as libraries pass them by position.
_ARGUMENTS = {
    "flash_attn_func": (*_QKV, *_HOW, "window_size", *_REFUSED),
    "flash_attn_varlen_func": (*_QKV, *_ENDS, *_HOW, "window_size", *_REFUSED),
    "_flash_attn_forward": (*_QKV, *_HOW, *_WINDOW, *_REFUSED),
    "_flash_attn_backward": (*_BUFFERS, *_HOW, *_WINDOW, *_REFUSED),
    "_flash_attn_varlen_forward": (*_QKV, *_ENDS, *_HOW, *_WINDOW, *_REFUSED),
    "_flash_attn_varlen_backward": (*_BUFFERS, *_ENDS, *_HOW, *_WINDOW, *_REFUSED),
}
Given = dict[str, Any]


class StandIn(ModuleType):
    """`flash_attn` and, being its own submodule, `flash_attn.flash_attn_interface`."""

    kernel: Kernel
    operators: torch.library.Library | None = None  # PyTorch's operators of that name, where they are replaced, too

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__version__ = "2.8.3"
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(NAME, None, is_package=True)
        self.flash_attn_interface = self
        for name in _ARGUMENTS:
            work = {"func": _differentiable, "forward": _forward, "backward": _backward}[name.rpartition("_")[2]]
            setattr(self, name, _function(self, name, work))


def install() -> StandIn:
    """Return the stand-in of this process, which `import flash_attn` gives from now on."""
    found = sys.modules.get(NAME)
    if not isinstance(found, StandIn):
        found = sys.modules[NAME] = sys.modules[f"{NAME}.flash_attn_interface"] = StandIn()
    return found


def _function(module: StandIn, name: str, work: Callable[[StandIn, Given], Any]) -> Callable[..., Any]:
    """Return the function of that name; a plain one, since libraries look into it."""

    def function(*by_position: Any, **by_name: Any) -> Any:
        given = dict(zip(_ARGUMENTS[name], by_position, strict=False)) | by_name
        windows = [*given.get("window_size", ()), *(given.get(each, -1) for each in _WINDOW)]
        alibi = given.get("alibi_slopes") is not None
        if alibi or any(size != -1 for size in windows) or given.get("dropout_p") or given.get("softcap"):
            raise NotImplementedError("the stand-in for flash_attn has no dropout, windows, softcap or alibi")
        return work(module, given)

    return function


def _differentiable(module: StandIn, given: Given) -> Tensor:
    qkv = (_batched(given, given[name]) for name in _QKV)
    out: Tensor = _Attention.apply(module, *qkv, _how(given))  # type: ignore[no-untyped-call]
    return out if out.dim() == given["q"].dim() else out.squeeze(0)


def _forward(module: StandIn, given: Given) -> tuple[Tensor, Tensor, None, None]:
    qkv = (_batched(given, given[name]) for name in _QKV)
    out, lse = forward(module.kernel, *qkv, _how(given))
    if "cu_seqlens_q" in given:
        return typed(module.kernel, out[0], given["q"].dtype), lse[0], None, None
    return out, lse, None, None  # out as wide as it was computed: callers sum it up in float32


def _backward(module: StandIn, given: Given) -> None:
    q, dout, out, lse, k, v = (_batched(given, given[x]) for x in ("q", "dout", "out", "softmax_lse", "k", "v"))
    grads = backward(module.kernel, Queries(q, dout, out, lse), k, v, _how(given))
    for name, grad in zip(("dq", "dk", "dv"), grads[:3], strict=True):
        write(module.kernel, grad if "cu_seqlens_q" not in given else grad[0], given[name])


def _batched(given: Given, x: Tensor) -> Tensor:
    return x.unsqueeze(0) if "cu_seqlens_q" in given else x


def _how(given: Given) -> How:
    ends = (given["cu_seqlens_q"], given["cu_seqlens_k"]) if "cu_seqlens_q" in given else None
    return tile(given.get("softmax_scale"), given.get("causal", False), given["q"].shape[-1], ends)


class _Attention(torch.autograd.Function):
    """Attention on one rank, with gradients."""

    @staticmethod
    def forward(ctx: Any, module: StandIn, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        out, lse = forward(module.kernel, q, k, v, how)
        out = typed(module.kernel, out, q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.module, ctx.how = module, how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kernel = ctx.module.kernel
        grads = backward(kernel, Queries(q, dout, out, lse), k, v, ctx.how)
        return (None, *(typed(kernel, grad, q.dtype) for grad in grads[:3]), None)
