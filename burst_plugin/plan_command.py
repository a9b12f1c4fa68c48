"""`burst plan`: which schedule, exchange of heads, parts and traveller suit a cluster, by the planner's prices."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from burst_plugin.planner import Links, Plan, buffer_bytes, plans, visit_seconds
from burst_plugin.shapes import Shapes
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology

__all__ = ["add_arguments", "lines"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True, help="of the context-parallel group")
    parser.add_argument("--seq", type=int, required=True, help="tokens of the whole sequence")
    parser.add_argument("--heads", required=True, metavar="Q/KV", help="query/kv heads of one rank, such as 32/8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--tflops", type=float, required=True, help="that the attention kernel reaches, forward")
    parser.add_argument(
        "--intra-gb-s", type=float, required=True, help="GB/s per direction of a rank inside its node"
    )
    parser.add_argument("--inter-gb-s", type=float, required=True, help="GB/s per direction of a NIC")
    parser.add_argument("--nic", choices=("rank", "node"), default="rank", help="whose a NIC is")


def lines(options: argparse.Namespace) -> Iterator[str]:
    """What the command prints. Raises ValueError for what cannot be."""
    topology = Topology(options.nodes, options.ranks_per_node)
    heads = options.heads.split("/")
    if len(heads) != 2 or not all(n.isdigit() and int(n) > 0 for n in heads) or int(heads[0]) % int(heads[1]):
        raise ValueError(f"--heads {options.heads} is not valid; write query heads / key/value heads, such as 32/8")
    if min(options.seq, options.head_dim, options.tflops) <= 0:
        raise ValueError("--seq, --head-dim and --tflops have to be more than 0")
    local, dim = -(-options.seq // topology.ranks), options.head_dim
    shapes = Shapes(1, local, local, int(heads[0]), int(heads[1]), dim, dim, _DTYPES[options.dtype])
    links = Links(options.intra_gb_s * 1e9, options.inter_gb_s * 1e9, options.nic)
    visit_s = visit_seconds(shapes, options.tflops * 1e12, options.mask == "causal")
    best_first = plans(topology, shapes, visit_s, links)
    yield f"{topology}, {local} tokens per rank, {options.heads} heads of {dim}, {options.dtype}, {options.mask}"
    yield (
        f"{'schedule':<16}{'ulysses':>8}{'parts':>8}{'travels':>11}{'forward ms':>12}{'backward ms':>13}"
        f"{'over the bound':>16}"
    )
    best = {(p.strategy.ulysses_degree, p.strategy.schedule): p for p in reversed(best_first)}
    of_degree = {p.strategy.ulysses_degree: p for p in reversed(best_first)}
    for plan in best_first:
        strategy, bound_s = plan.strategy, plan.forward.bound_s + plan.backward.bound_s
        degree = strategy.ulysses_degree
        if degree == 1 and strategy.parts != 1 and plan is not best[1, strategy.schedule]:
            continue
        if degree > 1 and plan is not of_degree[degree]:
            continue
        yield (
            f"{strategy.schedule:<16}{degree:>8}{strategy.parts!s:>8}{', '.join(plan.travellers):>11}"
            f"{1e3 * plan.forward.time_s:>12.2f}{1e3 * plan.backward.time_s:>13.2f}{plan.step_s / bound_s:>15.2f}x"
        )
    yield _advice(best_first[0], buffer_bytes(best_first[0], topology, shapes))


def _advice(best: Plan, nbytes: float) -> str:
    busiest = max((p.link_s[link], link.value) for p in (best.forward, best.backward) for link in Link)
    compute_s = best.forward.compute_s + best.backward.compute_s
    waits = best.step_s > 1.02 * compute_s
    why = f"{busiest[1]}-node links are what ranks wait for" if waits else "all communication is hidden behind work"
    options = {name: getattr(best.strategy, name) for name in ("schedule", "parts")}
    for name in ("forward", "backward", "ulysses_degree"):
        value = getattr(best.strategy, name)
        if value != getattr(Strategy(), name):
            options[name] = value
    return (
        f"Best: Strategy({', '.join(f'{name}={value!r}' for name, value in options.items())}); {why}. "
        f"Its ring's buffers take about {nbytes / 2**30:.2f} GiB of a rank's memory, for all layers together."
    )
