"""The tables and grids of docs/systems.md: what is counted for every preset, as the planner counts it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.buffer_count import most_held
from burst_plugin.planning.exchange import exchange_buffer_bytes
from burst_plugin.planning.links import Links
from burst_plugin.planning.planner import pass_price
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.strategy import Strategy
from burst_plugin.strategy.presets import PRESETS
from burst_plugin.topology import Link, Topology
from burst_plugin.types import DIRECTIONS, Direction

__all__ = ["SHAPES", "TOPOLOGY", "page", "sent_bytes"]

TOPOLOGY = Topology(nodes=2, ranks_per_node=4)
SHAPES = tuple(Shapes(1, 8192, 8192, 32, kv_heads, 128, 128, torch.bfloat16) for kv_heads in (32, 8))
_ONE_BYTE_PER_S = Links(1.0, 1.0)


def sent_bytes(strategy: Strategy, direction: Direction, topology: Topology, shapes: Shapes) -> dict[Link, int]:
    """Return by link the most bytes that any rank sends in a pass in which every rank needs every block.

    shapes: those of a rank, all of which hold equally many tokens. Raises ValueError as `Strategy.on`.
    """
    price = pass_price(strategy.on(topology), direction, topology, shapes, 0.0, _ONE_BYTE_PER_S)
    return {link: round(price.link_s[link]) for link in Link}


def page() -> str:
    """Return what docs/systems.md has between its markers, in Markdown."""
    sections = {
        "What they are": [_systems(), _uses()],
        "What they send and hold": map(_bytes, SHAPES),
        "Grids": [_grids()],
    }
    return "\n\n".join(
        f"## {title}\n\n" + "\n\n".join("\n".join(lines) for lines in blocks) for title, blocks in sections.items()
    )


def _systems() -> Iterator[str]:
    """Yield the table of systems and their papers."""
    yield _row("preset", "system", "what it is here", "not as in the paper")
    yield _row(*["---"] * 4)
    for name, preset in PRESETS.items():
        paper = f"{preset.title}, [{preset.arxiv}](https://arxiv.org/abs/{preset.arxiv})"
        yield _row(f"`{name}`", paper, preset.what, preset.differs or "–")


def _uses() -> Iterator[str]:
    """Yield the table of what presets set, what they cannot do, and what they are for."""
    names = list(dict.fromkeys(option for preset in PRESETS.values() for option in preset.options))
    yield _row("preset", *(f"`{option}`" for option in names), "limits", "when to choose it")
    yield _row(*["---"] * (len(names) + 3))
    for name, preset in PRESETS.items():
        values = (f"`{preset.options[option]}`" if option in preset.options else "" for option in names)
        yield _row(f"`{name}`", *values, preset.limits, preset.choose)


def _bytes(shapes: Shapes) -> Iterator[str]:
    """Yield the table of bytes and buffers."""
    yield (
        f"{shapes.q_heads} query and {shapes.kv_heads} key/value heads of {shapes.qk_dim}, bf16, {shapes.q_len:,} "
        f"tokens per rank, {TOPOLOGY}, no mask:\n"
    )
    columns = [f"{direction}, {link.value}" for direction in DIRECTIONS for link in Link]
    yield _row("preset", *columns, "buffers forward", "buffers backward", "exchange")
    yield _row("---", *["---:"] * 7)
    for name in PRESETS:
        strategy = Strategy.preset(name).on(TOPOLOGY)
        sent = (sent_bytes(strategy, direction, TOPOLOGY, shapes) for direction in DIRECTIONS)
        counts = [f"{nbytes / 2**20:.1f}" for by_link in sent for nbytes in by_link.values()]
        exchange = f"{2 - 2 / strategy.degree:g}" if strategy.degree > 1 else "–"
        if strategy.mesh_degree > 1:
            moving = [choose_moving_side(strategy, direction, shapes) for direction in DIRECTIONS]
            own = shapes.dtype.itemsize * shapes.q_len * shapes.qk_dim * (shapes.q_heads + 2 * shapes.kv_heads)
            exchange = f"{exchange_buffer_bytes(shapes, strategy, moving) / own:.2g}"
        yield _row(f"`{name}`", *counts, *(_buffers(strategy, each) for each in DIRECTIONS), exchange)


def _buffers(strategy: Strategy, direction: Direction) -> str:
    """Return how many buffers a rank needs for operands and for partial results of blocks."""
    held = most_held(_schedule(strategy, direction == "backward" or strategy.forward == "q"))
    return f"{held.operands} + {held.results}" if held.results else str(held.operands)


def _schedule(strategy: Strategy, reduces: bool) -> Schedule:
    groups = TOPOLOGY.of_ulysses_groups(strategy.group_size)
    return SCHEDULES[strategy.schedule_for(groups)](groups, reduces)


def _grids() -> Iterator[str]:
    """Yield each grid once, with the presets that have it."""
    names = defaultdict[str, list[str]](list)
    for name in PRESETS:
        names[_schedule(Strategy.preset(name).on(TOPOLOGY), True).format()].append(f"`{name}`")
    yield "\n\n".join(f"{', '.join(of_grid)}:\n\n```\n{grid}\n```" for grid, of_grid in names.items())


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
