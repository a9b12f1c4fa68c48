"""An emulated cluster: network namespaces with shaped links, real gloo traffic, and all contenders on it by turns.

Compute is slept by default, so that two cores can stand for many GPUs: a kernel call takes the time of its share of a
visit and no processor. What a contender itself does, packing, merging, Python, is real.

Figures are medians over rounds, from a start that all ranks agree on to the end of the last one. The bound is the
longer of all work and of all bytes that the busiest NIC sends, at its rate less the headers; the model is the
planner's price. Neither knows of latency. Packed documents have no model; their bytes are those that have to cross,
less the 128 KiB that an emulated NIC lets through at once.

On a cluster each rank has a core. With `--core-per-rank` links and compute are slowed down by the number of ranks
that share one here, and times are divided by it ("time dilation"): by the cluster's clock each rank has a whole core.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch

from benchmarks import RefusedError
from benchmarks.cluster_ranks import Measured, measure_in_rank
from benchmarks.contenders import CONTENDERS, PACKED, Case, Contender, Slept
from benchmarks.contenders.burst import PRESETS, Burst
from benchmarks.documents import drawn_documents, least_nic_bytes
from benchmarks.report.files import Recording, Row, default_path
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.planner import plans
from burst_plugin.planning.price import has_price, pass_price
from burst_plugin.types import DIRECTIONS
from tests.support.netns import BUCKET_BYTES, EmulatedCluster

BLOCK_BYTES = 1 << 20
PAYLOAD = 1448 / 1514  # of a packet of 1500 bytes in an Ethernet frame
INTRA_BYTES_PER_S = 1e9  # about what gloo moves between namespaces of one machine
OURS, EVEN = "burst", 1.03  # times as much as ours that is no difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add, names = parser.add_argument, dict.fromkeys(contender.name for contender in (*CONTENDERS, *PACKED))
    add("--topologies", nargs="+", default=["2x4", "4x2", "4x4"], metavar="NxW", help="nodes x ranks")
    add("--rates", nargs="+", type=float, default=[100, 200, 400], metavar="MBIT", help="of a NIC")
    add("--heads", nargs="+", default=["16/16", "16/4"], metavar="Q/KV", help="query/kv heads")
    add("--latency-ms", type=float, default=0.0, metavar="MS", help="one way, between NICs")
    add("--compute", choices=("slept", "real"), default="slept")
    add("--visit-ms", nargs=2, type=float, default=[30, 75], metavar=("FWD", "BWD"), help="if slept")
    add("--core-per-rank", action="store_true", help="slow links and compute down until each rank has a core's time")
    add("--seq", type=int, help="tokens per rank (default: as many as make keys and values 1 MiB)")
    add("--documents", type=int, metavar="TOKENS", help="causal packed documents, of so many tokens on average")
    add("--sigmas", nargs="+", type=float, default=[0.5, 1.0, 1.5], help="of the logarithms of documents' lengths")
    add("--contenders", nargs="+", choices=names, default=list(names), metavar="NAME")
    add("--presets", nargs="+", choices=("all", *PRESETS), default=[], metavar="NAME", help="published systems")
    add("--rounds", type=int, default=5)
    add("--out", type=Path, metavar="FILE", help="of the result (default: in benchmarks/results)")


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
    if options.core_per_rank and options.compute == "real":
        raise RefusedError("--core-per-rank takes --compute slept: real kernels cannot be slowed down")
    contenders, sigmas = (CONTENDERS, [None]) if options.documents is None else (PACKED, options.sigmas)
    every = product(options.topologies, options.rates, options.heads, sigmas)
    cases = [(case_of(topology, heads, sigma, options), rate) for topology, rate, heads, sigma in every]
    chosen: list[Contender] = [each for each in contenders if each.name in options.contenders]
    chosen += [each for name, each in PRESETS.items() if {name, "all"} & {*options.presets}]
    kinds = {"real": options.compute == "real", "latency": options.latency_ms, "packed": options.documents}
    name = "-".join(["cluster", *(kind for kind, is_it in kinds.items() if is_it)])
    recording = Recording("cluster", vars(options), options.out or default_path(name))
    for case, rate_mbit in cases:
        rows = recording.measure(partial(measure, case, rate_mbit, chosen, options))
        print(*lines(rows), sep="\n", flush=True)
    print(*verdicts(recording.rows), sep="\n")
    recording.save()
    return 0


def case_of(topology: str, heads: str, sigma: float | None, options: argparse.Namespace) -> Case:
    """Return the case of a topology, such as "2x4", heads, such as "16/4", and documents; raises RefusedError."""
    sizes, counts = topology.split("x"), heads.split("/")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise RefusedError(f"--topologies {topology} is not valid; write nodes x ranks per node, such as 2x4")
    if len(counts) != 2 or not all(n.isdigit() and int(n) > 0 for n in counts) or int(counts[0]) % int(counts[1]):
        raise RefusedError(f"--heads {heads} is not valid; write query heads / key and value heads, such as 16/4")
    (nodes, ranks), (q_heads, kv_heads), head_dim, dtype = map(int, sizes), map(int, counts), 64, torch.bfloat16
    seq = options.seq or BLOCK_BYTES // (2 * kv_heads * head_dim * dtype.itemsize)
    case = Case(nodes, ranks, seq, q_heads, kv_heads, head_dim, dtype, causal=sigma is not None, sigma=sigma)
    return case if sigma is None else replace(case, documents=drawn_documents(case, options.documents))


def measure(case: Case, rate_mbit: float, chosen: Sequence[Contender], options: argparse.Namespace) -> list[Row]:
    """Return the rows of contenders on one case."""
    slept = None if options.compute == "real" else Slept(*(ms / 1e3 for ms in options.visit_ms))
    slower = dilation(case.ranks) if options.core_per_rank else 1.0
    slept_here = slept and Slept(slower * slept.forward_s, slower * slept.backward_s)
    links_here = {"rate_mbit": rate_mbit / slower, "latency_ms": slower * options.latency_ms}
    links = Links(INTRA_BYTES_PER_S, rate_mbit * 1e6 / 8 * PAYLOAD)
    base = {"nodes": case.nodes, "ranks_per_node": case.ranks_per_node, "rate_mbit": rate_mbit, "nic": "rank"}
    base |= {"latency_ms": options.latency_ms, "compute": options.compute, "dilation": slower}
    base |= {name: getattr(case, name) for name in ("q_heads", "kv_heads", "seq", "causal")}
    base |= {"documents": len(case.documents), "sigma": case.sigma} if case.documents else {}
    reasons = {c.name: c.reason(case) for c in chosen}
    able = {c.name: c.configurations(case) for c in chosen if not reasons[c.name]}
    if slept is not None and not case.documents:
        able = {name: planned(found, case, slept, links) for name, found in able.items()}
    timeout_s = slower * (600.0 + 90.0 * options.rounds)  # sixteen ranks at 100 mbit, and their configurations
    with EmulatedCluster(case.nodes, case.ranks_per_node, **links_here) as cluster:
        found = cluster.run(measure_in_rank, case, able, slept_here, options.rounds, timeout_s=timeout_s)[0]
    rows: list[Row] = []
    for name, reason in reasons.items():
        row = {**base, "contender": name} | reason
        rows += [row] if reason else rows_of(row, case, slept, links, _undilated(found[name], slower))
    return rows


def dilation(ranks: int) -> float:
    """Return how many ranks share a core: the factor by which all else is slowed down so that each has one's time."""
    return max(1.0, ranks / len(os.sched_getaffinity(0)))


