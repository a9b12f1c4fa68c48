"""Attention problems to check kernels and rings with: random tensors, exact results in float64, and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.kernels.trial import RESULTS, difference

BOUNDS: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 1.6e-2,
}
"""Relative errors, as 2-norms, that rounding explains; what is left out or mixed up is far more."""


class Problem(NamedTuple):
    """An attention problem to check kernels and rings with: queries, keys, values, and the gradient of the output.

    q: [B, Sq, Hq, D]. k: [B, Sk, Hkv, D]. v: [B, Sk, Hkv, Dv]. dout: [B, Sq, Hq, Dv].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def draw(
        cls,
        rows: tuple[int, int],
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Problem:
        """Return a problem of normal random numbers for one sequence, B = 1, equal on all ranks and in all runs.

        rows: (queries, keys). heads: (query heads, key heads). dims: the sizes of a head of (queries and keys,
        values).
        """
        source = torch.Generator("cpu").manual_seed(7)
        (queries, keys), (q_heads, kv_heads), (dim, v_dim) = rows, heads, dims
        shapes = (queries, q_heads, dim), (keys, kv_heads, dim), (keys, kv_heads, v_dim), (queries, q_heads, v_dim)
        drawn = (torch.randn(1, *shape, generator=source, device="cpu") for shape in shapes)
        return cls(*(x.to(device, dtype) for x in drawn))


def definition(problem: Problem, allowed: Tensor) -> tuple[Tensor, ...]:
    """Return out, lse, dq, dk and dv of a problem in float64, by softmax and autograd.

    allowed: bool [Sq, Sk], True where a query may attend to a key. The results have the shapes of the problem's
    tensors; lse has [B, Hq, Sq].
    """
    kv_heads, by_head = problem.k.shape[2], []
    group = problem.q.shape[2] // kv_heads
    for head in range(kv_heads):  # all of many ranks' heads at once would not fit into a GPU
        own, queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
        tensors = problem.q[:, :, queries], problem.k[:, :, own], problem.v[:, :, own]
        q, k, v = (x.double().requires_grad_() for x in tensors)
        with torch.enable_grad():
            scores = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * q.shape[3] ** -0.5
            scores = scores.masked_fill(~allowed, -torch.inf)
            out = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), v[:, :, 0])
            grads = torch.autograd.grad(out, (q, k, v), problem.dout[:, :, queries].double())
        by_head.append((out.detach(), scores.detach().logsumexp(-1), *grads))
    dims = (2, 1, 2, 2, 2)  # of heads
    return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*by_head, strict=True), dims, strict=True))


def differences(results: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """Return the relative errors, as 2-norms, of "out", "lse", "dq", "dk" and "dv".

    results, expected: these five tensors in this order.
    """
    return {name: difference(x, y) for name, x, y in zip(RESULTS, results, expected, strict=True)}


def worst(errors: Mapping[str, float]) -> tuple[str, float]:
    """Return the name and the value of the largest of the `errors`; NaN counts as larger than any."""
    name = max(errors, key=lambda result: (math.isnan(errors[result]), errors[result]))
    return name, errors[name]
