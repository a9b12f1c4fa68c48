"""One ring beside a group for each length of document, as Megatron's hybrid context parallelism makes them.

    one ring           documents of a microbatch on all ranks, by layout "auto"
    groups per length  each document on the ranks that Megatron's BalancedCPScheduler gives it, in zigzag; all ranks
                       meet after each of its rounds

Both are rings of this package with the same kernels, on documents of log-normal lengths that fill the microbatches of
a step. Attention is slept in proportion to its pairs, and the rest of a layer, `--rests` of a full visit's time, in
proportion to tokens, backward twice as long. A document on one rank costs nothing besides. The schedule is that of
the installed megatron-core. Each row also has what its busiest ranks compute, as if nothing had to be sent.
`--core-per-rank` is as of `bench cluster`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks import RefusedError
from benchmarks.cluster import case_of, dilation
from benchmarks.contenders import Case, Slept
from benchmarks.documents import drawn_documents
from benchmarks.groups_ranks import GROUPS, RING, Part, Rounds, Step, measure_in_rank
from benchmarks.report.files import Recording, Row, default_path
from tests.support.netns import EmulatedCluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--topologies", nargs="+", default=["2x4"], metavar="NxW", help="nodes x ranks")
    add("--rates", nargs="+", type=float, default=[100, 400], metavar="MBIT", help="of a NIC")
    add("--heads", default="16/4", metavar="Q/KV", help="query/kv heads")
    add("--seq", type=int, default=2048, help="tokens that a rank holds")
    add("--documents", nargs="+", type=int, default=[512, 2048], metavar="TOKENS", help="of a document, on average")
    add("--sigmas", nargs="+", type=float, default=[0.5, 1.0, 1.5], help="of the logarithms of documents' lengths")
    add(
        "--rests",
        nargs="+",
        type=float,
        default=[0, 1, 3],
        help="of a full visit: a layer beside attention, 6 * hidden size / tokens of a rank in most models",
    )
    add("--microbatches", type=int, default=4, help="of a step")
    add("--visit-ms", nargs=2, type=float, default=[30, 75], metavar=("FWD", "BWD"), help="of a full visit")
    add("--core-per-rank", action="store_true", help="slow links and compute down until each rank has a core's time")
    add("--rounds", type=int, default=5)
    add("--out", type=Path, metavar="FILE", help="of the result (default: in benchmarks/results)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    reason = EmulatedCluster.unavailable()
    if reason is not None:
        print(f"bench groups: skipped, no such cluster can be emulated here: {reason}")
        return 0
    if min(options.rounds, options.microbatches, *options.rates, *options.visit_ms) <= 0 or min(options.rests) < 0:
        raise RefusedError("--rounds, --microbatches, --rates and --visit-ms have to be above 0, --rests 0 or more")
    recording = Recording("groups", vars(options), options.out or default_path("groups"))
    lengths = product(options.documents, options.sigmas)
    for topology, rate, (mean, sigma), rest in product(options.topologies, options.rates, lengths, options.rests):
        case = case_of(topology, options.heads, sigma, argparse.Namespace(seq=options.seq, documents=mean))
        for row in recording.measure(partial(measure, case, rate, (mean, rest), options)):
            where = f"{topology} {rate:g} mbit, {mean} tokens, sigma {sigma:g}, rest {rest:g}, {row['contender']}:"
            times = f"{row['tokens_per_s']:8.0f} tokens/s, {row['over_ring']:.2f} x one ring's time"
            spread = f"{row['over_ring_min']:.2f} to {row['over_ring_max']:.2f}"
            print(f"{where:<74} {times} ({spread}), {row['compute_s']:.3f} s of computing", flush=True)
    recording.save()
    return 0


def measure(case: Case, rate_mbit: float, of: tuple[int, float], options: argparse.Namespace) -> list[Row]:
    """Return a row for each way on one case; ratios are of turns that follow each other.

    of: the mean length of documents, and the rest of a layer.
    """
    mean, rest = of
    forward_s, backward_s = (ms / 1e3 for ms in options.visit_ms)
    slower = dilation(case.ranks) if options.core_per_rank else 1.0
    batches = tuple(drawn_documents(case, mean, Random(number)) for number in range(options.microbatches))
    rounds = schedule(case, [length for documents in batches for length in documents])
    times_s = Slept(slower * forward_s, slower * backward_s), slower * rest * forward_s
    with EmulatedCluster(case.nodes, case.ranks_per_node, rate_mbit=rate_mbit / slower) as cluster:
        step = Step(case, batches, rounds, *times_s)
        found = cluster.run(measure_in_rank, step, options.rounds, timeout_s=slower * (300 + 60.0 * options.rounds))[
            0
        ]
    compute_s = dict(
        zip((RING, GROUPS), computing_s(case, rounds, forward_s + backward_s, 3 * rest * forward_s), strict=True)
    )
    rows: list[Row] = []
    for way, turns in found.items():
        ratios = [seconds / ring for seconds, ring in zip(turns, found[RING], strict=True)]
        seconds = [each / slower for each in turns]
        rows.append(
            {
                "nodes": case.nodes,
                "ranks_per_node": case.ranks_per_node,
                "rate_mbit": rate_mbit,
                "seq": case.seq,
                "mean": mean,
                "sigma": case.sigma,
                "rest": rest,
                "documents": sum(map(len, batches)),
                "contender": way,
                "scheduled_rounds": len(rounds) if way == GROUPS else len(batches),
                "repeats": len(seconds),
                "time_s": median(seconds),
                "time_s_min": min(seconds),
                "time_s_max": max(seconds),
                "compute_s": compute_s[way],
                "tokens_per_s": len(batches) * case.ranks * case.seq / median(seconds),
                "over_ring": median(ratios),
                "over_ring_min": min(ratios),
                "over_ring_max": max(ratios),
                "dilation": slower,
            }
        )
    return rows


def computing_s(case: Case, rounds: Rounds, visit_s: float, rest_s: float) -> tuple[float, float]:
    """Return what a step computes if nothing is sent: with work that is even over ranks, and on groups.

    visit_s, rest_s: attention of a full visit, and the rest of a layer for `case.seq` tokens, in both passes.
    """

    def work_s(parts: Sequence[Part]) -> float:
        visits = sum(part.length**2 / 2 / part.ranks for part in parts) / case.seq**2
        return visits * visit_s + sum(part.length / part.ranks for part in parts) / case.seq * rest_s

    by_round = [[work_s(parts) for parts in of_ranks] for of_ranks in rounds]
    return sum(map(sum, by_round)) / case.ranks, sum(map(max, by_round))


def schedule(case: Case, lengths: list[int]) -> Rounds:
    """Return what Megatron's scheduler has every rank compute, by round and rank.

    Raises RefusedError where megatron-core is not installed, or the schedule wants groups that there are not.
    """
    try:
        from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError as error:
        raise RefusedError(f"bench groups needs the scheduler of megatron-core 0.16 or later: {error}") from error
    group: Any = SimpleNamespace(size=lambda: case.ranks)
    _, rounds = BalancedCPScheduler(case.seq, group).get_groups_and_subsamples([*enumerate(lengths)], None)
    found = []
    for of_ranks in rounds:
        members = {
            sample: [rank for rank, own in enumerate(of_ranks) if sample in own] for own in of_ranks for sample in own
        }
        for ranks in members.values():
            if (
                ranks != [*range(ranks[0], ranks[0] + len(ranks))]
                or ranks[0] % len(ranks)
                or math.log2(len(ranks)) % 1
            ):
                raise RefusedError(f"Megatron's scheduler gives a document to ranks {ranks}, which are no group")
        found.append(tuple(tuple(Part(lengths[sample], len(members[sample])) for sample in own) for own in of_ranks))
    return tuple(found)
