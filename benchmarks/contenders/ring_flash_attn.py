"""ring-flash-attn: keys and values travel one flat ring in both directions, zigzag where causal.

The package is as published. `flash_attn`, which it imports, is a stand-in; its adapters for transformers are left
out, since they do not import with transformers 5.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist

from benchmarks.contenders.kernels import StandIn, install, kernel_for
from benchmarks.contenders.protocol import Case, Contender, Session, Slept, import_problem, layout_rows

_FUNCTIONS = {"ring": "ring_flash_attn", "zigzag": "zigzag_ring_flash_attn", "llama3": "llama3_flash_attn"}
_PREPARED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")


@dataclass(frozen=True)
class RingFlashAttn(Contender):
    """`zigzag_ring_flash_attn_func` for causal attention, `ring_flash_attn_func` for full.

    `packed` is its function for packed documents: "zigzag" or "ring", each on its own; "llama3", all heads at once.
    """

    name: str = "ring-flash-attn"
    packed: str = ""

    def absent(self) -> str | None:
        return import_problem("ring_flash_attn", _package)

    def refuse(self, case: Case) -> str | None:
        if bool(case.documents) != bool(self.packed):
            return "it has other functions for packed documents"
        if case.documents and case.batch > 1:
            return "it has no batches of packed documents"
        if self.packed == "llama3":
            return None
        pieces = (2 if self.packed == "zigzag" else 1) * case.ranks
        if any(length % pieces for length in case.documents):
            return f"it cuts every document into {pieces} pieces of one length"
        return refuse_ring(case, case.ranks)

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        package, stand_in = _package()
        way = self.packed or ("zigzag" if case.causal else "ring")
        function = getattr(package, f"{_FUNCTIONS[way]}{'_varlen' * bool(self.packed)}_func")
        attend = partial(function, causal=case.causal, group=dist.group.WORLD, **self._lengths(case, package))
        layout, by_document = "zigzag" if way == "zigzag" else "contiguous", self.packed in ("zigzag", "ring")
        rows = layout_rows(layout, case, by_document=by_document)
        enter = partial(setattr, stand_in, "kernel", kernel_for(case, slept))
        if not self.packed:
            return Session(rows, attend, enter)
        return Session(rows, lambda *qkv: attend(*(x.squeeze(0) for x in qkv)).unsqueeze(0), enter)

    def _lengths(self, case: Case, package: ModuleType) -> dict[str, object]:
        """Return what its functions for packed documents are told of them."""
        if not self.packed:
            return {}
        cu_seqlens = torch.tensor(case.cu_seqlens, dtype=torch.int32)
        if self.packed != "llama3":
            return {"cu_seqlens": cu_seqlens // case.ranks, "max_seqlen": max(case.documents) // case.ranks}
        prepared = package.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, dist.get_rank(), case.ranks)
        return dict(zip(_PREPARED, prepared, strict=True)) | {"heads_k_stride": case.kv_heads}


PACKED = tuple(RingFlashAttn(f"ring-flash-attn {function}", function) for function in ("zigzag", "ring", "llama3"))


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
