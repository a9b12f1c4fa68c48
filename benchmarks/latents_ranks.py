"""What every rank of an emulated cluster does with a layer of multi-head latent attention: all ways by turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cluster_ranks import Entry, defer_transfers, take_turn
from benchmarks.memory import keep_freed_memory
from burst_plugin import ContextParallel, burst_attention, latent_attention
from burst_plugin.compute.passes import BackwardPart
from burst_plugin.compute.up_projection import LatentBackwardPart, UpProjection
from burst_plugin.sequence.tiles import Tile
from burst_plugin.sparse import select_keys
from burst_plugin.sparse.selection import RankSelection
from tests.support.emulated_gpu import EmulatedDevice, SleepingKernel, zeros

LAYERS = ("dense", "indexed")
OWN, SHARED, VALUE, LATENT, INDEX = 128, 64, 128, 512, 128
FEW_HEADS = 4
_TOP_K = 512
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its later name first


@dataclass(frozen=True)
class Sizes:
    """A layer on a cluster, and what its scores and its kernel take for a visit in which all pairs attend."""

    nodes: int
    ranks_per_node: int
    tokens: int
    layer: str
    heads: int
    projection: float
    scores_s: float
    forward_s: float
    backward_s: float

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def visits(self) -> float:
        """Return how many visits in which all pairs attend are a rank's work, under a causal mask in zigzag."""
        return self.ranks / 2


class _Slept:
    """The projections of a layer, which take their time and no processor."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._device = sizes, EmulatedDevice()

    def expand(self, up: Any, latents: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Take the place of `UpProjection.of`."""
        c, heads = latents[0], self._sizes.heads
        self._device.launch()
        found = [zeros((*c.shape[:2], heads, width), c.dtype, width) for width in (OWN + SHARED, VALUE)]
        self._sleep("forward", c.shape[1], 1.0)
        return tuple(found)

    def compute(self, part: Any, q: Any, kv: Any, tile: Tile, positions: Any) -> Any:
        """Take the place of `LatentBackwardPart.compute`, which projects gradients and adds up the weight's."""
        of_queries, (dk, _) = BackwardPart.compute(part, q, kv[:2], tile, positions)
        self._device.launch()
        grads = [zeros((*dk.shape[:2], 1, width), dk.dtype, width) for width in (LATENT, SHARED)]
        self._sleep("forward", dk.shape[1], 2.0)
        return of_queries, tuple(grads)

    def _sleep(self, direction: str, tokens: int, times: float) -> None:
        seconds = getattr(self._sizes, f"{direction}_s") * self._sizes.projection
        self._device.finish(times * seconds * tokens / self._sizes.tokens)


class _Session(NamedTuple):
    attend: Callable[..., Tensor]


