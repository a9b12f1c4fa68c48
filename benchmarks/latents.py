"""Multi-head latent attention on an emulated cluster: latents sent, beside keys and values of all heads.

Kernels and projections are slept, in proportion to their work: a tile's kernel by its pairs, an expansion of latents
by its tokens, `--projection` of a visit's forward kernel, and twice that for its gradients. A layer has DeepSeek V3's
shape: latents of 512 and shared keys of 64 numbers, heads of 192 and 128. `--core-per-rank` is as of `bench cluster`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import RefusedError
from benchmarks.cluster import dilation
from benchmarks.cluster_ranks import Entry, defer_transfers, take_turn
from benchmarks.memory import keep_freed_memory
from benchmarks.report.files import Recording, Row, default_path
from burst_plugin import ContextParallel, burst_attention, latent_attention
from burst_plugin.compute.passes import BackwardPart
from burst_plugin.compute.up_projection import LatentBackwardPart, UpProjection
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import DIRECTIONS
from tests.support.emulated_gpu import EmulatedDevice, SleepingKernel, zeros
from tests.support.netns import EmulatedCluster

OWN, SHARED, VALUE, LATENT = 128, 64, 128, 512


@dataclass(frozen=True)
class Sizes:
    """A layer on a cluster, and what its kernel takes for a visit in which all pairs attend."""

    nodes: int
    ranks_per_node: int
    tokens: int
    heads: int
    projection: float
    forward_s: float
    backward_s: float

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--topologies", nargs="+", default=["2x4"], metavar="NxW", help="nodes x ranks")
    add("--rates", nargs="+", type=float, default=[100], metavar="MBIT", help="of a NIC")
    add("--tokens", nargs="+", type=int, default=[4096], help="per rank")
    add("--heads", type=int, default=128)
    add("--visit-ms", nargs=2, type=float, default=[30, 75], metavar=("FWD", "BWD"), help="of a visit's kernel")
    add("--projection", type=float, default=0.1, help="of a visit's kernel: what an expansion takes")
    add("--core-per-rank", action="store_true", help="slow links and kernels down until each rank has a core's time")
    add("--rounds", type=int, default=3)
    add("--out", type=Path, metavar="FILE", help="of the result (default: in benchmarks/results)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    reason = EmulatedCluster.unavailable()
    if reason is not None:
        print(f"bench latents: skipped, no such cluster can be emulated here: {reason}")
        return 0
    if options.rounds < 1 or min(*options.rates, *options.visit_ms, *options.tokens, options.projection) <= 0:
        raise RefusedError("--rounds, --rates, --visit-ms, --tokens and --projection have to be above 0")
    recording = Recording("latents", vars(options), options.out or default_path("latents"))
    for topology, rate, tokens in product(options.topologies, options.rates, options.tokens):
        try:
            nodes, ranks = map(int, topology.split("x"))
        except ValueError as error:
            raise RefusedError(f"--topologies {topology} is not valid; write nodes x ranks, such as 2x4") from error
        seconds = (ms / 1e3 for ms in options.visit_ms)
        sizes = Sizes(nodes, ranks, tokens, options.heads, options.projection, *seconds)
        slower = dilation(sizes.ranks) if options.core_per_rank else 1.0
        for row in recording.measure(partial(measure, sizes, rate, options.rounds, slower)):
            where = f"{topology} {rate:g} mbit, {tokens:5} tokens, {row['contender']}, {row['direction']}:"
            print(f"{where:<56} {row['time_s'] * 1e3:8.0f} ms, {row['nic_bytes'] / 2**20:7.1f} MiB", flush=True)
    recording.save()
    return 0


def measure(sizes: Sizes, rate_mbit: float, rounds: int, slower: float = 1.0) -> list[Row]:
    """Return the rows of both ways on one case; `slower` is how much links and kernels are slowed down meanwhile."""
    here = replace(sizes, forward_s=slower * sizes.forward_s, backward_s=slower * sizes.backward_s)
    with EmulatedCluster(sizes.nodes, sizes.ranks_per_node, rate_mbit=rate_mbit / slower) as cluster:
        found = cluster.run(measure_in_rank, here, rounds, timeout_s=slower * (600.0 + 300.0 * rounds))[0]
    rows: list[Row] = []
    for way, (times, nic_bytes) in found.items():
        seconds = {each: [second / slower for second in times[each]] for each in DIRECTIONS}
        seconds["both"] = [sum(pair) for pair in zip(*seconds.values(), strict=True)]
        for direction, each in seconds.items():
            rows.append(
                {
                    "nodes": sizes.nodes,
                    "ranks_per_node": sizes.ranks_per_node,
                    "rate_mbit": rate_mbit,
                    "tokens": sizes.tokens,
                    "heads": sizes.heads,
                    "contender": way,
                    "direction": direction,
                    "repeats": len(each),
                    "time_s": median(each),
                    "time_s_min": min(each),
                    "time_s_max": max(each),
                    "dilation": slower,
                    "nic_bytes": sum(nic_bytes[one] for one in (DIRECTIONS if direction == "both" else (direction,))),
                }
            )
    return rows


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


def measure_in_rank(rank: int, sizes: Sizes, rounds: int) -> dict[str, tuple[dict[str, list[float]], dict[str, int]]]:
    """Measure both ways on one case, by turns: times by direction, and bytes at the busiest NIC."""
    gc.collect()
    gc.freeze()
    keep_freed_memory()
    pairs, slept = sizes.tokens**2 * sizes.heads, _Slept(sizes)
    kernel = SleepingKernel(pairs, sizes.forward_s, sizes.backward_s, torch.bfloat16)
    shapes = (sizes.heads, OWN + SHARED), (1, LATENT), (1, SHARED), (sizes.heads, VALUE)
    q, c, shared, dout = (torch.zeros(1, sizes.tokens, *shape, dtype=torch.bfloat16) for shape in shapes)
    weight = torch.zeros(sizes.heads * (OWN + VALUE), LATENT, dtype=torch.bfloat16)
    inputs = *(x.requires_grad_() for x in (q, c, shared)), dout
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(UpProjection, "of", partialmethod(_call, slept.expand)))
        stack.enter_context(mock.patch.object(LatentBackwardPart, "compute", partialmethod(_call, slept.compute)))
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=sizes.ranks_per_node, kernel=kernel)
        cp.rank_state.strategy = replace(cp.strategy, check="sparse")  # as on GPUs
        ways = {"latents": _sent, "expanded": _expanded}
        entries = {name: Entry(name, _Session(partial(way, cp, weight=weight))) for name, way in ways.items()}
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
