"""An emulated cluster: network namespaces with shaped links, real gloo traffic, and all contenders on it in turn.

Compute is slept by default, so that two cores can stand for many GPUs: a kernel call takes the time of its share of a
visit and no processor. What a contender itself does, packing, merging, Python, is real. With `--compute real` the
kernels compute.

One run is interleaved: in every round each contender does one forward and one backward pass, between a start agreed
on by all ranks and the end of the last one. Figures are medians over rounds. The bound is the longer of all work and
of all bytes that the busiest NIC sends, at its rate less the headers; the model is the planner's price. Neither knows
of latency. Packed documents have no model, and their bound is computing alone, dealt out evenly.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.campaign import Campaign, Row, add_campaign_arguments
from benchmarks.cluster_ranks import Setting, Work, measure_in_rank, parts_by_degree, visit_seconds
from benchmarks.cluster_report import table_of, verdicts
from benchmarks.contenders import CONTENDERS, Case, Slept
from benchmarks.limits import RefusedError, check_ranks
from burst_plugin.planning.planner import Links, Price, pass_price
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology
from burst_plugin.types import DIRECTIONS, Direction
from tests.support.netns import EmulatedCluster

RANK_BYTES = 400 << 20  # of one forked rank, but for its tensors: libraries, and gloo's connections
BLOCK_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--topologies", nargs="+", default=["2x4", "4x2", "4x4"], metavar="NxW", help="nodes x ranks")
    parser.add_argument("--rates", nargs="+", type=float, default=[100, 200, 400], metavar="MBIT", help="of a NIC")
    parser.add_argument("--heads", nargs="+", default=["16/16", "16/4"], metavar="Q/KV", help="query/kv heads")
    parser.add_argument("--nic", choices=("rank", "node"), default="rank", help="whose a NIC is")
    parser.add_argument("--latency-ms", type=float, default=0.0, metavar="MS", help="one way, between NICs")
    parser.add_argument("--compute", choices=("slept", "real"), default="slept")
    parser.add_argument("--visit-ms", nargs=2, type=float, default=[30, 75], metavar=("FWD", "BWD"), help="if slept")
    parser.add_argument("--seq", type=int, help="tokens per rank (default: as many as make keys and values 1 MiB)")
    parser.add_argument("--causal", action="store_true", help="a causal mask (default: full attention)")
    parser.add_argument(
        "--documents", type=int, metavar="TOKENS", help="causal packed documents, of so many tokens on average"
    )
    parser.add_argument("--contenders", nargs="+", choices=[c.name for c in CONTENDERS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    add_campaign_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    reason = EmulatedCluster.unavailable(options.latency_ms)
    if reason is not None:
        print(f"bench cluster: skipped, no such cluster can be emulated here: {reason}")
        return 0
    if options.documents is not None and options.compute == "real":
        raise RefusedError("--documents takes --compute slept: stand-ins compute more than libraries for GPUs would")
    if options.rounds < 1 or min(options.rates) <= 0 or min(*options.visit_ms, options.latency_ms) < 0:
        raise RefusedError("--rounds has to be 1 or more, --rates above 0, --visit-ms and --latency-ms 0 or more")
    slept = None if options.compute == "real" else Slept(*(ms / 1e3 for ms in options.visit_ms))
    chosen = [c for c in CONTENDERS if not options.contenders or c.name in options.contenders]
    names = tuple(c.name for c in chosen)
    absent = {c.name: reason for c in chosen if (reason := c.absent()) is not None}
    console = Console(width=None if sys.stdout.isatty() else 120)
    kinds = {"real": slept is None, "latency": options.latency_ms, "packed": options.documents}
    variant = "-".join(["cluster", *(kind for kind, is_it in kinds.items() if is_it)])
    campaign = Campaign.begin("cluster", options, variant=variant, free=("topologies", "rates"))

    def measured(setting: Setting) -> list[Row]:
        cases = tuple(case_of(setting, heads, options) for heads in options.heads)
        check_ranks(setting.topology.ranks, max(map(rank_bytes, cases)), "--topologies or --seq")
        parts = parts_of(setting, cases, slept)
        timeout_s = 600.0 + 90.0 * options.rounds  # of a case: sixteen ranks at 100 mbit, and their configurations
        return measure(setting, Work(cases, slept, names, absent, options.rounds, timeout_s, parts))

    def show(setting: Setting, rows: list[Row]) -> None:
        late = f", {setting.latency_ms:g} ms away" if setting.latency_ms else ""
        console.print(table_of(f"{setting.topology}, {setting.rate_mbit:g} mbit per {setting.nic}{late}, ms", rows))

    for setting in settings(options):
        campaign.measure(setting.is_of, partial(measured, setting), partial(show, setting))
    for line in verdicts(campaign.rows):
        console.print(line)
    campaign.end()
    return 0


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """The clusters that are asked for. RefusedError for sizes that cannot be."""
    for text in options.topologies:
        sizes = text.split("x")
        if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise RefusedError(f"--topologies {text} is not valid; write nodes x ranks per node, such as 2x4")
        for rate in options.rates:
            yield Setting(int(sizes[0]), int(sizes[1]), rate, options.nic, options.latency_ms)


def case_of(setting: Setting, heads: str, options: argparse.Namespace) -> Case:
    """The case of one pair of head counts, such as "16/4"."""
    counts = heads.split("/")
    if len(counts) != 2 or not all(n.isdigit() and int(n) > 0 for n in counts) or int(counts[0]) % int(counts[1]):
        raise RefusedError(f"--heads {heads} is not valid; write query heads / key and value heads, such as 16/4")
    q_heads, kv_heads, head_dim = int(counts[0]), int(counts[1]), 64
    seq = options.seq or BLOCK_BYTES // (2 * kv_heads * head_dim * 2)
    documents = (
        drawn_documents(setting.topology.ranks, seq, options.documents) if options.documents is not None else ()
    )
    return Case(
        setting.nodes,
        setting.ranks_per_node,
        seq,
        q_heads,
        kv_heads,
        head_dim,
        torch.bfloat16,
        options.causal or bool(documents),
        documents=documents,
    )


def drawn_documents(ranks: int, seq: int, mean: int) -> tuple[int, ...]:
    """Lengths of documents that fill `ranks * seq` tokens: many are short and few are long, as those of texts are.

    Log-normal, of sigma 1; in multiples of 2 * ranks, as all contenders can cut them. The last one is what is left.
    """
    unit, random = 2 * ranks, Random(0)
    if seq % 2:
        raise RefusedError(f"--documents needs an even number of tokens per rank, not --seq {seq}")
    if mean < unit:
        raise RefusedError(f"--documents {mean} is too short to cut into 2 * {ranks} ranks; use {unit} or more")
    left, lengths = ranks * seq // unit, []
    while left:
        drawn = random.lognormvariate(math.log(mean / unit) - 0.5, 1.0)
        lengths.append(min(max(1, round(drawn)), left))
        left -= lengths[-1]
    return tuple(length * unit for length in lengths)


def rank_bytes(case: Case) -> int:
    """About what one rank needs: queries, gradients and sums in float32, a ring's blocks, of several contenders."""
    return RANK_BYTES + 24 * case.batch * case.seq * case.q_heads * case.head_dim * case.dtype.itemsize


