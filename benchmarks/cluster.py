"""An emulated cluster: network namespaces with shaped links, real gloo traffic, and all contenders on it in turn.

Compute is slept by default, so that two cores can stand for many GPUs: a kernel call takes the time of its share of a
visit and no processor. What a contender itself does, packing, merging, Python, is real. With `--compute real` the
kernels compute.

One run is interleaved: in every round each contender does one forward and one backward pass, between a start agreed
on by all ranks and the end of the last one. Figures are medians over rounds. The rate of the links is measured first,
with the same ranks and nothing else to do, and is what the bound and the model use.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from benchmarks import results
from benchmarks.cluster_report import table_of, verdicts
from benchmarks.contenders import CONTENDERS, Case, Contender, Session, Slept
from benchmarks.contenders.burst import BURST, Burst
from benchmarks.limits import RefusedError, check_ranks
from benchmarks.netns import EmulatedCluster, interface_bytes
from burst_plugin.planner import DIRECTIONS, Links, Load, Price, plans, price
from burst_plugin.schedule import SCHEDULES
from burst_plugin.strategy import Shapes, Strategy, choose_traveller
from burst_plugin.topology import Topology

RANK_BYTES = 400 << 20  # of one forked rank: gloo's connections, buffers and blocks of the sizes used here
PROBE_BYTES = 2 << 20
LEAD_S = 0.1  # by which a start is agreed on beforehand
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Setting:
    """One emulated cluster."""

    nodes: int
    ranks_per_node: int
    rate_mbit: float
    nic: str = "rank"

    @property
    def topology(self) -> Topology:
        """Nodes and ranks."""
        return Topology(self.nodes, self.ranks_per_node)


@dataclass(frozen=True)
class Work:
    """What every rank runs on one cluster."""

    cases: tuple[Case, ...]
    slept: Slept | None
    names: tuple[str, ...]
    rounds: int
    nic: str
    timeout_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--topologies", nargs="+", default=["2x4", "4x2", "4x4"], metavar="NxW", help="nodes x ranks")
    parser.add_argument("--rates", nargs="+", type=float, default=[100, 200, 400], metavar="MBIT", help="of a NIC")
    parser.add_argument("--heads", nargs="+", default=["16/16", "16/4"], metavar="Q/KV", help="query/kv heads")
    parser.add_argument("--nic", choices=("rank", "node"), default="rank", help="whose a NIC is")
    parser.add_argument("--compute", choices=("slept", "real"), default="slept")
    parser.add_argument("--visit-ms", nargs=2, type=float, default=[30, 75], metavar=("FWD", "BWD"), help="if slept")
    parser.add_argument("--seq", type=int, help="tokens per rank (default: as many as make keys and values 1 MiB)")
    parser.add_argument("--causal", action="store_true", help="a causal mask (default: full attention)")
    parser.add_argument("--contenders", nargs="+", choices=[c.name for c in CONTENDERS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true", help="only print")


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    reason = EmulatedCluster.unavailable()
    if reason is not None:
        print(f"bench cluster: skipped, no cluster can be emulated here: {reason}")
        return 0
    slept = None if options.compute == "real" else Slept(*(ms / 1e3 for ms in options.visit_ms))
    names = tuple(options.contenders or (c.name for c in CONTENDERS))
    console, rows = Console(), []
    with results.Watch() as watch:
        for setting in settings(options):
            check_ranks(setting.topology.ranks, RANK_BYTES, "--topologies")
            cases = tuple(case_of(setting, heads, options) for heads in options.heads)
            work = Work(cases, slept, names, options.rounds, setting.nic, 120.0 + 60.0 * options.rounds)
            found = measure(setting, work)
            rows += found
            console.print(table_of(f"{setting.topology}, {setting.rate_mbit:g} mbit per {setting.nic}, ms", found))
    for line in verdicts(rows):
        console.print(line)
    if not options.no_save:
        shown = {k: v for k, v in vars(options).items() if k not in ("run", "no_save")}
        results.save("cluster" if slept else "cluster-real", shown, rows, watch.load)
    return 0


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """The clusters that are asked for. RefusedError for sizes that cannot be."""
    for text in options.topologies:
        sizes = text.split("x")
        if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise RefusedError(f"--topologies {text} is not valid; write nodes x ranks per node, such as 2x4")
        for rate in options.rates:
            yield Setting(int(sizes[0]), int(sizes[1]), rate, options.nic)


def case_of(setting: Setting, heads: str, options: argparse.Namespace) -> Case:
    """The case of one pair of head counts, such as "16/4"."""
    counts = heads.split("/")
    if len(counts) != 2 or not all(n.isdigit() and int(n) > 0 for n in counts) or int(counts[0]) % int(counts[1]):
        raise RefusedError(f"--heads {heads} is not valid; write query heads / key and value heads, such as 16/4")
    q_heads, kv_heads, head_dim = int(counts[0]), int(counts[1]), 64
    seq = options.seq or BLOCK_BYTES // (2 * kv_heads * head_dim * 2)
    return Case(
        setting.nodes, setting.ranks_per_node, seq, q_heads, kv_heads, head_dim, torch.bfloat16, options.causal
    )


def measure(setting: Setting, work: Work) -> list[dict[str, Any]]:
    """Rows of all cases and contenders on one cluster."""
    with EmulatedCluster(setting.nodes, setting.ranks_per_node, setting.rate_mbit, setting.nic) as cluster:
        measured = cluster.run(_rank, setting, work, timeout_s=work.timeout_s * len(work.cases))
    return [row for found in measured[0] for row in rows_of(setting, work.slept, *found)]


# ------------------------------------------------------------------------------------------------------ in every rank


@dataclass
class Entry:
    """One contender and its times so far, seconds, by direction."""

    contender: Contender
    session: Session
    times: dict[str, list[float]]
    nic_bytes: dict[str, int]

    @property
    def step_s(self) -> float:
        """Median of a forward and a backward pass."""
        return sum(median(times) for times in self.times.values())


def _rank(rank: int, setting: Setting, work: Work) -> list[tuple[Case, Links, dict[str, Any]]]:
    """What this rank measured; times are the same on every rank."""
    links = _measured_links(setting)
    found: list[tuple[Case, Links, dict[str, Any]]] = []
    for case in work.cases:
        inputs = _inputs(case)
        entries = []
        for name in work.names:
            kept, refused = _best(name, case, work.slept, links, inputs)
            if kept is None:
                found.append((case, links, {"contender": name, **refused}))
            else:
                entries.append((name, kept))
        for entry in (kept for _, kept in entries):
            entry.times = {direction: [] for direction in DIRECTIONS}
        for _ in range(work.rounds):
            for _, entry in entries:
                _take_turn(entry, inputs)
        for name, entry in entries:
            strategy = getattr(entry.contender, "strategy", None)
            measured = {"times": entry.times, "nic_bytes": entry.nic_bytes, "strategy": strategy}
            found.append((case, links, {"contender": name, "configuration": entry.contender.name, **measured}))
    return found


def _best(
    name: str, case: Case, slept: Slept | None, links: Links, inputs: Sequence[Tensor]
) -> tuple[Entry | None, dict[str, str]]:
    """The fastest configuration of a contender after two turns each (the first opens connections), or why none."""
    contender = next(c for c in CONTENDERS if c.name == name)
    absent, refused = contender.absent(), contender.refuse(case)
    if absent or not contender.configurations(case):
        return None, {"absent": absent} if absent else {"refused": refused or "no configuration can do this case"}
    configurations: Sequence[Contender] = contender.configurations(case)
    if contender is BURST[0] and slept is not None:
        configurations = (planned(case, slept, links),)
    entries = []
    for each in configurations:
        entry = Entry(each, each.prepare(case, slept), {d: [] for d in DIRECTIONS}, {})
        _take_turn(entry, inputs)
        entry.times = {direction: [] for direction in DIRECTIONS}
        _take_turn(entry, inputs, count=True)
        entries.append(entry)
    return min(entries, key=lambda entry: entry.step_s), {}


def planned(case: Case, slept: Slept, links: Links) -> Burst:
    """`burst` as the planner would run it on these links, its two rings compared; keys and values travel forward."""
    shapes = shapes_of(case)
    best = plans(Topology(case.nodes, case.ranks_per_node), shapes, (slept.forward_s, slept.backward_s), links)[0]
    return replace(BURST[0], strategy=replace(BURST[0].strategy, parts=best.strategy.parts))


def _take_turn(entry: Entry, inputs: Sequence[Tensor], count: bool = False) -> None:
    """One forward and one backward pass, timed, and if asked the bytes at the busiest NIC."""
    *qkv, dout = inputs
    passes: dict[str, Callable[[], Any]] = {"forward": partial(entry.session.attend, *qkv)}
    for direction in DIRECTIONS:
        _, before = interface_bytes()
        seconds, found = _timed(passes[direction])
        if count:
            _, after = interface_bytes()
            entry.nic_bytes[direction] = int(_most(after - before))
        entry.times[direction].append(seconds)
        passes["backward"] = partial(torch.autograd.grad, found, qkv, dout)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds from a start agreed on by all ranks until the last one is done; the clock is one for all processes."""
    start_s = _agreed_start()
    time.sleep(max(0.0, start_s - time.perf_counter()))
    found = work()
    end_s = time.perf_counter()
    return _most(end_s) - start_s, found


