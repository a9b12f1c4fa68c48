"""Attention in plain PyTorch: any device, any float type, every feature. Slow; other kernels are compared with it.

Dropout depends only on the seed, the batch row, the head and two positions: every (row, head, query, key) has a
32-bit hash, so that any tile of the attention matrix can be drawn on its own, by any rank and in any pass. The
finaliser is a multiply-xorshift of 32 bits (constants: Chris Wellons, "Prospecting for hash functions",
nullprogram.com, 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from burst_plugin.kernels.limits import Limits
from burst_plugin.kernels.protocol import FEATURES, Case, Grads, How, Queries, Selection
from burst_plugin.kernels.varlen import backward_looped, forward_looped
from burst_plugin.scores import Scores
from burst_plugin.types import FULL

# Scores of query rows that are worked on at a time, so that memory does not grow with the square of the sequence.
MOST_SCORES = 2**26
_ROWS = 512  # at a time, at most


class ReferenceKernel:
    """The reference kernel: softmax and its derivative by definition, in float32 (float64 for float64 inputs)."""

    name = "reference"
    limits = Limits()
    features = frozenset(FEATURES)

    def refuse(self, case: Case) -> str | None:
        """Return None: this kernel does every case."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of a tile, or of the packed sequences of `how.lengths`.

        Rows without a key get out 0 and lse -inf.
        """
        if how.lengths is not None:
            return forward_looped(self, q, k, v, how)
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
        keys, values = _by_query_head(k, q, dtype), _by_query_head(v, q, dtype)
        for rows in row_slices(q, k):
            part = _rows_of(how, rows)
            scores = _scores(q[:, rows], keys, part, rows.start)[0]
            lse[:, :, rows] = torch.logsumexp(scores, -1)
            p = _probabilities(scores, lse[:, :, rows])
            factor = _dropout_factor(p, part)
            dropped = p if factor is None else p * factor
            out[:, rows] = dropped.matmul(values).transpose(1, 2)
        return out, lse

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the contributions to dq, dk, dv and dbias of a tile, or of the packed sequences of `how.lengths`.

        Source: flash-attention, arXiv 2205.14135, appendix B.2.
        """
        if how.lengths is not None:
            return backward_looped(self, queries, k, v, how)
        q = queries.q
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys, values = _by_query_head(k, q, dtype), _by_query_head(v, q, dtype)
        dq = torch.empty_like(q, dtype=dtype)
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        dbias = torch.zeros_like(how.bias, dtype=dtype) if how.bias is not None and how.wants_dbias else None
        for rows in row_slices(q, k):
            part = _rows_of(how, rows)
            q_rows, dout, out = (x[:, rows].to(dtype) for x in queries[:3])
            scores, slope = _scores(q_rows, keys, part, rows.start)
            p = _probabilities(scores, queries.lse[:, :, rows].to(dtype))
            factor = _dropout_factor(p, part)
            dout_heads = dout.transpose(1, 2)
            delta = (dout_heads * out.transpose(1, 2)).sum(-1, keepdim=True)
            dp = dout_heads.matmul(values.transpose(-1, -2))
            ds = p * ((dp if factor is None else dp * factor) - delta)
            if dbias is not None:
                dbias[:, :, rows] = ds.sum_to_size(dbias[:, :, rows].shape)
            ds = ds * how.scale if slope is None else ds * slope * how.scale
            dq[:, rows] = ds.matmul(keys).transpose(1, 2)
            dk += ds.transpose(-1, -2).matmul(q_rows.transpose(1, 2))
            dv += (p if factor is None else p * factor).transpose(-1, -2).matmul(dout_heads)
        return Grads(dq, _by_kv_head(dk, k), _by_kv_head(dv, v), dbias)


def largest_scores(q: Tensor, k: Tensor, how: How) -> Tensor:
    """Return the largest score of every query head in a tile's band, [Hq], float32 or wider; -inf without any.

    q is [B, Sq, Hq, D] and k [B, Sk, Hkv, D]. Scores are taken before the softmax, with scale, cap, slopes and bias.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = _by_query_head(k, q, dtype)
    largest = torch.full((q.shape[2],), -torch.inf, dtype=dtype, device=q.device)
    for rows in row_slices(q, k):
        inside = k.shape[1] if how.band.upper is None else max(0, min(k.shape[1], rows.stop + how.band.upper))
        if inside:
            part = _first_keys_of(_rows_of(how, rows), inside)
            scores, _ = _scores(q[:, rows], keys[:, :, :inside], part, rows.start)
            largest = largest.maximum(scores.amax((0, 2, 3)))
    return largest


def row_slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of q [B, Sq, H, D] whose scores with k [B, Sk, H, D] number at most `MOST_SCORES`."""
    batch, length, heads, _ = q.shape
    rows = max(1, min(_ROWS, MOST_SCORES // max(1, batch * heads * k.shape[1])))
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))


def _rows_of(how: How, rows: slice) -> How:
    """Return `how` for some query rows; the band is still counted from the tile's first row."""
    return how._replace(
        bias=None if how.bias is None else how.bias[:, :, rows],
        selection=None if how.selection is None else how.selection.of_rows(rows),
        q_positions=None if how.q_positions is None else how.q_positions[rows],
    )


