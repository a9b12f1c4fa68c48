"""Token rows of tensors [B, S, H, D] and [B, H, S]."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_plugin.types import Rows


def rows_of(x: Tensor, rows: slice, batch: tuple[int, int] | None = None) -> Tensor:
    """Return a range of token rows, of all batch rows or some, as a view; x itself where that is all of it."""
    if batch is not None:
        x = x.narrow(0, batch[0], batch[1] - batch[0])
    dim = 1 if x.dim() == 4 else 2  # as `token_dim` says; ten times per visit, so without a call
    length = rows.stop - rows.start
    return x if length == x.size(dim) else x.narrow(dim, rows.start, length)


def take_rows(x: Tensor, rows: Rows) -> Tensor:
    """Return some token rows; a view where they are one range."""
    parts = [rows_of(x, slice(start, stop)) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, token_dim(x))


def token_dim(x: Tensor) -> int:
    """Return which dim has the tokens."""
    return 1 if x.dim() == 4 else 2
