"""An emulated cluster: network namespaces with shaped links, real gloo traffic, and all contenders on it by turns.

Compute is slept by default, so that two cores can stand for many GPUs: a kernel call takes the time of its share of a
visit and no processor. What a contender itself does, packing, merging, Python, is real.

Figures are medians over rounds, from a start that all ranks agree on to the end of the last one. The bound is the
longer of all work and of all bytes that the busiest NIC sends, at its rate less the headers; the model is the
planner's price. Neither knows of latency. Packed documents have no model, and their bound is computing alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import torch

from benchmarks import RefusedError
from benchmarks.cluster_ranks import Measured, measure_in_rank
from benchmarks.contenders import CONTENDERS, Case, Contender, Slept
from benchmarks.contenders.burst import Burst
from benchmarks.report.files import Recording, Row, default_path
from burst_plugin.planning.planner import Links, pass_price, plans
from burst_plugin.topology import Topology
from burst_plugin.types import DIRECTIONS
from tests.support.netns import EmulatedCluster

BLOCK_BYTES = 1 << 20
PAYLOAD = 1448 / 1514  # of a packet of 1500 bytes in an Ethernet frame
INTRA_BYTES_PER_S = 1e9  # about what gloo moves between namespaces of one machine
OURS = "burst"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add, names = parser.add_argument, [contender.name for contender in CONTENDERS]
    add("--topologies", nargs="+", default=["2x4", "4x2", "4x4"], metavar="NxW", help="nodes x ranks")
    add("--rates", nargs="+", type=float, default=[100, 200, 400], metavar="MBIT", help="of a NIC")
    add("--heads", nargs="+", default=["16/16", "16/4"], metavar="Q/KV", help="query/kv heads")
    add("--latency-ms", type=float, default=0.0, metavar="MS", help="one way, between NICs")
    add("--compute", choices=("slept", "real"), default="slept")
    add("--visit-ms", nargs=2, type=float, default=[30, 75], metavar=("FWD", "BWD"), help="if slept")
    add("--seq", type=int, help="tokens per rank (default: as many as make keys and values 1 MiB)")
    add("--documents", type=int, metavar="TOKENS", help="causal packed documents, of so many tokens on average")
    add("--contenders", nargs="+", choices=names, default=names, metavar="NAME")
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
    cases = [[case_of(topology, heads, options) for heads in options.heads] for topology in options.topologies]
    absent = {c.name: why for c in CONTENDERS if c.name in options.contenders and (why := c.absent()) is not None}
    kinds = {"real": options.compute == "real", "latency": options.latency_ms, "packed": options.documents}
    name = "-".join(["cluster", *(kind for kind, is_it in kinds.items() if is_it)])
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    recording = Recording("cluster", settings, options.out or default_path(name))
    for case, rate_mbit in ((case, rate) for each in cases for rate in options.rates for case in each):
        rows = recording.measure(partial(measure, case, rate_mbit, absent, options))
        print(*lines(rows), sep="\n", flush=True)
    print(*verdicts(recording.rows), sep="\n")
    recording.save()
    return 0


def case_of(topology: str, heads: str, options: argparse.Namespace) -> Case:
    """Return the case of a topology, such as "2x4", and head counts, such as "16/4"; raises RefusedError."""
    sizes, counts = topology.split("x"), heads.split("/")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise RefusedError(f"--topologies {topology} is not valid; write nodes x ranks per node, such as 2x4")
    if len(counts) != 2 or not all(n.isdigit() and int(n) > 0 for n in counts) or int(counts[0]) % int(counts[1]):
        raise RefusedError(f"--heads {heads} is not valid; write query heads / key and value heads, such as 16/4")
    (nodes, ranks), (q_heads, kv_heads), head_dim, dtype = map(int, sizes), map(int, counts), 64, torch.bfloat16
    seq = options.seq or BLOCK_BYTES // (2 * kv_heads * head_dim * dtype.itemsize)
    packed = options.documents is not None
    documents = drawn_documents(nodes * ranks, seq, options.documents) if packed else ()
    return Case(nodes, ranks, seq, q_heads, kv_heads, head_dim, dtype, causal=packed, documents=documents)


def drawn_documents(ranks: int, seq: int, mean: int) -> tuple[int, ...]:
    """Draw log-normal lengths, of sigma 1, of documents that fill `ranks * seq` tokens, in multiples of 2 * ranks."""
    unit, random = 2 * ranks, Random(0)
    if seq % 2:
        raise RefusedError(f"--documents needs an even number of tokens per rank, not --seq {seq}")
    if mean < unit:
        raise RefusedError(f"--documents {mean} is too short to cut into 2 * {ranks} ranks; use {unit} or more")
    left, lengths = ranks * seq // unit, []
    while left:
        lengths.append(min(max(1, round(random.lognormvariate(math.log(mean / unit) - 0.5, 1.0))), left))
        left -= lengths[-1]
    return tuple(length * unit for length in lengths)


def measure(case: Case, rate_mbit: float, absent: Mapping[str, str], options: argparse.Namespace) -> list[Row]:
    """Return the rows of all contenders on one case."""
    slept = None if options.compute == "real" else Slept(*(ms / 1e3 for ms in options.visit_ms))
    links = Links(INTRA_BYTES_PER_S, rate_mbit * 1e6 / 8 * PAYLOAD)
    base = {"nodes": case.nodes, "ranks_per_node": case.ranks_per_node, "rate_mbit": rate_mbit, "nic": "rank"}
    base |= {"latency_ms": options.latency_ms, "compute": options.compute}
    base |= {name: getattr(case, name) for name in ("q_heads", "kv_heads", "seq", "causal")}
    base |= {"documents": len(case.documents)} if case.documents else {}
    chosen = [c for c in CONTENDERS if c.name in options.contenders]
    able = {c.name: found for c in chosen if c.name not in absent and (found := c.configurations(case))}
    if slept is not None and not case.documents:
        able = {name: planned(found, case, slept, links) for name, found in able.items()}
    timeout_s = 600.0 + 90.0 * options.rounds  # sixteen ranks at 100 mbit, and their configurations
    with EmulatedCluster(case.nodes, case.ranks_per_node, rate_mbit, latency_ms=options.latency_ms) as cluster:
        found = cluster.run(measure_in_rank, case, able, slept, options.rounds, timeout_s=timeout_s)[0]
    rows: list[Row] = []
    for contender in chosen:
        row = {**base, "contender": contender.name}
        if contender.name in able:
            rows += rows_of(row, case, slept, links, found[contender.name])
        else:
            refused = {"refused": contender.refuse(case) or "no configuration can do this case"}
            rows.append(row | ({"absent": absent[contender.name]} if contender.name in absent else refused))
    return rows


def planned(configurations: Sequence[Contender], case: Case, slept: Slept, links: Links) -> Sequence[Contender]:
    """Return configurations with as many parts as the planner says, where that is open."""
    ours = [each for each in configurations if isinstance(each, Burst) and each.several]
    if not ours:
        return configurations
    visit_s = (slept.forward_s, slept.backward_s)
    found = plans(Topology(case.nodes, case.ranks_per_node), case.shapes, visit_s, links)
    parts = {each.strategy.ulysses_degree: each.strategy.parts for each in reversed(found)}  # the best last
    usual = ours[0].strategy.parts
    strategies = [replace(c.strategy, parts=parts.get(c.strategy.ulysses_degree, usual)) for c in ours]
    return [replace(each, strategy=strategy) for each, strategy in zip(ours, strategies, strict=True)]


def rows_of(base: Row, case: Case, slept: Slept | None, links: Links, found: Measured) -> list[Row]:
    """Return the rows of one contender on one case: both directions, and their sum."""
    configuration, passes, nic_bytes = found
    both = [sum(pair) for pair in zip(*passes.values(), strict=True)]
    bounds = {} if slept is None else bounds_of(case, slept, links, configuration)
    rows = []
    for direction, times in {**passes, "both": both}.items():
        of = DIRECTIONS if direction == "both" else (direction,)
        row = {**base, "configuration": configuration.name, "repeats": len(times), "direction": direction}
        row["nic_bytes"] = sum(nic_bytes[each] for each in of)
        if isinstance(configuration, Burst) and direction in DIRECTIONS:
            strategy = configuration.strategy
            row |= {"parts": strategy.parts_of(direction), "ulysses_degree": strategy.ulysses_degree}
        row |= {"time_s": median(times), "time_s_min": min(times), "time_s_max": max(times)}
        rows.append(row | {name: sum(seconds[each] for each in of) for name, seconds in bounds.items()})
    return rows


def bounds_of(case: Case, slept: Slept, links: Links, configuration: Contender) -> dict[str, dict[str, float]]:
    """Return seconds by direction of the bound and, of strategies of ours, of the planner's model."""
    visit_s = dict(zip(DIRECTIONS, (slept.forward_s, slept.backward_s), strict=True))
    if case.documents:  # even work, and no waiting
        visits = sum(length**2 / 2 for length in case.documents) / (case.ranks * case.seq**2)
        return {"bound_s": {direction: visits * seconds for direction, seconds in visit_s.items()}}
    if not isinstance(configuration, Burst):
        return {}
    of = (Topology(case.nodes, case.ranks_per_node), case.shapes)
    prices = {d: pass_price(configuration.strategy, d, *of, visit_s[d], links) for d in DIRECTIONS}
    model_s, bound_s = ({d: getattr(price, name) for d, price in prices.items()} for name in ("time_s", "bound_s"))
    return {"model_s": model_s, "bound_s": bound_s}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line per contender; times in milliseconds, and as multiples of this project's, bound and model."""
    sums = [row for row in rows if row.get("direction", "both") == "both"]
    ours_s = next((row["time_s"] for row in sums if row["contender"] == OURS and "time_s" in row), None)
    for row in sums:
        where = f"{_where(row)}  {row.get('configuration', row['contender']):<30}"
        if "time_s" not in row:
            yield f"{where} {'absent' if 'absent' in row else 'refused'}: {row.get('absent') or row['refused']}"
            continue
        passes = [r for r in rows if r["contender"] == row["contender"] and r["direction"] in DIRECTIONS]
        parts = f", parts {passes[0]['parts']} + {passes[1]['parts']}" if "parts" in passes[0] else ""
        over = {"burst": ours_s, "the bound": row.get("bound_s"), "the model": row.get("model_s")}
        ratios = "".join(f", {row['time_s'] / seconds:.2f} x {name}" for name, seconds in over.items() if seconds)
        times = " + ".join(f"{1e3 * r['time_s']:.0f}" for r in passes)
        yield f"{where} {times} ms{ratios}, {row['nic_bytes'] / 2**20:.1f} MiB at the NIC{parts}"


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the worst figures: times of this project over bound and model, and the nearest of other libraries."""
    timed = [row for row in rows if "time_s" in row]
    ours = {_where(row): row for row in timed if row["contender"] == OURS}
    priced = {where: row for where, row in ours.items() if "model_s" in row and not row["latency_ms"]}
    for name in ("bound", "model"):
        ratios = {w: row["time_s"] / row[f"{name}_s"] for w, row in priced.items() if row["direction"] != "both"}
        for where in sorted(ratios, key=ratios.__getitem__)[-1:]:
            yield f"time / {name}: at most {ratios[where]:.3f}, {where}"
    others = [row for row in timed if not row["contender"].startswith(OURS) and _where(row) in ours]
    ratios = {f"{row['contender']}, {_where(row)}": row["time_s"] / ours[_where(row)]["time_s"] for row in others}
    for where in sorted(ratios, key=ratios.__getitem__)[:1]:
        yield f"time of others / burst: at least {ratios[where]:.3f}, {where}"


def _where(row: Row) -> str:
    place = f"{row['nodes']}x{row['ranks_per_node']}, {row['rate_mbit']:g} mbit"
    direction = f", {row['direction']}" if row.get("direction", "both") != "both" else ""
    return f"{place}, heads {row['q_heads']}/{row['kv_heads']}{direction}"
