"""What flash-attention kernels have in common: windows counted from the bottom right corner, and one head dim.

Bands are counted from the top left corner of a tile, windows of libraries from the bottom right one (flash-attention
2.1 and newer),

    lower <= j - i <= upper               -left <= j - i - (Sk - Sq) <= right        None: no bound

so `left = Sk - Sq - lower` and `right = upper - (Sk - Sq)`. Neither may be negative, as that stands for no bound in
most libraries; as every query of a tile has a key, only `right` can be, where the last keys have no query: these are
left out. ALiBi is not among the features: libraries take distances from rows and keys of a tile, not from positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.kernels.limits import Limits
from burst_plugin.kernels.protocol import Case, Grads, How, Lengths, Queries
from burst_plugin.kernels.shaping import fit, round_up
from burst_plugin.kernels.varlen import (
    DQ_ROWS,
    Trial,
    backward_looped,
    forward_looped,
    in_rows,
    in_rows_of_heads,
    is_right,
)
from burst_plugin.types import ANTICAUSAL, FULL, Band

ALIGN_BYTES = 16  # of every row, for vector loads and TMA
_DQ_DIMS = 64  # flash-attention 2 rounds up to multiples of this, at most, where it sums dq; rows: DQ_ROWS


class Window(NamedTuple):
    """A window of a tile as flash-attention counts it: some query rows, their keys, and how far these attend.

    rows, keys: the query rows and the key rows of the tile that the window has.
    left, right: query i of the window attends to key j where `-left <= j - i - (keys - rows) <= right`, with the
        numbers of keys and rows; None is no bound.
    """

    rows: slice
    keys: slice
    left: int | None
    right: int | None


class Ask(NamedTuple):
    """The options of one call of a flash-attention library, by the names that the libraries use.

    scale: the factor on q . k.
    softcap: the cap of scores; 0 is none.
    left, right: the bounds of the window, see `Window`.
    deterministic: whether two runs have to give the same bits.
    """

    scale: float
    softcap: float  # 0 is none
    left: int | None
    right: int | None
    deterministic: bool


def pieces(band: Band, q_rows: int, k_rows: int, tall: bool) -> tuple[Window, ...]:
    """Cut a tile of `q_rows` queries and `k_rows` keys into windows as flash-attention counts them; mostly one.

    Last keys that no query attends to are left out. Unless `tall`, no window has more rows than keys: flash-attention
    2 takes a side of a window for no bound if it is wider than there are keys, which is wrong there
    (csrc/flash_attn/flash_api.cpp, v2.8.3).
    """
    step = q_rows if tall or band == FULL else min(q_rows, k_rows)
    windows = []
    for first in range(0, q_rows, step):
        rows = min(step, q_rows - first)
        lower, upper = (None if edge is None else edge + first for edge in band)
        keys = k_rows if upper is None else min(k_rows, rows + upper)
        left = None if lower is None else keys - rows - lower
        right = None if upper is None else upper - (keys - rows)
        windows.append(Window(slice(first, first + rows), slice(0, keys), left, right))
    return tuple(windows)


class FlashKernel(ABC):
    """The base of kernels that call a flash-attention library with windows and gradients from a given lse.

    Subclasses call the library; this class cuts tiles into windows, fills head dims up, and batches packed sequences.

    name: the kernel's name in the option `kernel`.
    limits: the device, types, head dims and library that the kernel needs.
    features: names in `FEATURES`.
    tall: whether the library is right for windows of more rows than keys.
    largest_dq: how many numbers of dq the library can address; larger ones are worked on in slices. None is no limit.
    """

    name: str
    limits: Limits
    features: frozenset[str] = frozenset({"windows", "head dims", "deterministic"})
    tall: bool = True
    largest_dq: int | None = None

    def refuse(self, case: Case) -> str | None:
        """Return why this kernel cannot do `case`; None if it can. The library is imported last, if at all."""
        return self.limits.refuse(case) or self.refuse_library(case)

    def refuse_library(self, case: Case) -> str | None:
        """Return why the installed library cannot do `case`; None if it can."""
        return None

    def _dims(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        """Return the head dims (of q and k, of v) to fill up to."""
        return (round_up(max(qk_dim, v_dim), 8),) * 2

    def _dims_of(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        """Return the head dims to fill these tensors up to."""
        return self._dims(k.shape[-1], v.shape[-1])

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]."""

    @abstractmethod
    def call_backward(self, queries: Queries, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv; all tensors have one type, and the lse is contiguous."""

    def call_forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, ask: Ask, lengths: Lengths
    ) -> tuple[Tensor, Tensor]:
        """Return `call_forward` of packed sequences, [T, H, D]: out [T, Hq, Dv] and lse [Hq, T]."""
        raise NotImplementedError

    def call_backward_varlen(
        self, queries: Queries, k: Tensor, v: Tensor, ask: Ask, lengths: Lengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `call_backward` of packed sequences, [T, H, D]; the lse is [Hq, T]."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of a tile, or of the packed sequences of `how.lengths`."""
        if how.lengths is not None:
            if self._can_batch(q, v, how, how.lengths):
                return self.forward_batched(q, k, v, how, how.lengths)
            return forward_looped(self, q, k, v, how)
        v_dim, (qk_dims, v_dims) = v.shape[-1], self._dims_of(k, v)
        q, k, v = fit(q, qk_dims, ALIGN_BYTES), fit(k, qk_dims, ALIGN_BYTES), fit(v, v_dims, ALIGN_BYTES)
        outputs = [
            self.call_forward(q[:, part.rows], k[:, part.keys], v[:, part.keys], _ask(how, part))
            for part in pieces(how.band, q.shape[1], k.shape[1], self.tall)
        ]
        out, lse = (_joined([part[n] for part in outputs], dim) for n, dim in ((0, 1), (1, 2)))
        return out[..., :v_dim], lse

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the contributions to dq, dk and dv of a tile, or of the packed sequences of `how.lengths`."""
        if how.lengths is not None:
            if self._can_batch(queries.q, v, how, how.lengths):
                return self.backward_batched(queries, k, v, how, how.lengths)
            return backward_looped(self, queries, k, v, how)
        qk_dim, v_dim = k.shape[-1], v.shape[-1]
        qk_dims, v_dims = self._dims_of(k, v)
        q, k, v = fit(queries.q, qk_dims, ALIGN_BYTES), fit(k, qk_dims, ALIGN_BYTES), fit(v, v_dims, ALIGN_BYTES)
        dout, out = (fit(x.to(q.dtype), v_dims, ALIGN_BYTES) for x in (queries.dout, queries.out))
        parts = pieces(how.band, q.shape[1], k.shape[1], self.tall)
        by_part = []
        for part in parts:
            lse = queries.lse[:, :, part.rows].contiguous()
            rows = Queries(q[:, part.rows], dout[:, part.rows], out[:, part.rows], lse)
            by_part.append(self._backward_in_slices(rows, k[:, part.keys], v[:, part.keys], _ask(how, part)))
        dq = _joined([grads[0] for grads in by_part], 1)
        dk, dv = (_summed([grads[n] for grads in by_part], parts, x) for n, x in ((1, k), (2, v)))
        return Grads(dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim])

    def forward_batched(self, q: Tensor, k: Tensor, v: Tensor, how: How, lengths: Lengths) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of packed sequences, in one call of the library.

        `lengths` says how many queries and keys each sequence has.
        """
        v_dim, batch = v.shape[-1], q.shape[0]
        qk_dims, v_dims = self._dims_of(k, v)
        q, k = (fit(x, qk_dims, ALIGN_BYTES).flatten(0, 1) for x in (q, k))
        v = fit(v, v_dims, ALIGN_BYTES).flatten(0, 1)
        out, lse = self.call_forward_varlen(q, k, v, _ask_varlen(how), lengths)
        return in_rows(out, batch)[..., :v_dim], in_rows_of_heads(lse, batch)

    def backward_batched(self, queries: Queries, k: Tensor, v: Tensor, how: How, lengths: Lengths) -> Grads:
        """Return the contributions to dq, dk and dv of packed sequences, in one call of the library.

        `lengths` says how many queries and keys each sequence has.
        """
        qk_dim, v_dim, batch = k.shape[-1], v.shape[-1], k.shape[0]
        qk_dims, v_dims = self._dims_of(k, v)
        q, k = (fit(x, qk_dims, ALIGN_BYTES).flatten(0, 1) for x in (queries.q, k))
        v, dout, out = (fit(x.to(q.dtype), v_dims, ALIGN_BYTES).flatten(0, 1) for x in (v, queries.dout, queries.out))
        lse = queries.lse.transpose(0, 1).flatten(1).contiguous()
        grads = self.call_backward_varlen(Queries(q, dout, out, lse), k, v, _ask_varlen(how), lengths)
        dq, dk, dv = (in_rows(grad, batch) for grad in grads)
        return Grads(dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim])

    def _can_batch(self, q: Tensor, v: Tensor, how: How, lengths: Lengths) -> bool:
        """Return whether all sequences can be batched in one call; not if the library is wrong there."""
        if max(lengths.q) == 1:  # then flash-attention 2 makes rows of the heads of a group
            return False
        (qk_dim, v_dim), heads = (q.shape[-1], v.shape[-1]), q.shape[2]
        dim = round_up(self._dims_of(q, v)[0], _DQ_DIMS)
        dq = (sum(lengths.q) + DQ_ROWS * len(lengths.q)) * dim * heads
        if self.largest_dq is not None and dq > self.largest_dq:
            return False
        trial = Trial(q.device, q.dtype, qk_dim, v_dim, how.scores.softcap, how.deterministic, how.band == ANTICAUSAL)
        return is_right(self, trial)

    def _backward_in_slices(self, queries: Queries, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, ...]:
        """Return `call_backward`, of as many batch rows at a time as `largest_dq` allows, or heads of one row."""
        batch, rows, heads, dim = queries.q.shape
        head = round_up(rows, DQ_ROWS) * round_up(dim, _DQ_DIMS)
        if self.largest_dq is None or head * heads * batch <= self.largest_dq or heads * batch == 1:
            return self.call_backward(queries, k, v, ask)
        if batch > 1:
            some = max(1, self.largest_dq // (head * heads))
            parts = [slice(first, first + some) for first in range(0, batch, some)]
            slices = ((Queries(*(x[part] for x in queries)), k[part], v[part]) for part in parts)
            return tuple(torch.cat(grads) for grads in self._each_in_slices(slices, ask))
        few, kv_heads = max(1, self.largest_dq // head), k.shape[2]
        group = heads // kv_heads
        if kv_heads == 1:  # the query heads in several calls, which all have gradients for it
            few = -(-heads // -(-heads // few))  # of even sizes, since a kernel's own memory follows the largest
            parts = [slice(first, first + few) for first in range(0, heads, few)]
            each_dq, *each_dkv = self._each_in_slices(((_of_heads(queries, part), k, v) for part in parts), ask)
            dq = torch.cat(each_dq, 2)
            del each_dq  # as large as dq, before dk and dv are summed up
            return dq, *(_sum(each_dkv.pop(0)) for _ in range(2))
        some = max(1, few // group)
        keys = [slice(first, min(first + some, kv_heads)) for first in range(0, kv_heads, some)]
        slices = (
            (_of_heads(queries, slice(part.start * group, part.stop * group)), k[:, :, part], v[:, :, part])
            for part in keys
        )
        return tuple(torch.cat(grads, 2) for grads in self._each_in_slices(slices, ask))

    def _each_in_slices(self, each: Iterable[tuple[Queries, Tensor, Tensor]], ask: Ask) -> list[tuple[Tensor, ...]]:
        """Return the dq of all slices, their dk and their dv."""
        return list(zip(*(self._backward_in_slices(*part, ask) for part in each), strict=True))


class FlashAttention2(FlashKernel):
    """The base of kernels that call flash-attention 2, as the package flash-attn or PyTorch builds it."""

    features = FlashKernel.features | {"varlen"}
    tall = False
    largest_dq = 2**31 - 1  # int32 in flash_bwd_kernel.h up to v2.8.3, flash-attention#2260

    def _dims(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        """Return head dims that have backward kernels on every GPU: all multiples of 8 up to 192, and 256.

        Source: `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120` in PyTorch's sdp_utils.cpp.
        """
        dim = round_up(max(qk_dim, v_dim), 8)
        return (256, 256) if dim > 192 else (dim, dim)


def _sum(grads: Sequence[Tensor]) -> Tensor:
    """Return the sum of gradients in float32, or wider."""
    total = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32), copy=True)
    for grad in grads[1:]:
        total += grad
    return total


def _of_heads(queries: Queries, heads: slice) -> Queries:
    q, dout, out = (x[:, :, heads] for x in queries[:3])
    return Queries(q, dout, out, queries.lse[:, heads].contiguous())


def sequence_options(lengths: Lengths) -> dict[str, object]:
    """Return the keyword arguments for packed sequences of flash-attention 2 and 3, `cu_seqlens_q` and so on."""
    return {
        "cu_seqlens_q": lengths.q_ends,
        "cu_seqlens_k": lengths.k_ends,
        "max_seqlen_q": max(lengths.q),
        "max_seqlen_k": max(lengths.k),
    }


def _ask_varlen(how: How) -> Ask:
    """Return the options for sequences that are full, or causal or anticausal squares."""
    return _ask(how, pieces(how.band, 1, 1, tall=True)[0])


def _ask(how: How, part: Window) -> Ask:
    return Ask(how.scale, how.scores.softcap or 0.0, part.left, part.right, how.deterministic)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _summed(grads: Sequence[Tensor], parts: Sequence[Window], x: Tensor) -> Tensor:
    """Return the gradient of all keys, from the gradients of the pieces."""
    if len(grads) == 1 and grads[0].shape == x.shape:
        return grads[0]
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for grad, part in zip(grads, parts, strict=True):
        total[:, part.keys] += grad
    return total
