"""Attention on listed keys alone, in plain PyTorch: the keys of each query are gathered, and then multiplied.

Its work grows with the number of selected keys, not with the sequence. Queries with about equally many of their
keys in a tile are worked on together: queries with 33 to 64 keys, say, as if they had 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.kernels.limits import HALVES, Limits
from burst_plugin.kernels.protocol import Case, Grads, How, Queries, Selection
from burst_plugin.types import Band

_LISTED = 2**23  # numbers of a selection that are looked up at a time
_GATHERED = 2**25  # numbers of keys and values that are gathered at a time


class TorchGatherKernel:
    """The kernel for selections of keys, in plain PyTorch: it gathers the listed keys of each query.

    It takes any device and type. Key heads that share a list are gathered together. Sums are in float32 or wider.
    Untried on GPUs.
    """

    name = "torch_gather"
    limits = Limits()
    features = frozenset({"head dims", "selection", "windows", "deterministic"})

    def refuse(self, case: Case) -> str | None:
        """Return why this kernel cannot do `case`; None if it can."""
        if "selection" not in case.features:
            return "it works on a selection of keys only"
        if "deterministic" in case.features and case.device == "cuda":
            return "gradients of keys add up in no fixed order on CUDA"
        return self.limits.refuse(case)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of a tile whose queries have selected keys, `how.selection`.

        Queries that selected none of the tile's keys get out 0 and lse -inf.
        """
        dtype, (queries, keys, values) = torch.promote_types(q.dtype, torch.float32), _by_token(q, k, v)
        out = queries.new_zeros((*queries.shape[:2], v.shape[-1]), dtype=dtype)
        lse = queries.new_full(queries.shape[:2], -torch.inf, dtype=dtype)
        for some in _chunks(q, k, v, how):
            scores = some.scores(queries, keys, how.scale)
            sums = torch.logsumexp(scores, -1, keepdim=True)
            out[some.rows, some.heads] = _product(torch.exp(scores - sums), some.of_keys(values)).flatten(1, 2)
            lse[some.rows, some.heads] = sums.flatten(1)
        return out.view(*q.shape[:3], -1), lse.view(q.shape[:3]).transpose(1, 2).contiguous()

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the contributions to dq, dk and dv of a tile whose queries have selected keys, `how.selection`.

        Source: flash-attention, arXiv 2205.14135, appendix B.2.
        """
        dtype = torch.promote_types(k.dtype, torch.float32)
        q, dout, out, keys, values = _by_token(*queries[:3], k, v)
        lse = queries.lse.transpose(1, 2).flatten(0, 1).unsqueeze(-1)
        delta = (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (keys, values))
        for some in _chunks(queries.q, k, v, how):
            p = torch.exp(some.scores(q, keys, how.scale) - some.of_queries(lse).to(dtype))
            douts = some.of_queries(dout)
            dp = _product(douts, some.of_keys(values).transpose(-1, -2))
            ds = p * (dp - some.of_queries(delta)) * how.scale
            dq[some.rows, some.heads] = _product(ds, some.of_keys(keys)).flatten(1, 2)
            some.add_to(dk, _product(ds.transpose(-1, -2), some.of_queries(q)))
            some.add_to(dv, _product(p.transpose(-1, -2), douts))
        return Grads(dq.view_as(queries.q), dk.view(k.shape), dv.view(v.shape))


class _Chunk(NamedTuple):
    """Queries that are worked on together.

    rows: [m], their rows among the tokens of all batch rows. columns: [m, w], the rows of their keys, which
    count if they are `listed`. heads, kv_heads: the heads that the list applies to, of queries and of keys.
    """

    rows: Tensor
    columns: Tensor
    listed: Tensor
    heads: slice
    kv_heads: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """Return these rows of [B * Sq, Hq, D] by key head, [m, kv heads, heads per kv head, D]."""
        some = x[self.rows, self.heads]
        return some.view(len(some), self.kv_heads.stop - self.kv_heads.start, -1, x.shape[-1])

    def of_keys(self, x: Tensor) -> Tensor:
        """Return these rows of [B * Sk, Hkv, D] by key head, [m, kv heads, w, D]."""
        return x[:, self.kv_heads][self.columns].transpose(1, 2)

    def scores(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Return the scores of listed keys [m, kv heads, heads per kv head, w], -inf in other places."""
        scores = _product(self.of_queries(queries), self.of_keys(keys).transpose(-1, -2)).mul_(scale)
        return scores.masked_fill_(~self.listed[:, None, None], -torch.inf)

    def add_to(self, sums: Tensor, grads: Tensor) -> None:
        """Add gradients [m, kv heads, w, D] to `sums` at their keys, [B * Sk, Hkv, D]; other places have zeros."""
        by_key = grads.transpose(1, 2).flatten(0, 1)
        sums[:, self.kv_heads].index_add_(0, self.columns.flatten(), by_key)


