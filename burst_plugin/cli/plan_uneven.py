"""`burst plan` where nodes or ranks are unlike: a node with slower NICs, a rank that computes more slowly."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from burst_plugin.planning.links import Links

__all__ = ["add_uneven_options", "uneven_links"]

_NODE, _RANK = "--node-gb-s", "--slow-rank"
_GB_S = 1e9


def add_uneven_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what differs of single nodes and ranks; nodes and ranks have numbers from 0 on."""
    for name, parse, metavar, text in (
        (_NODE, _numbered("node", "GB/s", (1e-3, 1e6)), "NODE=GB/S", "rate of a NIC of single nodes, such as 3=3.1"),
        (
            _RANK,
            _numbered("rank", "its share of the usual speed", (0.01, 1.0)),
            "RANK=SPEED",
            "speed of single ranks, such as 5=0.8 for one that does 0.8 of the work of others in the same time",
        ),
    ):
        parser.add_argument(name, metavar=metavar, type=parse, nargs="+", action="extend", help=text)


def uneven_links(links: Links, options: argparse.Namespace) -> Links:
    """Return the links with what the options say of single nodes and ranks. Raise ValueError for one named twice."""
    rates = _by_number(_NODE, options.node_gb_s or ())
    speeds = _by_number(_RANK, options.slow_rank or ())
    return replace(
        links,
        node_bytes_per_s={**links.node_bytes_per_s, **{node: rate * _GB_S for node, rate in rates.items()}},
        rank_speed={**links.rank_speed, **speeds},
    )


def _by_number(option: str, pairs: Sequence[tuple[int, float]]) -> Mapping[int, float]:
    found = dict(pairs)
    if len(found) < len(pairs):
        numbers = [number for number, _ in pairs]
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(f"{option} names {twice} more than once; give each number one value")
    return found


def _numbered(what: str, unit: str, bounds: tuple[float, float]) -> Callable[[str], tuple[int, float]]:
    """Return a parser of a number and its value, such as 3=3.1."""
    least, most = bounds

    def parse(text: str) -> tuple[int, float]:
        number, _, value_text = text.partition("=")
        try:
            value = float(value_text)
        except ValueError:
            value = math.nan
        if not (number.isascii() and number.isdigit() and len(number) <= 6) or not least <= value <= most:
            got = repr(text if len(text) <= 40 else f"{text[:40]}...")
            raise argparse.ArgumentTypeError(
                f"got {got}, expected a {what}'s number, = and {unit}, {least:g} to {most:,.0f}"
            )
        return int(number), value

    return parse
