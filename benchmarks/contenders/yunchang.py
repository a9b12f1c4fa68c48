"""USP, of the package yunchang as published: Ulysses within groups of ranks, ring-flash-attn's ring between them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders.kernels import StandIn, install, kernel_for
from benchmarks.contenders.protocol import Case, Contender, Session, Slept, import_problem
from benchmarks.contenders.ring_flash_attn import refuse_ring


@dataclass(frozen=True)
class USP(Contender):
    """`LongContextAttention`, or `UlyssesAttention` where one group has all ranks and no ring is left.

    `ulysses_degree` is the number of ranks of a group; None is as many of a node's as the heads allow.
    """

    name: str = "USP"
    ulysses_degree: int | None = None

    def absent(self) -> str | None:
        return import_problem("yunchang", _package)

    def refuse(self, case: Case) -> str | None:
        ulysses, ring = self._sizes(case)
        if case.documents:
            return "its attention takes whole sequences, not packed documents"
        if ulysses * ring != case.ranks:
            return f"{case.ranks} ranks do not divide into groups of {ulysses}"
        if case.q_heads % ulysses or case.kv_heads % ulysses:
            return f"Ulysses over {ulysses} ranks needs heads that divide, not {case.q_heads} and {case.kv_heads}"
        return refuse_ring(case, ring, ulysses) if ring > 1 else None

    def variants(self, case: Case) -> tuple[Contender, ...]:
        usual, _ = self._sizes(case)
        others = (n for n in range(1, case.ranks + 1) if case.ranks % n == 0 and n != usual)
        return tuple(replace(self, name=f"{self.name}, Ulysses of {n}", ulysses_degree=n) for n in others)

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        yunchang, stand_in = _package()
        (ulysses, ring), rank = self._sizes(case), dist.get_rank()
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, case.ranks, use_ulysses_low=True)
        kind = "zigzag" if case.causal and ring > 1 else "basic"
        whole = torch.arange(case.ranks * case.seq).unsqueeze(0)
        rows = yunchang.EXTRACT_FUNC_DICT[kind](whole, rank, case.ranks, rd=ring, ud=ulysses)[0]
        if ring > 1:
            layer = yunchang.LongContextAttention(ring_impl_type=kind)
        else:  # a ring of one rank would send to itself, which gloo does not do
            layer = yunchang.UlyssesAttention(importlib.import_module("yunchang.globals").PROCESS_GROUP.ULYSSES_PG)
        enter = partial(setattr, stand_in, "kernel", kernel_for(case, slept))
        return Session(rows, partial(layer, causal=case.causal), enter)

    def _sizes(self, case: Case) -> tuple[int, int]:
        """Return the number of ranks of a group, and of groups."""
        ulysses = self.ulysses_degree or gcd(case.ranks_per_node, case.q_heads, case.kv_heads)
        return ulysses, case.ranks // ulysses


def _package() -> tuple[Any, StandIn]:
    stand_in = install()
    return importlib.import_module("yunchang"), stand_in
