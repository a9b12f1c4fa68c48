"""`burst plan`: the schedule, exchange of heads, parts and moving sides that suit a cluster.

The cluster is described by options, or it is one that `burst check` has measured (`--profile`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from burst_plugin.cli.values import StatusLine, heads, number, tokens, whole, write_json
from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.measured import measured_links, measured_work_seconds, model_shapes, options_of
from burst_plugin.planning.planner import (
    MOST_SIMULATED,
    PricedPlan,
    buffer_bytes,
    least_seconds,
    left_out,
    plans,
    reason,
)
from burst_plugin.planning.price import work_seconds
from burst_plugin.profiling.cluster_profile import ClusterProfile, Model
from burst_plugin.topology import Topology

_MOST_NODES = 100_000
_MOST_RANKS_PER_NODE = 1_024
_MOST_HEAD_DIM = 65_536

_DESCRIPTION = """\
Estimate what one attention layer takes, forward and backward, with each
schedule on a cluster that you describe, and print the Strategy to use. Nothing
is run and no GPU is needed. The estimate leaves out latency and kernel launches.
"""
_EXAMPLE = """\
example: 2 nodes of 8 GPUs, NVLink of 400 GB/s, and a NIC of 40 GB/s for each GPU
  burst plan --nodes 2 --ranks-per-node 8 --seq 131072 --heads 32/8 \\
    --tflops 500 --intra-gb-s 400 --inter-gb-s 40

for a whole model (burst plan --help):
  burst plan llama3_8b --seq 1m --gpus 8 --gpu-gib 80

on links and kernels that burst check has measured (burst plan --profile x --help):
  burst plan --profile burst-profile.json --seq 1000000
"""
_MEASURED_DESCRIPTION = """\
Estimate what one attention layer takes, forward and backward, with each
schedule, on the links and with the kernel that burst check has measured. The
estimate leaves out kernel launches. With --nodes: on so many such nodes.
"""
_MEASURED_EXAMPLE = """\
example:
  burst check --quick
  burst plan --profile burst-profile.json --heads 64/8 --seq 1000000
"""
_LEGEND = """\
over the bound: the time of both passes over {bound_ms} ms, the same for all rows. No plan is faster than that: every
  rank has its share of the computing, each block has to be sent once to every other node, and once to every rank.
  The bound is the longest of the three, for the exchange of heads and the moving side for which it is shortest.
