"""What the quickstart found: a table, a verdict and where the picture is."""

from __future__ import annotations

import json
from typing import Any

from quickstart_picture import draw
from quickstart_settings import Settings
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["report"]

_LINKS = {"intra": "inside nodes", "inter": "between nodes"}
_TOLERANCE = {"cpu": 1e-3, "cuda": 5e-2}  # of the loss: float32 on CPUs, bfloat16 on GPUs


def report(settings: Settings, console: Console) -> int:
    """Print the tables, draw the picture, say what to try next. Returns 0 if everything agrees, else 1."""
    burst = [_read(settings, "burst", rank) for rank in range(settings.ranks)]
    reference = _read(settings, "reference", 0) if settings.reference else None
    console.print()
    console.print(_ring_table(settings, burst))
    problems = [] if _bytes_agree(burst) else ["the bytes sent differ from the schedule's count"]
    console.print(_training_table(settings, burst[0], reference))
    if reference is not None:
        console.print(_comparison(burst[0], reference), soft_wrap=True)
        problems += _disagreements(settings, burst[0], reference)
    picture = draw(settings, burst, reference)
    console.print(f"Picture: {escape(str(picture))}", soft_wrap=True)
    for problem in problems:
        console.print(f"[bold red]Not as it should be:[/bold red] {problem}.")
    console.print(f"Next:    {_next_command(settings)}", soft_wrap=True)
    return 1 if problems else 0


def _read(settings: Settings, name: str, rank: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((settings.directory / f"{name}-rank{rank}.json").read_text())
    return record


def _ring_table(settings: Settings, burst: list[dict[str, Any]]) -> Table:
    described = burst[0]["describe"]
    steps = "1 step" if settings.steps == 1 else f"{settings.steps} steps"
    table = Table(title=f"The ring (bytes: of all ranks, in {steps})", title_justify="left", show_header=False)
    table.add_row("topology", described["topology"])
    table.add_row("schedule", described["schedule"])
    table.add_row("layout", described["layout"])
    table.add_row("travels forward", described["forward"])
    table.add_row("travels backward", f"{described['backward']} (asked for: {settings.backward})")
    table.add_row("kernel", described["kernel"])
    for link, words in _LINKS.items():
        sent, expected = _total(burst, "sent", link), _total(burst, "expected", link)
        verdict = "as the schedule counts" if sent == expected else f"the schedule counts {_bytes(expected)}"
        table.add_row(f"sent {words}", f"{_bytes(sent)}, {verdict}")
    return table


def _training_table(settings: Settings, burst: dict[str, Any], reference: dict[str, Any] | None) -> Table:
    table = Table(title="Training", title_justify="left")
    table.add_column("")
    runs = [(f"{settings.ranks} ranks, burst", burst)]
    if reference is not None:
        runs.append(("1 rank, Megatron's own", reference))
    for words, _ in runs:
        table.add_column(words)
    if reference is not None:
        table.add_column("largest difference")
    first_to_last = {"loss": ("losses", "{:.4f}"), "gradient norm": ("grad_norms", "{:.3f}")}
    for label, (key, form) in first_to_last.items():
        cells = [f"{form} -> {form}".format(run[key][0], run[key][-1]) for _, run in runs]
        if reference is not None:
            cells.append(f"{_largest(burst, reference, key):.1e}")
        table.add_row(label, *cells)
    table.add_row("time per step", *(f"{_median(run['steps_s']):.2f} s" for _, run in runs))
    return table


def _comparison(burst: dict[str, Any], reference: dict[str, Any]) -> str:
    same = "the same" if burst["weights"] == reference["weights"] else "DIFFERENT"
    return (
        f"Both runs began with {same} {burst['parameters']:,} weights. (The times do not compare: Megatron's own "
        "attention writes out\nevery score.)"
    )


def _disagreements(settings: Settings, burst: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    problems = []
    if burst["weights"] != reference["weights"]:
        problems.append("the runs began with different weights")
    if not _largest(burst, reference, "losses") <= _TOLERANCE[settings.device]:
        problems.append(f"the losses differ by more than {_TOLERANCE[settings.device]}")
    return problems


def _largest(burst: dict[str, Any], reference: dict[str, Any], key: str) -> float:
    return max(abs(ours - theirs) for ours, theirs in zip(burst[key], reference[key], strict=True))


def _total(burst: list[dict[str, Any]], key: str, link: str) -> int:
    return sum(sum(rank[key][link].values()) for rank in burst)


def _bytes_agree(burst: list[dict[str, Any]]) -> bool:
    """Rank by rank and kind by kind."""
    return all(rank["sent"] == rank["expected"] for rank in burst)


def _bytes(count: int) -> str:
    """With a decimal unit."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _next_command(settings: Settings) -> str:
    """Something that shows another side of it."""
    if settings.backward == "auto":
        return "bash examples/quickstart.sh --backward q --no-reference   (queries travel backward: more bytes here)"
    if settings.nodes == 2 and settings.ranks == 4:
        return "bash examples/quickstart.sh --ranks 8 --nodes 4 --no-reference   (a larger ring)"
    return "bash examples/quickstart.sh --data your.txt   (your own text)"
