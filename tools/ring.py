"""The picture of two schedules for the page on how it works: docs/ring.svg.

python -m tools.ring        # draws it anew from the package's schedules
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from burst_plugin import Link, Schedule, Topology, Transfer, flat_ring, two_level_ring

PICTURE = Path(__file__).parents[1] / "docs" / "ring.svg"
_NODES, _RANKS = 2, 4
_CELL, _ROW, _STEP = (34, 24), 32, 68  # width and height of a cell; from row to row, and from step to step
_LEFT, _GAP = 124, 46  # of the first cell; between two nodes
_INK, _OWN = "#333333", "#dddddd"
_COLOURS = {
    Link.INTRA: "#56B4E9",
    Link.INTER: "#E69F00",
}  # Okabe and Ito's, which colour-blind readers can tell apart
_CAPTIONS = (
    ("flat_ring", "at every step a block crosses between nodes, and all ranks wait for it"),
    ("two_level_ring", "blocks cross between nodes once, hidden behind four steps of work"),
)


def picture() -> str:
    """Return the picture, SVG."""
    topology = Topology(_NODES, _RANKS)
    drawn, top = [], 16
    for schedule, (name, caption) in zip((flat_ring, two_level_ring), _CAPTIONS, strict=True):
        drawn += [_text(16, top + 12, f"<tspan font-weight='bold'>{name}</tspan>: {caption}", 13)]
        drawn += _grid(schedule(topology, reduces=False), top + 44)
        top += 44 + _height() + 22
    drawn += _legend(top)
    width, height = _LEFT + _NODES * _RANKS * _STEP, top + 56
    frame = f"<rect width='{width}' height='{height}' rx='8' fill='white'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    heads = "".join(
        f"<marker id='{link.name}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='9' markerHeight='9' "
        "markerUnits='userSpaceOnUse' orient='auto'>"
        f"<path d='M0,0 L8,4 L0,8 z' fill='{colour}'/></marker>"
        for link, colour in _COLOURS.items()
    )
    return "\n".join([f"{head} font-family='sans-serif'>", f"<defs>{heads}</defs>", frame, *drawn, "</svg>", ""])


def _grid(schedule: Schedule, top: int) -> Iterator[str]:
    """Yield the ranks as rows and the steps as columns: which block a rank visits, and how it came there."""
    came = {(t.dst, t.block): t.link for t in schedule.gather}
    for step in range(len(schedule.visits[0])):
        yield _text(_x(step) + _CELL[0] / 2, top - 10, f"step {step}", 11, "middle")
    for transfers in _by_time(schedule).values():
        first = transfers[0]
        if first.due - first.issue == 1:
            yield from (_arrow(t, top) for t in transfers)
        else:
            yield from _lane(transfers, top)
    for rank, visits in enumerate(schedule.visits):
        if rank % _RANKS == 0:
            yield _text(16, _y(rank, top) + 16, f"node {rank // _RANKS}", 12)
        yield _text(_LEFT - 8, _y(rank, top) + 16, f"rank {rank}", 11, "end")
        for step, block in enumerate(visits):
            x, y = _x(step), _y(rank, top)
            fill = _OWN if block == rank else _COLOURS[came[rank, block]] if block is not None else "none"
            yield f"<rect x='{x}' y='{y}' width='{_CELL[0]}' height='{_CELL[1]}' rx='4' fill='{fill}'/>"
            yield _text(x + _CELL[0] / 2, y + 17, str(block), 13, "middle")


def _by_time(schedule: Schedule) -> dict[tuple[int, int, Link], list[Transfer]]:
    """Return the transfers by when they are under way, and over which link."""
    found = defaultdict(list)
    for transfer in schedule.gather:
        found[transfer.issue, transfer.due, transfer.link].append(transfer)
    return found


def _arrow(transfer: Transfer, top: int) -> str:
    """Return a transfer that takes one step, as an arrow from the rank that sends to the one that receives."""
    x, y = _x(transfer.issue) + _CELL[0] + 2, _y(transfer.src, top) + _CELL[1] / 2
    to_x, to_y = _x(transfer.due) - 2, _y(transfer.dst, top) + _CELL[1] / 2
    colour = _COLOURS[transfer.link]
    width = 2.4 if transfer.link is Link.INTER else 1.4
    return (
        f"<line x1='{x}' y1='{y}' x2='{to_x}' y2='{to_y}' stroke='{colour}' stroke-width='{width}' "
        f"marker-end='url(#{transfer.link.name})'/>"
    )


def _lane(transfers: list[Transfer], top: int) -> Iterator[str]:
    """Yield transfers that take several steps, as one bar between the nodes."""
    first = transfers[0]
    x, to_x = _x(first.issue), _x(first.due) - 10
    y = _y(_RANKS, top) - _GAP + 8
    colour = _COLOURS[first.link]
    yield f"<rect x='{x}' y='{y}' width='{to_x - x}' height='20' rx='4' fill='{colour}'/>"
    by_node = [sorted(t.block for t in transfers if t.src // _RANKS == node) for node in range(_NODES)]
    said = " and ".join(f"{blocks[0]}–{blocks[-1]}" for blocks in by_node)
    yield _text((x + to_x) / 2, y + 14, f"{said} cross to the other node", 12, "middle")
    for way in (-1, 1):
        yield (
            f"<path d='M{to_x},{y + 10} q14,0 18,{way * 18}' fill='none' stroke='{colour}' stroke-width='2.4' "
            f"marker-end='url(#{first.link.name})'/>"
        )


def _legend(top: int) -> Iterator[str]:
    said = ("the rank's own block", "came from a rank of its node", "came from another node")
    for number, (colour, text) in enumerate(zip((_OWN, *_COLOURS.values()), said, strict=True)):
        x = 16 + number * 210
        yield f"<rect x='{x}' y='{top}' width='16' height='16' rx='3' fill='{colour}'/>"
        yield _text(x + 24, top + 13, text, 12)
    yield _text(16, top + 38, "The number is that of the rank whose block is worked on at this step.", 12)


def _x(step: int) -> int:
    return _LEFT + step * _STEP


def _y(rank: int, top: int) -> int:
    return top + rank * _ROW + rank // _RANKS * _GAP


def _height() -> int:
    return _y(_NODES * _RANKS, 0) - _GAP


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}' fill='{_INK}'>{text}</text>"


if __name__ == "__main__":
    PICTURE.write_text(picture())
