"""The section "tuned": the strategy that suits a model on the links and with the kernel that were measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from burst_plugin.check.fast import links_of, rates_of
from burst_plugin.check.findings import NOT_SHOWN, OK, Finding, shown_time
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import World
from burst_plugin.planning.measured import measured_links, measured_visit_seconds, model_shapes
from burst_plugin.planning.planner import Plan, plans, reason
from burst_plugin.profiling.cluster_profile import ClusterProfile, Model, device_name
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link

__all__ = ["choose", "tuned"]

_PRICING_S = 600.0  # that pricing all plans may take


def tuned(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield the strategy that suits the model, and write the profile; the same on every rank; collective."""
    start = time.perf_counter()
    measured = _measured(world, settings)
    if world.size == 1:
        yield Finding("tuned", NOT_SHOWN, "strategy", "there is one rank, and nothing to choose; start 2 or more")
        return
    mine = None
    if world.rank == 0:
        profile = choose(measured)
        if settings.profile:
            profile.save(settings.profile)
        mine = {"text": _text(profile, settings.profile), "figures": profile.as_dict()}
    found: dict[str, Any] = world.exchange("plans priced", mine, _PRICING_S)[0]
    yield Finding("tuned", OK, "strategy", found["text"], found["figures"], time.perf_counter() - start)


def _text(profile: ClusterProfile, path: str) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in profile.strategy.items())
    model = profile.model
    wrote = f"; wrote {path}" if path else ""
    return (
        f"Strategy({options}) for heads {model.q_heads}/{model.kv_heads} of {model.head_dim} and {model.seq} tokens, "
        f"{profile.dtype}, {model.mask}: {profile.why}; runner-up: {profile.runner_up}{wrote}"
    )


def _measured(world: World, settings: Settings) -> ClusterProfile:
    """Return the profile of this cluster, without a strategy yet; collective."""
    topology, links = links_of(world, settings)
    rates = rates_of(world, settings)
    dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    inter = links.get(Link.INTER)
    return ClusterProfile(
        nodes=topology.nodes,
        ranks_per_node=topology.ranks_per_node,
        device=device_name(),
        backend=world.backend,
        intra=links[Link.INTRA].rate if Link.INTRA in links else None,
        inter=None if inter is None else inter.rate,
        nic="node" if inter is not None and inter.is_shared else "rank",
        kernel=rates.kernel,
        dtype=dtype,
        rates=rates.by_rows,
        model=settings.model,
        strategy={},
        why="",
        runner_up="",
    )


def choose(profile: ClusterProfile, model: Model | None = None) -> ClusterProfile:
    """Return the profile with the strategy that suits `model`, by default its own, with the reason and the runner-up.

    Raises ValueError for a sequence with fewer tokens than ranks.
    """
    model = model or profile.model
    topology = profile.topology
    shapes = model_shapes(model, topology, profile.dtype)
    visit_s = measured_visit_seconds(profile, shapes, model.mask == "causal")
    best, *others = plans(topology, shapes, visit_s, measured_links(profile))
    runner_up = f"{_short(others[0])}, {_behind(best, others[0])}" if others else "none"
    why = f"{shown_time(best.step_s)} for both passes of a layer, {reason(best)}"
    return replace(profile, model=model, strategy=_options(best.strategy), why=why, runner_up=runner_up)


def _options(strategy: Strategy) -> dict[str, Any]:
    """Return what a strategy says besides defaults, always with its schedule, as JSON holds it.

    Not how many ranks a node has: a smaller group on the same cluster may have fewer, and its ranks know it.
    """
    default = Strategy()
    names = [each.name for each in fields(Strategy) if each.name != "ranks_per_node"]
    said = {name: getattr(strategy, name) for name in names if getattr(strategy, name) != getattr(default, name)}
    return {"schedule": strategy.schedule, **{k: list(v) if isinstance(v, tuple) else v for k, v in said.items()}}


def _short(plan: Plan) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in _options(plan.strategy).items())
    return f"Strategy({options})"


def _behind(best: Plan, other: Plan) -> str:
    more = other.step_s / best.step_s - 1
    if more < 0.005:  # of plans equally far from the bound the simplest is the first
        return "as fast, and less simple"
    return f"{more:.1%} slower: {reason(other)}"
