"""Host memory in pages of one size, which tensors take and give back.

PyTorch makes pinned memory in powers of two, so that a tensor of another size wastes up to half of its own. A page is
such a power, and a tensor takes as many as it needs, of which only the last may not be full. Pages are large enough
to keep the link to a GPU busy: 16 MiB take 0.3 ms at 50 GB/s, during which some ten copies can be started. They are
small enough to waste little: half a page per tensor on average, 1 % of tensors of 1 GiB.

Whether this host has the memory that offloading needs is asked before the kernel would end the process. What is
available is what the kernel says, and what the limits of this process's cgroup leave; in a container those are the
container's. Where neither can be read, nothing is known, and nothing is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

PAGE_BYTES = 16 << 20


def whole_pages(nbytes: float) -> int:
    """Return the bytes of host memory that a tensor of `nbytes` takes, rounded up to whole pages."""
    return ceil(nbytes / PAGE_BYTES) * PAGE_BYTES


class Pages:
    """A pool of pages of host memory, which are reused once their tensors are gone.

    is_pinned: whether its pages are pinned, as fast copies from and to a GPU need. made: how many pages it has made.
    free: pages that no tensor has.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self.free: list[Tensor] = []
        self.made = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pages that were made."""
        return self.made * PAGE_BYTES

    def take(self, nbytes: int) -> list[Tensor]:
        """Return pages for `nbytes` bytes: uint8 tensors of `PAGE_BYTES` each, old ones first.

        Raises MemoryError if this host has no memory for the new ones on each of its ranks.
        """
        count = whole_pages(nbytes) // PAGE_BYTES
        lacking = count - len(self.free)
        if lacking > 0:
            check_room(self.nbytes + lacking * PAGE_BYTES, self.nbytes, ranks_here())
        for _ in range(lacking):
            self.free.append(torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu"))
            self.made += 1
        return [self.free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[Tensor]) -> None:
        """Add pages to the pool again; copies from and to them have to be over, or all on one stream."""
        self.free.extend(pages)


def copy_to_pages(x: Tensor, pages: Sequence[Tensor]) -> None:
    """Start to copy a dense tensor, in the order of its memory, to the pages that `take(x.nbytes)` gave."""
    for piece, page in _pairs(x, pages):
        page.copy_(piece, non_blocking=True)


def copy_from_pages(x: Tensor, pages: Sequence[Tensor]) -> None:
    """Start to copy to `x`, a dense tensor, from pages that `copy_to_pages` filled from one of equal strides."""
    for piece, page in _pairs(x, pages):
        piece.copy_(page, non_blocking=True)


def _pairs(x: Tensor, pages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the bytes of a dense tensor in the order of memory, whatever its strides, each part with its page."""
    in_memory = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
    pieces = torch.split(in_memory, PAGE_BYTES) if len(in_memory) else ()
    return [
        (piece, page if len(piece) == PAGE_BYTES else page[: len(piece)])
        for piece, page in zip(pieces, pages, strict=True)
    ]


_GIB = 2**30
# Of cgroups: the folder of the hierarchy; files of the limit and of what is used; what of that is a cache of files
_VERSIONS = {
    2: ("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    1: (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def check_room(needed: float, held: float, ranks: int) -> None:
    """Raise MemoryError if this host cannot give each of its `ranks` the rest of the bytes that it needs.

    needed, held: the bytes of host memory that one rank needs in all, and has already. Nothing is raised where the
    available memory is unknown.
    """
    available = available_bytes()
    if available is None or (needed - held) * ranks <= available:
        return
    raise MemoryError(
        f"offload needs at least {needed * ranks / _GIB:.1f} GiB on this host, {needed / _GIB:.1f} GiB for each of "
        f"{ranks} rank{'s' if ranks > 1 else ''}, which have {held * ranks / _GIB:.1f} GiB of it, but only "
        f"{available / _GIB:.1f} GiB are available: use a shorter sequence, more nodes, keep_attention='none' or a "
        "smaller share, a host or container with more memory, or offload=False"
    )


def ranks_here() -> int:
    """Return how many ranks the launcher has started on this host; 1 if it does not say."""
    told = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))  # torchrun's, DeepSpeed's
    started = max((int(number) for number in told if number.isdecimal()), default=0)
    names = () if started else ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")
    counts = (os.environ.get(name, "").partition("(")[0] for name in names)  # Slurm's are like 8(x2)
    return started or next((int(count) for count in counts if count.isdecimal()), 1) or 1


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that this process and others may still take; None if it is not known.

    root: the folder that has `proc` and `sys`.
    """
    found = [line.split() for line in _read(root / "proc/meminfo").splitlines()]
    left = [int(words[1]) * 1024 for words in found if words[:1] == ["MemAvailable:"]]
    return min([*left, *_left_by_cgroups(root)], default=None)


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """Yield the bytes that each limit on this process's cgroup, or on a cgroup around it, leaves."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        top, limit_file, usage_file, caches = _VERSIONS[2 if number == "0" else 1]
        # A container may find its own cgroup at the top, and be told the path on the host: inner folders are absent.
        inner = Path(path.lstrip("/"))
        for folder in (root / top / each for each in (inner, *inner.parents)):
            limit, usage = (_read(folder / name).strip() for name in (limit_file, usage_file))
            if limit.isdecimal() and usage.isdecimal():
                stat = (words.split() for words in _read(folder / "memory.stat").splitlines())
                cached = sum(int(words[1]) for words in stat if words[0] in caches)
                yield max(0, int(limit) - int(usage) + cached)


def _read(path: Path) -> str:
    """Return the text of a file; nothing if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
