"""The tables of docs/systems.md: what is counted for every preset, as the planner counts it.

python -m tools.systems            # draw the schedules of the presets, as grids of ranks and steps
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch

from burst_plugin.compute.shapes import Shapes, hop_bytes_by_traffic
from burst_plugin.planning.buffer_count import most_held
from burst_plugin.planning.price import exchange_buffer_bytes, exchanged_bytes, shapes_in_ring
from burst_plugin.ring.choices import moving_sides
from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.ring.systems.both_sides import half_of_visits
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Full
from burst_plugin.strategy import Strategy
from burst_plugin.strategy.presets import PRESETS, RING
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import DIRECTIONS, Direction, Side

TOPOLOGY = Topology(nodes=2, ranks_per_node=4)
SHAPES = tuple(Shapes(1, 8192, 8192, 32, kv_heads, 128, 128, torch.bfloat16) for kv_heads in (32, 8))
_Value = TypeVar("_Value")
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
        return table.schedule(PassKey(attending, side, bool(ring.side(direction, side)[1]), parts, visits=visits))

    return [_Half(side, of(side)) for side in sides]


def page() -> str:
    """Return what docs/systems.md has between its markers, in Markdown."""
    sections = {
        "What they are": _systems(),
        "How they differ from the papers": _differences(),
        "What they send and hold": _bytes(),
    }
    return "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items())


def _systems() -> Iterator[str]:
    """Yield the table of systems: paper, description, options beside `RING`'s, limits, and when to choose it."""
    yield _row("preset and paper", "what it is here", "options", "limits", "when to choose it")
    yield _row(*["---"] * 5)
    for name, preset in PRESETS.items():
        paper = f"`{name}`: [{preset.title}](https://arxiv.org/abs/{preset.arxiv})"
        options = ", ".join(f"`{key}={value}`" for key, value in preset.options.items() if RING.get(key) != value)
        yield _row(paper, preset.what, options, preset.limits or "–", preset.choose)


def _differences() -> Iterator[str]:
    """Yield the list of presets that are not as in their papers."""
    for text, names in _together({f"`{name}`": preset.differs for name, preset in PRESETS.items()}):
        if text:
            yield f"- {names}: {text}."


def _bytes() -> Iterator[str]:
    """Yield the table of bytes and buffers, for as many key/value heads as query heads / for fewer."""
    many, few = SHAPES
    yield (
        f"{many.q_heads} query heads and {many.kv_heads}/{few.kv_heads} key/value heads of {many.qk_dim}, bf16, "
        f"{many.q_len:,} tokens per rank, {TOPOLOGY}, no mask:\n"
    )
    columns = [f"{direction}, {link.value}" for direction in DIRECTIONS for link in Link]
    yield _row("preset", *columns, "buffers forward", "buffers backward", "exchange")
    yield _row("---", *["---:"] * 7)
    for figures, names in _together({f"`{name}`": _figures(Strategy.preset(name).on(TOPOLOGY)) for name in PRESETS}):
        yield _row(names, *figures)


def _figures(strategy: Strategy) -> tuple[str, ...]:
    """Return a row of the table of bytes and buffers."""
    sent = (_most_sent(strategy, direction, link) for direction in DIRECTIONS for link in Link)
    halves = (_halves(strategy, direction, TOPOLOGY, SHAPES[0]) for direction in DIRECTIONS)
    buffers = ("; ".join(map(_buffers, of_pass)) for of_pass in halves)
    return (*sent, *buffers, _either(*(_exchange(strategy, shapes) for shapes in SHAPES)))


def _most_sent(strategy: Strategy, direction: Direction, link: Link) -> str:
    """Return the MiB that the busiest rank sends over `link`, for both shapes."""
    by_rank = (sent_bytes(strategy, direction, TOPOLOGY, shapes) for shapes in SHAPES)
    return _either(*(f"{max(sent[link] for sent in ranks) / 2**20:.0f}" for ranks in by_rank))


def _exchange(strategy: Strategy, shapes: Shapes) -> str:
    """Return the buffers of an exchange of heads or blocks, as a multiple of a rank's q, k and v."""
    if strategy.mesh_degree > 1:
        moving = [_halves(strategy, direction, TOPOLOGY, shapes)[0].moving for direction in DIRECTIONS]
        own = shapes.dtype.itemsize * shapes.q_len * shapes.qk_dim * (shapes.q_heads + 2 * shapes.kv_heads)
        return f"{exchange_buffer_bytes(shapes, strategy, moving) / own:.2g}"
    return f"{2 - 2 / strategy.degree:g}" if strategy.degree > 1 else "–"


def _either(many: str, few: str) -> str:
    return many if many == few else f"{many}/{few}"


def _buffers(half: _Half) -> str:
    """Return how many buffers a rank needs for operands and for partial results of blocks."""
    held = most_held(half.schedule)
    operands, results = (f"{count / half.schedule.parts:g}" for count in held)
    return f"{operands} + {results}" if held.results else operands


def grids() -> str:
    """Return each grid once, with the presets that have it, of passes in which partial results are sent.

    Where heads are exchanged, a rank of the grid is one of each group, and its block is the group's, of its share of
    the heads. Where blocks are in parts, a visit is of one part: with 8 ranks, 8 to 15 are the second parts of blocks
    0 to 7.
    """
    by_pass = {}
    for name in PRESETS:
        halves = _halves(Strategy.preset(name).on(TOPOLOGY), "backward", TOPOLOGY, SHAPES[0])
        for half in halves:
            which = f", where {_IN_WORDS[half.moving]} move" if len(halves) > 1 else ""
            by_pass[name + which] = half.schedule.format()
    return "\n\n".join(f"{names}:\n\n{grid}" for grid, names in _together(by_pass))


def _together(by_name: Mapping[str, _Value]) -> list[tuple[_Value, str]]:
    """Return each value once, with the names that have it."""
    names = defaultdict[_Value, list[str]](list)
    for name, value in by_name.items():
        names[value].append(name)
    return [(value, ", ".join(of_value)) for value, of_value in names.items()]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(grids())
