"""Multi-head latent attention on an emulated cluster: latents sent, beside other ways.

    dense      latents on the ring, beside keys and values of all heads
    indexed    latents and index keys on the ring, beside both gathered first, as in Megatron

Scores, kernels and projections are slept, in proportion to their work: those of a tile by its pairs, an expansion of
latents by its tokens, `--projection` of a visit's forward kernel, and twice that for its gradients. A dense layer has
DeepSeek V3's shape: latents of 512 and shared keys of 64 numbers, heads of 192 and 128. An indexed one has few heads
of 576, whose queries stay where they are, and index keys of 128 numbers; what is slept by default is what an H100
takes at 400 TFLOP/s for DeepSeek V3.2's with 512 keys per query, 4,096 tokens per rank and 8 ranks, as much slower as
100 Mbit/s is than 400 Gbit/s. What is gathered is kept for the backward pass. `--core-per-rank` is as of `bench
cluster`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks import RefusedError
from benchmarks.cluster import dilation
from benchmarks.latents_ranks import FEW_HEADS, LAYERS, Sizes, measure_in_rank
from benchmarks.report.files import Recording, Row, default_path
from burst_plugin.types import DIRECTIONS
from tests.support.netns import EmulatedCluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--topologies", nargs="+", default=["2x4"], metavar="NxW", help="nodes x ranks")
    add("--rates", nargs="+", type=float, default=[100], metavar="MBIT", help="of a NIC")
    add("--tokens", nargs="+", type=int, default=[4096], help="per rank")
    add("--heads", type=int, default=128)
    add("--layers", nargs="+", choices=LAYERS, default=[*LAYERS])
    add("--visit-ms", nargs=2, type=float, default=[30, 75], metavar=("FWD", "BWD"), help="of a dense visit's kernel")
    add(
        "--indexed-ms",
        nargs=3,
        type=float,
        default=[2750, 1300, 3250],
        metavar=("SCORES", "FWD", "BWD"),
        help="of an indexed visit: its scores, and its kernel on what was selected",
    )
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
    times_ms = (*options.visit_ms, *options.indexed_ms)
    if options.rounds < 1 or min(*options.rates, *times_ms, *options.tokens, options.projection) <= 0:
        raise RefusedError("--rounds, --rates, --tokens, --projection and times have to be above 0")
    recording = Recording("latents", vars(options), options.out or default_path("latents"))
    for topology, rate, tokens, layer in product(options.topologies, options.rates, options.tokens, options.layers):
        try:
            nodes, ranks = map(int, topology.split("x"))
        except ValueError as error:
            raise RefusedError(f"--topologies {topology} is not valid; write nodes x ranks, such as 2x4") from error
        of_layer = (0.0, *options.visit_ms) if layer == "dense" else options.indexed_ms
        heads = options.heads if layer == "dense" else FEW_HEADS
        sizes = Sizes(nodes, ranks, tokens, layer, heads, options.projection, *(ms / 1e3 for ms in of_layer))
        slower = dilation(sizes.ranks) if options.core_per_rank else 1.0
        for row in recording.measure(partial(measure, sizes, rate, options.rounds, slower)):
            where = f"{topology} {rate:g} mbit, {tokens:5} tokens, {layer}, {row['contender']}, {row['direction']}:"
            print(f"{where:<64} {row['time_s'] * 1e3:8.0f} ms, {row['nic_bytes'] / 2**20:7.1f} MiB", flush=True)
    recording.save()
    return 0


def measure(sizes: Sizes, rate_mbit: float, rounds: int, slower: float = 1.0) -> list[Row]:
    """Return the rows of both ways on one case; `slower` is how much links and kernels are slowed down meanwhile."""
    times = {name: slower * getattr(sizes, name) for name in ("scores_s", "forward_s", "backward_s")}
    here = replace(sizes, **times)  # type: ignore[arg-type]
    with EmulatedCluster(sizes.nodes, sizes.ranks_per_node, rate_mbit=rate_mbit / slower) as cluster:
        found = cluster.run(measure_in_rank, here, rounds, timeout_s=slower * (600.0 + 300.0 * rounds))[0]
    rows: list[Row] = []
    for way, (seconds_of, nic_bytes) in found.items():
        seconds = {each: [second / slower for second in seconds_of[each]] for each in DIRECTIONS}
        seconds["both"] = [sum(pair) for pair in zip(*seconds.values(), strict=True)]
        for direction, each in seconds.items():
            rows.append(
                {
                    "nodes": sizes.nodes,
                    "ranks_per_node": sizes.ranks_per_node,
                    "rate_mbit": rate_mbit,
                    "tokens": sizes.tokens,
                    "layer": sizes.layer,
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
