"""Which of its three plans, each with options of its own, `burst plan` is asked for; options of another one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType, ModuleType

from burst_plugin.cli import plan, plan_measured, plan_model

__all__ = ["mode_of", "wrong_option"]

_MODES: Mapping[str, ModuleType] = MappingProxyType(
    {"burst plan --model": plan_model, "burst plan --profile": plan_measured, "burst plan": plan}
)


def mode_of(words: Sequence[str]) -> ModuleType:
    """Return the plan that is asked for: of a model, on a measured cluster, or on one that is described."""
    names = set(_option_names(words))
    return plan_model if "--model" in names else plan_measured if "--profile" in names else plan


def wrong_option(words: Sequence[str]) -> str | None:
    """Return what is wrong with an option that the plan asked for does not have; None if it has all of them."""
    asked = mode_of(words)
    valid = {name: _options(mode) for name, mode in _MODES.items()}
    title = next(name for name, mode in _MODES.items() if mode is asked)
    for option in _option_names(words):
        if option in valid[title]:
            continue
        others = [f"`{name}`" for name, options in valid.items() if option in options]
        if {"--model", "--profile"} <= {option, *_option_names(words)}:
            return "--model and --profile exclude each other: a plan is for a model, or on a measured cluster"
        if others:
            instead = _INSTEAD.get((title, option), "")
            return f"{option} is an option of {' and '.join(others)}, not of `{title}`{instead}"
        close = get_close_matches(option, sorted(set().union(*valid.values())), 1, 0.7)
        return f"{option} is not an option{f' (did you mean {close[0]}?)' if close else ''}; see `{title} ... --help`"
    return None


_INSTEAD = {
    ("burst plan --model", "--nodes"): ": give --gpus, those of all nodes, and --gpus-per-node",
    ("burst plan --model", "--ranks-per-node"): ": give --gpus-per-node",
    ("burst plan --model", "--heads"): ": the model has its own",
    ("burst plan --model", "--head-dim"): ": the model has its own",
    ("burst plan", "--gpus"): ": add --model, or give --nodes and --ranks-per-node",
    ("burst plan", "--gpus-per-node"): ": add --model, or give --ranks-per-node",
}


def _option_names(words: Sequence[str]) -> Iterator[str]:
    """Yield the long options among the words of a command line, without their values."""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            yield word.split("=")[0]


def _options(mode: ModuleType) -> set[str]:
    parser = argparse.ArgumentParser(add_help=True)
    mode.add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}
