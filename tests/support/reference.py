"""The judge: attention of a whole sequence in float64 on one process, and the error against it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin import Causal
from burst_plugin.mask import Mask

__all__ = ["NAMES", "Problem", "Result", "errors", "reference", "relative"]

NAMES = ("out", "dq", "dk", "dv")


class Problem(NamedTuple):
    """Whole sequences: q, dout [B, S, Hq, .], k, v [B, S, Hkv, .]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def draw(
        cls, seq_len: int, heads: tuple[int, int], dim: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> Problem:
        """Standard normal tensors; batch 2."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(2, seq_len, hs, dim) for hs in (heads[0], heads[1], heads[1], heads[0])]
        return cls(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))


class Result(NamedTuple):
    """What attention gives."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def reference(problem: Problem, mask: Mask) -> Result:
    """In float64, from the definition, with PyTorch's autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in problem[:3])
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) / q.shape[-1] ** 0.5
    if mask == Causal():
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
    return Result(out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout.double()))


def relative(x: Tensor, truth: Tensor) -> float:
    """2-norm of the error over 2-norm of the truth."""
    return float(torch.linalg.vector_norm(x.double() - truth) / torch.linalg.vector_norm(truth))


def errors(result: Result, truth: Result) -> dict[str, float]:
    """Relative error by name."""
    return {name: relative(x, y) for name, x, y in zip(NAMES, result, truth, strict=True)}
