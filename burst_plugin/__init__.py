"""BurstAttention: exact attention over sequences that are spread over a ring of ranks.

    cp = burst_plugin.ContextParallel(group)
    out = burst_plugin.burst_attention(q, k, v, cp)

Importing this package imports torch and nothing else, and has no side effect.

docs/architecture.md shows the parts of the package, and how q passes through them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from burst_plugin.comm.transport import RingError
from burst_plugin.schedule.direct import direct
from burst_plugin.schedule.rings import flat_ring, tasp, two_level_ring
from burst_plugin.schedule.schedule import Schedule, ScheduleError
from burst_plugin.schedule.steps import Transfer
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.mask import Region
from burst_plugin.sequence.masks import (
    BidirectionalSpans,
    Causal,
    CausalBottomRight,
    Documents,
    Full,
    Keys,
    Mask,
    PerHeadGroup,
    PerRow,
    PrefixLM,
    SlidingWindow,
    key_padding,
)
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology, Traffic

if TYPE_CHECKING:
    from burst_plugin.attention import burst_attention
    from burst_plugin.batch import shard_batch
    from burst_plugin.context import ContextParallel
    from burst_plugin.latents import latent_attention
    from burst_plugin.relative_bias import relative_attention
    from burst_plugin.sequence.block_masks import BlockMask, selected_blocks
    from burst_plugin.sequence.prefix_tree import PrefixTree
    from burst_plugin.virtual import VirtualRing

__version__ = "0.1.0"

__all__ = [
    "BidirectionalSpans",
    "BlockMask",
    "Causal",
    "CausalBottomRight",
    "ContextParallel",
    "Documents",
    "Full",
    "Keys",
    "Link",
    "Mask",
    "PerHeadGroup",
    "PerRow",
    "PrefixLM",
    "PrefixTree",
    "Region",
    "RingError",
    "Schedule",
    "ScheduleError",
    "Scores",
    "SlidingWindow",
    "Strategy",
    "Tokens",
    "Topology",
    "Traffic",
    "Transfer",
    "VirtualRing",
    "burst_attention",
    "direct",
    "flat_ring",
    "key_padding",
    "latent_attention",
    "relative_attention",
    "selected_blocks",
    "shard_batch",
    "tasp",
    "two_level_ring",
]


_LOADED_LATER = {  # at their first use, from modules that run a ring, or that most training does not need
    "BlockMask": "sequence.block_masks",
    "ContextParallel": "context",
    "PrefixTree": "sequence.prefix_tree",
    "VirtualRing": "virtual",
    "burst_attention": "attention",
    "latent_attention": "latents",
    "relative_attention": "relative_bias",
    "selected_blocks": "sequence.block_masks",
    "shard_batch": "batch",
}


def __getattr__(name: str) -> Any:
    """Load a name of `_LOADED_LATER` when it is first used."""
    if name not in _LOADED_LATER:
        raise AttributeError(f"module 'burst_plugin' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"burst_plugin.{_LOADED_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    """List the names that are loaded later, too."""
    return sorted({*globals(), *_LOADED_LATER})
