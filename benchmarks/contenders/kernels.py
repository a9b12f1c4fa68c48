"""The kernel under every contender, and a stand-in for the package `flash_attn`, which needs a GPU, that calls it.

It is PyTorch's for CPUs or one that only takes its time, the very kernel object that `burst` uses, so that whatever
differs between contenders is their own. Libraries bind the functions (of release 2.8) once, when they are imported:
there is one stand-in per process, and a session sets its kernel before either pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.contenders.protocol import Case, Slept
from burst_plugin.kernels import Case as KernelCase
from burst_plugin.kernels import Grads, How, Kernel, Lengths, Queries, choose_kernel
from burst_plugin.kernels.varlen import backward_looped, forward_looped
from burst_plugin.scores import Scores
from burst_plugin.types import CAUSAL, FULL
from tests.support.emulated_gpu import SleepingKernel, zeros

NAME = "flash_attn"
_QKV = ("q", "k", "v")
_ENDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_BUFFERS = ("dout", *_QKV, "out", "softmax_lse", "dq", "dk", "dv")
_WHOLE = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")
_PASS = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
# Arguments in flash_attn's order, as far as libraries pass them by position.
_ARGUMENTS = {
    "flash_attn_func": (*_QKV, *_WHOLE),
    "flash_attn_varlen_func": (*_QKV, *_ENDS, *_WHOLE),
    "_flash_attn_forward": (*_QKV, *_PASS),
    "_flash_attn_backward": (*_BUFFERS, *_PASS),
    "_flash_attn_varlen_forward": (*_QKV, *_ENDS, *_PASS),
    "_flash_attn_varlen_backward": (*_BUFFERS, *_ENDS, *_PASS),
}
Given = dict[str, Any]


def sleeping(case: Case, slept: Slept, grads: torch.dtype | None = None) -> SleepingKernel:
    """Return a kernel that takes the time of its share of a full visit."""
    return SleepingKernel(case.batch * case.seq**2 * case.q_heads, slept.forward_s, slept.backward_s, grads)


def kernel_for(case: Case, slept: Slept | None) -> Kernel:
    """Return the kernel of this case, with results as flash_attn gives them."""
    if slept is not None:
        return sleeping(case, slept, case.dtype)
    dims = (case.head_dim, case.head_dim)
    return choose_kernel("auto", KernelCase("cpu", case.dtype, case.q_heads, case.kv_heads, *dims))


def typed(kernel: Kernel, found: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a result of `kernel` in `dtype`; where compute is slept it costs nothing, as on GPUs."""
    if isinstance(kernel, SleepingKernel):
        return zeros(tuple(found.shape), dtype).detach()  # a tensor of its own for autograd, of the same memory
    return found.to(dtype)


def tile(scale: float | None, causal: bool, head_dim: int, ends: tuple[Tensor, Tensor] | None = None) -> How:
    """Return a tile of full or causal attention; of sequences with these query and key `ends`, int32 [number + 1]."""
    how = How(CAUSAL if causal else FULL, Scores(scale=head_dim**-0.5 if scale is None else scale))
    if ends is None:
        return how
    q, k = (tuple(each.diff().tolist()) for each in ends)
    return how._replace(lengths=Lengths(q, k, *ends))


def forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return out [B, T, Hq, D] and lse [B, Hq, T] of q [B, T, Hq, D], k and v [B, U, Hkv, D]; B is 1 for sequences.

    In flash_attn a causal sequence may have keys before its first query: the last query sees the last key. A kernel
    that works on one sequence after another has causal squares only, so it gets as many queries as there are keys.
    """
    if how.lengths is None or "varlen" in kernel.features:
        return kernel.forward(q, k, v, how)
    rows, how = _in_squares(how, how.lengths)
    out, lse = forward_looped(kernel, _padded(q, rows, 1), k, v, how)
    return out[:, rows], lse[:, :, rows]


def backward(kernel: Kernel, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
    """Return the gradients, in the shapes of q, k and v; see `forward`."""
    if how.lengths is None or "varlen" in kernel.features:
        return kernel.backward(queries, k, v, how)
    rows, how = _in_squares(how, how.lengths)
    q, dout, out = (_padded(x, rows, 1) for x in queries[:3])
    grads = backward_looped(kernel, Queries(q, dout, out, _padded(queries.lse, rows, 2)), k, v, how)
    return grads._replace(dq=grads.dq[:, rows])


def _in_squares(how: How, lengths: Lengths) -> tuple[Tensor, How]:
    """Return the rows of the real queries, int64 [T], and `how` for as many queries as keys, if it is causal."""
    if how.band != CAUSAL:
        return torch.arange(sum(lengths.q)), how
    ends = zip(accumulate(lengths.k), lengths.q, strict=True)
    rows = torch.cat([torch.arange(stop - count, stop) for stop, count in ends])
    return rows, how._replace(lengths=lengths._replace(q=lengths.k, q_ends=lengths.k_ends))


def _padded(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Return zeros with `x` at `rows` of `dim`."""
    shape = list(x.shape)
    shape[dim] = int(rows[-1]) + 1
    return x.new_zeros(shape).index_copy(dim, rows, x)


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
        works = {"func": _differentiable, "forward": _forward, "backward": _backward}
        for name in _ARGUMENTS:
            setattr(self, name, _function(self, name, works[name.rpartition("_")[2]]))


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
        sides = (given.get(f"window_size_{side}", -1) for side in ("left", "right"))
        windows = any(size != -1 for size in (*given.get("window_size", ()), *sides))
        if windows or given.get("dropout_p") or given.get("softcap") or given.get("alibi_slopes") is not None:
            raise NotImplementedError("the stand-in for flash_attn has no dropout, windows, softcap or alibi")
        return work(module, given)

    return function


def _read(given: Given, *names: str) -> tuple[Any, ...]:
    """Return the tile, and the tensors of these names with a batch of 1 where there are sequences."""
    packed = "cu_seqlens_q" in given
    ends = (given["cu_seqlens_q"], given["cu_seqlens_k"]) if packed else None
    how = tile(given.get("softmax_scale"), given.get("causal", False), given["q"].shape[-1], ends)
    return how, *(given[name].unsqueeze(0) if packed else given[name] for name in names)


def _differentiable(module: StandIn, given: Given) -> Tensor:
    how, q, k, v = _read(given, *_QKV)
    out: Tensor = _Attention.apply(module, q, k, v, how)  # type: ignore[no-untyped-call]
    return out if how.lengths is None else out.squeeze(0)


def _forward(module: StandIn, given: Given) -> tuple[Tensor, Tensor, None, None]:
    how, q, k, v = _read(given, *_QKV)
    out, lse = forward(module.kernel, q, k, v, how)
    if how.lengths is not None:
        return typed(module.kernel, out[0], q.dtype), lse[0], None, None
    return out, lse, None, None  # out as wide as it was computed: callers sum it up in float32


def _backward(module: StandIn, given: Given) -> None:
    how, q, k, v, *saved, dq, dk, dv = _read(given, *_QKV, "dout", "out", "softmax_lse", "dq", "dk", "dv")
    grads = backward(module.kernel, Queries(q, *saved), k, v, how)
    for buffer, grad in zip((dq, dk, dv), grads[:3], strict=True):
        buffer.zero_() if isinstance(module.kernel, SleepingKernel) else buffer.copy_(grad)  # it costs as much


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
