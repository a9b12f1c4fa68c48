"""Layers that carry a state, on an emulated cluster: states sent, heads exchanged, tokens made contiguous and back.

Heads are exchanged in two parts that hide each other, as `recurrent="heads"` does, and at once, as others do.

Kernels are slept: they take time in proportion to tokens, heads and their width.
Packing, composing states and Python are real. The times by default are those of an H100's kernels beside 400 Gbit/s
per GPU, in the ratio of 100 Mbit/s. What is added for an entering state (Mamba-2) sleeps a fifth of its kernel.

A layer is Qwen3.5's (gated delta net) or Nemotron-H's (Mamba-2), with fewer heads. Its kernels' time is the bound,
twice for delta rules without stages (`recurrent.staged`), whose pieces would be computed twice.
`--core-per-rank` is as of `bench cluster`.
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
from benchmarks.recurrent_ranks import LAYERS, WAYS, Sizes, measure_in_rank
from benchmarks.report.files import Recording, Row, default_path
from burst_plugin.types import DIRECTIONS
from tests.support.netns import EmulatedCluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--topologies", nargs="+", default=["2x4", "4x2"], metavar="NxW", help="nodes x ranks")
    add("--rates", nargs="+", type=float, default=[100, 400], metavar="MBIT", help="of a NIC")
    add("--layers", nargs="+", choices=LAYERS, default=[*LAYERS])
    add("--tokens", nargs="+", type=int, default=[1024, 4096], help="per rank")
    add(
        "--kernel-ms",
        nargs=2,
        type=float,
        default=[900, 1800],
        metavar=("FWD", "BWD"),
        help="of 8,192 tokens, 8 heads of 128",
    )
    add("--core-per-rank", action="store_true", help="slow links and kernels down until each rank has a core's time")
    add("--rounds", type=int, default=5)
    add("--out", type=Path, metavar="FILE", help="of the result (default: in benchmarks/results)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    reason = EmulatedCluster.unavailable()
    if reason is not None:
        print(f"bench recurrent: skipped, no such cluster can be emulated here: {reason}")
        return 0
    if options.rounds < 1 or min(*options.rates, *options.kernel_ms, *options.tokens) <= 0:
        raise RefusedError("--rounds, --rates, --kernel-ms and --tokens have to be above 0")
    recording = Recording("recurrent", vars(options), options.out or default_path("recurrent"))
    for topology, rate, tokens, layer in product(options.topologies, options.rates, options.tokens, options.layers):
        try:
            nodes, ranks = map(int, topology.split("x"))
        except ValueError as error:
            raise RefusedError(f"--topologies {topology} is not valid; write nodes x ranks, such as 2x4") from error
        sizes = Sizes(nodes, ranks, tokens, layer, *(ms / 1e3 for ms in options.kernel_ms))
        slower = dilation(sizes.ranks) if options.core_per_rank else 1.0
        rows = recording.measure(partial(measure, sizes, rate, options.rounds, slower))
        for row in (row for row in rows if row["direction"] == "both"):
            where = f"{topology} {rate:g} mbit, {tokens:5} tokens, {layer}, {row['contender']}:"
            print(f"{where:<70} {row['time_s'] * 1e3:6.0f} ms, {row['over_bound']:.2f} of kernels", flush=True)
    recording.save()
    return 0


def measure(sizes: Sizes, rate_mbit: float, rounds: int, slower: float = 1.0) -> list[Row]:
    """Return the rows of all ways on one case; `slower` is how much links and kernels are slowed down meanwhile."""
    here = replace(sizes, forward_s=slower * sizes.forward_s, backward_s=slower * sizes.backward_s)
    with EmulatedCluster(sizes.nodes, sizes.ranks_per_node, rate_mbit=rate_mbit / slower) as cluster:
        found = cluster.run(measure_in_rank, here, rounds, timeout_s=slower * (300.0 + 60.0 * rounds))[0]
    rows: list[Row] = []
    for way in WAYS:
        times, nic_bytes = found[way]
        times = {direction: [each / slower for each in seconds] for direction, seconds in times.items()}
        both = [sum(pair) for pair in zip(*times.values(), strict=True)]
        for direction, seconds in {**times, "both": both}.items():
            of = DIRECTIONS if direction == "both" else (direction,)
            bound_s = sum(sizes.kernels_s[each] for each in of)
            rows.append(
                {
                    "nodes": sizes.nodes,
                    "ranks_per_node": sizes.ranks_per_node,
                    "rate_mbit": rate_mbit,
                    "tokens": sizes.tokens,
                    "layer": sizes.layer,
                    "contender": way,
                    "direction": direction,
                    "repeats": len(seconds),
                    "time_s": median(seconds),
                    "time_s_min": min(seconds),
                    "time_s_max": max(seconds),
                    "dilation": slower,
                    "nic_bytes": sum(nic_bytes[each] for each in of),
                    "bound_s": bound_s,
                    "over_bound": median(seconds) / bound_s,
                }
            )
    return rows
