"""Memory of this process: how much some work needs at its peak, and what the C library does with what is freed."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["PeakMemory", "keep_freed_memory"]

_SELF = Path("/proc/self")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, as the quickstart does by environment variables.

    It would hand large tensors back to the system each time and clear their pages again, which costs longer
    sequences, with larger tensors, more; GPUs have nothing of the kind.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only in glibc
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_MAX, 0)


class PeakMemory:
    """As a context manager; `nbytes` afterwards is the growth, None where the system does not say.

    On GPUs it is what torch allocated; on CPUs what of this process was resident, but for mapped files (Linux alone
    tells the peak of a while; memory that was freed is given back to the system first, so that it counts again).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.nbytes: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before: int | None = torch.cuda.memory_allocated(self._device)
        else:
            self._before = _resident_bytes("VmRSS") - _resident_bytes("RssFile") if _reset_peak() else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _resident_bytes("VmHWM") - _resident_bytes("RssFile")  # libraries are mapped once and stay
        self.nbytes = peak - self._before


def _reset_peak() -> bool:
    """Give free memory back, and have the kernel forget the peak so far; False where that cannot be done."""
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        (_SELF / "clear_refs").write_text("5")  # proc(5): resets the peak resident set size
    except OSError:
        return False
    return True


def _resident_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE)
    assert found is not None  # Linux always says
    return int(found[1]) * 1024
