"""ring-flash-attn: keys and values travel one flat ring in both directions, zigzag where causal.

The package is as published. `flash_attn`, which it imports, is a stand-in; its adapters for transformers are left
out, since they do not import with transformers 5.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders.kernels import StandIn, install, kernel_for
from benchmarks.contenders.protocol import Attend, Case, Contender, Session, Slept, import_problem, layout_rows

_PREPARED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")


@dataclass(frozen=True)
class RingFlashAttn(Contender):
    """`zigzag_ring_flash_attn_func` for causal attention, `ring_flash_attn_func` for full.

    Packed documents take `zigzag_ring_flash_attn_varlen_func`, each distributed on its own; or, with `gathers`
    ("heads" at once, or one "head" while it works on the one before), `llama3_flash_attn_varlen_func`.
    """

    name: str = "ring-flash-attn"
    gathers: str = ""

    def absent(self) -> str | None:
        return import_problem("ring_flash_attn", _package)

    def refuse(self, case: Case) -> str | None:
        if case.documents and case.batch > 1:
            return "it has no batches of packed documents"
        if self.gathers:
            return None if case.documents else "its llama3 function is for packed documents"
        if any(length % (2 * case.ranks) for length in case.documents):
            return f"zigzag cuts every document into {2 * case.ranks} pieces of one length"
        return refuse_ring(case, case.ranks)

    def variants(self, case: Case) -> tuple[Contender, ...]:
        return tuple(replace(self, name=f"{self.name}, llama3 by {n}", gathers=n) for n in ("heads", "head"))

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        package, stand_in = _package()
        enter = partial(setattr, stand_in, "kernel", kernel_for(case, slept))
        if case.documents:
            attend = self._packed(case, package)
        elif case.causal:
            attend = partial(package.zigzag_ring_flash_attn_func, causal=True, group=dist.group.WORLD)
        else:
            attend = partial(package.ring_flash_attn_func, causal=False, group=dist.group.WORLD)
        zigzag = case.causal and not self.gathers
        rows = layout_rows("zigzag" if zigzag else "contiguous", case, by_document=zigzag and bool(case.documents))
        return Session(rows, attend, enter)

    def _packed(self, case: Case, package: ModuleType) -> Attend:
        cu_seqlens = torch.tensor(case.cu_seqlens, dtype=torch.int32)
        if not self.gathers:
            longest = max(case.documents) // case.ranks
            lengths = {"cu_seqlens": cu_seqlens // case.ranks, "max_seqlen": longest}
            return _of_one_row(package.zigzag_ring_flash_attn_varlen_func, **lengths)
        prepared = package.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, dist.get_rank(), case.ranks)
        lengths = dict(zip(_PREPARED, prepared, strict=True))
        stride = 1 if self.gathers == "head" else case.kv_heads
        return _of_one_row(package.llama3_flash_attn_varlen_func, heads_k_stride=stride, **lengths)


def _of_one_row(function: Callable[..., Tensor], **lengths: object) -> Attend:
    """Return a causal function of [T, H, D] as one of [1, T, H, D]."""
    call = partial(function, causal=True, group=dist.group.WORLD, **lengths)
    return lambda q, k, v: call(q.squeeze(0), k.squeeze(0), v.squeeze(0)).unsqueeze(0)


def refuse_ring(case: Case, ring_ranks: int, joined: int = 1) -> str | None:
    """Return why its rings, which yunchang has too, cannot do this case; `joined` ranks share a place of the ring."""
    if ring_ranks < 2:
        return "its ring of one rank sends to itself, which gloo does not do"
    if case.dtype.itemsize > 2:
        return (
            f"its gradients are wrong in {str(case.dtype).removeprefix('torch.')}: its backward pass sums up in "
            "`buffer.to(torch.float32)`, which is the buffer itself, and writes the part of the next visit into it"
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
    stand_in = install()
    return importlib.import_module("ring_flash_attn"), stand_in
