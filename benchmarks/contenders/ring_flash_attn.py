"""ring-flash-attn: keys and values travel one flat ring in both directions, zigzag where causal.

The package is as published. `flash_attn`, which it imports, is a stand-in; its adapters for transformers, which this
benchmark has no use for, are left out, since they do not import with transformers 5.
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

from benchmarks.contenders import flash_attn_stand_in
from benchmarks.contenders.flash_attn_stand_in import StandIn
from benchmarks.contenders.kernels import kernel_for
from benchmarks.contenders.peer import Attend, PeerSession, import_problem, layout_rows
from benchmarks.contenders.protocol import Case, Contender, Slept
from burst_plugin.sequence.layout import LAYOUTS, Tokens, positions

__all__ = ["RingFlashAttn", "refuse_ring"]

_PREPARED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")


@dataclass(frozen=True)
class RingFlashAttn:
    """`zigzag_ring_flash_attn_func` for causal attention, `ring_flash_attn_func` for full.

    Packed documents take `zigzag_ring_flash_attn_varlen_func`, each dealt out on its own; or, where it `gathers`
    ("heads" at once, or one "head" while it works on the one before), `llama3_flash_attn_varlen_func`.
    """

    name: str = "ring-flash-attn"
    gathers: str = ""

    def absent(self) -> str | None:
        """See `Contender.absent`."""
        return import_problem("ring_flash_attn", _package)

    def refuse(self, case: Case) -> str | None:
        """See `Contender.refuse`."""
        if case.documents and case.batch > 1:
            return "it has no batches of packed documents"
        if self.gathers:
            return None if case.documents else "its llama3 function is for packed documents"
        if any(length % (2 * case.ranks) for length in case.documents):
            return f"zigzag cuts every document into {2 * case.ranks} pieces of one length"
        return refuse_ring(case, case.ranks)

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """See `Contender.configurations`."""
        gathering = (replace(self, name=f"{self.name}, llama3 by {n}", gathers=n) for n in ("heads", "head"))
        return tuple(each for each in (self, *gathering) if each.refuse(case) is None)

    def prepare(self, case: Case, slept: Slept | None) -> PeerSession:
        """See `Contender.prepare`."""
        package, stand_in = _package()
        enter = partial(setattr, stand_in, "kernel", kernel_for(case, slept))
        if case.documents:
            deal = self._gathering if self.gathers else self._by_document
            return PeerSession(*deal(case, package), enter)
        function = package.zigzag_ring_flash_attn_func if case.causal else package.ring_flash_attn_func

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = function(q, k, v, causal=case.causal, group=dist.group.WORLD)
            return out

        rows = layout_rows("zigzag" if case.causal else "contiguous", case.seq)
        return PeerSession(rows, attend, enter)

    def _by_document(self, case: Case, package: ModuleType) -> tuple[Tensor, Attend]:
        rows = positions(
            LAYOUTS["zigzag"].runs(dist.get_rank(), case.ranks, Tokens(case.ranks * case.seq, case.cu_seqlens))
        )
        cu_seqlens = torch.tensor(case.cu_seqlens, dtype=torch.int32) // case.ranks
        attend = partial(
            package.zigzag_ring_flash_attn_varlen_func,
            cu_seqlens=cu_seqlens,
            max_seqlen=max(case.documents) // case.ranks,
            causal=True,
            group=dist.group.WORLD,
        )
        return rows, _of_one_row(attend)

    def _gathering(self, case: Case, package: ModuleType) -> tuple[Tensor, Attend]:
        whole = torch.tensor(case.cu_seqlens, dtype=torch.int32)
        prepared = package.llama3_flash_attn_prepare_cu_seqlens(whole, True, dist.get_rank(), case.ranks)
        attend = partial(
            package.llama3_flash_attn_varlen_func,
            **dict(zip(_PREPARED, prepared, strict=True)),
            heads_k_stride=1 if self.gathers == "head" else case.kv_heads,
            causal=True,
            group=dist.group.WORLD,
        )
        return layout_rows("contiguous", case.seq), _of_one_row(attend)


def _of_one_row(function: Callable[..., Tensor]) -> Attend:
    """A function of [T, H, D] as one of [1, T, H, D]."""
    return lambda q, k, v: function(q.squeeze(0), k.squeeze(0), v.squeeze(0)).unsqueeze(0)


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
