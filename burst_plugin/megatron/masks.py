"""Megatron's mask types, windows and mask tensors, as masks of the core. Mask tensors are True where masked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.mask import Causal, CausalBottomRight, Full, Mask, PerRow, SlidingWindow, key_padding
from burst_plugin.region import allowed

__all__ = ["BY_TYPE", "check_same", "read_key_padding", "windowed", "with_masked"]

BY_TYPE: Mapping[str, Mask] = MappingProxyType(
    {
        "causal": Causal(),
        "no_mask": Full(),
        "padding": Full(),
        "padding_causal": Causal(),
        "arbitrary": Full(),
        "causal_bottom_right": CausalBottomRight(),
    }
)


def windowed(mask: Mask, window_size: tuple[int, int]) -> SlidingWindow:
    """`mask`, causal or full, within a window as Megatron has it: (left, right), -1 for no bound.

    Causal masks have no right side, whatever the window says, as in Transformer Engine.
    """
    left, right = (None if side == -1 else side for side in window_size)
    return SlidingWindow(left, right if mask.looks_ahead else 0)


def with_masked(bias: Tensor | None, attention_mask: Tensor, lengths: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`bias`, or 0, where any mask [1 or B, 1 or H, S/CP, Sk] allows, -inf elsewhere. Nothing is read on the host.

    `lengths` are S/CP and Sk. Raises ValueError for a mask of another shape.
    """
    if (
        attention_mask.dim() != 4
        or attention_mask.shape[2] not in (1, lengths[0])
        or attention_mask.shape[3] != lengths[1]
    ):
        raise ValueError(
            f"attention_mask of attn_mask_type=arbitrary must be [1 or batch, 1 or heads, {lengths[0]} queries of "
            f"this rank, all {lengths[1]} keys], got {list(attention_mask.shape)}; cut its queries as the batch"
        )
    attention_mask = attention_mask.expand(-1, -1, lengths[0], -1)
    bias = torch.zeros_like(attention_mask, dtype=dtype) if bias is None else bias
    return bias.masked_fill(attention_mask.bool(), -torch.inf)


def check_same(cp: ContextParallel, attention_mask: Tensor, mask: Mask) -> None:
    """Raise ValueError on every rank unless `attention_mask` [1 or B, 1, S/CP, S] is `mask`; collective."""
    problem = _shape_problem(attention_mask)
    if not problem:
        masked = attention_mask.bool()
        if masked.shape[2] * cp.ranks > masked.shape[3]:  # not cut over the ranks
            differs = True
        else:
            differs = bool((~masked != _expected(cp, masked, mask)).any())
        if differs:
            problem = (
                f"attention_mask {list(attention_mask.shape)} is not the {mask} that attn_mask_type says; to keep "
                "documents apart pack them (PackedSeqParams), for any other mask use attn_mask_type=arbitrary, and "
                f"for {mask} pass none (--no-create-attention-mask-in-dataloader)"
            )
    cp.agree({"attention_mask": "to be checked"}, problem)


def read_key_padding(cp: ContextParallel, attention_mask: Tensor, mask: Mask) -> Mask:
    """The keys that a mask [1 or B, 1, 1 or S/CP, Sk] leaves, as a mask; collective if it has a row per query.

    A row is what `mask` leaves of these keys, or masked altogether: that of a padded query. Raises ValueError, on
    every rank, for rows that are neither.
    """
    problem = _shape_problem(attention_mask)
    if problem:
        raise ValueError(problem)
    left = ~attention_mask.bool()
    valid = left[:, 0].any(1)
    if attention_mask.shape[2] > 1 and cp.ranks > 1:
        valid = _anywhere(cp, valid)
    if attention_mask.shape[2] > 1:
        other = (left != valid[:, None, None] & _expected(cp, left, mask)).any(-1) & left.any(-1)
        any_other = _anywhere(cp, other.any().view(1)) if cp.ranks > 1 else other.any()
        if bool(any_other):
            raise ValueError(
                f"attention_mask {list(attention_mask.shape)} does not mask whole keys, as attn_mask_type=padding or "
                "padding_causal says; use attn_mask_type=arbitrary"
            )
    rows = key_padding(valid).masks
    return rows[0] if len(set(rows)) == 1 else PerRow(rows)


def _shape_problem(attention_mask: Tensor) -> str:
    if attention_mask.dim() == 4 and attention_mask.shape[1] == 1:
        return ""
    return f"attention_mask must be [1 or batch, 1, queries, keys], got {list(attention_mask.shape)}"


def _expected(cp: ContextParallel, rows: Tensor, mask: Mask) -> Tensor:
    """What `mask` leaves to this rank's queries, [S/CP, Sk]."""
    q_len, kv_len = rows.shape[2] * cp.ranks, rows.shape[3]
    return allowed(mask, (q_len, kv_len), cp.positions(q_len, rows.device), torch.arange(kv_len, device=rows.device))


def _anywhere(cp: ContextParallel, flags: Tensor) -> Tensor:
    """Which flags are set on any rank."""
    union = flags.to(torch.uint8)
    dist.all_reduce(union, op=dist.ReduceOp.MAX, group=cp.group)
    return union.bool()
