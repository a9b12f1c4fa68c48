"""This project, by several of its strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders.kernels import SleepingKernel
from benchmarks.contenders.protocol import Case, Contender, Slept
from burst_plugin import ContextParallel, Mask, Strategy, Tokens, Topology, burst_attention
from burst_plugin.strategy import AUTO

__all__ = ["BURST", "Burst"]

_DEFAULTS = Strategy()


@dataclass(frozen=True)
class Burst:
    """`burst_attention` by a strategy, whose kernel and ranks per node are those of the case.

    With `several` the rest is open too, as to a user who asks `burst plan`: heads exchanged by several ranks or none,
    without that keys and values that travel backward, and on described links parts as the planner says.
    """

    name: str
    strategy: Strategy = _DEFAULTS
    several: bool = False

    def absent(self) -> str | None:
        """See `Contender.absent`."""
        return None

    def refuse(self, case: Case) -> str | None:
        """See `Contender.refuse`."""
        degree = self.strategy.ulysses_degree
        sizes = Topology(case.nodes, case.ranks_per_node).ulysses_degrees
        if degree not in sizes or degree not in case.shapes.ulysses_degrees:
            return f"no teams of {degree} ranks can share {case.q_heads} query and {case.kv_heads} key/value heads"
        return None

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """See `Contender.configurations`; `several` of them differ in who travels, and how many exchange heads."""
        if not self.several:
            return (self,) if self.refuse(case) is None else ()
        sizes = Topology(case.nodes, case.ranks_per_node).ulysses_degrees
        by_keys = replace(self, name=f"{self.name}, kv back", strategy=replace(self.strategy, backward="kv"))
        exchanging = (self.of_degree(n) for n in sizes if n > 1)
        return tuple(each for each in (self, by_keys, *exchanging) if each.refuse(case) is None)

    def of_degree(self, degree: int) -> Burst:
        """With that many ranks exchanging heads."""
        if degree == 1:
            return self
        return replace(
            self,
            name=f"{self.name}, Ulysses of {degree}",
            strategy=replace(self.strategy, ulysses_degree=degree),
        )

    def prepare(self, case: Case, slept: Slept | None) -> BurstSession:
        """See `Contender.prepare`."""
        kernel = AUTO if slept is None else SleepingKernel(case, slept)
        strategy = replace(self.strategy, kernel=kernel, ranks_per_node=case.ranks_per_node)
        cp, length = ContextParallel(dist.group.WORLD, strategy=strategy), case.ranks * case.seq
        cp.strategy = replace(strategy, check="sparse")  # as on GPUs, for which emulated ranks stand
        tokens = cp.tokens(length, case.mask, alike=True) if case.documents else Tokens(length)
        return BurstSession(cp, case.mask, tokens)


@dataclass(frozen=True)
class BurstSession:
    """See `Session`."""

    cp: ContextParallel
    mask: Mask
    tokens: Tokens

    def shard(self, whole: Tensor) -> Tensor:
        """See `Session.shard`."""
        return self.cp.shard(whole, tokens=self.tokens)

    def unshard(self, local: Tensor) -> Tensor:
        """See `Session.unshard`."""
        return self.cp.unshard(local.detach(), tokens=self.tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Session.attend`."""
        return burst_attention(q, k, v, self.cp, mask=self.mask, tokens=self.tokens)


BURST = (
    Burst("burst", several=True),
    Burst("burst flat ring", replace(_DEFAULTS, schedule="flat_ring")),
    Burst("burst, q travels", replace(_DEFAULTS, forward="kv", backward="q")),
    Burst("burst, kv travels", replace(_DEFAULTS, forward="kv", backward="kv")),
)
