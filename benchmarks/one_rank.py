"""The baseline: the whole sequence on one rank, by the fastest kernel of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_plugin.kernels import KERNELS, How, Kernel, Queries
from burst_plugin.kernels import Case as KernelCase
from burst_plugin.kernels.reference import ReferenceKernel
from burst_plugin.scores import Scores
from burst_plugin.types import CAUSAL, FULL

_TRIED_TOKENS = 4096
_NOT_FAR = 1.5  # times the time of the fastest


class Whole(NamedTuple):
    """The whole sequence: q and dout [B, S, Hq, D], k and v [B, S, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def draw(cls, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> Whole:
        """Draw normal numbers, the same on every rank; `shape` is (batch, tokens, query heads, key heads, dim)."""
        batch, tokens, q_heads, kv_heads, dim = shape
        source = torch.Generator(device).manual_seed(5)
        sizes = ((batch, tokens, heads, dim) for heads in (q_heads, kv_heads, kv_heads, q_heads))
        return cls(*(torch.randn(s, dtype=dtype, device=device, generator=source) for s in sizes))


class Gradients(NamedTuple):
    """The results of a forward and a backward pass."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class OneRank(NamedTuple):
    """A kernel on the whole sequence: `forward` returns what `backward` needs."""

    name: str
    forward: Callable[[Whole], Any]
    backward: Callable[[Whole, Any], Gradients]


def fastest(whole: Whole, causal: bool, most: Callable[[float], float]) -> OneRank:
    """Return the kernel that is quickest in forward and backward on the first few thousand tokens.

    Candidates are all kernels of the package that can do it, called as the package calls them, and
    `scaled_dot_product_attention` with autograd. `most` returns the largest number of all ranks, so that they choose
    the same. On a GPU so few tokens are a matter of launches: there the whole sequence decides between those that
    are not far behind.
    """

    def by_time(candidates: Sequence[OneRank], whole: Whole) -> list[tuple[float, OneRank]]:
        return sorted(((most(_duration_s(each, whole)), each) for each in candidates), key=lambda pair: pair[0])

    found = by_time(_candidates(whole, causal), Whole(*(x[:, :_TRIED_TOKENS].contiguous() for x in whole)))
    if whole.q.is_cuda and whole.q.shape[1] > _TRIED_TOKENS:
        found = by_time([each for took_s, each in found if took_s < _NOT_FAR * found[0][0]], whole)
    return found[0][1]


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _duration_s(kernel: OneRank, whole: Whole) -> float:
    durations_s = []
    for _ in range(3):
        synchronize(whole.q.device)
        start = time.perf_counter()
        kernel.backward(whole, kernel.forward(whole))
        synchronize(whole.q.device)
        durations_s.append(time.perf_counter() - start)
    return min(durations_s)


def _candidates(whole: Whole, causal: bool) -> list[OneRank]:
    q, k = whole.q, whole.k
    case = KernelCase(q.device.type, q.dtype, q.shape[2], k.shape[2], q.shape[3], k.shape[3])
    how = How(CAUSAL if causal else FULL, Scores(scale=q.shape[3] ** -0.5))
    able = [kernel for kernel in KERNELS.values() if kernel.refuse(case) is None]
    return [_of_package(kernel, how) for kernel in able if kernel.name != ReferenceKernel.name] + [_of_torch(causal)]


def _of_package(kernel: Kernel, how: How) -> OneRank:
    def backward(whole: Whole, saved: tuple[Tensor, Tensor]) -> Gradients:
        out, lse = saved
        queries = Queries(whole.q, whole.dout, out.to(whole.q.dtype), lse)
        return Gradients(out, *kernel.backward(queries, whole.k, whole.v, how)[:3])

    return OneRank(kernel.name, lambda whole: kernel.forward(*whole[:3], how), backward)


def _of_torch(causal: bool) -> OneRank:
    def forward(whole: Whole) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.detach().requires_grad_() for x in whole[:3]]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2), leaves

    def backward(whole: Whole, saved: tuple[Tensor, list[Tensor]]) -> Gradients:
        out, leaves = saved
        return Gradients(out.detach(), *torch.autograd.grad(out, leaves, whole.dout))

    return OneRank("scaled_dot_product_attention", forward, backward)