def _undilated(found: Measured, dilation: float) -> Measured:
    """Return what was measured in the time of a cluster that is not slowed down."""
    configuration, passes, nic_bytes = found
    return configuration, {of: [seconds / dilation for seconds in times] for of, times in passes.items()}, nic_bytes


def planned(configurations: Sequence[Contender], case: Case, slept: Slept, links: Links) -> Sequence[Contender]:
    """Return configurations with as many parts as the planner says, where that is open."""
    ours = [each for each in configurations if isinstance(each, Burst) and each.several]
    if not ours:
        return configurations
    found = plans(case.topology, case.shapes, slept, links)
    parts = {each.strategy.degree: each.strategy.parts for each in reversed(found)}  # the best last
    usual = ours[0].strategy.parts
    return [replace(c, strategy=replace(c.strategy, parts=parts.get(c.strategy.degree, usual))) for c in ours]


def rows_of(base: Row, case: Case, slept: Slept | None, links: Links, found: Measured) -> list[Row]:
    """Return the rows of one contender on one case: both directions, and their sum."""
    configuration, passes, nic_bytes = found
    both = [sum(pair) for pair in zip(*passes.values(), strict=True)]
    bounds = {} if slept is None else bounds_of(case, slept, links, configuration)
    work = {"imbalance": configuration.imbalance(case)} if isinstance(configuration, Burst) else {}
    rows = []
    for direction, times in {**passes, "both": both}.items():
        of = DIRECTIONS if direction == "both" else (direction,)
        row = {**base, **work, "configuration": configuration.name, "repeats": len(times), "direction": direction}
        row["nic_bytes"] = sum(nic_bytes[each] for each in of)
        if isinstance(configuration, Burst) and direction in DIRECTIONS:
            strategy = configuration.strategy
            row |= {"parts": strategy.parts_of(direction), "ulysses_degree": strategy.degree}
        row |= {"time_s": median(times), "time_s_min": min(times), "time_s_max": max(times)}
        row |= {name: sum(seconds[each] for each in of) for name, seconds in bounds.items()}
        rows.append(row | ({"over_bound": row["time_s"] / row["bound_s"]} if row.get("bound_s") else {}))
    return rows


