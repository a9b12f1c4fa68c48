"""USP, of the package yunchang: Ulysses within groups of ranks, and ring-flash-attn's ring between the groups.

The package is as published; `flash_attn`, which it imports, is a stand-in.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import flash_attn_stand_in
from benchmarks.contenders.flash_attn_stand_in import StandIn
from benchmarks.contenders.kernels import kernel_for
from benchmarks.contenders.peer import PeerSession, import_problem
from benchmarks.contenders.protocol import Case, Contender, Slept
from benchmarks.contenders.ring_flash_attn import refuse_ring

__all__ = ["USP"]


@dataclass(frozen=True)
class USP:
    """`LongContextAttention`, or `UlyssesAttention` where one group has all ranks and no ring is left.

    `ulysses_degree` is the ranks of a group, consecutive ones; None is as many of a node's as the heads allow: then
    the all-to-alls stay inside nodes and the ring runs between them. `configurations` has all degrees.
    """

    name: str = "USP"
    ulysses_degree: int | None = None

    def absent(self) -> str | None:
        """See `Contender.absent`."""
        return import_problem("yunchang", _package)

    def refuse(self, case: Case) -> str | None:
        """See `Contender.refuse`."""
        ulysses, ring = self._sizes(case)
        if case.documents:
            return "its attention takes whole sequences, not packed documents"
        if ulysses * ring != case.ranks:
            return f"{case.ranks} ranks do not divide into groups of {ulysses}"
        if case.q_heads % ulysses or case.kv_heads % ulysses:
            return f"Ulysses over {ulysses} ranks needs heads that divide, not {case.q_heads} and {case.kv_heads}"
        return refuse_ring(case, ring, ulysses) if ring > 1 else None

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """See `Contender.configurations`."""
        usual, _ = self._sizes(case)
        others = (n for n in range(1, case.ranks + 1) if case.ranks % n == 0 and n != usual)
        found = (self, *(replace(self, name=f"{self.name}, Ulysses of {n}", ulysses_degree=n) for n in others))
        return tuple(usp for usp in found if usp.refuse(case) is None)

    def prepare(self, case: Case, slept: Slept | None) -> PeerSession:
        """See `Contender.prepare`."""
        yunchang, stand_in = _package()
        ulysses, ring = self._sizes(case)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, ranks, use_ulysses_low=True)
        kind = "zigzag" if case.causal and ring > 1 else "basic"
        whole = torch.arange(ranks * case.seq).unsqueeze(0)
        rows = yunchang.EXTRACT_FUNC_DICT[kind](whole, rank, ranks, rd=ring, ud=ulysses)[0]
        layer = _layer(yunchang, kind, ring)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = layer(q, k, v, causal=case.causal)
            return out

        return PeerSession(rows, attend, partial(setattr, stand_in, "kernel", kernel_for(case, slept)))

    def _sizes(self, case: Case) -> tuple[int, int]:
        """Ranks of a group, and groups."""
        ulysses = self.ulysses_degree or gcd(case.ranks_per_node, case.q_heads, case.kv_heads)
        return ulysses, case.ranks // ulysses


def _package() -> tuple[Any, StandIn]:
    stand_in = flash_attn_stand_in.install()
    return importlib.import_module("yunchang"), stand_in


def _layer(yunchang: Any, kind: str, ring: int) -> Any:
    """The module of the groups just set; a ring of one rank would send to itself, which gloo does not do."""
    if ring > 1:
        return yunchang.LongContextAttention(ring_impl_type=kind)
    groups = importlib.import_module("yunchang.globals").PROCESS_GROUP
    return yunchang.UlyssesAttention(groups.ULYSSES_PG)
