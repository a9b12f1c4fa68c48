"""An emulated accelerator: kernels that take their time, and no processor, so that a laptop stands for many GPUs."""

from __future__ import annotations

import resource
import time
from functools import cache

import torch
from torch import Tensor

from burst_plugin.kernels import Case, Grads, How, Queries
from burst_plugin.types import FULL

_PER_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # only Linux counts by thread


class EmulatedDevice:
    """An accelerator that runs one kernel after the other by sleeping, for a process that may wake up late.

    A GPU ends its kernel in time, however many ranks want a processor then, and has the next one in its queue. So a
    late wake-up is subtracted from the next kernel; not if the process has waited for anything in between, such as a
    message, which would not have arrived any sooner. (A message that arrived while the process overslept was not
    waited for: by that much at most is a kernel early.)
    """

    def __init__(self) -> None:
        self._start_s = 0.0
        self._late_s = 0.0  # delay of the process over the same process with a processor to itself
        self._waits = 0

    def launch(self) -> None:
        """Begin a kernel: now, or when a process that woke up in time would have launched it."""
        if _waits() != self._waits:
            self._late_s = 0.0
        self._start_s = time.perf_counter() - self._late_s

    def finish(self, seconds: float) -> None:
        """Wait until the kernel has taken `seconds`."""
        end_s = self._start_s + seconds
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            self._late_s = time.perf_counter() - end_s
        else:  # the process is behind its device: as late as before, or by the time since the kernel ended
            self._late_s = min(self._late_s, -left_s)
        self._waits = _waits()


def _waits() -> int:
    """Return how often this thread has given up its processor to wait for something."""
    return resource.getrusage(_PER_THREAD).ru_nvcsw


class SleepingKernel:
    """A kernel that takes its time without the arithmetic, so that ranks do not compete for processors.

    A call sleeps in proportion to its batch * queries * keys * query heads, less what a causal mask leaves out: half
    of a square whose last query sees all keys. Its results have the right shapes and are zero: in float32 or wider,
    as from the kernel for CPUs, or gradients in the type of `grads`, as from flash_attn. Zeros are written once and
    returned again and again, since writing what a GPU would write takes processor time that other ranks want.

    Args:
        pairs: batch * queries * keys * query heads of a call that takes `forward_s`, and `backward_s` backward.
    """

    name = "sleeping"
    features = frozenset({"head dims", "deterministic", "varlen"})

    def __init__(self, pairs: int, forward_s: float, backward_s: float, grads: torch.dtype | None = None) -> None:
        self._forward_s, self._backward_s, self._grads = forward_s / pairs, backward_s / pairs, grads
        self._device = EmulatedDevice()

    def refuse(self, case: Case) -> str | None:
        """See `Kernel.refuse`."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        self._device.launch()
        out = zeros((*q.shape[:3], v.shape[3]), torch.promote_types(q.dtype, torch.float32))
        found = out, out.new_zeros(q.shape[0], q.shape[2], q.shape[1])
        self._device.finish(self._forward_s * _pairs(q, k, how))
        return found

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """See `Kernel.backward`."""
        self._device.launch()
        dtype = self._grads or torch.promote_types(k.dtype, torch.float32)
        grads = Grads(*(zeros(x.shape, dtype, n) for n, x in enumerate((queries.q, k, v))))
        self._device.finish(self._backward_s * _pairs(queries.q, k, how))
        return grads


@cache
def zeros(shape: tuple[int, ...], dtype: torch.dtype, _number: int = 0) -> Tensor:
    """Return the same tensor for the same arguments."""
    return torch.zeros(shape, dtype=dtype)


def _pairs(q: Tensor, k: Tensor, how: How) -> float:
    """Count pairs of queries and keys of all heads; a causal square has half of them, keys may precede it."""
    every = [(q.shape[1], k.shape[1])] * q.shape[0] if how.lengths is None else zip(*how.lengths[:2], strict=True)
    if how.band == FULL:
        return q.shape[2] * sum(rows * keys for rows, keys in every)
    return q.shape[2] * sum(min(rows, keys) * (keys - min(rows, keys) / 2) for rows, keys in every)