def bounds_of(case: Case, slept: Slept, links: Links, configuration: Contender) -> dict[str, dict[str, float]]:
    """Return seconds by direction of the bound and, of strategies of ours, of the planner's model."""
    visit_s = dict(zip(DIRECTIONS, (slept.forward_s, slept.backward_s), strict=True))
    if not isinstance(configuration, Burst) or not has_price(configuration.strategy):
        return {}
    if case.documents:
        visits = sum(length**2 / 2 for length in case.documents) / (case.ranks * case.seq**2)
        compute_s = {direction: visits * seconds for direction, seconds in visit_s.items()}
        crossing = {d: max(0.0, least_nic_bytes(case, configuration, d) - BUCKET_BYTES) for d in DIRECTIONS}
        link_s = {d: size / links.inter_bytes_per_s for d, size in crossing.items()}
        return {"compute_s": compute_s, "bound_s": {d: max(compute_s[d], link_s[d]) for d in DIRECTIONS}}
    strategy, topology, shapes = configuration.strategy, case.topology, case.shapes
    prices = {d: pass_price(strategy, d, topology, shapes, visit_s[d], links) for d in DIRECTIONS}
    model_s, bound_s = ({d: getattr(price, name) for d, price in prices.items()} for name in ("time_s", "bound_s"))
    return {"model_s": model_s, "bound_s": bound_s}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line per contender; times in milliseconds, and as multiples of this project's, bound and model."""
    sums = [row for row in rows if row.get("direction", "both") == "both"]
    ours: Row = next((row for row in sums if row["contender"] == OURS and "time_s" in row), {})
    for row in sums:
        where = f"{_where(row)}  {row.get('configuration', row['contender']):<30}"
        if "time_s" not in row:
            yield f"{where} {'absent' if 'absent' in row else 'refused'}: {row.get('absent') or row['refused']}"
            continue
        passes = [r for r in rows if r["contender"] == row["contender"] and r["direction"] in DIRECTIONS]
        parts = f", parts {passes[0]['parts']} + {passes[1]['parts']}" if "parts" in passes[0] else ""
        over = {"burst": ours.get("time_s"), "the bound": row.get("bound_s"), "the model": row.get("model_s")}
        ratios = "".join(f", {row['time_s'] / seconds:.2f} x {name}" for name, seconds in over.items() if seconds)
        times = " + ".join(f"{1e3 * r['time_s']:.0f}" for r in passes)
        why = f", {_why(row, ours)}" if ours and "imbalance" in row and row is not ours else ""
        yield f"{where} {times} ms{ratios}, {row['nic_bytes'] / 2**20:.1f} MiB at the NIC{parts}{why}"


def _why(row: Row, ours: Row) -> str:
    """Return what a strategy loses by: bytes at the NIC, balance of work or, where these take no longer, steps."""
    if row["time_s"] <= EVEN * ours["time_s"]:
        return "not behind"
    nic_s, work_s = 8e-6 / PAYLOAD / row["rate_mbit"], row.get("compute_s", 0.0)  # of a byte, of a rank's even share
    lost_s = {"bytes": nic_s * (row["nic_bytes"] - ours["nic_bytes"]), "steps": (EVEN - 1) * ours["time_s"]}
    lost_s["balance"] = work_s * (row["imbalance"] - ours["imbalance"])
    cause = max(lost_s, key=lost_s.__getitem__)
    return f"behind by {cause}" if cause == "steps" else f"behind by {cause}, {1e3 * lost_s[cause]:.0f} ms"


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the worst figures: of this project over bound and model, with the median, and of the nearest other.

    Of single passes or, for packed documents, of both together.
    """
    timed = [row for row in rows if "time_s" in row and ("sigma" in row) == (row["direction"] == "both")]
    ours = {_where(row): row for row in timed if row["contender"] == OURS}
    for name in ("bound_s", "model_s"):
        known = {where: row for where, row in ours.items() if name in row and not row["latency_ms"]}
        ratios = {where: row["time_s"] / row[name] for where, row in known.items()}
        for where in sorted(ratios, key=ratios.__getitem__)[-1:]:
            yield f"time / {name[:-2]}: {median(ratios.values()):.3f}, at most {ratios[where]:.3f}, {where}"
    others = [row for row in timed if not row["contender"].startswith(OURS) and _where(row) in ours]
    ratios = {f"{row['contender']}, {_where(row)}": row["time_s"] / ours[_where(row)]["time_s"] for row in others}
    for where in sorted(ratios, key=ratios.__getitem__)[:1]:
        yield f"time of others / burst: at least {ratios[where]:.3f}, {where}"


def _where(row: Row) -> str:
    place = f"{row['nodes']}x{row['ranks_per_node']}, {row['rate_mbit']:g} mbit"
    sigma = f", sigma {row['sigma']:g}" if "sigma" in row else ""
    direction = f", {row['direction']}" if row.get("direction", "both") != "both" else ""
    return f"{place}, heads {row['q_heads']}/{row['kv_heads']}{sigma}{direction}"
