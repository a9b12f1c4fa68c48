"""DeepSpeed-Ulysses: all-to-alls swap the sequence for the heads, so that each rank attends with some whole heads.

The package is as published, with both of its layers: `DistributedAttention`, and where there are fewer key/value
heads than ranks `UlyssesSPAttentionHF`, which sends each of them to several. The local attention is flash_attn's, of
which there is a stand-in.
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

from benchmarks.contenders.kernels import StandIn, install, kernel_for
from benchmarks.contenders.protocol import Attend, Case, Contender, Session, Slept, layout_rows
from burst_plugin.deepspeed import cpu


@dataclass(frozen=True)
class Ulysses(Contender):
    """All ranks exchange their heads."""

    name: str = "Ulysses"

    def absent(self) -> str | None:
        try:  # here, so that ranks forked from here need not
            _imported("deepspeed.sequence.layer")
            _imported("deepspeed.runtime.sequence_parallel.ulysses_sp")
        except Exception as error:  # whatever an import may raise
            return f"deepspeed does not import ({error!r}); the extra `bench` has it"
        return None

    def refuse(self, case: Case) -> str | None:
        if case.kv_heads < case.ranks and (case.q_heads % case.ranks or case.ranks % case.kv_heads):
            return f"it assigns heads to {case.ranks} ranks: {case.q_heads} and {case.kv_heads} do not divide"
        return None

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        stand_in, kernel = install(), kernel_for(case, slept)
        _imported("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        layer = _replicating if case.kv_heads < case.ranks else _distributed
        rows = layout_rows("contiguous", case)
        return Session(rows, layer(case, _local(case, stand_in), rows), partial(setattr, stand_in, "kernel", kernel))


def _distributed(case: Case, local: Attend, _: Tensor) -> Attend:
    """Return the layer that exchanges key/value heads as it exchanges query heads."""
    layer = _imported("deepspeed.sequence.layer").DistributedAttention
    # An engine would have set this, of Megatron's groups, for heads that do not divide.
    _imported("deepspeed.utils.groups").mpu = SimpleNamespace(get_sequence_parallel_rank=dist.get_rank)
    return partial(layer(local, dist.group.WORLD, scatter_idx=2, gather_idx=1), batch_dim_idx=0)


def _replicating(case: Case, local: Attend, rows: Tensor) -> Attend:
    """Return the layer for models of transformers, which replicates key/value heads where there are few.

    It calls what transformers would: attention of a module, on [B, H, S, D], that returns [B, S, H, D].
    """

    def transposed(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **_: object) -> tuple[Tensor, None]:
        return local(*(x.transpose(1, 2) for x in (q, k, v))), None

    sizes = {"batch_size": case.batch, "local_seq_length": case.seq, "global_seq_length": case.seq * case.ranks}
    sizes |= {"attn_head_count": case.q_heads, "kv_head_count": case.kv_heads, "attn_head_size": case.head_dim}
    layer = _imported("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF(
        transposed, **sizes, num_hidden_layers=1, process_group=dist.group.WORLD
    )
    module = SimpleNamespace(training=True)  # of transformers; the layer notes query heads per key head in it
    position_ids = rows.expand(case.batch, -1).contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = layer(module, *(x.transpose(1, 2) for x in (q, k, v)), None, position_ids=position_ids)
        return out.unflatten(2, (case.q_heads, case.head_dim))

    return attend


def _local(case: Case, stand_in: StandIn) -> Attend:
    """Return attention of whole sequences [B, ranks * S, H, D]."""
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
    """Import a module of DeepSpeed, which on a machine with GPUs would otherwise settle for those."""
    with mock.patch.dict(os.environ):  # what is set there is for DeepSpeed alone
        cpu.enable()
        return importlib.import_module(module)
