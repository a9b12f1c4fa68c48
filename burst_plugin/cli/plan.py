"""`burst plan`: the schedule, exchange of heads, parts and moving sides that suit a cluster."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch

from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.cluster import Links
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
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology

__all__ = ["add_arguments", "add_options", "heads", "lines", "progress_bar", "report", "tokens", "whole"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BAR_WIDTH = 30

# The bounds are far beyond any machine or model, so that a value outside them is a typing error or in a wrong unit.
# Within them all times computed are finite, and every loop ends soon.
_MOST_NODES = 100_000
_MOST_RANKS_PER_NODE = 1_024
_MOST_TOKENS = 10**12
_MOST_HEADS = 100_000
_MOST_HEAD_DIM = 65_536
_RATES = (1e-3, 1e6)
_SUFFIXES = MappingProxyType({"": 1, "k": 2**10, "m": 2**20, "g": 2**30})

_DESCRIPTION = """\
Estimate what one attention layer takes, forward and backward, with each
schedule on a cluster that you describe, and print the Strategy to use. Nothing
is run and no GPU is needed. The estimate leaves out latency and kernel launches.
"""
_EXAMPLE = """\
example: 2 nodes of 8 GPUs, NVLink of 400 GB/s, and a NIC of 40 GB/s for each GPU
  burst plan --nodes 2 --ranks-per-node 8 --seq 131072 --heads 32/8 \\
    --tflops 500 --intra-gb-s 400 --inter-gb-s 40

for a whole model (its options: burst plan --model x --help):
  burst plan --model llama3_8b --seq 1m --gpus 8 --gpu-gib 80

on links and kernels that burst check has measured (burst plan --profile x --help):
  burst plan --profile burst-profile.json --seq 1000000
"""
_LEGEND = """\
over the bound: the time of both passes over {bound_ms} ms, the same for all rows. No plan is faster than that: every
  rank has its share of the computing, each block has to be sent once to every other node, and once to every rank.
  The bound is the longest of the three, for the exchange of heads and the moving side for which it is shortest.
ulysses: ranks that exchange heads before and after the ring, 1 for none. parts, moves: forward and backward.
Rows: without an exchange, each schedule with 1 part and with its best number of parts; and the best plan for each
  number of ranks that exchange heads. The fastest are on top; of plans equally far from the bound, the simplest."""


def whole(unit: str, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers of `unit`, 1 to `most`."""

    def parse(text: str) -> int:
        if not _is_whole(text, most):
            raise argparse.ArgumentTypeError(f"got {_short(text)}, expected a whole number of {unit}, 1 to {most:,}")
        return int(text)

    return parse


def tokens(text: str) -> int:
    """Parse a number of tokens, such as 131072, 128k or 1.5m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", text.strip().lower().replace(",", ""), re.ASCII)
    value = float(match[1]) * _SUFFIXES[match[2]] if match else 0.0
    if not 1 <= value <= _MOST_TOKENS or value % 1:
        raise argparse.ArgumentTypeError(
            f"got {_short(text)}, expected a number of tokens such as 131072, 128k (131,072) or 1m (1,048,576), "
            f"1 to {_MOST_TOKENS:,}"
        )
    return int(value)


def _rate(unit: str) -> Callable[[str], float]:
    """Return a parser of finite numbers of `unit` within `_RATES`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        least, most = _RATES
        if not least <= value <= most:  # nan is not, either
            raise argparse.ArgumentTypeError(f"got {_short(text)}, expected {unit}, {least:g} to {most:,.0f}")
        return value

    return parse


def heads(text: str) -> tuple[int, int]:
    """Parse numbers of query heads and key/value heads, such as 32/8."""
    numbers = text.split("/")
    if len(numbers) != 2 or not all(_is_whole(each, _MOST_HEADS) for each in numbers):
        raise argparse.ArgumentTypeError(
            f"got {_short(text)}, expected query heads / key/value heads, such as 32/8, each 1 to {_MOST_HEADS:,}"
        )
    q_heads, kv_heads = map(int, numbers)
    if q_heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"got {text}, but {kv_heads} key/value heads do not divide {q_heads} query heads; write for example 32/8"
        )
    return q_heads, kv_heads


