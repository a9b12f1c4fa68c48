"""Megatron's mask types, windows and mask tensors (True where masked), as `Mask` objects of the ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.sequence.mask import allowed
from burst_plugin.sequence.masks import Causal, CausalBottomRight, Full, Mask, PerRow, SlidingWindow, key_padding
from burst_plugin.sequence.prefix_tree import PrefixTree

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

ELEMENTS_AT_ONCE = 2**24  # of a mask that is read


def windowed(mask: Mask, window_size: tuple[int, int]) -> SlidingWindow:
    """Return `mask`, which is causal or full, within a sliding window.

    Causal masks have no right side, whatever the window says, as in Transformer Engine.

    window_size: Megatron's (left, right), keys before and after a query; -1 for no bound.
    """
    left, right = (None if side == -1 else side for side in window_size)
    return SlidingWindow(left, right if mask.looks_ahead else 0)


def with_masked(bias: Tensor | None, attention_mask: Tensor, lengths: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a bias that is -inf where `attention_mask` is True, and elsewhere `bias`, or 0 if that is None.

    The host does not wait for the GPU.

    Args:
        bias: [1 or B, 1 or H, S/CP, Sk], or None.
        attention_mask: [1 or B, 1 or H, 1 or S/CP, Sk].
        lengths: S/CP and Sk.
        dtype: of the result, if `bias` is None.

    Raises:
        ValueError: for a mask of another shape.
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
    """Raise ValueError on every rank of the ring `cp` unless a mask tensor equals `mask`; collective.

    attention_mask: [1 or B, 1, S/CP, S], True where masked; the rows are this rank's queries.
    """
    problem = _shape_problem(attention_mask)
    if not problem:
        differs = torch.tensor(attention_mask.shape[2] * cp.ranks > attention_mask.shape[3])  # not cut over ranks
        if not differs:
            differs = differs.to(attention_mask.device)
            for masked, is_allowed in _expected(cp, attention_mask, mask):
                differs |= (masked == is_allowed).any()
        if differs:
            problem = (
                f"attention_mask {list(attention_mask.shape)} is not the {mask} that attn_mask_type says; to keep "
                "documents apart pack them (PackedSeqParams), for any other mask use attn_mask_type=arbitrary, and "
                f"for {mask} pass none (--no-create-attention-mask-in-dataloader)"
            )
    cp.agree({"attention_mask": "to be checked"}, problem)


def read_key_padding(cp: ContextParallel, attention_mask: Tensor, mask: Mask) -> Mask:
    """Return the mask that lets all queries attend to the keys that are not padding by `attention_mask`.

    Collective over the ring `cp` if the tensor has a row for each query. Each row must then be what `mask` allows of
    the keys that are not padding, or all masked, for a padded query.

    Args:
        attention_mask: [1 or B, 1, 1 or S/CP, Sk], True where masked.
        mask: the mask of the call's mask type, full or causal, to compare rows with. It is not part of the result.

    Raises:
        ValueError: on every rank, for rows that are neither.
    """
    problem = _shape_problem(attention_mask)
    if problem:
        raise ValueError(problem)
    valid = ~attention_mask[:, 0].bool().all(1)
    if attention_mask.shape[2] > 1 and cp.ranks > 1:
        valid = _anywhere(cp, valid)
    if attention_mask.shape[2] > 1:
        mismatch = torch.zeros(1, dtype=torch.bool, device=attention_mask.device)
        for masked, is_allowed in _expected(cp, attention_mask, mask):
            differ = (masked == (valid[:, None, None] & is_allowed)).any(-1)
            mismatch |= (differ & ~masked.all(-1)).any()
        if bool(_anywhere(cp, mismatch) if cp.ranks > 1 else mismatch):
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


def _expected(cp: ContextParallel, attention_mask: Tensor, mask: Mask) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of `attention_mask`, bool [B, 1, some, Sk], and what `mask` allows them, [some, Sk].

    Rows are few at a time: computing what is allowed takes ten bytes per element, and whole masks fill much of a GPU.
    """
    q_len, kv_len = attention_mask.shape[2] * cp.ranks, attention_mask.shape[3]
    keys = torch.arange(kv_len, device=attention_mask.device)
    positions = cp.positions(q_len, attention_mask.device)
    some = max(1, ELEMENTS_AT_ONCE // kv_len)
    for rows, queries in zip(torch.split(attention_mask, some, 2), torch.split(positions, some), strict=True):
        yield rows.bool(), allowed(mask, (q_len, kv_len), queries, keys)


def _anywhere(cp: ContextParallel, flags: Tensor) -> Tensor:
    """Return which flags are set on any rank."""
    union = flags.to(torch.uint8)
    dist.all_reduce(union, op=dist.ReduceOp.MAX, group=cp.group)
    return union.bool()


# ---------------------------------------------------------------------------------------------------- prefix trees


def as_attention_mask(tree: PrefixTree) -> Tensor:
    """Return a prefix tree encoded as a tensor to pass for an attention mask: int32 [1, 2, nodes], on the CPU.

    It holds the parent of each node, then the number of tokens of each node.
    """
    return torch.tensor([[tree.parents, tree.lengths]], dtype=torch.int32, device="cpu")


def is_tree(attention_mask: Any) -> bool:
    """Return whether an attention mask is a prefix tree, int32 [1, 2, nodes], rather than a mask of Megatron's."""
    return isinstance(attention_mask, Tensor) and attention_mask.dim() == 3 and attention_mask.dtype == torch.int32


def tree_of(attention_mask: Tensor) -> PrefixTree:
    """Return the prefix tree that `as_attention_mask` has encoded in `attention_mask`, int32 [1, 2, nodes]."""
    parents, lengths = attention_mask[0].tolist()
    return PrefixTree(tuple(parents), tuple(lengths))
