"""Memory: how many ranks fit, how much some work needs at its peak, and what the C library does with freed memory."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from benchmarks import RefusedError

_USED = 0.9  # of the memory that is available: the rest is left to the system and to other programs
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>


def check_ranks(ranks: int, rank_bytes: int, change: str) -> None:
    """Raise RefusedError for more ranks than memory allows; `change` names options."""
    available = psutil.virtual_memory().available
    fit = int(_USED * available) // rank_bytes
    if ranks > fit:
        each, needed, there = (f"{n / 1e9:.3g} GB" for n in (rank_bytes, ranks * rank_bytes, available))
        raise RefusedError(
            f"{ranks} ranks of about {each} each need {needed}; {there} are available, in which at most {fit} fit. "
            f"Lower {change}."
        )


def keep_freed_memory() -> None:
    """Have glibc keep freed memory, as the quickstart does by environment variables.

    It would return large tensors to the system each time and clear their pages again, which costs longer sequences,
    with larger tensors, more; GPUs have nothing of the kind.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only in glibc
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_MAX, 0)


class PeakMemory:
    """A context manager; its `nbytes` afterwards is the growth at the peak, None where the system does not tell.

    On GPUs it is what torch allocated; on CPUs resident memory of this process, without mapped files (only Linux
    tells the peak of a period; freed memory is returned to the system first, so that it counts again).
    """

    nbytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
            trim(0)
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
                self._before = _resident_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.nbytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            self.nbytes = _resident_bytes("VmHWM") - self._before


def _resident_bytes(field: str) -> int:
    """Read a size of this process from Linux, without mapped libraries, which stay."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE))
    return (int(found[field]) - int(found["RssFile"])) * 1024
