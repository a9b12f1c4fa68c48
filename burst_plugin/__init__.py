"""BurstAttention: exact attention over sequences that are spread over a ring of ranks.

    cp = burst_plugin.ContextParallel(group)
    out = burst_plugin.burst_attention(q, k, v, cp)

Importing this package imports torch and nothing else, and has no side effect.

What happens in a call, and where:

    attention.burst_attention
      request, choices -> call      arguments checked, every choice made, once for calls that are alike
      context, agreement            ranks compare what they are about to do; communicators are made
      ulysses                       heads go to their ranks (ulysses_degree > 1), and outputs come back
      attention.run_pass            the loop, a visit per step:
        executor.RingPass             waits, posts, hands over the block that is here
          schedule -> transfers         who visits what when, for all ranks, as data
          needs, routes -> itinerary    what mask and layout leave of that for this rank; its messages
          transport, packing            how bytes move, and in which buffers
        passes, tile_work, kernels    work on the tiles of the visit (layout, mask -> region -> tiles)
        sums, softmax                 add up what tiles and other ranks contribute
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst_plugin.attention import burst_attention
from burst_plugin.batch import shard_batch
from burst_plugin.context import ContextParallel
from burst_plugin.layout import Tokens
from burst_plugin.mask import (
    BlockMask,
    Causal,
    CausalBottomRight,
    Documents,
    Full,
    Keys,
    Mask,
    PerRow,
    PrefixLM,
    SlidingWindow,
    key_padding,
)
from burst_plugin.schedule import direct, flat_ring, two_level_ring
from burst_plugin.scores import Scores
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.transfers import Schedule, ScheduleError, Transfer
from burst_plugin.transport import RingError

if TYPE_CHECKING:
    from burst_plugin.virtual import VirtualRing

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "Causal",
    "CausalBottomRight",
    "ContextParallel",
    "Documents",
    "Full",
    "Keys",
    "Link",
    "Mask",
    "PerRow",
    "PrefixLM",
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
    "shard_batch",
    "two_level_ring",
]


def __getattr__(name: str) -> Any:
    """Loads what training does not need when it is first asked for."""
    if name == "VirtualRing":
        from burst_plugin.virtual import VirtualRing

        return VirtualRing
    raise AttributeError(f"module 'burst_plugin' has no attribute {name!r}")
