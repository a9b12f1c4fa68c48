"""DeepSpeed-Ulysses: all-to-alls swap the sequence for the heads, so that each rank attends with some whole heads.

The package is as published, with both of its layers: `DistributedAttention`, and where there are fewer key/value
heads than ranks `UlyssesSPAttentionHF`, which sends each of them to several. The local attention is
`flash_attn_func`, of packed documents `flash_attn_varlen_func`, here stand-ins. The shared-memory collectives, which
it would compile, are left out: there is no all-to-all among them.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import flash_attn_stand_in
from benchmarks.contenders.flash_attn_stand_in import StandIn
from benchmarks.contenders.kernels import kernel_for
from benchmarks.contenders.peer import Attend, PeerSession, layout_rows
from benchmarks.contenders.protocol import Case, Contender, Slept
from burst_plugin.deepspeed import cpu

__all__ = ["Ulysses"]


@dataclass(frozen=True)
class Ulysses:
    """All ranks deal out their heads to each other."""

    name: str = "Ulysses"

    def absent(self) -> str | None:
        """See `Contender.absent`. Imports DeepSpeed, so that ranks forked from here need not."""
        try:
            _imported("deepspeed.sequence.layer")
            _imported("deepspeed.runtime.sequence_parallel.ulysses_sp")
        except Exception as error:  # whatever an import may raise
            return f"deepspeed does not import ({error!r}); the extra `bench` has it"
        return None

    def refuse(self, case: Case) -> str | None:
        """See `Contender.refuse`."""
        if case.kv_heads < case.ranks and (case.q_heads % case.ranks or case.ranks % case.kv_heads):
            return f"it deals heads out to {case.ranks} ranks: {case.q_heads} and {case.kv_heads} do not divide"
        return None

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """See `Contender.configurations`."""
        return (self,) if self.refuse(case) is None else ()

    def prepare(self, case: Case, slept: Slept | None) -> PeerSession:
        """See `Contender.prepare`."""
        stand_in, kernel = flash_attn_stand_in.install(), kernel_for(case, slept)
        _imported("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        layer = _replicating if case.kv_heads < case.ranks else _distributed
        rows = layout_rows("contiguous", case.seq)
        return PeerSession(rows, layer(case, stand_in, rows), partial(setattr, stand_in, "kernel", kernel))


class _Ranks:
    """All that is asked of Megatron's groups."""

    get_sequence_parallel_rank = staticmethod(dist.get_rank)


def _distributed(case: Case, stand_in: StandIn, _: Tensor) -> Attend:
    """The layer whose ranks share key/value heads as they share query heads."""
    distributed = _imported("deepspeed.sequence.layer").DistributedAttention
    _imported("deepspeed.utils.groups").mpu = _Ranks  # which an engine would have set: for heads that do not divide
    layer = distributed(_local(case, stand_in), dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(q, k, v, batch_dim_idx=0)
        return out

    return attend


def _replicating(case: Case, stand_in: StandIn, rows: Tensor) -> Attend:
    """The layer for models of transformers, which knows what to do with few key/value heads.

    It calls what transformers would: attention of a module, on [B, H, S, D], that returns [B, S, H, D].
    """

    attention = _local(case, stand_in)

    def local(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **_: object) -> tuple[Tensor, None]:
        return attention(*(x.transpose(1, 2) for x in (q, k, v))), None

    layer = _imported("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF(
        local,
        batch_size=case.batch,
        attn_head_count=case.q_heads,
        attn_head_size=case.head_dim,
        kv_head_count=case.kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        local_seq_length=case.seq,
        global_seq_length=case.seq * case.ranks,
    )
    module = SimpleNamespace(training=True)  # of transformers: the layer tells it how many query heads share a key
    position_ids = rows.expand(case.batch, -1).contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = layer(module, *(x.transpose(1, 2) for x in (q, k, v)), None, position_ids=position_ids)
        found: torch.Tensor = out.unflatten(2, (case.q_heads, case.head_dim))
        return found

    return attend


def _local(case: Case, stand_in: StandIn) -> Attend:
    """Attention of whole sequences [B, ranks * S, H, D]."""
    if not case.documents:
        return partial(stand_in.flash_attn_func, causal=case.causal)
    length, longest = case.ranks * case.seq, max(case.documents)
    ends = [row * length + end for row in range(case.batch) for end in case.cu_seqlens[:-1]]
    cu_seqlens = torch.tensor([*ends, case.batch * length], dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = (x.flatten(0, 1) for x in (q, k, v))
        out: Tensor = stand_in.flash_attn_varlen_func(*qkv, cu_seqlens, cu_seqlens, longest, longest, causal=True)
        return out.unflatten(0, (case.batch, length))

    return attend


def _imported(module: str) -> Any:
    """A module of DeepSpeed, which on a machine with GPUs would otherwise settle for those when it is imported."""
    with mock.patch.dict(os.environ):  # what is set there is for DeepSpeed alone
        cpu.enable()
        return importlib.import_module(module)
