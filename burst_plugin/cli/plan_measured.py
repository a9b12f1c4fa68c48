"""`burst plan --profile`: what suits a cluster that `burst check` has measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from burst_plugin.cli.plan import add_options, report
from burst_plugin.planning.measured import measured_links, measured_work_seconds, model_shapes
from burst_plugin.profiling.cluster_profile import ClusterProfile, LinkRate, Model
from burst_plugin.topology import Topology

__all__ = ["add_arguments", "lines"]

_DESCRIPTION = """\
Estimate what one attention layer takes, forward and backward, with each
schedule, on the links and with the kernel that burst check has measured. The
estimate leaves out kernel launches. With --nodes: on so many such nodes.
"""
_EXAMPLE = """\
example:
  burst check --quick
  burst plan --profile burst-profile.json --heads 64/8 --seq 1000000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--profile", required=True, metavar="FILE", help="that burst check wrote")
    add_options(parser, ("--nodes", "--seq", "--heads", "--head-dim", "--mask"), may_lack=True)


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield what the command prints.

    Raises ValueError for a profile that cannot be read, fewer tokens than ranks, and nodes without measured links.
    """
    profile = ClusterProfile.read(options.profile)
    model = _asked(options, profile.model)
    topology = Topology(options.nodes or profile.nodes, profile.ranks_per_node)
    if topology.nodes > 1 and profile.inter is None:
        raise ValueError(
            f"--nodes {topology.nodes}: the profile {options.profile} is of one node, without links to others; run "
            "burst check on two nodes or more"
        )
    shapes = model_shapes(model, topology, profile.dtype)
    yield (
        f"{topology}, {'up to ' if model.seq % topology.ranks else ''}{shapes.q_len} tokens per rank, "
        f"{model.q_heads}/{model.kv_heads} heads of {model.head_dim}, {profile.dtype}, {model.mask}"
    )
    yield f"measured on {profile.device}: {profile.kernel}, {_shown(profile)}"
    visit_s = measured_work_seconds(profile, shapes, model.mask == "causal")
    yield from report(topology, shapes, visit_s, measured_links(profile))


def _asked(options: argparse.Namespace, model: Model) -> Model:
    """Return the model of the profile with what the options say instead."""
    q_heads, kv_heads = options.heads or (model.q_heads, model.kv_heads)
    given = {name: getattr(options, name) for name in ("head_dim", "seq", "mask")}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(model, q_heads=q_heads, kv_heads=kv_heads, **given)


def _shown(profile: ClusterProfile) -> str:
    """Return the rates of the longest tile and of the links."""
    longest = profile.rates[-1]
    rates = f"{longest.forward_flops_per_s / 1e12:.3g}/{longest.backward_flops_per_s / 1e12:.3g} TFLOP/s"
    of_links = {"inside nodes": profile.intra, f"between nodes, a NIC per {profile.nic}": profile.inter}
    return ", ".join([f"{rates} forward/backward", *(_rate(rate, where) for where, rate in of_links.items() if rate)])


def _rate(rate: LinkRate, where: str) -> str:
    return f"{rate.bytes_per_s / 1e9:.4g} GB/s {where}"
