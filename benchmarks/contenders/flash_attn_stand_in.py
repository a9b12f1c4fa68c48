"""A stand-in for the package `flash_attn`, which needs a GPU: its functions as of release 2.8, on a kernel object.

Libraries bind these functions once, when they are imported. So there is one stand-in per process, and the kernel that
it uses at the moment is an attribute of it: a session sets its own before either pass.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.contenders import sequences
from benchmarks.contenders.kernels import tile, typed, write
from burst_plugin.kernels import How, Kernel, Queries

__all__ = ["StandIn", "install"]

NAME = "flash_attn"
Window = tuple[int, int]


class StandIn(ModuleType):
    """`flash_attn` and, being its own submodule, `flash_attn.flash_attn_interface`."""

    kernel: Kernel
    operators: torch.library.Library | None = None  # PyTorch's operators of its name, where they too stand in

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__version__ = "2.8.3"
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(NAME, None, is_package=True)
        self.flash_attn_interface = self
        self.flash_attn_func = _differentiable(self)
        self._flash_attn_forward, self._flash_attn_backward = _forward(self), _backward(self)
        self.flash_attn_varlen_func = _differentiable_varlen(self)
        self._flash_attn_varlen_forward = _varlen_forward(self)
        self._flash_attn_varlen_backward = _varlen_backward(self)


def install() -> StandIn:
    """The stand-in of this process, which is what `import flash_attn` finds from now on."""
    found = sys.modules.get(NAME)
    if not isinstance(found, StandIn):
        found = sys.modules[NAME] = sys.modules[f"{NAME}.flash_attn_interface"] = StandIn()
    return found


def _forward(module: StandIn) -> Any:
    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        _check(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
        out, lse = module.kernel.forward(q, k, v, tile(softmax_scale, causal, q.shape[3]))
        return out, lse, None, None  # out as wide as it was computed: callers sum it up in float32

    return _flash_attn_forward


def _backward(module: StandIn) -> Any:
    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        rng_state: Tensor | None = None,
    ) -> None:
        _check(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
        grads = module.kernel.backward(
            Queries(q, dout, out, softmax_lse), k, v, tile(softmax_scale, causal, q.shape[3])
        )
        for buffer, grad in zip((dq, dk, dv), grads[:3], strict=True):
            write(module.kernel, grad, buffer)

    return _flash_attn_backward


def _varlen_forward(module: StandIn) -> Any:
    def _flash_attn_varlen_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        _check(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
        how = sequences.how_of(softmax_scale, causal, q.shape[2], cu_seqlens_q, cu_seqlens_k)
        out, lse = sequences.forward(module.kernel, *(x.unsqueeze(0) for x in (q, k, v)), how)
        return typed(module.kernel, out[0], q.dtype), lse[0], None, None

    return _flash_attn_varlen_forward


def _varlen_backward(module: StandIn) -> Any:
    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        rng_state: Tensor | None = None,
    ) -> None:
        _check(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
        how = sequences.how_of(softmax_scale, causal, q.shape[2], cu_seqlens_q, cu_seqlens_k)
        queries = Queries(*(x.unsqueeze(0) for x in (q, dout, out, softmax_lse)))
        grads = sequences.backward(module.kernel, queries, k.unsqueeze(0), v.unsqueeze(0), how)
        for buffer, grad in zip((dq, dk, dv), grads[:3], strict=True):
            write(module.kernel, grad[0], buffer)

    return _flash_attn_varlen_backward


class _Attention(torch.autograd.Function):
    """Attention on one rank, with gradients."""

    @staticmethod
    def forward(ctx: Any, module: StandIn, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        attend = module.kernel.forward if how.lengths is None else partial(sequences.forward, module.kernel)
        out, lse = attend(q, k, v, how)
        out = typed(module.kernel, out, q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.module, ctx.how = module, how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kernel = ctx.module.kernel
        attend = kernel.backward if ctx.how.lengths is None else partial(sequences.backward, kernel)
        grads = attend(Queries(q, dout, out, lse), k, v, ctx.how)
        return (None, *(typed(kernel, grad, q.dtype) for grad in grads[:3]), None)


def _differentiable(module: StandIn) -> Any:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        _check(dropout_p, window_size, softcap, alibi_slopes)
        how = tile(softmax_scale, causal, q.shape[3])
        out: Tensor = _Attention.apply(module, q, k, v, how)  # type: ignore[no-untyped-call]
        return out

    return flash_attn_func


def _differentiable_varlen(module: StandIn) -> Any:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        _check(dropout_p, window_size, softcap, alibi_slopes)
        how = sequences.how_of(softmax_scale, causal, q.shape[2], cu_seqlens_q, cu_seqlens_k)
        qkv = (x.unsqueeze(0) for x in (q, k, v))
        out: Tensor = _Attention.apply(module, *qkv, how)  # type: ignore[no-untyped-call]
        return out.squeeze(0)

    return flash_attn_varlen_func


def _check(dropout_p: float, window: Window, softcap: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or tuple(window) != (-1, -1) or softcap or alibi_slopes is not None:
        raise NotImplementedError("the stand-in for flash_attn has no dropout, windows, softcap or alibi")