def _is_whole(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


# Options by name; those without a default have to be given.
_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "--nodes": {"metavar": "N", "type": whole("nodes", _MOST_NODES), "help": "number of nodes"},
        "--ranks-per-node": {
            "metavar": "N",
            "type": whole("ranks", _MOST_RANKS_PER_NODE),
            "help": "ranks of the context-parallel group on each node",
        },
        "--seq": {
            "metavar": "TOKENS",
            "type": tokens,
            "help": "length of the whole sequence, such as 131072, 128k or 1m",
        },
        "--heads": {
            "metavar": "Q/KV",
            "type": heads,
            "help": "query and key/value heads that a rank has, such as 32/8; with tensor parallelism, "
            "its share of them",
        },
        "--head-dim": {
            "metavar": "DIM",
            "type": whole("elements", _MOST_HEAD_DIM),
            "default": 128,
            "help": "size of a head (default: %(default)s)",
        },
        "--dtype": {
            "choices": _DTYPES,
            "default": "bfloat16",
            "help": "type of q, k and v (default: %(default)s)",
        },
        "--mask": {
            "choices": ("causal", "full"),
            "default": "causal",
            "help": "attention mask (default: %(default)s)",
        },
        "--tflops": {
            "metavar": "TFLOPS",
            "type": _rate("TFLOPS, such as 500"),
            "help": "speed of the attention kernel in a forward pass, such as 500; backward is 2.5 times the work",
        },
        "--intra-gb-s": {
            "metavar": "GB/S",
            "type": _rate("GB/s, such as 400"),
            "help": "rate at which a rank sends inside its node, such as 400, and receives at the same time",
        },
        "--inter-gb-s": {
            "metavar": "GB/S",
            "type": _rate("GB/s, such as 40"),
            "help": "rate at which a NIC sends to other nodes, such as 40, and receives at the same time",
        },
        "--mesh-degree": {
            "metavar": "N",
            "type": whole("ranks", _MOST_NODES * _MOST_RANKS_PER_NODE),
            "default": 1,
            "help": "ranks that gather each other's blocks, in all plans, in place of an exchange of heads "
            "(default: %(default)s, none)",
        },
        "--nic": {
            "choices": ("rank", "node"),
            "default": "rank",
            "help": "whether each rank has a NIC, or all ranks of a node share one (default: %(default)s)",
        },
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, _OPTIONS)


def add_options(parser: argparse.ArgumentParser, names: Iterable[str], *, may_lack: bool = False) -> None:
    """Add some options of the command; with `may_lack` all of them may be left out, and are None then."""
    for name in names:
        keywords = _OPTIONS[name]
        if may_lack:
            text = keywords["help"].split(" (default")[0]
            parser.add_argument(name, **{**keywords, "default": None, "help": f"{text} (default: the profile's)"})
        else:
            parser.add_argument(name, required="default" not in keywords, **keywords)


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield what the command prints. Raise ValueError for a sequence shorter than the number of ranks."""
    topology = Topology(options.nodes, options.ranks_per_node)
    if options.seq < topology.ranks:
        raise ValueError(
            f"--seq {options.seq} is fewer tokens than the {topology.ranks} ranks of --nodes {options.nodes} "
            f"--ranks-per-node {options.ranks_per_node}, some of which would have none; use a longer sequence, or "
            "fewer ranks"
        )
    (q_heads, kv_heads), dim = options.heads, options.head_dim
    local = -(-options.seq // topology.ranks)
    shapes = Shapes(1, local, local, q_heads, kv_heads, dim, dim, _DTYPES[options.dtype])
    links = Links(options.intra_gb_s * 1e9, options.inter_gb_s * 1e9, options.nic)
    visit_s = work_seconds(shapes, options.tflops * 1e12, options.mask == "causal")
    yield (
        f"{topology}, {'up to ' if options.seq % topology.ranks else ''}{local} tokens per rank, "
        f"{q_heads}/{kv_heads} heads of {dim}, {options.dtype}, {options.mask}"
    )
    yield from report(topology, shapes, visit_s, links, options.mesh_degree)


def report(
    topology: Topology, shapes: Shapes, visit_s: tuple[float, float], links: Links, mesh_degree: int = 1
) -> Iterator[str]:
    """Yield the table of plans, the best of them, and what the columns mean. See `planner.plans`."""
    progress, fixed = progress_bar if sys.stderr.isatty() else None, {"mesh_degree": mesh_degree}
    best_first = plans(topology, shapes, visit_s, links, progress, fixed)
    bound_s = least_seconds(topology, shapes, visit_s, links, mesh_degree)
    yield from _rows(best_first, bound_s)
    for name in left_out(topology):
        yield (
            f"{name:<16} is left out without an exchange: it would take minutes to simulate the "
            f"{topology.ranks_per_node} ranks of a node one by one, and at most {MOST_SIMULATED} are"
        )
    yield ""
    yield _advice(best_first[0], buffer_bytes(best_first[0], topology, shapes))
    yield ""
    yield _LEGEND.format(bound_ms=_ms(bound_s))


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
    options = {name: getattr(best.strategy, name) for name in ("schedule", "parts")}
    for each in fields(Strategy):
        value = getattr(best.strategy, each.name)
        if value != each.default and each.name != "ranks_per_node":  # which the cluster says by itself
            options.setdefault(each.name, value)
    return (
        f"Best: Strategy({', '.join(f'{name}={value!r}' for name, value in options.items())}); {reason(best)}. "
        f"Its communication buffers take about {nbytes / 2**30:.2f} GiB per rank, shared by all layers."
    )


def progress_bar(done: int, total: int) -> None:
    """Draw a progress bar on standard error, and erase it when all is done."""
    filled = _BAR_WIDTH * done // total
    bar = f"\rpricing [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {done}/{total}"
    print(bar if done < total else f"\r{' ' * (len(bar) - 1)}\r", end="", file=sys.stderr, flush=True)
