"""What a profile tells the planner: rates of links and of the kernel; and the strategy that suits the cluster."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.planner import PricedPlan, plans, reason
from burst_plugin.planning.price import work_seconds
from burst_plugin.profiling.cluster_profile import ClusterProfile, KernelRate, Model
from burst_plugin.strategy import PLANNED, MeasuredStrategy, Strategy
from burst_plugin.topology import Topology

_LOG = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A choice among plans: the `strategy` of the best, `why` it is, and the `runner_up`, both as text."""

    strategy: Strategy
    why: str
    runner_up: str

    def __str__(self) -> str:
        return f"{strategy_in_words(self.strategy)}: {self.why}; runner-up: {self.runner_up}"


def planned(strategy: Strategy, topology: Topology, *, logs: bool = False) -> tuple[Strategy, str]:
    """Return the strategy that a ring on `topology` is to use, and text on how it was planned, "" if it was not.

    Options that a `MeasuredStrategy` leaves open come from the best plan for its model, and are equal on all ranks
    with the same profile. Any other strategy is returned unchanged. `logs`: whether to log the text.

    Raises ValueError for links that were not measured, a sequence shorter than the ring, options that no plan has.
    """
    if not isinstance(strategy, MeasuredStrategy):
        return strategy, ""
    options = {field.name: getattr(strategy, field.name) for field in fields(Strategy)}
    if topology.ranks == 1:
        return Strategy(**options), ""
    model, fixed = _at_once(strategy), {name: options[name] for name in PLANNED if name in strategy.given}
    choice = choose(strategy.measured, model, topology, fixed)
    sizes = f"{model.q_heads}/{model.kv_heads} heads of {model.head_dim} and {model.seq} tokens"
    text = f"planned for {sizes} on {topology}: {choice}"
    if logs:
        _LOG.info("burst attention is %s", text)
    return Strategy(**{**options, **{name: getattr(choice.strategy, name) for name in PLANNED}}), text


def choose(
    profile: ClusterProfile, model: Model, topology: Topology, fixed: Mapping[str, Any] | None = None
) -> Choice:
    """Return the best plan for the attention of `model` on `topology`, by the rates in `profile`.

    `fixed` are options of `Strategy`, by name, that the plan has to have; None for none. Raises ValueError for links
    that were not measured, a sequence shorter than the ring, and `fixed` options that no plan has.
    """
    shapes = model_shapes(model, topology, profile.dtype)
    work_s = measured_work_seconds(profile, shapes, model.mask == "causal")
    best, *others = plans(topology, shapes, work_s, measured_links(profile, topology), fixed=fixed)
    # Plans with different names may be the same: with one ring rank, or one rank per node, schedules do not differ.
    other = next((plan for plan in others if (plan.forward, plan.backward) != (best.forward, best.backward)), None)
    runner_up = "none" if other is None else f"{strategy_in_words(other.strategy)}, {_behind(best, other)}"
    return Choice(best.strategy, _in_words(best), runner_up)


