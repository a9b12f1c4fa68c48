"""`compute.online_softmax` for GPUs: each of its functions by one Triton kernel that passes over memory once.

Eagerly a merge of 16-bit outputs moves 18 bytes per element, here 10, and 4 for each where `FAN_IN` are merged. A
program works on some tokens of one head. Importing this module imports triton; `online_softmax` does so when it
first meets a GPU. Sums are float32; nothing depends on the order in which programs run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

T = TypeVar("T")

FAN_IN = 4  # parts that are added up together; each further one saves less, and has to be kept as long
_ELEMENTS = 2048  # that a program works on: 16 rows of 128


@triton.jit
def _my_rows(heads, length, ROWS: tl.constexpr):
    """Return (batch row, tokens [ROWS], head) of this program."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(length, ROWS)
    rest = program // heads
    return rest // tiles, rest % tiles * ROWS + tl.arange(0, ROWS), program % heads


@triton.jit
def _at(x, strides, batch, tokens, head, columns):
    """Return pointers [ROWS, WIDTH] to rows of x [B, S, H, D]."""
    rows = x + batch * strides[0] + tokens * strides[1] + head * strides[2]
    return rows[:, None] + columns[None, :] * strides[3]


@triton.jit
def _at_rows(x, strides, batch, tokens, head):
    """Return pointers [ROWS] to rows of x [B, H, S]."""
    return x + batch * strides[0] + head * strides[1] + tokens * strides[2]


