"""The strategy that suits a model on a measured cluster: plans priced for its shapes, around options that are set."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from burst_plugin.planning.measured import measured_links, measured_visit_seconds, model_shapes
from burst_plugin.planning.planner import Plan, plans, reason
from burst_plugin.profiling.cluster_profile import ClusterProfile, Model
from burst_plugin.strategy import PLANNED, MeasuredStrategy, Strategy
from burst_plugin.topology import Topology

__all__ = ["Choice", "choose", "planned", "strategy_in_words"]

_LOG = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The strategy of the best plan; why, and which plan is next, in words."""

    strategy: Strategy
    why: str
    runner_up: str

    @property
    def options(self) -> dict[str, Any]:
        """Return what the strategy says besides defaults, always with its schedule, as JSON holds it."""
        return _options(self.strategy)

    def __str__(self) -> str:
        return f"{strategy_in_words(self.strategy)}: {self.why}; runner-up: {self.runner_up}"


def planned(strategy: Strategy, topology: Topology, *, logs: bool = False) -> tuple[Strategy, str]:
    """Return the strategy of a ring on `topology`, and what was chosen in words.

    Of a `MeasuredStrategy` the options that are not set are those of the best plan for its model; the same on all
    ranks that have the same profile. Any other strategy is returned unchanged, with no words. `logs`: whether to log
    the choice.

    Raises ValueError for links that were not measured, a sequence shorter than the ring, options that no plan has.
    """
    if not isinstance(strategy, MeasuredStrategy):
        return strategy, ""
    options = {each.name: getattr(strategy, each.name) for each in fields(Strategy)}
    if topology.ranks == 1:
        return Strategy(**options), ""
    model, fixed = _at_once(strategy), {name: options[name] for name in PLANNED if name in strategy.given}
    choice = choose(strategy.measured, model, topology, fixed)
    sizes = f"{model.q_heads}/{model.kv_heads} heads of {model.head_dim} and {model.seq} tokens"
    said = f"planned for {sizes} on {topology}: {choice}"
    if logs:
        _LOG.info("burst attention is %s", said)
    return Strategy(**{**options, **{name: getattr(choice.strategy, name) for name in PLANNED}}), said


def choose(
    profile: ClusterProfile, model: Model, topology: Topology, fixed: Mapping[str, Any] | None = None
) -> Choice:
    """Return the best plan for `model` on `topology`, with what is `fixed`: options of `Strategy` that are set.

    Raises ValueError as `planned`.
    """
    shapes = model_shapes(model, topology, profile.dtype)
    visit_s = measured_visit_seconds(profile, shapes, model.mask == "causal")
    best, *others = plans(topology, shapes, visit_s, measured_links(profile, topology), fixed=fixed)
    # Plans may have other names and be the same: of one ring rank, or one rank per node, schedules do not differ.
    other = next((each for each in others if (each.forward, each.backward) != (best.forward, best.backward)), None)
    runner_up = "none" if other is None else f"{strategy_in_words(other.strategy)}, {_behind(best, other)}"
    return Choice(best.strategy, _in_words(best), runner_up)


def _at_once(strategy: MeasuredStrategy) -> Model:
    """Return the model with the heads that a call of attention has: with a `head_chunk` only so many."""
    model, chunk = strategy.model, strategy.head_chunk
    if not 0 < chunk < model.q_heads:
        return model
    return replace(model, q_heads=chunk, kv_heads=max(1, model.kv_heads * chunk // model.q_heads))


def _options(strategy: Strategy) -> dict[str, Any]:
    """Return what a strategy says besides defaults, always with its schedule, as JSON holds it.

    Not how many ranks a node has: a smaller group on the same cluster may have fewer, and its ranks know it.
    """
    default = Strategy()
    names = [each.name for each in fields(Strategy) if each.name != "ranks_per_node"]
    said = {name: getattr(strategy, name) for name in names if getattr(strategy, name) != getattr(default, name)}
    return {"schedule": strategy.schedule, **{k: list(v) if isinstance(v, tuple) else v for k, v in said.items()}}


def strategy_in_words(strategy: Strategy) -> str:
    """Return a strategy as it is written, with what it says besides defaults and always with its schedule."""
    options = ", ".join(f"{name}={value!r}" for name, value in _options(strategy).items())
    return f"Strategy({options})"


def _in_words(plan: Plan) -> str:
    return f"{1e3 * plan.step_s:.4g} ms for both passes of a layer, {reason(plan)}"


def _behind(best: Plan, other: Plan) -> str:
    more = other.step_s / best.step_s - 1
    if more < 0.005:  # of plans equally far from the bound the simplest is the first
        return f"as fast, and less simple: {_in_words(other)}"
    return f"{more:.1%} slower: {_in_words(other)}"
