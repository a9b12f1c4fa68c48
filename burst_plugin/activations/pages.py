"""Host memory in pages of one size, which tensors take and give back.

PyTorch makes pinned memory in powers of two, so that a tensor of another size wastes up to half of its own. A page is
such a power, and a tensor takes as many as it needs, of which only the last may not be full. Pages are large enough
to keep the link to a GPU busy: 16 MiB take 0.3 ms at 50 GB/s, during which some ten copies can be started. They are
small enough to waste little: half a page per tensor on average, 1 % of tensors of 1 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from burst_plugin.activations.host_room import check_room, ranks_here

PAGE_BYTES = 16 << 20


def whole_pages(nbytes: float) -> int:
    """Return how many bytes the pages of a tensor of `nbytes` have."""
    return ceil(nbytes / PAGE_BYTES) * PAGE_BYTES


class Pages:
    """Pages of a process, which it keeps: those of tensors that are gone are used again. `made` counts them."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._free: list[Tensor] = []
        self.made = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pages."""
        return self.made * PAGE_BYTES

    def take(self, nbytes: int) -> list[Tensor]:
        """Return pages for `nbytes`. Raise MemoryError if the host has none left for all of its ranks."""
        count = whole_pages(nbytes) // PAGE_BYTES
        lacking = count - len(self._free)
        if lacking > 0:
            check_room(self.nbytes + lacking * PAGE_BYTES, self.nbytes, ranks_here())
        for _ in range(lacking):
            self._free.append(torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu"))
            self.made += 1
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[Tensor]) -> None:
        """Take pages back. Copies from and to them have to be on one stream, the only one, or to have ended."""
        self._free.extend(pages)


def copy_to_pages(x: Tensor, pages: Sequence[Tensor]) -> None:
    """Start to copy a dense tensor to pages."""
    for piece, page in _pairs(x, pages):
        page.copy_(piece, non_blocking=True)


def copy_from_pages(x: Tensor, pages: Sequence[Tensor]) -> None:
    """Start to copy pages to a dense tensor."""
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