ulysses: ranks that exchange heads before and after the ring, 1 for none. parts, moves: forward and backward.
Rows: without an exchange, each schedule with 1 part and with its best number of parts; and the best plan for each
  number of ranks that exchange heads. The fastest are on top; of plans equally far from the bound, the simplest."""


def _option(metavar: str, parse: Callable[[str], Any], text: str, **more: Any) -> Mapping[str, Any]:
    return {"metavar": metavar, "type": parse, "help": text, **more}


# Options by name; those without a default have to be given.
_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "--nodes": _option("N", whole("nodes", _MOST_NODES), "number of nodes"),
        "--ranks-per-node": _option(
            "N", whole("ranks", _MOST_RANKS_PER_NODE), "ranks of the context-parallel group on each node"
        ),
        "--seq": _option("TOKENS", tokens, "length of the whole sequence, such as 131072, 128k or 1m"),
        "--heads": _option(
            "Q/KV",
            heads,
            "query and key/value heads that a rank has, such as 32/8; with tensor parallelism, its share of them",
        ),
        "--head-dim": _option(
            "DIM", whole("elements", _MOST_HEAD_DIM), "size of a head (default: %(default)s)", default=128
        ),
        "--dtype": {
            "choices": ("bfloat16", "float16", "float32"),
            "default": "bfloat16",
            "help": "type of q, k and v (default: %(default)s)",
        },
        "--mask": {
            "choices": ("causal", "full"),
            "default": "causal",
            "help": "attention mask (default: %(default)s)",
        },
        "--tflops": _option(
            "TFLOPS",
            number("TFLOPS, such as 500"),
            "speed of the attention kernel in a forward pass, such as 500; backward is 2.5 times the work",
        ),
        "--intra-gb-s": _option(
            "GB/S",
            number("GB/s, such as 400"),
            "rate at which a rank sends inside its node, such as 400, and receives at the same time",
        ),
        "--inter-gb-s": _option(
            "GB/S",
            number("GB/s, such as 40"),
            "rate at which a NIC sends to other nodes, such as 40, and receives at the same time",
        ),
        "--mesh-degree": _option(
            "N",
            whole("ranks", _MOST_NODES * _MOST_RANKS_PER_NODE),
            "ranks that gather each other's blocks, in all plans, in place of an exchange of heads "
            "(default: %(default)s, none)",
            default=1,
        ),
        "--nic": {
            "choices": ("rank", "node"),
            "default": "rank",
            "help": "whether each rank has a NIC, or all ranks of a node share one (default: %(default)s)",
        },
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `burst plan` for a cluster that is described, with neither `--model` nor `--profile`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, keywords in _OPTIONS.items():
        parser.add_argument(name, required="default" not in keywords, **keywords)
    _add_json(parser)


def add_measured_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `burst plan --profile`; values of options that are left out come from the profile."""
    parser.description, parser.epilog = _MEASURED_DESCRIPTION, _MEASURED_EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--profile", required=True, metavar="FILE", help="that burst check wrote")
    for name in ("--nodes", "--seq", "--heads", "--head-dim", "--mask"):
        text = f"{_OPTIONS[name]['help'].split(' (default')[0]} (default: the profile's)"
        parser.add_argument(name, **{**_OPTIONS[name], "default": None, "help": text})
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all plans as JSON there, too")


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that `burst plan` prints for a cluster that is described: a table of plans, and the best one.

    options: the parsed options of `add_arguments`; with `--json`, all plans are written to a file as well. Raises
    ValueError for a sequence with fewer tokens than ranks, and a file that cannot be written.
    """
    topology = Topology(options.nodes, options.ranks_per_node)
    if options.seq < topology.ranks:
        raise ValueError(
            f"--seq {options.seq} is fewer tokens than the {topology.ranks} ranks of --nodes {options.nodes} "
            f"--ranks-per-node {options.ranks_per_node}, some of which would have none; use a longer sequence, or "
            "fewer ranks"
        )
    q_heads, kv_heads = options.heads
    model = Model(q_heads, kv_heads, options.head_dim, options.seq, options.mask)
    shapes = model_shapes(model, topology, options.dtype)
    yield _setting_line(topology, model, shapes.q_len, options.dtype)
    work_s = work_seconds(shapes, options.tflops * 1e12, options.mask == "causal")
    links = Links(options.intra_gb_s * 1e9, options.inter_gb_s * 1e9, options.nic)
    yield from _report(topology, shapes, work_s, links, options.json, options.mesh_degree)


def measured_lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that `burst plan --profile` prints: a table of plans on the measured cluster, and the best one.

    options: the parsed options of `add_measured_arguments`; with `--json`, all plans are written to a file as well.
    Raises ValueError for a profile that cannot be read, fewer tokens than ranks, nodes without measured links, and a
    file that cannot be written.
    """
    profile = ClusterProfile.read(options.profile)
    sizes = {name: getattr(options, name) for name in ("head_dim", "seq", "mask")}
    if options.heads is not None:
        sizes["q_heads"], sizes["kv_heads"] = options.heads
    model = replace(profile.model, **{name: size for name, size in sizes.items() if size is not None})
    topology = Topology(options.nodes or profile.nodes, profile.ranks_per_node)
    if topology.nodes > 1 and profile.inter is None:
        raise ValueError(
            f"--nodes {topology.nodes}: the profile {options.profile} is of one node, without links to others; run "
            "burst check on two nodes or more"
        )
    shapes = model_shapes(model, topology, profile.dtype)
    yield _setting_line(topology, model, shapes.q_len, profile.dtype)
    yield f"measured on {profile.device}: {profile.kernel}, {_measured_rates(profile)}"
    work_s = measured_work_seconds(profile, shapes, model.mask == "causal")
    yield from _report(topology, shapes, work_s, measured_links(profile), options.json)


