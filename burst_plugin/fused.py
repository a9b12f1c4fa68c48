"""`burst_plugin.softmax` for GPUs: each of its functions as one Triton kernel that passes over memory once.

Eagerly a merge of 16-bit outputs moves 18 bytes per element, here 10. A program works on some tokens of one head.
Importing this module imports triton; `softmax` does so when it first meets a GPU. Sums are float32; nothing depends
on the order in which programs run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["merge_", "row_delta", "row_factor", "try_out"]

_ELEMENTS = 2048  # that a program works on: 16 rows of 128


@triton.jit
def _my_rows(heads, length, ROWS: tl.constexpr):
    """(batch row, tokens [ROWS], head) of this program."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(length, ROWS)
    rest = program // heads
    return rest // tiles, rest % tiles * ROWS + tl.arange(0, ROWS), program % heads


@triton.jit
def _at(x, strides, batch, tokens, head, columns):
    """Pointers [ROWS, WIDTH] to rows of x [B, S, H, D]."""
    rows = x + batch * strides[0] + tokens * strides[1] + head * strides[2]
    return rows[:, None] + columns[None, :] * strides[3]


@triton.jit
def _at_rows(x, strides, batch, tokens, head):
    """Pointers [ROWS] to what x [B, H, S] has of rows."""
    return x + batch * strides[0] + head * strides[1] + tokens * strides[2]


@triton.jit
def _merge(tensors, strides, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    batch, tokens, head = _my_rows(sizes[0], sizes[1], ROWS)
    columns = tl.arange(0, WIDTH)
    there = tokens < sizes[1]
    inside = there[:, None] & (columns < sizes[2])[None, :]
    at_out = _at(tensors[0], strides[0], batch, tokens, head, columns)
    at_lse = _at_rows(tensors[1], strides[1], batch, tokens, head)
    # All reads are under way before anything waits for one.
    ours = tl.load(at_out, mask=inside, other=0.0)
    theirs = tl.load(_at(tensors[2], strides[2], batch, tokens, head, columns), mask=inside, other=0.0)
    a = tl.load(at_lse, mask=there, other=0.0)
    b = tl.load(_at_rows(tensors[3], strides[3], batch, tokens, head), mask=there, other=0.0)
    empty = a == -float("inf")
    weight = (1.0 / (1.0 + tl.exp(tl.where(empty, -3.4e38, a) - b)))[:, None]  # 1 / inf where b is -inf
    tl.store(at_out, ours * (1.0 - weight) + theirs.to(tl.float32) * weight, mask=inside)
    tl.debug_barrier()  # lse is read by more threads than write it
    apart = tl.where(empty & (b == -float("inf")), 0.0, tl.abs(a - b))
    tl.store(at_lse, tl.maximum(a, b) + tl.log(1.0 + tl.exp(-apart)), mask=there)


@triton.jit
def _row_delta(tensors, strides, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    batch, tokens, head = _my_rows(sizes[0], sizes[1], ROWS)
    columns = tl.arange(0, WIDTH)
    there = tokens < sizes[1]
    inside = there[:, None] & (columns < sizes[2])[None, :]
    out = tl.load(_at(tensors[0], strides[0], batch, tokens, head, columns), mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(_at(tensors[1], strides[1], batch, tokens, head, columns), mask=inside, other=0.0).to(tl.float32)
    tl.store(_at_rows(tensors[2], strides[2], batch, tokens, head), tl.sum(out * dout, 1), mask=there)


@triton.jit
def _row_factor(tensors, strides, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    batch, tokens, head = _my_rows(sizes[0], sizes[1], ROWS)
    columns = tl.arange(0, WIDTH)
    there = tokens < sizes[1]
    inside = there[:, None] & (columns < sizes[2])[None, :]
    out = tl.load(_at(tensors[0], strides[0], batch, tokens, head, columns), mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(_at(tensors[1], strides[1], batch, tokens, head, columns), mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(dout), 1)
    nothing = scale == 0.0
    scale = tl.where(nothing, 1.0, scale)
    unit = dout / scale[:, None]
    factor = tl.sum(out * dout, 1) / tl.where(nothing, 1.0, scale * tl.sum(unit * unit, 1)) / scale
    factor = tl.minimum(tl.maximum(factor, -3.4028234e38), 3.4028234e38)
    tl.store(_at_rows(tensors[2], strides[2], batch, tokens, head), factor, mask=there)


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """See `softmax.merge_`; out and both lse float32, the other out of any floating type; any strides."""
    _launch(_merge, out.shape, (out, lse, other_out, other_lse))


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """See `softmax.row_delta`; float32."""
    return _rows_of(_row_delta, out, dout)


def row_factor(out: Tensor, dout: Tensor) -> Tensor:
    """See `softmax.row_factor`; float32."""
    return _rows_of(_row_factor, out, dout)


def try_out(device: torch.device) -> None:
    """Raise what triton raises where it cannot compile or launch, such as for want of a C compiler."""
    rows = torch.zeros(2, 2, 3, device=device, dtype=torch.float32)
    ones = torch.zeros(2, 3, 2, 4, device=device, dtype=torch.float32)
    merge_(ones, rows, ones.bfloat16(), rows.clone())
    row_delta(ones.bfloat16(), ones.bfloat16())
    row_factor(ones.bfloat16(), ones.bfloat16())


def _rows_of(kernel: Any, out: Tensor, dout: Tensor) -> Tensor:
    """What a kernel makes of rows of two [B, S, H, D]: [B, H, S], float32."""
    batch, length, heads, _ = out.shape
    rows = torch.empty(batch, heads, length, dtype=torch.float32, device=out.device)
    _launch(kernel, out.shape, (out, dout, rows))
    return rows


def _launch(kernel: Any, shape: torch.Size, tensors: tuple[Tensor, ...]) -> None:
    """Run a kernel over the rows of [B, S, H, D]."""
    batch, length, heads, dim = shape
    width = triton.next_power_of_2(max(1, dim))
    rows = max(1, _ELEMENTS // width)
    programs = batch * heads * triton.cdiv(length, rows)
    if programs:
        strides = tuple(tensor.stride() for tensor in tensors)
        with _current(tensors[0].device):
            kernel[(programs,)](tensors, strides, (heads, length, dim), ROWS=rows, WIDTH=width)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU, wherever tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
