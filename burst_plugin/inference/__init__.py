"""Attention at inference: keys and values of a batch, kept by the ranks of a ring from turn to turn.

cache = burst_plugin.inference.KVCache(cp, layers=2)
"""

from __future__ import annotations

from burst_plugin.inference.attending import pass_q_share
from burst_plugin.inference.cache import KVCache
from burst_plugin.inference.tree import decode_bytes
from burst_plugin.inference.turn import Turn, are_few

__all__ = ["KVCache", "Turn", "are_few", "decode_bytes", "pass_q_share"]