def _chunks(q: Tensor, k: Tensor, v: Tensor, how: How) -> Iterator[_Chunk]:
    """Yield the queries that selected a key of this tile, in groups of about equally many keys."""
    assert how.selection is not None, "the plan of a call sees to it"
    (batch, q_len), k_len, (lists, most) = q.shape[:2], k.shape[1], how.selection.keys.shape[1:4:2]
    heads, kv_heads = q.shape[2] // lists, k.shape[2] // lists
    per_key = kv_heads * (k.shape[3] + v.shape[3]) + heads
    step = max(1, _LISTED // (batch * lists * most))
    for start in range(0, q_len, step):
        rows = slice(start, min(start + step, q_len))
        columns, counts = _listed(how.selection.of_rows(rows), rows.start, how.band)
        for group in range(lists):
            of_heads = (slice(group * n, (group + 1) * n) for n in (heads, kv_heads))
            places = tuple(of_heads)
            for few, width in _by_count(counts[:, group].flatten(), per_key):
                row, of_batch = few % (rows.stop - rows.start), few // (rows.stop - rows.start)
                local = columns[of_batch, group, row, :width]
                is_listed = local < k_len
                local = torch.where(is_listed, local, 0) + of_batch.unsqueeze(1) * k_len
                yield _Chunk(of_batch * q_len + rows.start + row, local, is_listed, *places)


def _listed(selection: Selection, first: int, band: Band) -> tuple[Tensor, Tensor]:
    """Return the rows of selected keys in the tile, each once and ascending, and up to where there are any.

    [B, G, rows, n] with the number of keys in other places, and [B, G, rows].
    """
    local, length = selection.local(), len(selection.columns)
    ahead = local - torch.arange(first, first + local.shape[2], device=local.device).unsqueeze(1)
    if band.lower is not None:
        local = local.masked_fill(ahead < band.lower, length)
    if band.upper is not None:
        local = local.masked_fill(ahead > band.upper, length)
    local = local.sort(-1).values
    counts = (local < length).sum(-1)
    local[..., 1:].masked_fill_(local[..., 1:] == local[..., :-1], length)
    return local, counts


def _by_count(counts: Tensor, per_key: int) -> Iterator[tuple[Tensor, int]]:
    """Yield the rows that have keys in groups, each with the power of two keys that its rows need."""
    ordered, order = counts.sort()
    bits = torch.where(ordered > 0, ordered.double().log2().ceil(), -1.0).long()
    sizes = torch.bincount(bits + 1, minlength=1).tolist()  # waits for the device
    for power, (start, stop) in enumerate(pairwise(accumulate(sizes))):
        step = max(1, _GATHERED // (per_key << power))
        for first in range(start, stop, step):
            yield order[first : min(first + step, stop)], 1 << power


def _by_token(*tensors: Tensor) -> list[Tensor]:
    """Return tensors [B, S, H, D] as [B * S, H, D]."""
    return [x.flatten(0, 1) for x in tensors]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 or wider; of halves on CUDA, which have products of their own for that."""
    narrow = a.dtype if a.dtype in HALVES else b.dtype
    if a.is_cuda and narrow in HALVES:
        left, right = (x.to(narrow).flatten(0, 1) for x in (a, b))
        product: Tensor = torch.bmm(left, right, out_dtype=torch.float32)
        return product.view(*a.shape[:2], *product.shape[1:])
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(wide) @ b.to(wide)
