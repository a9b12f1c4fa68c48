"""No two accesses to the same memory of a GPU are left unordered, in both passes: see `tests.support.races`.

Two layers on every rank, so that the second finds the buffers of the first, over the transport of process groups on
what NCCL does, and over copies on streams of the ranks. The faults are planted in the package's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_plugin import Causal, Documents, Mask, Scores, SlidingWindow, Strategy, Tokens, Topology, VirtualRing
from burst_plugin.activations import pages
from burst_plugin.activations.host_memory import HostMemory, Parked
from burst_plugin.comm import copies, in_process, torch_distributed
from burst_plugin.comm.buffers import Buffer, BufferPool
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.comm.in_process import Parcel
from burst_plugin.ring import memo as memos
from burst_plugin.ring.autograd import RingAttention, by_rank
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.executor import RingPass
from burst_plugin.ring.memo import Memo
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.ring.send_recv_plan import Post
from burst_plugin.ring.ulysses import HeadExchange
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.sequence.listed_masks import QueriesBefore
from burst_plugin.topology import Traffic
from tests.support.fake_gpu import GPU
from tests.support.late_copies import LateNetwork
from tests.support.pretended_gpu import kept_rows
from tests.support.races import Gpus, Race
from tests.support.recorded_gpu import NcclNetwork, PlainKernel, recorded_gpus

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

SEQ, LAYERS = 240, 2
NETWORKS: dict[str, Callable[[int], Any]] = {
    "nccl": NcclNetwork,
    "copies": lambda ranks: CopyNetwork(ranks, GPU),
    "late copies": lambda ranks: LateNetwork(ranks, GPU),
}


class _Node:
    """An autograd function's context, without autograd."""

    def __init__(self, ranks: int) -> None:
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.needs_input_grad = (*[False] * 3, *[True, True, True, False, False] * ranks)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass


