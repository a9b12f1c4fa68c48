"""The section "tuned": the strategy that is recommended for a model, by measured links and a measured kernel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from burst_plugin.check.findings import NOT_SHOWN, OK, RECOMMENDATION, Finding
from burst_plugin.check.links import node_rates
from burst_plugin.check.performance import links_of, rates_of
from burst_plugin.check.recurrent_rates import recurrent_rates_of
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import World
from burst_plugin.planning.measured import choose, options_of
from burst_plugin.profiling.cluster_profile import ClusterProfile, device_name
from burst_plugin.topology import Link

_PRICING_S = 600.0  # that pricing all plans may take


def recommend_strategy(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield a finding with the strategy that suits the model on this cluster, equal on all ranks; collective.

    The first rank writes the profile, with this strategy, to `settings.profile` unless that is "". With one rank
    nothing is recommended or written.
    """
    start = time.perf_counter()
    profile = measured_profile(world, settings)
    if world.size == 1:
        yield Finding(
            RECOMMENDATION, NOT_SHOWN, "strategy", "there is one rank, and nothing to choose; start 2 or more"
        )
        return
    chosen = None
    if world.rank == 0:
        choice = choose(profile, profile.model, profile.topology)
        profile = replace(profile, strategy=options_of(choice.strategy), why=choice.why, runner_up=choice.runner_up)
        if settings.profile:
            profile.save(settings.profile)
        chosen = {"text": _text(profile, settings.profile), "figures": profile.as_dict()}
    chosen = world.exchange("plans priced", chosen, _PRICING_S)[0]
    yield Finding(RECOMMENDATION, OK, "strategy", chosen["text"], chosen["figures"], time.perf_counter() - start)


def _text(profile: ClusterProfile, path: str) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in profile.strategy.items())
    model = profile.model
    wrote = f"; wrote {path}" if path else ""
    return (
        f"Strategy({options}) for heads {model.q_heads}/{model.kv_heads} of {model.head_dim} and {model.seq} tokens, "
        f"{profile.dtype}, {model.mask}: {profile.why}; runner-up: {profile.runner_up}{wrote}"
    )


def measured_profile(world: World, settings: Settings) -> ClusterProfile:
    """Return the measured speed of links and kernels as a profile without a strategy; collective."""
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
        node_rates=() if inter is None else node_rates(topology, inter.edges),
        rank_rates=rates.by_rank if world.device.type == "cuda" else (),  # ranks on CPUs compete for processors
        recurrent={rate.kind: rate.flops_per_s for rate in recurrent_rates_of(world, settings)},
    )
