"""Dropout that depends only on the seed, the batch row, the head and two positions.

Every (row, head, query, key) has a 32-bit hash, so any tile of the attention matrix can be drawn on its own, by any
rank and in any pass. The finaliser is a multiply-xorshift of 32 bits (constants: Chris Wellons, "Prospecting
for hash functions", nullprogram.com, 2018).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from burst_plugin.scores import Scores

T = TypeVar("T", int, Tensor)

_BITS = 0xFFFFFFFF


def keep(scores: Scores, rows: range, heads: range, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Return the factor of every probability, 0 or 1 / (1 - dropout), for these rows and heads: [B, H, Sq, Sk]."""
    device = q_positions.device
    # Mixed before rows are added: no row of one seed is another row of the next.
    seed = _mixed((scores.seed & _BITS) ^ _mixed((scores.seed >> 32) & _BITS))
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