def _expanded(cp: ContextParallel, q: Tensor, c: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
    """Attend to keys and values that every rank makes of its own latents before they travel."""
    up = UpProjection(weight, q.shape[2], OWN)
    out: Tensor = burst_attention(q, *_Expanded.apply(up, c, shared), cp)
    return out


class _Expanded(torch.autograd.Function):
    """Keys and values of a rank's own latents, and back."""

    @staticmethod
    def forward(ctx: Any, up: UpProjection, c: Tensor, shared: Tensor) -> Any:
        ctx.shapes = c.shape, shared.shape
        return tuple(x.detach() for x in up.of((c, shared)))

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> Any:
        return None, *(zeros(tuple(shape), dk.dtype, 3) for shape in ctx.shapes)


def _sent(cp: ContextParallel, q: Tensor, c: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = latent_attention(q, c, shared, cp, weight=weight)
    return out


class _SelectingKernel(SleepingKernel):
    """A kernel that takes its time, on listed keys."""

    features = SleepingKernel.features | {"selection", "windows"}


def _slept_scores(sizes: Sizes, device: EmulatedDevice, selection: Any, owner: int, keys: Tensor, best: Any) -> None:
    """Take the place of `RankSelection.score`: half of all pairs attend, of each block."""
    device.launch()
    device.finish(sizes.scores_s / 2 * keys.shape[1] / sizes.tokens)


def _on_ring(cp: ContextParallel, q: Tensor, c: Tensor, shared: Tensor, indexer: tuple[Tensor, ...]) -> Tensor:
    selected = select_keys(*indexer, _TOP_K, cp)
    out: Tensor = latent_attention(q, c, shared, cp, selection=selected)
    return out


class _Gathered(torch.autograd.Function):
    """A layer whose ranks gather latents and index keys, and then compute; gradients are added up by one exchange."""

    @staticmethod
    def forward(ctx: Any, run: tuple[Sizes, EmulatedDevice], index_k: Tensor, q: Tensor, *latents: Tensor) -> Tensor:
        sizes, device = run
        for x in (index_k, *latents):
            whole = x.new_empty((sizes.ranks * x.numel(),))
            dist.all_gather_into_tensor(whole, x.detach().flatten())
        device.launch()
        device.finish(sizes.visits * (sizes.scores_s + sizes.forward_s))
        ctx.run, ctx.shapes = run, [tuple(x.shape) for x in (q, *latents)]
        return zeros((*q.shape[:3], LATENT), q.dtype, 11).detach()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        sizes, device = ctx.run
        device.launch()
        device.finish(sizes.visits * sizes.backward_s)
        for shape in ctx.shapes[1:]:
            mine = torch.empty(torch.Size(shape).numel())
            _reduce_scatter(mine, zeros((sizes.ranks * mine.numel(),), torch.float32, 12))
        return None, None, *(zeros(shape, dout.dtype, 13) for shape in ctx.shapes)


def _dense_ways(sizes: Sizes, cp: ContextParallel) -> dict[str, Callable[..., Tensor]]:
    weight = torch.zeros(sizes.heads * (OWN + VALUE), LATENT, dtype=torch.bfloat16)
    return {name: partial(way, cp, weight=weight) for name, way in (("latents", _sent), ("expanded", _expanded))}


def _indexed_ways(sizes: Sizes, cp: ContextParallel) -> dict[str, Callable[..., Tensor]]:
    at = (1, sizes.tokens)
    indexer = tuple(torch.zeros(*at, *shape, dtype=torch.bfloat16) for shape in ((1, INDEX), (INDEX,), (1,)))

    def gathered(q: Tensor, c: Tensor, shared: Tensor) -> Tensor:
        out: Tensor = _Gathered.apply((sizes, EmulatedDevice()), indexer[1], q, c, shared)
        return out

    return {"ring": partial(_on_ring, cp, indexer=indexer), "gathered": gathered}


@contextmanager
def _slept(sizes: Sizes) -> Iterator[None]:
    """Let projections and scores take their time and no processor, in the block."""
    projections = _Slept(sizes)
    score = partialmethod(_call, partial(_slept_scores, sizes, EmulatedDevice()))
    with ExitStack() as stack:
        if sizes.layer == "dense":
            stack.enter_context(mock.patch.object(UpProjection, "of", partialmethod(_call, projections.expand)))
            compute = partialmethod(_call, projections.compute)
            stack.enter_context(mock.patch.object(LatentBackwardPart, "compute", compute))
        else:
            stack.enter_context(mock.patch.object(RankSelection, "score", score))
        yield


def measure_in_rank(rank: int, sizes: Sizes, rounds: int) -> dict[str, tuple[dict[str, list[float]], dict[str, int]]]:
    """Measure all ways on one case, by turns: times by direction, and bytes at the busiest NIC."""
    gc.collect()
    gc.freeze()
    keep_freed_memory()
    make = SleepingKernel if sizes.layer == "dense" else _SelectingKernel
    kernel = make(sizes.tokens**2 * sizes.heads, sizes.forward_s, sizes.backward_s, torch.bfloat16)
    width, value = (OWN, VALUE) if sizes.layer == "dense" else (LATENT, LATENT)
    shapes = (sizes.heads, width + SHARED), (1, LATENT), (1, SHARED), (sizes.heads, value)
    q, c, shared, dout = (torch.zeros(1, sizes.tokens, *shape, dtype=torch.bfloat16) for shape in shapes)
    inputs = *(x.requires_grad_() for x in (q, c, shared)), dout
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=sizes.ranks_per_node, kernel=kernel)
    cp.rank_state.strategy = replace(cp.strategy, check="sparse")  # as on GPUs
    ways = (_dense_ways if sizes.layer == "dense" else _indexed_ways)(sizes, cp)
    with _slept(sizes):
        entries = {name: Entry(name, _Session(way)) for name, way in ways.items()}
        for entry in entries.values():
            take_turn(entry, inputs)
            entry.times.clear()
        defer_transfers()
        for number in range(rounds):
            for entry in Random(number).sample([*entries.values()], len(entries)):
                take_turn(entry, inputs, count=number == 0)
    return {way: (dict(entry.times), entry.nic_bytes) for way, entry in entries.items()}


def _call(of: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(of, *args)
