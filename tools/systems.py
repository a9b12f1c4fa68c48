"""The tables and grids of docs/systems.md: what is counted for every preset, as the planner counts it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from burst_plugin.compute.shapes import Shapes, hop_bytes_by_traffic
from burst_plugin.planning.buffer_count import most_held
from burst_plugin.planning.price import exchange_buffer_bytes, exchanged_bytes, shapes_in_ring
from burst_plugin.ring.choices import moving_sides
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.ring.systems.both_sides import half_of_visits
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Full
from burst_plugin.strategy import Strategy
from burst_plugin.strategy.presets import PRESETS
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import DIRECTIONS, Direction, Side

TOPOLOGY = Topology(nodes=2, ranks_per_node=4)
SHAPES = tuple(Shapes(1, 8192, 8192, 32, kv_heads, 128, 128, torch.bfloat16) for kv_heads in (32, 8))
_IN_WORDS: dict[Side, str] = {"q": "queries", "kv": "keys and values"}


class _Half(NamedTuple):
    """The visits of a pass in which one side moves: all of them, unless both do, in different visits."""

    moving: Side
    schedule: Schedule


def sent_bytes(
    strategy: Strategy, direction: Direction, topology: Topology, shapes: Shapes, label_bytes: int = 0
) -> list[Counter[Link]]:
    """Return by rank of the ring, and link, the bytes that it sends in a pass in which every rank needs every block.

    Counted in the schedules that are run. shapes: those of a rank, all of which hold equally many tokens.
    label_bytes: what every message has besides, as on CPUs. Raises ValueError as `Strategy.on`.
    """
    strategy = strategy.on(topology)
    ring, halves = shapes_in_ring(shapes, strategy.degree), _halves(strategy, direction, topology, shapes)
    exchanged = exchanged_bytes(shapes, strategy, direction, halves[0].moving)
    first, *others = strategy.groups(topology).members(0)
    to_others = dict.fromkeys(Link, 0)
    for other in others:
        to_others[topology.link(first, other)] += exchanged + 2 * label_bytes
    sent = [Counter(to_others) for _ in range(halves[0].schedule.ranks)]
    for moving, schedule in halves:
        of_block = dict(zip(Traffic, hop_bytes_by_traffic(ring, direction, moving), strict=True))
        for t in schedule.transfers:
            sent[t.src][t.link] += of_block[t.traffic] // schedule.parts + label_bytes
    return sent


def _halves(strategy: Strategy, direction: Direction, topology: Topology, shapes: Shapes) -> list[_Half]:
    """Return the halves of a pass with no mask; the one if one side moves."""
    table, ring = RouteTable(topology, strategy), shapes_in_ring(shapes, strategy.degree)
    tokens, parts = Tokens(topology.ranks * shapes.q_len), strategy.parts_of(direction)
    attending, sides = Attending(tokens, tokens, Full()), moving_sides(strategy, ring, table.ring_ranks)[direction]
    visits = half_of_visits if len(sides) > 1 else None

    def of(side: Side) -> Schedule:
        return table.schedule(attending, side, bool(ring.side(direction, side)[1]), parts, visits=visits)

    return [_Half(side, of(side)) for side in sides]


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
        passes = [_halves(strategy, direction, TOPOLOGY, shapes) for direction in DIRECTIONS]
        sent = (sent_bytes(strategy, direction, TOPOLOGY, shapes) for direction in DIRECTIONS)
        counts = [f"{max(each[link] for each in by_rank) / 2**20:.1f}" for by_rank in sent for link in Link]
        exchange = f"{2 - 2 / strategy.degree:g}" if strategy.degree > 1 else "–"
        if strategy.mesh_degree > 1:
            moving = [halves[0].moving for halves in passes]
            own = shapes.dtype.itemsize * shapes.q_len * shapes.qk_dim * (shapes.q_heads + 2 * shapes.kv_heads)
            exchange = f"{exchange_buffer_bytes(shapes, strategy, moving) / own:.2g}"
        yield _row(f"`{name}`", *counts, *("; ".join(map(_buffers, halves)) for halves in passes), exchange)


def _buffers(half: _Half) -> str:
    """Return how many buffers a rank needs for operands and for partial results of blocks."""
    held = most_held(half.schedule)
    operands, results = (f"{count / half.schedule.parts:g}" for count in held)
    return f"{operands} + {results}" if held.results else operands


def _grids() -> Iterator[str]:
    """Yield each grid once, with the presets that have it."""
    names = defaultdict[str, list[str]](list)
    for name in PRESETS:
        halves = _halves(Strategy.preset(name).on(TOPOLOGY), "backward", TOPOLOGY, SHAPES[0])
        for half in halves:
            which = f", where {_IN_WORDS[half.moving]} move" if len(halves) > 1 else ""
            names[half.schedule.format()].append(f"`{name}`{which}")
    yield "\n\n".join(f"{', '.join(of_grid)}:\n\n```\n{grid}\n```" for grid, of_grid in names.items())


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
