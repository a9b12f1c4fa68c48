"""Layers of attention on all ranks of a ring, trained on GPUs that are not there, whose accesses are checked.

    gpus, sent_bytes = train("nccl", Topology(2, 2), backward="q")         # raises RaceError

Without autograd: what it would do, and what layers and checkpoints do around attention, is done here for every rank
on its GPU. There are two layers, so that the second finds the buffers of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin import Causal, Mask, Scores, Strategy, Tokens, Topology, VirtualRing
from burst_plugin.activations.host_memory import HostMemory, Parked
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.kept_outputs import KeptOutputs
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.sequence.masks import QueriesBefore
from burst_plugin.virtual import VirtualRingAttention, by_rank
from tests.support.fake_gpu import GPU
from tests.support.late_copies import LateNetwork
from tests.support.races import Gpus
from tests.support.recorded_gpu import NcclNetwork, PlainKernel, recorded_gpus
from tests.support.ring_memory import Pass

SEQ = 240
_LAYERS = 2
_TWO_NODES, _CAUSAL = Topology(2, 2), Causal()
NETWORKS: dict[str, Callable[[int], Any]] = {
    "nccl": NcclNetwork,
    "copies": lambda ranks: CopyNetwork(ranks, GPU),
    "late copies": lambda ranks: LateNetwork(ranks, GPU),
}


def train(
    network: str,
    topology: Topology = _TWO_NODES,
    *,
    mask: Mask = _CAUSAL,
    keeps: float | None = None,
    thread: str = "",
    **options: Any,
) -> tuple[Gpus, int]:
    """Run both passes; return the GPUs, and the bytes of all messages.

    keeps: the share of attention's outputs that checkpoints keep, on the host, as they keep the layers' inputs; None
    for no checkpoints. thread: the one that runs the backward pass. options: of `Strategy`.
    """
    with recorded_gpus() as gpus:
        strategy = Strategy(**{"kernel": PlainKernel(gpus), **options})
        layers = _Layers(
            gpus, VirtualRing(topology, strategy, network=NETWORKS[network](topology.ranks)), mask, keeps
        )
        saved = layers.forward()
        gpus.thread = thread
        layers.backward(saved)
        states = layers.ring.rank_states
        sent = sum((state.transport.sent_bytes + state.ulysses_transport.sent_bytes).total() for state in states)
        del layers, states
        gpus.check_frees()
    return gpus, sent


class _Saved(NamedTuple):
    """What a layer saves: a node, or, by rank, what its checkpoint has."""

    node: Pass | None
    parked: list[list[Parked]]
    all_kept: list[KeptOutputs]


class _Layers:
    def __init__(self, gpus: Gpus, ring: VirtualRing, mask: Mask, keeps: float | None) -> None:
        self.ring = ring
        self._gpus, self._keeps, self._calls = gpus, keeps, 0
        self._request = Request(mask, Scores(), (Tokens(SEQ), Tokens(SEQ)), lse=True)
        self._ranks = range(len(ring.rank_states))
        self._hosts = self._on_each(lambda _: HostMemory(GPU), self._ranks)

    def forward(self) -> list[_Saved]:
        """Return what every layer saves."""
        rows = [SEQ // len(self._ranks)] * len(self._ranks)
        x, saved = self._on_each(_first_inputs, rows), []
        for _ in range(_LAYERS):
            all_kept = [] if self._keeps is None else [KeptOutputs(self._keeps, host) for host in self._hosts]
            node, outs = self._attend(x, all_kept)
            saved.append(
                _Saved(None, self._on_each(_park, self._hosts, x), all_kept) if all_kept else _Saved(node, [], [])
            )
            x = self._on_each(_next_inputs, outs, x)
            del node, outs
        return saved

    def backward(self, saved: list[_Saved]) -> None:
        """Run every layer's backward pass, the last one first, with what it computes again before it."""
        rows = [SEQ // len(self._ranks)] * len(self._ranks)
        douts = self._on_each(_some_dout, rows)
        while saved:
            node, parked, all_kept = saved.pop()
            if node is None:
                node, _ = self._attend(self._on_each(_fetch, self._hosts, parked), all_kept)
            grads = VirtualRingAttention.backward(node, *(x for dout in douts for x in (dout, None, None)))[2:]
            douts = self._on_each(_twice, [dq for dq, *_ in by_rank(grads, len(self._ranks))])
            del node, grads

    def _attend(self, x: Sequence[Inputs], all_kept: Sequence[KeptOutputs]) -> tuple[Pass, list[Tensor]]:
        self._calls += 1
        plans = [self._plan(rank, x[rank], self._request) for rank in self._ranks]
        for rank, kept in enumerate(all_kept):
            first = kept.first_kept(plans[rank])
            if kept.is_filled and first:
                rest = self._request._replace(mask=self._request.mask & QueriesBefore(first))
                kept.rest = self._plan(rank, x[rank], rest)
        self._gpus.kept_of_ranks = dict(enumerate(all_kept))
        node = Pass()
        wanted = [name in ("q", "k", "v") for name in Inputs._fields]
        node.needs_input_grad = (False, False, *wanted * len(self._ranks))
        flat = VirtualRingAttention.forward(
            node, plans, CallId(self._calls), *(tensor for each in x for tensor in each)
        )
        return node, [out for out, *_ in by_rank(flat, len(self._ranks))]

    def _plan(self, rank: int, x: Inputs, request: Request) -> Plan:
        return make_plan(self.ring.rank_states[rank], x, request, self.ring._known[rank])

    def _on_each(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call a function for every rank, with the rank's arguments, on its GPU."""
        found = []
        for rank, mine in enumerate(zip(*arguments, strict=True)):
            with self._gpus.rank(rank):
                found.append(function(*mine))
        return found


def _some_dout(rows: int) -> Tensor:
    return torch.full((1, rows, 8, 64), 0.5, dtype=torch.bfloat16, device=GPU)


def _first_inputs(rows: int) -> Inputs:
    return Inputs(*(torch.full((1, rows, heads, 64), 0.5, dtype=torch.bfloat16, device=GPU) for heads in (8, 4, 4)))


def _next_inputs(out: Tensor, x: Inputs) -> Inputs:
    return Inputs(out * 2, x.k * 2, x.v * 2)


def _park(host: HostMemory, x: Inputs) -> list[Parked]:
    return [host.park(each) for each in x[:3]]


def _fetch(host: HostMemory, parked: Sequence[Parked]) -> Inputs:
    return Inputs(*[host.fetch(each) for each in reversed(parked)][::-1])


def _twice(grad: Tensor) -> Tensor:
    return grad * 2
