"""Passes of a ring in one process, without autograd: the one place of benchmarks with private parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from burst_plugin import Mask, Strategy, Topology, VirtualRing
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.kernels import Kernel
from burst_plugin.ring.attention_pass import backward_program, forward_program
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.ring.routes import RouteTable
from burst_plugin.sequence.layout import Tokens


class InProcessRing:
    """All ranks of a ring taking turns in this process, with a copy in memory for every message.

    Runs what `burst_attention` runs on every rank; autograd and the consistency check between ranks are left out.
    """

    def __init__(
        self,
        topology: Topology,
        strategy: Strategy,
        qkv: Sequence[Tensor],
        mask: Mask,
        tokens: Callable[[RouteTable], Tokens] | None = None,
    ) -> None:
        """Prepare calls on whole sequences q, k, v [B, S, H, D]; `tokens` says which of them ranks hold."""
        network = CopyNetwork(topology.ranks, qkv[0].device)
        self.rank_states = tuple(VirtualRing(topology, strategy, network=network).rank_states)
        table, self._number = self.rank_states[0].route_table, 0
        self._tokens = Tokens(qkv[0].shape[1]) if tokens is None else tokens(table)
        self._layout = table.layout(self._tokens)
        self.inputs = [Inputs(*each) for each in zip(*map(self.shards, qkv), strict=True)]
        request = Request(mask, tokens=(self._tokens, self._tokens))
        each_rank = zip(self.rank_states, self.inputs, strict=True)
        self._plans = [make_plan(rank_state, inputs, request, {}) for rank_state, inputs in each_rank]

    @property
    def kernels(self) -> list[Kernel]:
        """Return the kernel of each rank."""
        return [plan.kernel for plan in self._plans]

    def use(self, kernels: Sequence[Kernel]) -> None:
        """Use these kernels from now on, one for each rank."""
        self._plans = [replace(plan, kernel=kernel) for plan, kernel in zip(self._plans, kernels, strict=True)]

    def shards(self, whole: Tensor) -> list[Tensor]:
        """Return every rank's part of a whole sequence."""
        ranks = len(self.rank_states)
        return [self._layout.shard(whole, 1, (rank, ranks), self._tokens) for rank in range(ranks)]

    def unshard(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole sequence."""
        return self._layout.unshard(list(parts), 1, self._tokens)

    def forward(self) -> tuple[list[Tensor], Any]:
        """Run a forward pass; returns every rank's out, and what the backward pass needs."""
        self._number += 1
        call_id = CallId(self._number)
        programs = (forward_program(plan, call_id, x) for plan, x in zip(self._plans, self.inputs, strict=True))
        done = lockstep(list(programs))
        return [found.out for found, _ in done], (call_id, [saved for _, saved in done])

    def backward(self, saved: Any, douts: Sequence[Tensor]) -> list[Any]:
        """Run the backward pass of a forward one on every rank's dout; returns every rank's gradients."""
        call_id, each = saved
        upstream = [(dout, None) for dout in douts]
        programs = (
            backward_program(*x) for x in zip(self._plans, [call_id] * len(each), upstream, each, strict=True)
        )
        return lockstep(list(programs))

    def buffer_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(rank_state.transport.pool.allocated_bytes for rank_state in self.rank_states)
