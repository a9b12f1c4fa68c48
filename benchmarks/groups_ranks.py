"""What every rank of an emulated cluster does with the documents of a step: on one ring, and on groups, by turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cluster_ranks import defer_transfers, timed
from benchmarks.contenders import Case, Slept
from benchmarks.contenders.kernels import sleeping
from benchmarks.memory import keep_freed_memory
from burst_plugin import Causal, ContextParallel, Documents, burst_attention
from tests.support.emulated_gpu import EmulatedDevice

RING, GROUPS = "one ring", "groups per length"


class Part(NamedTuple):
    """A document that a rank computes with others."""

    length: int
    ranks: int


Rounds = tuple[tuple[tuple[Part, ...], ...], ...]  # of the schedule, by rank


@dataclass(frozen=True)
class Step:
    """A step: documents by microbatch; parts by round and rank; seconds of a full visit, of the rest of a layer."""

    case: Case
    documents: tuple[tuple[int, ...], ...]
    rounds: Rounds
    slept: Slept
    rest_s: float


class _Layer:
    """Attention and the rest of a layer, forward and backward."""

    def __init__(self, step: Step) -> None:
        case = step.case
        self._step, self._device, self.kernel = step, EmulatedDevice(), sleeping(case, step.slept)
        shapes = (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads)
        self._inputs = [torch.zeros(1, case.seq, heads, case.head_dim, dtype=case.dtype) for heads in shapes]

    def ring(self, group: Any, ranks_per_node: int, layout: str) -> ContextParallel:
        cp = ContextParallel(group, ranks_per_node=ranks_per_node, kernel=self.kernel, layout=layout)
        cp.rank_state.strategy = replace(cp.strategy, check="sparse")  # as on GPUs
        return cp

    def train(self, tokens: int, attend: Callable[..., Tensor]) -> None:
        *qkv, dout = (x[:, :tokens].detach() for x in self._inputs)
        rest_s = self._step.rest_s * tokens / self._step.case.seq
        self._sleep(rest_s)
        out = attend(*(x.requires_grad_() for x in qkv))
        torch.autograd.grad(out, qkv, dout)
        self._sleep(2 * rest_s)

    def train_alone(self, length: int) -> None:
        """Compute a document that no other rank has a part of."""
        share = length**2 / 2 / self._step.case.seq**2
        self._sleep(share * sum(self._step.slept) + 3 * self._step.rest_s * length / self._step.case.seq)

    def _sleep(self, seconds: float) -> None:
        self._device.launch()
        self._device.finish(seconds)


def _on_one_ring(step: Step, layer: _Layer) -> Callable[[], None]:
    case = step.case
    cp = layer.ring(dist.group.WORLD, case.ranks_per_node, "auto")
    batches = []
    for documents in step.documents:
        mask = Causal() & Documents(replace(case, documents=documents).cu_seqlens)
        tokens = cp.tokens(case.ranks * case.seq, mask, alike=True)
        batches.append(partial(burst_attention, cp=cp, mask=mask, tokens=tokens))

    def run() -> None:
        for attend in batches:
            layer.train(case.seq, attend)

    return run


def _on_groups(step: Step, layer: _Layer, rank: int) -> Callable[[], None]:
    case, rings, size = step.case, {}, 2
    while size <= case.ranks:
        members = [[*range(first, first + size)] for first in range(0, case.ranks, size)]
        own = [dist.new_group(ranks) for ranks in members][rank // size]
        rings[size] = layer.ring(own, min(size, case.ranks_per_node), "zigzag")
        size *= 2

    def run() -> None:
        for of_ranks in step.rounds:
            for length, ranks in of_ranks[rank]:
                if ranks == 1:
                    layer.train_alone(length)
                else:
                    layer.train(length // ranks, partial(burst_attention, cp=rings[ranks], mask=Causal()))
            dist.barrier()

    return run


def measure_in_rank(rank: int, step: Step, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every turn of both ways, the same on all ranks."""
    gc.collect()
    gc.freeze()
    keep_freed_memory()
    layer = _Layer(step)
    ways = {RING: _on_one_ring(step, layer), GROUPS: _on_groups(step, layer, rank)}
    for way in ways.values():
        way()  # which opens connections
    defer_transfers()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in Random(number).sample([*ways], len(ways)):
            times[name].append(timed(ways[name])[0])
    return times