def _first_keys_of(how: How, keys: int) -> How:
    """Return `how` for the first key rows."""
    return how._replace(
        bias=None if how.bias is None else how.bias[..., :keys],
        selection=None if how.selection is None else how.selection._replace(columns=how.selection.columns[:keys]),
        k_positions=None if how.k_positions is None else how.k_positions[:keys],
    )


def _by_query_head(x: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [B, S, Hkv, D] as [B, Hq, S, D], every key head repeated for its query heads."""
    return x.to(dtype).transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], dim=1)


def _by_kv_head(grad: Tensor, x: Tensor) -> Tensor:
    """Return [B, Hq, S, D] summed over the query heads of every key head, as [B, S, Hkv, D] like `x`."""
    batch, _, rows, dim = grad.shape
    return grad.view(batch, x.shape[2], -1, rows, dim).sum(2).transpose(1, 2)


def _scores(q: Tensor, keys: Tensor, how: How, first_query: int) -> tuple[Tensor, Tensor | None]:
    """Return scores [B, H, rows, Sk], -inf outside the band, and the derivative of the softcap, if there is one."""
    scores, slope = q.to(keys.dtype).transpose(1, 2).matmul(keys.transpose(-1, -2)).mul_(how.scale), None
    if how.scores.softcap is not None:
        bent = torch.tanh(scores / how.scores.softcap)
        scores, slope = bent * how.scores.softcap, 1 - bent.square()
    if how.scores.alibi_slopes is not None:
        assert how.q_positions is not None
        assert how.k_positions is not None
        slopes = torch.tensor(how.scores.alibi_slopes, dtype=scores.dtype, device="cpu").to(
            q.device, non_blocking=True
        )
        apart = (how.q_positions.unsqueeze(1) - how.k_positions).abs()
        scores = scores - slopes.view(-1, 1, 1) * apart
    if how.bias is not None:
        scores = scores + how.bias.to(scores.dtype)
    if how.selection is not None:
        scores = scores.masked_fill_(_left_out(how.selection, q.shape[2]), -torch.inf)
    if how.band == FULL:
        return scores, slope
    rows = torch.arange(first_query, first_query + q.shape[1], device=q.device).unsqueeze(1)
    ahead = torch.arange(keys.shape[2], device=q.device) - rows
    outside = torch.zeros_like(ahead, dtype=torch.bool)
    if how.band.lower is not None:
        outside |= ahead < how.band.lower
    if how.band.upper is not None:
        outside |= ahead > how.band.upper
    return scores.masked_fill_(outside, -torch.inf), slope


def _left_out(selection: Selection, query_heads: int) -> Tensor:
    """Return which keys of a tile its queries did not select, bool [B, Hq, Sq, Sk]."""
    local = selection.local()
    listed = torch.zeros((*local.shape[:3], len(selection.columns) + 1), dtype=torch.bool, device=local.device)
    listed.scatter_(3, local, True)
    return ~listed[..., :-1].repeat_interleave(query_heads // local.shape[1], 1)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax from scores and lse; 0 where lse is -inf."""
    safe = lse.masked_fill(lse == -torch.inf, torch.inf)
    return torch.exp(scores - safe.unsqueeze(-1))


def _dropout_factor(p: Tensor, how: How) -> Tensor | None:
    """Return the factor that dropout puts on every probability; None without dropout."""
    if not how.scores.dropout:
        return None
    assert how.q_positions is not None
    assert how.k_positions is not None
    rows = range(how.first_batch_row, how.first_batch_row + p.shape[0])
    heads = range(how.first_head, how.first_head + p.shape[1])
    return keep(how.scores, rows, heads, how.q_positions, how.k_positions).to(p.dtype)


T = TypeVar("T", int, Tensor)

_BITS = 0xFFFFFFFF


def keep(scores: Scores, rows: range, heads: range, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Return the factor that dropout puts on each probability, 0 or 1 / (1 - dropout), float32 [B, H, Sq, Sk].

    Args:
        scores: has the share that is dropped, and the seed.
        rows: the numbers of the batch rows, B of them.
        heads: the numbers of the query heads, H of them.
        q_positions, k_positions: [Sq] and [Sk], int64, positions in the sequence.
    """
    device = q_positions.device
    # Mixed before rows are added: no row of one seed is another row of the next.
    number = scores.seed or 0
    seed = _mixed((number & _BITS) ^ _mixed((number >> 32) & _BITS))
    row = _mixed(seed + _mixed(torch.arange(rows.start, rows.stop, device=device))).view(-1, 1, 1)
    head = _mixed(row + 0x9E3779B9 * torch.arange(heads.start + 1, heads.stop + 1, device=device).view(1, -1, 1))
    query = _mixed(head ^ _mixed(q_positions))
    drawn = _mixed(query.unsqueeze(-1) + _mixed(k_positions + 0x85EBCA6B))
    return (drawn >= int(scores.dropout * (_BITS + 1))).to(torch.float32) / (1 - scores.dropout)


def _mixed(x: T) -> T:
    """Return a bijection of 32-bit numbers, as int64, in which every bit of the input affects every output bit."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _BITS
    return x ^ (x >> 16)