def _setting_line(topology: Topology, model: Model, local: int, dtype: str) -> str:
    return (
        f"{topology}, {'up to ' if model.seq % topology.ranks else ''}{local} tokens per rank, "
        f"{model.q_heads}/{model.kv_heads} heads of {model.head_dim}, {dtype}, {model.mask}"
    )


def _measured_rates(profile: ClusterProfile) -> str:
    """Return the rates of the longest tile and of the links."""
    longest = profile.rates[-1]
    flops = f"{longest.forward_flops_per_s / 1e12:.3g}/{longest.backward_flops_per_s / 1e12:.3g} TFLOP/s"
    links = {"inside nodes": profile.intra, f"between nodes, a NIC per {profile.nic}": profile.inter}
    rates = [f"{link.bytes_per_s / 1e9:.4g} GB/s {where}" for where, link in links.items() if link is not None]
    return ", ".join([f"{flops} forward/backward", *rates])


def _report(
    topology: Topology,
    shapes: Shapes,
    work_s: tuple[float, float],
    links: Links,
    json: Path | None,
    mesh_degree: int = 1,
) -> Iterator[str]:
    """Yield the table of plans, the best of them, and what the columns mean. See `planner.plans`."""
    fixed = {"mesh_degree": mesh_degree}
    best_first = plans(topology, shapes, work_s, links, StatusLine().progress, fixed)
    bound_s = least_seconds(topology, shapes, work_s, links, mesh_degree)
    if json is not None:
        write_json(json, {"bound_s": bound_s, "plans": [_as_dict(plan) for plan in best_first]})
    yield from _rows(best_first, bound_s)
    for name in left_out(topology):
        yield (
            f"{name:<16} is not priced without an exchange of heads: the {topology.ranks_per_node} ranks of a node "
            f"would have to be simulated one by one, which is done for {MOST_SIMULATED} at most"
        )
    yield ""
    yield _advice(best_first[0], buffer_bytes(best_first[0], topology, shapes))
    yield ""
    yield _LEGEND.format(bound_ms=_ms(bound_s))


def _as_dict(plan: PricedPlan) -> dict[str, object]:
    """Return a plan for a JSON file."""
    return {
        "options": {"schedule": plan.strategy.schedule, **options_of(plan.strategy)},
        "moves": plan.moving_sides,
        "forward_s": plan.forward.time_s,
        "backward_s": plan.backward.time_s,
    }


def _rows(best_first: list[PricedPlan], bound_s: float) -> Iterator[str]:
    yield (
        f"{'schedule':<16}{'ulysses':>8}{'parts':>8}{'moves':>11}{'forward ms':>12}{'backward ms':>13}"
        f"{'over the bound':>16}"
    )
    for plan in _shown(best_first):
        strategy = plan.strategy
        yield (
            f"{strategy.schedule:<16}{strategy.degree:>8}{strategy.parts!s:>8}"
            f"{', '.join(plan.moving_sides):>11}{_ms(plan.forward.time_s):>12}{_ms(plan.backward.time_s):>13}"
            f"{plan.step_s / bound_s:>15.2f}x"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 1e5 else f"{1e3 * seconds:.3g}"


def _shown(best_first: list[PricedPlan]) -> Iterator[PricedPlan]:
    """Yield the plans that get a row; the legend says which they are."""
    best = {(p.strategy.degree, p.strategy.schedule): p for p in reversed(best_first)}
    of_degree = {p.strategy.degree: p for p in reversed(best_first)}
    for plan in best_first:
        strategy = plan.strategy
        if strategy.degree > 1:
            is_shown = plan is of_degree[strategy.degree]
        else:
            is_shown = strategy.parts == 1 or plan is best[1, strategy.schedule]
        if is_shown:
            yield plan


def _advice(best: PricedPlan, nbytes: float) -> str:
    options = {"schedule": best.strategy.schedule, "parts": best.strategy.parts}
    for name, value in options_of(best.strategy).items():
        options.setdefault(name, value)
    return (
        f"Best: Strategy({', '.join(f'{name}={value!r}' for name, value in options.items())}); {reason(best)}. "
        f"Its communication buffers take about {nbytes / 2**30:.2f} GiB per rank, shared by all layers."
    )
