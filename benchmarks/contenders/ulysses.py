"""DeepSpeed-Ulysses: all-to-alls swap the sequence for the heads, so that each rank attends with some whole heads.

The package is as published. Its local attention is `flash_attn_func`, here a stand-in. Its shared-memory collectives,
which it would compile, are left out: there is no all-to-all among them.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import flash_attn_stand_in
from benchmarks.contenders.kernels import kernel_for
from benchmarks.contenders.peer import PeerSession, layout_rows
from benchmarks.contenders.protocol import Case, Contender, Slept
from burst_plugin.deepspeed import cpu

__all__ = ["Ulysses"]


@dataclass(frozen=True)
class Ulysses:
    """`deepspeed.sequence.layer.DistributedAttention` over all ranks."""

    name: str = "Ulysses"

    def absent(self) -> str | None:
        """See `Contender.absent`. Imports DeepSpeed, so that ranks forked from here need not."""
        try:
            _imported("deepspeed.sequence.layer")
        except Exception as error:  # whatever an import may raise
            return f"deepspeed does not import ({error!r}); the extra `bench` has it"
        return None

    def refuse(self, case: Case) -> str | None:
        """See `Contender.refuse`."""
        if case.q_heads % case.ranks or case.kv_heads % case.ranks:
            return f"it deals heads out to {case.ranks} ranks: {case.q_heads} and {case.kv_heads} do not divide"
        return None

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """See `Contender.configurations`."""
        return (self,) if self.refuse(case) is None else ()

    def prepare(self, case: Case, slept: Slept | None) -> PeerSession:
        """See `Contender.prepare`."""
        stand_in, kernel = flash_attn_stand_in.install(), kernel_for(case, slept)
        _imported("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        distributed = _imported("deepspeed.sequence.layer").DistributedAttention
        layer = distributed(stand_in.flash_attn_func, dist.group.WORLD, scatter_idx=2, gather_idx=1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = layer(q, k, v, batch_dim_idx=0, causal=case.causal)
            return out

        return PeerSession(layout_rows("contiguous", case.seq), attend, partial(setattr, stand_in, "kernel", kernel))


def _imported(module: str) -> Any:
    """A module of DeepSpeed, which on a machine with GPUs would otherwise settle for those when it is imported."""
    with mock.patch.dict(os.environ):  # what is set there is for DeepSpeed alone
        cpu.enable()
        return importlib.import_module(module)