def _at_once(strategy: MeasuredStrategy) -> Model:
    """Return the model with the heads of one call of attention: `head_chunk` of them, if that is set."""
    model, chunk = strategy.model, strategy.head_chunk
    if not 0 < chunk < model.q_heads:
        return model
    return replace(model, q_heads=chunk, kv_heads=max(1, model.kv_heads * chunk // model.q_heads))


def options_of(strategy: Strategy) -> dict[str, Any]:
    """Return the options of a strategy that differ from defaults, and its schedule in any case, as JSON holds them.

    `ranks_per_node` is left out: a smaller group on the same cluster may have fewer, and its ranks know how many.
    """
    default = Strategy()
    options: dict[str, Any] = {"schedule": strategy.schedule}
    for field in fields(Strategy):
        value = getattr(strategy, field.name)
        if value != getattr(default, field.name) and field.name != "ranks_per_node":
            options[field.name] = list(value) if isinstance(value, tuple) else value
    return options


def strategy_in_words(strategy: Strategy) -> str:
    """Return a strategy as it is written in Python: its schedule, and options that differ from defaults."""
    options = ", ".join(f"{name}={value!r}" for name, value in options_of(strategy).items())
    return f"Strategy({options})"


def _in_words(plan: PricedPlan) -> str:
    return f"{1e3 * plan.step_s:.4g} ms for both passes of a layer, {reason(plan)}"


def _behind(best: PricedPlan, rival: PricedPlan) -> str:
    more = rival.step_s / best.step_s - 1
    if more < 0.005:  # of plans equally far from the bound, the simplest comes first
        return f"as fast, and less simple: {_in_words(rival)}"
    return f"{more:.1%} slower: {_in_words(rival)}"


def model_shapes(model: Model, topology: Topology, dtype: str) -> Shapes:
    """Return the shapes of one layer's attention on each rank, of one sequence. `dtype` names a type: "bfloat16".

    Raises ValueError for a sequence with fewer tokens than ranks.
    """
    if model.seq < topology.ranks:
        raise ValueError(f"--seq {model.seq} is fewer tokens than the {topology.ranks} ranks; use a longer sequence")
    local, dim = -(-model.seq // topology.ranks), model.head_dim
    return Shapes(1, local, local, model.q_heads, model.kv_heads, dim, dim, getattr(torch, dtype))


def measured_links(profile: ClusterProfile, topology: Topology | None = None) -> Links:
    """Return the rates and latencies that a ring on `topology` has by a profile; by default a ring of all its ranks.

    If the ranks of a node share a NIC, a ring on some of them has their share of its rate, since the others send,
    too. A kind of link that the ring does not have gets the rate of the other kind.

    Raises ValueError if the ring has links, or more ranks on a node, that were not measured.
    """
    ring = topology or profile.topology
    lacks_intra = ring.ranks_per_node > profile.ranks_per_node
    if lacks_intra or (ring.nodes > 1 and profile.inter is None):
        raise ValueError(
            f"the profile is of another cluster: it was measured on {profile.topology}, and this is {ring}; run "
            "burst check again here"
        )
    intra, inter = profile.intra or profile.inter, profile.inter or profile.intra
    if intra is None or inter is None:
        return Links(1e12, 1e12)  # one rank sends nothing
    share = ring.ranks_per_node / profile.ranks_per_node if profile.nic == "node" else 1.0
    rates = intra.bytes_per_s, share * inter.bytes_per_s
    return Links(*rates, profile.nic, intra.latency_s, inter.latency_s)


def measured_work_seconds(profile: ClusterProfile, shapes: Shapes, causal: bool) -> tuple[float, float]:
    """Return the seconds of attention on a whole block, (forward, backward), at the rates that a profile measured.

    shapes: of one rank's block; each pass has the rate of tiles as long as this block.
    causal: whether a causal mask leaves half of the work.
    """
    rate = rate_at(profile.rates, max(1, min(shapes.q_len, shapes.kv_len)))
    forward_s, _ = work_seconds(shapes, rate.forward_flops_per_s, causal)
    _, backward_s = work_seconds(shapes, rate.backward_flops_per_s, causal)
    return forward_s, backward_s


def rate_at(rates: tuple[KernelRate, ...], rows: int) -> KernelRate:
    """Return the kernel's rates on a tile of `rows` queries and keys, from measured rates, smallest tiles first.

    Between two measured sizes they are interpolated by the logarithm of `rows`; beyond the ends the nearest counts.
    """
    if rows <= rates[0].rows:
        return rates[0]
    for below, above in pairwise(rates):
        if rows <= above.rows:
            share = math.log(rows / below.rows) / math.log(above.rows / below.rows)
            forward, backward = (
                getattr(below, name) + share * (getattr(above, name) - getattr(below, name))
                for name in ("forward_flops_per_s", "backward_flops_per_s")
            )
            return KernelRate(rows, forward, backward)
    return rates[-1]