class _Layers:
    """Layers of attention on all ranks, and what training does around them.

    keeps: computes every layer again in the backward pass, of which checkpoints keep this share; None for not at all.
    """

    def __init__(self, gpus: Gpus, network: str, topology: Topology, mask: Mask, keeps: float | None, **options: Any):
        self.gpus, self.keeps, self.ranks = gpus, keeps, range(topology.ranks)
        strategy = Strategy(**{"kernel": PlainKernel(gpus), **options})
        self.ring = VirtualRing(topology, strategy, network=NETWORKS[network](topology.ranks))
        self.request = Request(mask, Scores(), (Tokens(SEQ), Tokens(SEQ)), lse=True)
        self.hosts = self.on_each(lambda rank: HostMemory(GPU))
        self.calls = 0

    def on_each(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function for every rank, on its GPU."""
        found = []
        for rank in self.ranks:
            with self.gpus.rank(rank):
                found.append(function(rank))
        return found

    def forward(self) -> list[tuple[_Node, list[Any], dict[int, Memo]]]:
        """Return what is saved of every layer: a node, its inputs if they are needed again, and what is kept."""
        rows, saved = SEQ // len(self.ranks), []
        x = self.on_each(lambda _: Inputs(_full(rows, 8), _full(rows, 4), _full(rows, 4)))
        for _ in range(LAYERS):
            kept: dict[int, Memo] = {}
            if self.keeps is not None:
                kept = {rank: Memo(self.keeps, self.hosts[rank]) for rank in self.ranks}
            node, outs = self._attend(x, kept)
            parked = self.on_each(lambda rank: [self.hosts[rank].park(y) for y in x[rank][:3]]) if kept else []
            saved.append((node, parked, kept))
            x = self.on_each(lambda rank: Inputs(outs[rank] * 2, *(y * 2 for y in x[rank][1:3])))
        return saved

    def backward(self, saved: list[tuple[_Node, list[Any], dict[int, Memo]]]) -> None:
        """Run every layer's backward pass, the last one first."""
        douts = self.on_each(lambda _: _full(SEQ // len(self.ranks), 8))
        while saved:
            node, parked, kept = saved.pop()
            if parked:
                x = self.on_each(lambda rank: Inputs(*self._fetched(rank, parked[rank])))
                node, _ = self._attend(x, kept)
                del x
            grads = RingAttention.backward(node, *(y for dout in douts for y in (dout, None, None)))
            of_ranks = by_rank(grads[3:], len(self.ranks))
            douts = self.on_each(lambda rank: of_ranks[rank][0] * 2)
            del node, grads, of_ranks

    def _fetched(self, rank: int, parked: list[Parked]) -> list[Tensor]:
        return [self.hosts[rank].fetch(each) for each in reversed(parked)][::-1]

    def _attend(self, x: Sequence[Inputs], kept: dict[int, Memo]) -> tuple[_Node, list[Tensor]]:
        self.calls += 1
        plans = [self._plan(rank, x[rank], self.request) for rank in self.ranks]
        for rank, memo in kept.items():
            first = memo.first_kept(plans[rank])
            if memo.is_filled and first:
                rest = self.request._replace(mask=self.request.mask & QueriesBefore(first))
                memo.rest = self._plan(rank, x[rank], rest)
        self.gpus.memos = kept
        node = _Node(len(self.ranks))
        flat = RingAttention.forward(node, plans, CallId(self.calls), None, *(y for each in x for y in each))
        return node, [out for out, *_ in by_rank(flat, len(self.ranks))]

    def _plan(self, rank: int, x: Inputs, request: Request) -> Plan:
        return make_plan(self.ring.rank_states[rank], x, request, self.ring._known[rank])


def _full(rows: int, heads: int) -> Tensor:
    return torch.full((1, rows, heads, 64), 0.5, dtype=torch.bfloat16, device=GPU)


def _train(
    network: str,
    topology: Topology = Topology(2, 2),
    *,
    mask: Mask = Causal(),
    keeps: float | None = None,
    thread: str = "",
    **options: Any,
) -> tuple[Gpus, int]:
    """Return the GPUs after both passes, and how many messages there were. `thread` runs the backward pass."""
    with recorded_gpus() as gpus:
        layers = _Layers(gpus, network, topology, mask, keeps, **options)
        saved = layers.forward()
        gpus.thread = thread
        layers.backward(saved)
        states = layers.ring.rank_states
        sent = sum((state.transport.sent_bytes + state.ulysses_transport.sent_bytes).total() for state in states)
        del layers, states
        gpus.check_frees()
    return gpus, sent


CASES: dict[str, dict[str, Any]] = {
    **{schedule: {"schedule": schedule} for schedule in SCHEDULES},
    "one node": {"topology": Topology(1, 4)},
    "six ranks": {"topology": Topology(3, 2)},
    "parts": {"parts": 2},
    "parts of a flat ring": {"parts": 4, "topology": Topology(1, 3)},
    "heads exchanged": {"ulysses_degree": 2},
    "heads exchanged, parts": {"ulysses_degree": 2, "parts": 2, "topology": Topology(2, 4)},
    "queries travel forward": {"forward": "q"},
    "window": {"mask": SlidingWindow(40)},
    "documents": {"mask": Causal() & Documents((0, 100, 104, SEQ)), "schedule": "direct"},
    "computed again": {"keeps": 0.0},
    "computed again, kept": {"keeps": 1.0},
    "computed again, half kept": {"keeps": 0.5, "ulysses_degree": 2},
}


@pytest.mark.parametrize("moving", ["q", "kv"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("network", ["nccl", "copies"])
def test_every_access_is_ordered(network: str, case: str, moving: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memos, "_rows_from", kept_rows)
    monkeypatch.setattr(pages, "PAGE_BYTES", 1 << 12)
    gpus, sent = _train(network, backward=moving, **CASES[case])
    print(case, sum(gpus.accesses.values()), gpus.accesses, gpus.frees, sent)
