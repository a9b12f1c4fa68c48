"""All ranks of a ring in one process: the same schedule, executor and kernels, without a network.

To check on a laptop what a cluster will compute:

    ring = burst_plugin.VirtualRing(burst_plugin.Topology(nodes=2, ranks_per_node=4))
    out, lse = ring.attention(q, k, v)        # whole sequences; differentiable
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from burst_plugin.attention import backward_program, differentiable_attention, forward_program
from burst_plugin.call import Call, prepare
from burst_plugin.executor import lockstep
from burst_plugin.in_process import InProcessNetwork
from burst_plugin.kernels import Queries
from burst_plugin.mask import Causal, Mask
from burst_plugin.member import Member, as_traffic
from burst_plugin.passes import Tensors
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology

__all__ = ["VirtualRing"]

_CAUSAL = Causal()


class VirtualRing:
    """`topology.ranks` ranks in this process, with the options of `strategy`.

    The network between them is hostile on purpose (`burst_plugin.in_process`); `seed` sets its mood.
    """

    def __init__(self, topology: Topology, strategy: Strategy | None = None, *, seed: int = 0) -> None:
        self.network = InProcessNetwork(topology.ranks, seed)
        self.members = [
            Member(rank, topology, strategy or Strategy(), transport)
            for rank, transport in enumerate(self.network.transports())
        ]
        self._number = 0
        self._known: list[dict[Hashable, Call]] = [{} for _ in self.members]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = _CAUSAL, softmax_scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of whole sequences q [B, S, Hq, D], k and v [B, S, Hkv, D]; see `burst_attention`."""
        shards = zip(*(_shard(self.members, x) for x in (q, k, v)), strict=True)
        calls = [
            prepare(member, qkv, mask, softmax_scale, known)
            for member, qkv, known in zip(self.members, shards, self._known, strict=True)
        ]
        self._number += 1
        return differentiable_attention(_VirtualRunner(calls, self._number), q, k, v)

    def traffic(self, rank: int) -> dict[str, dict[str, int]]:
        """Bytes that `rank` has sent, as `ContextParallel.traffic`."""
        return as_traffic({channel: n for (r, channel), n in self.network.sent_bytes.items() if r == rank})

    def expected_traffic(self, rank: int) -> dict[str, dict[str, int]]:
        """The same, as the schedule counts it."""
        return as_traffic(self.members[rank].expected_bytes)


@dataclass(frozen=True)
class _VirtualRunner:
    """Deals whole tensors out to the ranks, runs them in lockstep, and puts the results together."""

    calls: Sequence[Call]
    number: int

    @property
    def _members(self) -> list[Member]:
        return [call.member for call in self.calls]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shards = zip(*(_shard(self._members, x) for x in (q, k, v)), strict=True)
        done = lockstep(
            [forward_program(call, self.number, *qkv) for call, qkv in zip(self.calls, shards, strict=True)]
        )
        layout = self.calls[0].member.layout
        return layout.unshard([out for out, _ in done], 1), layout.unshard([lse for _, lse in done], 2)

    def backward(self, queries: Queries, keys: Tensors) -> Tensors:
        members = self._members
        lse = _shard(members, queries.lse, dim=2)
        parts = zip(*(_shard(members, x) for x in (*queries[:3], *keys)), lse, strict=True)
        done = lockstep(
            [
                backward_program(call, self.number, Queries(q, dout, out, lse), (k, v))
                for call, (q, dout, out, k, v, lse) in zip(self.calls, parts, strict=True)
            ]
        )
        layout = self.calls[0].member.layout
        return tuple(layout.unshard(grads, 1) for grads in zip(*done, strict=True))


def _shard(members: Sequence[Member], x: Tensor, dim: int = 1) -> list[Tensor]:
    return [member.layout.shard(x, dim, member.rank, len(members)) for member in members]
