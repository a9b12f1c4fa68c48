"""All ranks of a ring in one process: the same schedule, executor and kernels, without a network.

To check on a laptop what a cluster will compute:

    ring = burst_plugin.VirtualRing(burst_plugin.Topology(nodes=2, ranks_per_node=4))
    out, lse = ring.attention(q, k, v)        # whole sequences; differentiable
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_plugin.attention import Outputs, backward_program, differentiable_attention, forward_program
from burst_plugin.call import Call, prepare
from burst_plugin.copies import CopyNetwork
from burst_plugin.executor import lockstep
from burst_plugin.in_process import InProcessNetwork
from burst_plugin.kernels import Queries
from burst_plugin.layout import Tokens
from burst_plugin.mask import Causal, Mask
from burst_plugin.member import Member, as_traffic
from burst_plugin.profile import Profile
from burst_plugin.request import Inputs, Request
from burst_plugin.routes import Routes
from burst_plugin.scores import Scores
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology
from burst_plugin.transport import Transport

__all__ = ["VirtualRing"]

_CAUSAL = Causal()
_PLAIN = Scores()


class VirtualRing:
    """`topology.ranks` ranks in this process, with the options of `strategy`.

    The network between them is hostile on purpose (`burst_plugin.in_process`); `seed` sets its mood. To measure time
    instead, give a `network` of plain copies (`burst_plugin.copies`).
    """

    def __init__(
        self,
        topology: Topology,
        strategy: Strategy | None = None,
        *,
        seed: int = 0,
        network: CopyNetwork | None = None,
    ) -> None:
        self.network: CopyNetwork | InProcessNetwork = network or InProcessNetwork(topology.ranks, seed)
        strategy = strategy or Strategy()
        routes = Routes(topology, strategy)
        transports: Sequence[Transport] = self.network.transports()
        self.members = [Member(rank, topology, strategy, wires, routes) for rank, wires in enumerate(transports)]
        self._number = 0
        self._known: list[dict[Hashable, Call]] = [{} for _ in self.members]

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask = _CAUSAL,
        scores: Scores = _PLAIN,
        sink: Tensor | None = None,
        bias: Tensor | None = None,
        tokens: Tokens | tuple[Tokens, Tokens] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of whole sequences q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

        As `burst_attention`, but that `bias` is [1 or B, 1 or Hq, Sq, Sk]; `tokens` are needed only to deal out every
        document on its own. The gradient of `sink` is the sum over ranks.
        """
        both = tokens if isinstance(tokens, tuple) else (tokens or Tokens(q.shape[1]), tokens or Tokens(k.shape[1]))
        inputs, request = Inputs(q, k, v, sink, bias), Request(mask, scores, both)
        deal = _Deal(self.members[0].routes, *both)
        calls = [
            prepare(member, mine, request, known)
            for member, mine, known in zip(self.members, deal.inputs(inputs), self._known, strict=True)
        ]
        self._number += 1
        out, lse, _ = differentiable_attention(_VirtualRunner(calls, self._number, deal), inputs)
        return out, lse

    @contextmanager
    def profile(self) -> Iterator[list[Profile]]:
        """What each rank does until the end of the `with` block. Waits are for copies here, never for a peer."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(member.profiled(Profile(member.rank, member.topology))) for member in self.members
            ]

    def traffic(self, rank: int) -> dict[str, dict[str, int]]:
        """Bytes that `rank` has sent, as `ContextParallel.traffic`."""
        return as_traffic({channel: n for (r, channel), n in self.network.sent_bytes.items() if r == rank})

    def expected_traffic(self, rank: int) -> dict[str, dict[str, int]]:
        """The same, as the schedule counts it."""
        return as_traffic(self.members[rank].expected_bytes)


@dataclass(frozen=True)
class _Deal:
    """Deals whole tensors out to the ranks, and puts shards together."""

    routes: Routes
    q: Tokens
    kv: Tokens

    def shard(self, x: Tensor, tokens: Tokens, dim: int = 1) -> list[Tensor]:
        layout, ranks = self.routes.layout(tokens), self.routes.ranks
        return [layout.shard(x, dim, (rank, ranks), tokens) for rank in range(ranks)]

    def unshard(self, shards: Sequence[Tensor], tokens: Tokens, dim: int = 1) -> Tensor:
        return self.routes.layout(tokens).unshard(shards, dim, tokens)

    def inputs(self, inputs: Inputs) -> list[Inputs]:
        q, k, v = (self.shard(x, t) for x, t in zip(inputs[:3], (self.q, self.kv, self.kv), strict=True))
        nothing: list[Tensor | None] = [None] * self.routes.ranks
        bias = nothing if inputs.bias is None else self.shard(inputs.bias, self.q, 2)
        return [Inputs(*qkv, inputs.sink, rows) for qkv, rows in zip(zip(q, k, v, strict=True), bias, strict=True)]


@dataclass(frozen=True)
class _VirtualRunner:
    """Runs all ranks in lockstep."""

    calls: Sequence[Call]
    number: int
    deal: _Deal

    def forward(self, inputs: Inputs) -> Outputs:
        each = zip(self.calls, self.deal.inputs(inputs), strict=True)
        done = lockstep([forward_program(call, self.number, mine) for call, mine in each])
        out, lse, _ = zip(*done, strict=True)
        return Outputs(self.deal.unshard(out, self.deal.q), self.deal.unshard(lse, self.deal.q, 2))

    def backward(self, inputs: Inputs, queries: Queries) -> tuple[Tensor | None, ...]:
        deal = self.deal
        rows = (*(deal.shard(x, deal.q) for x in queries[:3]), deal.shard(queries.lse, deal.q, 2))
        each = zip(self.calls, deal.inputs(inputs), zip(*rows, strict=True), strict=True)
        done = lockstep([backward_program(call, self.number, mine, Queries(*part)) for call, mine, part in each])
        dq, dk, dv, dsink, dbias = zip(*done, strict=True)
        return (
            deal.unshard(dq, deal.q),
            deal.unshard(dk, deal.kv),
            deal.unshard(dv, deal.kv),
            None if inputs.sink is None else torch.stack(dsink).sum(0),
            None if inputs.bias is None else deal.unshard(dbias, deal.q, 2),
        )