def parts_of(
    setting: Setting, cases: Sequence[Case], slept: Slept | None
) -> dict[tuple[Case, int], int | tuple[int, int]]:
    """What the planner says on the links of a cluster; nothing where compute is real, which nobody has timed.

    Nor of packed documents, of which it does not know.
    """
    if slept is None:
        return {}
    found = {case: parts_by_degree(case, slept, setting.links) for case in cases if not case.documents}
    return {(case, degree): parts for case, by_degree in found.items() for degree, parts in by_degree.items()}


def measure(setting: Setting, work: Work) -> list[Row]:
    """Rows of all cases and contenders on one cluster."""
    with EmulatedCluster(**asdict(setting)) as cluster:
        measured = cluster.run(measure_in_rank, setting, work, timeout_s=work.timeout_s * len(work.cases))
    return [row for found in measured[0] for row in rows_of(setting, work.slept, *found)]


def computing_s(case: Case, slept: Slept) -> tuple[float, float]:
    """What packed documents take, forward and backward, if ranks have even work and wait for nobody."""
    visits = sum(length**2 / 2 for length in case.documents) / (case.ranks * case.seq**2)
    return slept.forward_s * visits, slept.backward_s * visits


def model(case: Case, strategy: Strategy, direction: Direction, slept: Slept, links: Links) -> Price:
    """What the planner says of a strategy of ours."""
    topology, visit_s = Topology(case.nodes, case.ranks_per_node), visit_seconds(case, slept)
    return pass_price(strategy, direction, topology, case.shapes, visit_s[DIRECTIONS.index(direction)], links)


def rows_of(
    setting: Setting, slept: Slept | None, case: Case, links: Links, found: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of one contender on one case: both directions, and their sum."""
    base = {
        **asdict(setting),
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "seq": case.seq,
        "causal": case.causal,
        "compute": "real" if slept is None else "slept",
        "contender": found["contender"],
    }
    if case.documents:
        base["documents"] = len(case.documents)
    if "times" not in found:
        return [{**base, **{why: found[why] for why in ("absent", "refused") if why in found}}]
    base |= {"configuration": found["configuration"], "repeats": len(found["times"]["forward"])}
    times = {**found["times"], "both": [sum(pair) for pair in zip(*found["times"].values(), strict=True)]}
    nic_bytes = {**found["nic_bytes"], "both": sum(found["nic_bytes"].values())}
    prices: dict[str, Price] = {}
    if slept is not None and found["strategy"] is not None and not case.documents:
        prices = {d: model(case, found["strategy"], d, slept, links) for d in DIRECTIONS}
    rows = []
    for direction, each in times.items():
        row = {**base, "direction": direction, "nic_bytes": nic_bytes[direction]}
        if found["strategy"] is not None and direction in DIRECTIONS:
            row["parts"] = found["strategy"].parts_of(direction)
            row["ulysses_degree"] = found["strategy"].ulysses_degree
        row |= {"time_s": median(each), "time_s_min": min(each), "time_s_max": max(each)}
        of = [prices[d] for d in (DIRECTIONS if direction == "both" else (direction,)) if d in prices]
        if of:
            row |= {"model_s": sum(p.time_s for p in of), "bound_s": sum(p.bound_s for p in of)}
        if case.documents and slept is not None:
            seconds = dict(zip(DIRECTIONS, computing_s(case, slept), strict=True))
            row["bound_s"] = seconds.get(direction, sum(seconds.values()))
        rows.append(row)
    return rows
