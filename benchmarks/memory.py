"""Memory of this process: how much some work needs at its peak, and what the C library does with freed memory."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from burst_plugin.activations.host_memory import HostMemory
from tests.support.live_bytes import LiveBytes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>


def keep_freed_memory() -> None:
    """Have glibc keep freed memory, as the quickstart does by environment variables.

    It would return large tensors to the system each time and clear their pages again; GPUs do nothing of the kind.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)  # only in glibc
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_MMAP_MAX, 0)


@contextmanager
def device_tensors() -> Iterator[LiveBytes]:
    """Count tensors' bytes, without those of host memory that this package or DeepSpeed takes: those of a GPU."""
    from deepspeed.runtime.activation_checkpointing.offload_activations import _ActivationOffloadEngine as Offload

    with LiveBytes() as live, live.not_counting(HostMemory, "park"), live.not_counting(Offload, "_empty_cpu_like"):
        yield live


class PeakMemory:
    """A context manager; its `nbytes` afterwards is the growth at the peak, None where the system does not tell.

    On GPUs it is what torch allocated; on CPUs resident memory without mapped files, on Linux alone. Freed memory is
    returned to the system first, so that it counts again.
    """

    nbytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._before: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        elif sys.platform == "linux":
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
                self._before = _resident_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        if self._before is not None:
            peak = torch.cuda.max_memory_allocated() if self._on_gpu else _resident_bytes("VmHWM")
            self.nbytes = peak - self._before


def _resident_bytes(field: str) -> int:
    """Read a size of this process from Linux, without mapped libraries, which stay."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE))
    return (int(found[field]) - int(found["RssFile"])) * 1024
