"""A prefix tree in the place of Megatron's attention mask: int32 [1, 2, nodes] on the CPU, parents and lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burst_plugin.sequence.prefix_tree import PrefixTree

__all__ = ["as_attention_mask", "is_tree", "tree_of"]


def as_attention_mask(tree: PrefixTree) -> Tensor:
    """Return what tells layers of a tree."""
    return torch.tensor([[tree.parents, tree.lengths]], dtype=torch.int32, device="cpu")


def is_tree(attention_mask: Any) -> bool:
    """Return whether an attention mask is a prefix tree."""
    return isinstance(attention_mask, Tensor) and attention_mask.dim() == 3 and attention_mask.dtype == torch.int32


def tree_of(attention_mask: Tensor) -> PrefixTree:
    """Return the prefix tree that an attention mask is."""
    parents, lengths = attention_mask[0].tolist()
    return PrefixTree(tuple(parents), tuple(lengths))
