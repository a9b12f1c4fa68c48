"""Which `ContextParallel` belongs to which of Megatron's groups."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.mask import Mask
from burst_plugin.megatron.arguments import parsed_strategy
from burst_plugin.region import allowed
from burst_plugin.strategy import Strategy

__all__ = ["Registry"]


class Registry:
    """One `ContextParallel` per context-parallel group object, shared by all layers and microbatches.

    Copies, as Megatron makes of module specs, are the same registry.
    """

    def __init__(self, strategy: Strategy | None) -> None:
        self.strategy = strategy
        self._contexts: dict[dist.ProcessGroup, ContextParallel] = {}
        self._checked_mask: tuple[weakref.ref[Tensor], Mask] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Registry:
        return self

    def contexts(self) -> list[ContextParallel]:
        """All that are in use."""
        return list(self._contexts.values())

    def clear(self) -> None:
        """Forget all groups; Megatron has destroyed them."""
        self._contexts.clear()

    def context(self, config: Any, pg_collection: Any) -> ContextParallel:
        """That of a layer's group, created if this is its first use, which is then collective."""
        group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        if group not in self._contexts:
            hierarchy = None
            if config.hierarchical_context_parallel_sizes:
                hierarchy = getattr(pg_collection, "hcp", None)
                hierarchy = hierarchy or parallel_state.get_hierarchical_context_parallel_groups()
            self.add(group, hierarchy)
        return self._contexts[group]

    def add(self, group: dist.ProcessGroup, hierarchy: Any) -> None:
        """Make the ring of a group; collective. `hierarchy` is Megatron's list of groups, innermost first."""
        strategy = self.strategy or parsed_strategy() or Strategy()
        cp = ContextParallel(group, hierarchy=hierarchy, strategy=strategy)
        cp.connect()
        self._contexts[group] = cp

    def check_mask(self, cp: ContextParallel, attention_mask: Tensor, mask: Mask) -> None:
        """Raise ValueError on every rank if `attention_mask` [B or 1, 1, S/CP, S], True if masked, is not `mask`.

        Megatron passes a mask that is merely causal along with the mask type; one that is more must not be ignored.
        Each mask is looked at once; on GPUs, where looking stalls the host, only the first one.
        """
        seen = self._checked_mask
        if seen and ((seen[0]() is attention_mask and seen[1] == mask) or attention_mask.is_cuda):
            return
        cp.agree({"attention_mask": "to be checked"}, _mask_problem(cp, attention_mask, mask))
        self._checked_mask = (weakref.ref(attention_mask), mask)


def _mask_problem(cp: ContextParallel, attention_mask: Tensor, mask: Mask) -> str:
    """How a mask differs from what the mask type says; empty if it does not."""
    rows, columns = attention_mask.shape[-2:]
    queries = cp.positions(columns, attention_mask.device)
    keys = torch.arange(columns, device=attention_mask.device)
    expected = ~allowed(mask, (columns, columns), queries, keys)
    if rows == len(queries) and bool((attention_mask.bool() == expected).all()):
        return ""
    return (
        f"attention_mask {list(attention_mask.shape)} is not the {mask} that attn_mask_type says; drop "
        "--reset-attention-mask, or pass no mask (--no-create-attention-mask-in-dataloader)"
    )
