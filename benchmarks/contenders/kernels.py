"""The kernel under every contender: PyTorch's for CPUs, as this package calls it, or one that only takes its time.

What a peer's library would compute with a GPU package is handed to the very kernel object that `burst` uses, the
fastest one for this processor. So whatever differs between contenders is their own.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from benchmarks.contenders.emulated_device import EmulatedDevice
from benchmarks.contenders.protocol import Case, Slept
from burst_plugin.kernels import Case as KernelCase
from burst_plugin.kernels import Grads, How, Kernel, Queries, choose_kernel
from burst_plugin.scores import Scores
from burst_plugin.types import CAUSAL, FULL

__all__ = ["SleepingKernel", "kernel_for", "tile", "typed", "write"]


class SleepingKernel:
    """Takes the time of a kernel without the arithmetic, so that ranks do not compete for processors.

    What it returns has the right shapes and is zero: in float32 or wider, as the kernel for CPUs returns it, or
    gradients in the type of `grads`, as flash_attn does. Zeros are written once and returned again and again, since
    writing what a GPU would write takes the time of processors that other ranks want; who adds to them adds zero.
    See `Slept` and `EmulatedDevice`.
    """

    name = "sleeping"
    features = frozenset({"head dims", "deterministic", "varlen"})

    def __init__(self, case: Case, slept: Slept, grads: torch.dtype | None = None) -> None:
        self._grads = grads or torch.promote_types(case.dtype, torch.float32)
        full = case.batch * case.seq**2 * case.q_heads
        self._forward_s, self._backward_s = slept.forward_s / full, slept.backward_s / full
        self._device = EmulatedDevice()

    def refuse(self, case: KernelCase) -> str | None:
        """See `Kernel.refuse`."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        self._device.launch()
        out = _zeros((*q.shape[:3], v.shape[3]), torch.promote_types(q.dtype, torch.float32))
        found = out, out.new_zeros(q.shape[0], q.shape[2], q.shape[1])
        self._device.finish(self._forward_s * _pairs(q, k, how))
        return found

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """See `Kernel.backward`."""
        self._device.launch()
        grads = Grads(*(_zeros(x.shape, self._grads, n) for n, x in enumerate((queries.q, k, v))))
        self._device.finish(self._backward_s * _pairs(queries.q, k, how))
        return grads


def kernel_for(case: Case, slept: Slept | None) -> Kernel:
    """The kernel of this case, as flash_attn would give what it finds."""
    if slept is not None:
        return SleepingKernel(case, slept, case.dtype)
    return choose_kernel(
        "auto", KernelCase("cpu", case.dtype, case.q_heads, case.kv_heads, case.head_dim, case.head_dim)
    )


def typed(kernel: Kernel, found: Tensor, dtype: torch.dtype) -> Tensor:
    """What `kernel` found, in a type; where compute is slept it was written in that type, as GPUs do."""
    if isinstance(kernel, SleepingKernel):
        return _zeros(tuple(found.shape), dtype).detach()  # a tensor of its own for autograd, of the same memory
    return found.to(dtype)


def write(kernel: Kernel, found: Tensor, buffer: Tensor) -> None:
    """Have what `kernel` found in `buffer`; where compute is slept that costs what clearing costs."""
    if isinstance(kernel, SleepingKernel):
        buffer.zero_()
    else:
        buffer.copy_(found)


def tile(scale: float | None, causal: bool, head_dim: int) -> How:
    """How a library that has full and causal attention only asks for a tile."""
    return How(CAUSAL if causal else FULL, Scores(scale=head_dim**-0.5 if scale is None else scale))


@cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, _number: int = 0) -> Tensor:
    """The same tensor for the same arguments."""
    return torch.zeros(shape, dtype=dtype)


def _pairs(q: Tensor, k: Tensor, how: How) -> float:
    """Query and key pairs of all heads. A causal square has half of them; keys, or queries, may come before it."""
    every = [(q.shape[1], k.shape[1])] * q.shape[0] if how.lengths is None else zip(*how.lengths[:2], strict=True)
    if how.band == FULL:
        return q.shape[2] * sum(rows * keys for rows, keys in every)
    return q.shape[2] * sum(min(rows, keys) * (keys - min(rows, keys) / 2) for rows, keys in every)
