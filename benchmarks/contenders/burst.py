"""This project, by several of its strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders.kernels import SleepingKernel
from benchmarks.contenders.protocol import Case, Contender, Slept
from burst_plugin import Causal, ContextParallel, Full, Mask, Strategy, burst_attention
from burst_plugin.strategy import AUTO

__all__ = ["BURST", "Burst"]

_DEFAULTS = Strategy(check="sparse")  # what check="auto" is on GPUs, for which emulated ranks stand


@dataclass(frozen=True)
class Burst:
    """`burst_attention` by a strategy, whose kernel and ranks per node are those of the case."""

    name: str
    strategy: Strategy = _DEFAULTS

    def absent(self) -> str | None:
        """See `Contender.absent`."""
        return None

    def refuse(self, case: Case) -> str | None:
        """See `Contender.refuse`."""
        return None

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """See `Contender.configurations`."""
        return (self,) if self.refuse(case) is None else ()

    def prepare(self, case: Case, slept: Slept | None) -> BurstSession:
        """See `Contender.prepare`."""
        kernel = AUTO if slept is None else SleepingKernel(case, slept)
        strategy = replace(self.strategy, kernel=kernel, ranks_per_node=case.ranks_per_node)
        return BurstSession(ContextParallel(dist.group.WORLD, strategy=strategy), Causal() if case.causal else Full())


@dataclass(frozen=True)
class BurstSession:
    """See `Session`."""

    cp: ContextParallel
    mask: Mask

    def shard(self, whole: Tensor) -> Tensor:
        """See `Session.shard`."""
        return self.cp.shard(whole)

    def unshard(self, local: Tensor) -> Tensor:
        """See `Session.unshard`."""
        return self.cp.unshard(local.detach())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Session.attend`."""
        out = burst_attention(q, k, v, self.cp, mask=self.mask)
        assert isinstance(out, Tensor)  # nothing else was asked for
        return out


BURST = (
    Burst("burst"),
    Burst("burst flat ring", replace(_DEFAULTS, schedule="flat_ring")),
    Burst("burst, q travels", replace(_DEFAULTS, forward="kv", backward="q")),
    Burst("burst, kv travels", replace(_DEFAULTS, forward="kv", backward="kv")),
)
