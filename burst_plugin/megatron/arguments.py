"""The `--burst-*` flags of Megatron's argument parser, one per option of `Strategy` that Megatron leaves open."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from burst_plugin.kernels import KERNELS
from burst_plugin.schedule import SCHEDULES
from burst_plugin.strategy import AUTO, CHECKS, TRAVELLERS, Strategy

__all__ = ["add_arguments", "flag_problems", "parsed_strategy"]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one group of flags. Raises argparse.ArgumentError if they are there already."""
    default = Strategy()
    group = parser.add_argument_group(
        "burst attention", "used by layers whose --cp-comm-type is burst (burst_plugin)"
    )
    group.add_argument(
        "--burst-backward",
        choices=(AUTO, *TRAVELLERS),
        default=default.backward,
        help="which side travels in the backward pass; auto takes the one with fewer bytes",
    )
    group.add_argument(
        "--burst-schedule",
        choices=(AUTO, *SCHEDULES),
        default=default.schedule,
        help="auto takes two levels where the topology has two",
    )
    group.add_argument(
        "--burst-kernel", choices=(AUTO, *KERNELS), default=default.kernel, help="auto takes the fastest that can"
    )
    group.add_argument(
        "--burst-ranks-per-node",
        type=lambda text: AUTO if text == AUTO else int(text),
        default=default.ranks_per_node,
        help="without --hierarchical-context-parallel-sizes: context-parallel ranks per node; auto asks each rank",
    )
    group.add_argument(
        "--burst-check",
        choices=CHECKS,
        default=default.check,
        help="when ranks compare shapes and options; auto: always on CPUs, else at calls 1, 2, 4, 8, ...",
    )
    return parser


def flag_problems() -> list[str]:
    """What in Megatron's parsed arguments, but not in its TransformerConfig, asks for unsupported attention."""
    if getattr(_parsed_arguments(), "reset_attention_mask", False):
        return ["--reset-attention-mask is not supported: documents would attend to each other; drop it"]
    return []


def _parsed_arguments() -> Any:
    """What Megatron's parser found; None where it did not run."""
    global_vars: Any = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def parsed_strategy() -> Strategy | None:
    """The strategy that Megatron's parsed arguments ask for; None where its parser did not run."""
    args = _parsed_arguments()
    if args is None or not hasattr(args, "burst_backward"):
        return None
    return Strategy(
        backward=args.burst_backward,
        schedule=args.burst_schedule,
        kernel=args.burst_kernel,
        ranks_per_node=args.burst_ranks_per_node,
        check=args.burst_check,
    )