def _agreed_start() -> float:
    """A time soon enough ahead that every rank has heard of it by then."""
    lead_s = LEAD_S
    while True:
        start = torch.tensor([time.perf_counter() + lead_s], dtype=torch.float64)
        dist.broadcast(start, 0)
        if _most(time.perf_counter() + lead_s / 2 - start.item()) < 0:
            return start.item()
        lead_s *= 2


def _most(x: float) -> float:
    """The largest of all ranks."""
    found = torch.tensor([x], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _inputs(case: Case) -> tuple[Tensor, ...]:
    """q, k, v, dout of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    heads = (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads)
    shapes = [(case.batch, case.seq, n, case.head_dim) for n in heads]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def _measured_links(setting: Setting) -> Links:
    """The rates that gloo reaches, all ranks sending at once."""
    topology, rank = setting.topology, dist.get_rank()
    rates = []
    for near in (True, False):
        ring = topology.node_peers(rank) if near else topology.counterparts(rank)
        place = ring.index(rank)
        after, before = ring[(place + 1) % len(ring)], ring[place - 1]
        seconds = []
        for _ in range(3):
            if len(ring) == 1:
                break
            seconds.append(_timed(partial(_exchange, after, before))[0])
        rates.append(PROBE_BYTES / min(seconds) if seconds else 1e12)
    each = rates[1] * (setting.ranks_per_node if setting.nic == "node" else 1)
    return Links(rates[0], each, setting.nic)


def _exchange(after: int, before: int) -> None:
    mine, theirs = (torch.zeros(PROBE_BYTES, dtype=torch.uint8) for _ in range(2))
    for work in [dist.irecv(theirs, before), dist.isend(mine, after)]:
        work.wait()  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------------ figures


def shapes_of(case: Case) -> Shapes:
    """As the package names them."""
    return Shapes(
        case.batch, case.seq, case.seq, case.q_heads, case.kv_heads, case.head_dim, case.head_dim, case.dtype
    )


def model(case: Case, strategy: Strategy, direction: str, slept: Slept, links: Links) -> Price:
    """What the planner says of a strategy of ours."""
    topology, shapes = Topology(case.nodes, case.ranks_per_node), shapes_of(case)
    visit_s = slept.forward_s if direction == "forward" else slept.backward_s
    load = Load.of(
        shapes, direction, choose_traveller(strategy, direction, shapes), visit_s * (0.5 if case.causal else 1)
    )
    schedule = SCHEDULES[strategy.schedule_for(topology)](topology, load.reduce_bytes > 0, None)
    return price(schedule.in_parts(strategy.parts), load, links)


def rows_of(
    setting: Setting, slept: Slept | None, case: Case, links: Links, found: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of one contender on one case: both directions, and their sum."""
    base = {
        "nodes": setting.nodes,
        "ranks_per_node": setting.ranks_per_node,
        "rate_mbit": setting.rate_mbit,
        "nic": setting.nic,
        "link_bytes_per_s": links.inter_bytes_per_s,
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "seq": case.seq,
        "causal": case.causal,
        "compute": "real" if slept is None else "slept",
        "contender": found["contender"],
    }
    if "times" not in found:
        return [{**base, **{why: found[why] for why in ("absent", "refused") if why in found}}]
    base |= {"configuration": found["configuration"], "repeats": len(found["times"]["forward"])}
    if found["strategy"] is not None:
        base["parts"] = found["strategy"].parts
    times = {**found["times"], "both": [sum(pair) for pair in zip(*found["times"].values(), strict=True)]}
    nic_bytes = {**found["nic_bytes"], "both": sum(found["nic_bytes"].values())}
    prices: dict[str, Price] = {}
    if slept is not None and found["strategy"] is not None:
        prices = {d: model(case, found["strategy"], d, slept, links) for d in DIRECTIONS}
    rows = []
    for direction, each in times.items():
        row = {**base, "direction": direction, "nic_bytes": nic_bytes[direction]}
        row |= {"time_s": median(each), "time_s_min": min(each), "time_s_max": max(each)}
        of = [prices[d] for d in (DIRECTIONS if direction == "both" else (direction,)) if d in prices]
        if of:
            row |= {"model_s": sum(p.time_s for p in of), "bound_s": sum(p.bound_s for p in of)}
        rows.append(row)
    return rows
