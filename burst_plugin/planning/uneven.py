"""What nodes and ranks that are unlike cost, against a cluster on which all are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.choice import strategy_in_words
from burst_plugin.planning.links import Links
from burst_plugin.planning.planner import Plan, plans
from burst_plugin.topology import Topology

__all__ = ["uneven_in_words"]

_MOST_NAMED = 4


def uneven_in_words(
    best_first: Sequence[Plan], topology: Topology, shapes: Shapes, visit_s: tuple[float, float], links: Links
) -> str:
    """Return in a sentence what uneven `links` cost against even ones, each with the plan that suits them.

    `best_first` are all plans on these links, see `planner.plans`; `shapes` and `visit_s` are those of its arguments.
    """
    best = best_first[0]
    even = plans(topology, shapes, visit_s, links.even, fixed={"mesh_degree": best.strategy.mesh_degree})[0]
    usual = next(plan for plan in best_first if _is_like(plan, even))
    saved = usual.step_s / best.step_s - 1
    cost = best.step_s / even.step_s - 1
    slower = f"{_percent(cost)} slower than" if cost >= 0.0005 else "no slower than"
    return (
        f"Uneven: {slower} if all were alike, {_ms(best.step_s)} ms for both passes instead of {_ms(even.step_s)}; "
        f"{_named(links)}. What suits an even cluster, {strategy_in_words(even.strategy)}, "
        + ("suits this one too." if saved < 0.005 else f"takes {_ms(usual.step_s)} ms here, {_percent(saved)} more.")
    )


def _is_like(plan: Plan, other: Plan) -> bool:
    """Return whether plans differ in no more than their moving sides, of which each has the better ones."""
    return all(
        getattr(plan.strategy, name) == getattr(other.strategy, name)
        for name in ("schedule", "ulysses_degree", "parts")
    )


def _named(links: Links) -> str:
    """Return the nodes and ranks that differ, in words."""

    def several(words: Iterator[str], count: int, what: str) -> list[str]:
        named = [word for word, _ in zip(words, range(_MOST_NAMED), strict=False)]
        return [*named, f"{count - len(named)} more {what}s"] if count > len(named) else named

    rates, speeds = links.node_bytes_per_s, links.rank_speed
    nodes = (f"node {node} has NICs of {rate / 1e9:.4g} GB/s" for node, rate in sorted(rates.items()))
    ranks = (f"rank {rank} has {speed:.0%} of the speed" for rank, speed in sorted(speeds.items()))
    return ", ".join([*several(nodes, len(rates), "node"), *several(ranks, len(speeds), "rank")])


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"
