"""How much memory some work needs at its peak, and what the C library does with freed memory."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

from burst_plugin.activations.host_memory import HostMemory
from tests.support.live_bytes import LiveBytes

_OFFLOAD = "deepspeed.runtime.activation_checkpointing.offload_activations"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>


def keep_freed_memory() -> None:
    """Have glibc keep freed memory, as the quickstart does by environment variables.

    It would return large tensors to the system each time and clear their pages again; GPUs do nothing of the kind.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)  # only in glibc
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_MMAP_MAX, 0)


class PeakMemory:
    """A context manager; its `nbytes` afterwards is how much more was held at the peak than before.

    On GPUs it is what torch allocated. On CPUs it is the bytes of tensors, which takes time, but for those that this
    package or DeepSpeed parks in host memory: a GPU would not hold them.
    """

    nbytes = 0

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._before = device.type == "cuda", 0
        host: list[tuple[type, str]] = [(HostMemory, "park")]
        if _OFFLOAD in sys.modules:
            host.append((sys.modules[_OFFLOAD]._ActivationOffloadEngine, "_empty_cpu_like"))
        self._live = LiveBytes(*host)

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
            self.nbytes = torch.cuda.max_memory_allocated() - self._before
        else:
            self._live.__exit__(*exception)
            self.nbytes = self._live.peak
