"""ring-flash-attn: keys and values travel one flat ring in both directions, zigzag where causal.

The package is as published. `flash_attn`, which it imports, is a stand-in; its adapters for transformers, which this
benchmark has no use for, are left out, since they do not import with transformers 5.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import flash_attn_stand_in
from benchmarks.contenders.flash_attn_stand_in import StandIn
from benchmarks.contenders.kernels import kernel_for
from benchmarks.contenders.peer import PeerSession, import_problem, layout_rows
from benchmarks.contenders.protocol import Case, Contender, Slept

__all__ = ["RingFlashAttn", "refuse_ring"]


@dataclass(frozen=True)
class RingFlashAttn:
    """`zigzag_ring_flash_attn_func` for causal attention, `ring_flash_attn_func` for full."""

    name: str = "ring-flash-attn"

    def absent(self) -> str | None:
        """See `Contender.absent`."""
        return import_problem("ring_flash_attn", _package)

    def refuse(self, case: Case) -> str | None:
        """See `Contender.refuse`."""
        return refuse_ring(case, case.ranks)

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """See `Contender.configurations`."""
        return (self,) if self.refuse(case) is None else ()

    def prepare(self, case: Case, slept: Slept | None) -> PeerSession:
        """See `Contender.prepare`."""
        package, stand_in = _package()
        function = package.zigzag_ring_flash_attn_func if case.causal else package.ring_flash_attn_func

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = function(q, k, v, causal=case.causal, group=dist.group.WORLD)
            return out

        rows = layout_rows("zigzag" if case.causal else "contiguous", case.seq)
        return PeerSession(rows, attend, partial(setattr, stand_in, "kernel", kernel_for(case, slept)))


def refuse_ring(case: Case, ring_ranks: int, joined: int = 1) -> str | None:
    """Why ring-flash-attn's rings, which yunchang has too, cannot do this case; None if they can.

    `joined` ranks have their tokens on one place of the ring.
    """
    if ring_ranks < 2:
        return "its ring of one rank sends to itself, which gloo does not do"
    if case.dtype.itemsize > 2:
        dtype = str(case.dtype).removeprefix("torch.")
        return (
            f"its gradients are wrong in {dtype}: its backward pass sums up in `buffer.to(torch.float32)`, which for "
            "that type is the buffer itself, and writes the part of the next visit into it"
        )
    if not case.causal and case.dtype is not torch.bfloat16:
        return "its ring for full attention returns dq in bfloat16 whatever the inputs are"
    if case.causal and case.seq * joined % 2:
        return f"zigzag cuts what a place of the ring holds, {case.seq * joined} tokens, into halves"
    return None


def _package() -> tuple[ModuleType, StandIn]:
    adapters = ModuleType("ring_flash_attn.adapters")
    for name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):
        setattr(adapters, name, None)
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    stand_in = flash_attn_stand_in.install()
    return importlib.import_module("ring_flash_attn"), stand_in