@triton.jit
def _merge(tensors, strides, sizes, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Merge parts of (out, lse).

    `tensors`: out and lse, then outputs of the parts, and then every lse of these [PARTS, B, H, S], dense.
    """
    batch, tokens, head = _my_rows(sizes[0], sizes[1], ROWS)
    columns = tl.arange(0, WIDTH)
    there = tokens < sizes[1]
    inside = there[:, None] & (columns < sizes[2])[None, :]
    at_lse = tensors[2 + PARTS] + (batch * sizes[0] + head) * sizes[1] + tokens
    logs, outs = tensors[:0], tensors[:0]
    for n in tl.static_range(PARTS):  # all reads are under way before anything waits for one
        outs += (tl.load(_at(tensors[2 + n], strides[2 + n], batch, tokens, head, columns), mask=inside, other=0.0),)
        logs += (tl.load(at_lse, mask=there, other=0.0),)
        at_lse += strides[2 + PARTS][0]
    largest = logs[0]
    for n in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, logs[n])
    empty = largest == -float("inf")
    base = tl.where(empty, 0.0, largest)
    total = tl.zeros_like(base)
    for n in tl.static_range(PARTS):
        total += tl.exp(logs[n] - base)
    per_total = 1.0 / tl.where(empty, 1.0, total)
    out = tl.zeros_like(outs[0]).to(tl.float32)
    for n in tl.static_range(PARTS):
        out += outs[n].to(tl.float32) * (tl.exp(logs[n] - base) * per_total)[:, None]
    tl.store(_at(tensors[0], strides[0], batch, tokens, head, columns), out, mask=inside)
    lse = tl.where(empty, -float("inf"), base + tl.log(total))
    tl.store(_at_rows(tensors[1], strides[1], batch, tokens, head), lse, mask=there)


@triton.jit
def _add(tensors, strides, sizes, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Add up parts. `tensors`: the sum, and then the parts; the first part may be the sum itself."""
    batch, tokens, head = _my_rows(sizes[0], sizes[1], ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (tokens < sizes[1])[:, None] & (columns < sizes[2])[None, :]
    parts = tensors[:0]
    for n in tl.static_range(1, 1 + PARTS):
        parts += (tl.load(_at(tensors[n], strides[n], batch, tokens, head, columns), mask=inside, other=0.0),)
    total = parts[0].to(tl.float32)
    for n in tl.static_range(1, PARTS):
        total += parts[n].to(tl.float32)
    tl.store(_at(tensors[0], strides[0], batch, tokens, head, columns), total, mask=inside)


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
    within = tl.minimum(tl.maximum(factor, -3.4028234e38), 3.4028234e38)
    factor = tl.where(factor == factor, within, factor)  # NaN, which minimum and maximum drop
    tl.store(_at_rows(tensors[2], strides[2], batch, tokens, head), factor, mask=there)


def merge_(out: Tensor, lse: Tensor, parts: Sequence[Sequence[Tensor]], filled: bool) -> None:
    """Merge attention over other keys, parts of (out, lse), into `out` [B, S, H, D] and `lse` [B, H, S], in place.

    If not `filled`, `out` and `lse` hold nothing yet. Every lse is float32, outputs have any floating type; any
    strides.
    """
    for some in _in_batches((out, lse), parts, filled):
        # Where rows begin and how many there are decides how lse is aligned, and Triton compiles for any alignment.
        lses = torch.stack([part_lse for _, part_lse in some])
        outs = (part_out for part_out, _ in some)
        _launch(_merge, out.shape, (out, lse, *outs, lses), PARTS=len(some))


def add_(total: Tensor, parts: Sequence[Tensor], filled: bool) -> None:
    """Add `parts` to `total` in place with one kernel; unless `filled`, overwrite `total`.

    Parts have the shape of `total`, any floating type and any strides; see `online_softmax.add_`.
    """
    for some in _in_batches(total, parts, filled):
        _launch(_add, total.shape, (total, *some), PARTS=len(some))


def _in_batches(total: T, parts: Sequence[T], filled: bool) -> Iterator[Sequence[T]]:
    """Yield the parts, as many at a time as are added up together, with the sum so far among them."""
    queue = [total, *parts] if filled else [*parts]
    while queue:
        yield queue[: 1 + FAN_IN]
        queue = queue[1 + FAN_IN :]
        queue = [total, *queue] if queue else []


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Return `rowsum(out * dout)` as [B, H, S], float32, from out and dout [B, S, H, D]."""
    return _rows_of(_row_delta, out, dout)


def row_factor(out: Tensor, dout: Tensor) -> Tensor:
    """Return `rowsum(out * dout) / rowsum(dout**2)` as [B, H, S], float32, from out and dout [B, S, H, D].

    It is 0 where `dout` is 0, and clamped to the largest finite value; see `online_softmax.row_factor`.
    """
    return _rows_of(_row_factor, out, dout)


def try_out(device: torch.device) -> None:
    """Compile and run all kernels of this module on `device`; raise triton's error where that fails.

    It fails for want of a C compiler, say, or on a GPU that triton does not know.
    """
    rows = torch.zeros(2, 2, 3, device=device, dtype=torch.float32)
    ones = torch.zeros(2, 3, 2, 4, device=device, dtype=torch.float32)
    part = ones.bfloat16()
    for parts in (1, FAN_IN):
        merge_(ones, rows, [(part, rows)] * parts, True)
        add_(ones, [part] * parts, True)
    merge_(part, rows, [(ones, rows), (part, rows)], False)
    add_(part, [ones, part], False)
    row_delta(ones.bfloat16(), ones.bfloat16())
    row_factor(ones.bfloat16(), ones.bfloat16())


def _rows_of(kernel: Any, out: Tensor, dout: Tensor) -> Tensor:
    """Return the result of a kernel on rows of two tensors [B, S, H, D]: [B, H, S], float32."""
    batch, length, heads, _ = out.shape
    rows = torch.empty(batch, heads, length, dtype=torch.float32, device=out.device)
    _launch(kernel, out.shape, (out, dout, rows))
    return rows


def _launch(kernel: Any, shape: torch.Size, tensors: tuple[Tensor, ...], **constants: int) -> None:
    """Run a kernel over the rows of [B, S, H, D]."""
    batch, length, heads, dim = shape
    width = triton.next_power_of_2(max(1, dim))
    rows = max(1, _ELEMENTS // width)
    programs = batch * heads * triton.cdiv(length, rows)
    if programs:
        strides = tuple(tensor.stride() for tensor in tensors)
        with _current(tensors[0].device):
            kernel[(programs,)](tensors, strides, (heads, length, dim), ROWS=rows, WIDTH=width, **constants)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a tensor's GPU the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
