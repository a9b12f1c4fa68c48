"""Huge pages for a process that forks many others: there are fewer of them to copy the list of."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAPS = Path("/proc/self/maps")
# The heap, and what has neither a file nor a name: start, end, permissions, offset, device, inode.
_ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 *(?:\[heap\])?$", re.MULTILINE)


def use_huge_pages() -> None:
    """Move this process's memory to huge pages, on Linux 6.1 or newer; elsewhere do nothing.

    A fork copies the list of all pages, which takes 47 ms with everything imported that the tests import, and 12 ms
    with huge pages; the tests fork some ten thousand times. Huge pages are split where processes write after a fork,
    so call this again now and then, which takes 0.1 s.
    """
    if not _MAPS.exists():
        return
    libc = ctypes.CDLL(None)
    for start, end in _ANONYMOUS.findall(_MAPS.read_text()):
        first, last = -(-int(start, 16) // _HUGE_PAGE) * _HUGE_PAGE, int(end, 16) // _HUGE_PAGE * _HUGE_PAGE
        if first < last:
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):  # what cannot be had is left as it is
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
