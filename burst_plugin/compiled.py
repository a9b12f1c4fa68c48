"""Attention inside `torch.compile`: one opaque step between two graphs.

The compiler may neither look into the ring, whose order of messages all ranks share, nor take its options for
constants (`torch.compiler.assume_constant_result` forgets the fields of dataclasses made in compiled code, seen in
torch 2.13). So every attention is one graph break, with what comes before and after it compiled.
"""

from __future__ import annotations

import torch

from burst_plugin.attention import ring_attention

__all__ = ["opaque_attention"]

opaque_attention = torch.compiler.disable(  # type: ignore[no-untyped-call]
    ring_attention, reason="burst attention communicates around a ring"
)
