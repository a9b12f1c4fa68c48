"""Options of a run, one by one: their descriptions, and checks that turn numbers of any library into Python's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from typing import Any

from burst_plugin.checks import as_number, as_positive, check_one_of, shown, whole_number
from burst_plugin.kernels import FEATURES
from burst_plugin.types import BOTH, DIRECTIONS

AUTO = "auto"
OF_NODE, ALL_RANKS = "node", "all"  # values of `ulysses_degree` besides numbers
PLACEMENTS = ("head_first", "context_first")  # of LoongTrain, arXiv 2406.18485
_KERNEL = ("name", "features", "refuse", "forward", "backward")  # members of `Kernel`
_KEPT = {"none": 0.0, "all": 1.0}
_COUNTS = {  # by option: what it counts, and what happens without it
    "mlp_chunk": ("tokens", "all at once"),
    "head_chunk": ("query heads", "all at once"),
    "loss_chunk": ("tokens", "whole logits"),
    "max_ctas": ("thread blocks, a power of two", "NCCL's own choice"),
}


def about(
    text: str, choices: Collection[str] = (), *, words: Collection[str] = (), compared: bool = True
) -> dict[str, Any]:
    """Return the metadata of a field, which flags, keys and docs/options.md are made from.

    text: what the option does, in Markdown, with links relative to docs/. choices: all valid names; () if values are
    not names. words: valid words besides numbers. compared: whether all ranks must have one value.
    """
    return {"help": text, "choices": tuple(choices), "words": tuple(words), "compared": compared}


def validated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are numbers or switches, as they are kept. Raise ValueError for invalid values.

    options: all fields of a `Strategy`, by name.
    """
    for name in ("deterministic", "offload", "abort"):
        if not isinstance(options[name], bool):
            raise ValueError(f"{name}={options[name]!r} is not valid; use True or False")
    late_after = options["late_after"]
    if (as_number(late_after) is None and late_after != math.inf) or not late_after > 0:
        raise ValueError(
            f"late_after={shown(late_after)} is not valid; use a positive number of seconds, or math.inf for no such "
            "line"
        )
    if math.isnan(kept_share(options["keep_attention"])):
        raise ValueError(
            f"keep_attention={shown(options['keep_attention'])} is not valid; use 'none', 'all', or a share of the "
            "sequence from 0 to 1, such as 0.5"
        )
    valid_options: dict[str, Any] = {
        "parts": _parts(options["parts"]),
        "ulysses_degree": _number_or_word("ulysses_degree", options, OF_NODE, ALL_RANKS),
        "ranks_per_node": _number_or_word("ranks_per_node", options, AUTO),
        "mesh_degree": whole_number("mesh_degree={}", options["mesh_degree"], "use a positive number", 1),
        **_counts(options),
    }
    if valid_options["mesh_degree"] > 1:
        _check_mesh({**options, **valid_options})
    return valid_options


def check_kernel(kernel: object) -> None:
    """Raise ValueError for a kernel that is a class, lacks a member of `Kernel`, or has unknown features."""
    if isinstance(kernel, str):
        return
    if isinstance(kernel, type):
        name = kernel.__name__
        raise ValueError(f"kernel={name} is a class; pass an object of it, {name}(), or one of the names")
    missing = [member for member in _KERNEL if not hasattr(kernel, member)]
    if missing and len(missing) < len(_KERNEL):
        raise ValueError(
            f"kernel={shown(kernel)} lacks {', '.join(missing)}, which burst_plugin.kernels.Kernel names"
        )
    features: object = getattr(kernel, "features", frozenset())
    if not isinstance(features, Set):
        raise ValueError(f"kernel.features={shown(features)} is not valid; use a frozenset of names")
    for feature in features:
        check_one_of("kernel.features", feature, FEATURES)


def check_schedule(schedule: object) -> None:
    """Raise ValueError for a schedule that is a function."""
    if callable(schedule):
        name = getattr(schedule, "__name__", type(schedule).__name__)
        raise ValueError(
            f"schedule={name} is a function; list it in EVERY_SCHEDULE of burst_plugin/schedule/rings.py, and pass "
            f"schedule={name!r}"
        )


def kept_share(kept: float | str) -> float:
    """Return the share of the sequence that `keep_attention` asks for; nan for an invalid value."""
    share = _KEPT.get(kept) if isinstance(kept, str) else as_number(kept)
    return share if share is not None and 0.0 <= share <= 1.0 else math.nan


def _parts(value: Any) -> int | tuple[int, ...]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    parts = tuple(filter(None, map(as_positive, pair)))
    if not len(parts) == len(pair) == 2:
        raise ValueError(f"parts={shown(value)} is not valid; use a positive number, or two: forward and backward")
    return parts[0] if parts[0] == parts[1] else parts


def _check_mesh(options: Mapping[str, Any]) -> None:
    """Raise ValueError for what cannot be combined with a mesh."""
    mesh = f"mesh_degree={options['mesh_degree']}"
    if options["ulysses_degree"] != 1:
        raise ValueError(
            f"ulysses_degree={options['ulysses_degree']} and {mesh} cannot be combined: groups exchange heads or "
            "gather blocks; leave one out"
        )
    if options["ulysses_placement"] != PLACEMENTS[0]:
        raise ValueError(
            f"ulysses_placement={options['ulysses_placement']!r} and {mesh} cannot be combined: no heads are "
            "exchanged; leave one out"
        )
    for direction in DIRECTIONS:
        if options[direction] == BOTH:
            raise ValueError(
                f"{direction}='both' and {mesh} cannot be combined: groups gather blocks of a side that stays; "
                f"use {direction}='q', 'kv' or 'auto', or leave mesh_degree out"
            )


def _number_or_word(name: str, options: Mapping[str, Any], *words: str) -> int | str:
    value = options[name]
    number = as_positive(value)
    if number is not None:
        return number
    if not isinstance(value, str) or value not in words:
        raise ValueError(
            f"{name}={shown(value)} is not valid; use a positive number or {' or '.join(map(repr, words))}"
        )
    return value


def _counts(options: Mapping[str, Any]) -> dict[str, int]:
    counts = {}
    for name, (unit, without) in _COUNTS.items():
        expected = f"use a number of {unit}, or 0 for {without}"
        counts[name] = whole_number(f"{name}={{}}", options[name], expected)
    if counts["max_ctas"] & (counts["max_ctas"] - 1):
        raise ValueError(f"max_ctas={counts['max_ctas']} is not valid; {expected}")
    return counts
