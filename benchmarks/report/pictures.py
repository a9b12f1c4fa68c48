"""Draws results as pictures, PNG, into docs/."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks import RefusedError
from benchmarks.report import Case, absent, busy, cases, contenders, machine, measured, ranks
from benchmarks.report.files import RESULTS, ROOT, Result, load

# Okabe and Ito's, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#999999", "#F0E442")
_COLOUR_OF = {
    "burst": COLOURS[0],
    "PyTorch context_parallel": COLOURS[1],
    "ring-flash-attn": COLOURS[2],
    "ring-flash-attn zigzag": COLOURS[2],
    "USP": COLOURS[5],
    "Ulysses": COLOURS[6],
}
"""What a library has in every picture; others get what is left, in the order of the file."""
_SUMMARY: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    (
        "cluster-amd-epyc-2-cores.json",
        "One long text, 4 nodes of 4 ranks",
        {"nodes": 4, "ranks_per_node": 4, "rate_mbit": 100, "kv_heads": 4},
    ),
    (
        "cluster-packed-core-per-rank-8-ranks-amd-epyc-2-cores.json",
        "Packed documents, 2 nodes of 4 ranks",
        {"nodes": 2, "ranks_per_node": 4, "rate_mbit": 400.0, "sigma": 1.0},
    ),
)
"""Results that a passer-by sees first: the file, the title, and which case."""
_DPI = 110
_WIDTH = 11.0  # inches; with _DPI as wide as a README is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: those in benchmarks/results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", metavar="DIR", help="where the pictures go")


def run(options: argparse.Namespace) -> int:
    """Draw every file of which there are pictures, and say where."""
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.files or sorted(RESULTS.glob("*.json")):
        try:
            result = load(path)
        except (OSError, ValueError) as error:
            raise RefusedError(f"{path} cannot be read: {error}") from None
        if result.benchmark in _PAINTERS:
            if not any(map(measured, result.rows)):
                raise RefusedError(f"{path} has no case that was measured")
            picture = options.out / f"{path.stem}.png"
            figure = _PAINTERS[result.benchmark](result)
            figure.savefig(picture, dpi=_DPI, pil_kwargs={"optimize": True})
            plt.close(figure)
            print(f"Picture: {os.path.relpath(picture)}")
        elif options.files:
            raise RefusedError(f"{path} is of {result.benchmark!r}; there are pictures of {sorted(_PAINTERS)}")
    if not options.files:
        picture = options.out / "summary.png"
        figure = draw_summary({name: load(RESULTS / name) for name, _, _ in _SUMMARY})
        figure.savefig(picture, dpi=_DPI, pil_kwargs={"optimize": True})
        plt.close(figure)
        print(f"Picture: {os.path.relpath(picture)}")
    return 0


def draw_summary(results: Mapping[str, Result]) -> Any:
    """Draw a panel for each of `_SUMMARY`: a bar for each library, the time of both passes over the bound."""
    figure, axes = _panels(1, len(_SUMMARY), 2.9)
    for axis, (file, title, wanted) in zip(axes[0], _SUMMARY, strict=True):
        every = [case for group in cases(results[file]) for case in group]
        (case,) = [case for case in every if wanted.items() <= {**case.what}.items()]
        peers = [name for name in contenders([case]) if not re.match("burst[ ,]", name)]  # and no variants of burst's
        taken = {name: _step(case, name) for name in peers}
        bars = sorted((ratio, name) for name, ratio in taken.items() if ratio is not None)
        for place, (ratio, name) in enumerate(bars):
            axis.barh(place, ratio, 0.7, color=COLOURS[0] if name == "burst" else COLOURS[-2])
            axis.text(ratio, place, f" {ratio:.3g}", va="center", fontsize=10)
        axis.margins(x=0.12)  # for the numbers
        axis.set_yticks(range(len(bars)), ["burst_plugin" if name == "burst" else name for _, name in bars])
        axis.invert_yaxis()
        axis.axvline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=0.5)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("time over the bound")
    figure.suptitle(
        "Time of attention on emulated clusters: lower is better, 1 is what processors and links allow",
        x=0.005,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    return figure


def _colours(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of every contender."""
    left = iter([colour for colour in COLOURS if colour not in {_COLOUR_OF.get(name) for name in names}])
    return {name: _COLOUR_OF.get(name) or next(left) for name in names}


def _step(case: Case, contender: str) -> float | None:
    """Return the time of all passes of a step over the time that they take at least."""
    pairs = [(case.ratio(contender, way), case.yardstick_s(way)) for way in case.directions()]
    if any(ratio is None or least_s is None for ratio, least_s in pairs):
        return None
    return sum((ratio or 0.0) * (least_s or 0.0) for ratio, least_s in pairs) / sum(s or 0.0 for _, s in pairs)


def draw_cluster(result: Result) -> Any:
    """Draw bars of time over the bound; a panel for each topology (rows) and rate (columns)."""
    every = [case for group in cases(result) for case in group]
    topologies, rates = (list(dict.fromkeys(getattr(case, name) for case in every)) for name in ("topology", "rate"))
    names = contenders(every)
    figure, axes = _panels(len(topologies), len(rates), 1.5 + 2.35 * len(topologies), sharey="row")
    for row, topology in enumerate(topologies):
        for column, rate in enumerate(rates):
            axis = axes[row][column]
            _bars(axis, [case for case in every if (case.topology, case.rate) == (topology, rate)], names)
            axis.set_title(f"{topology} ranks, {rate}", loc="left", fontsize=11)
        axes[row][0].set_ylabel(f"time / {every[0].yardstick()}")
        axes[row][0].set_ylim(bottom=0)  # when all are drawn: after that nothing makes room for a longer bar
    _finish(figure, result, f"Emulated cluster (nodes × ranks per node), {every[0].cluster}: lower is better", names)
    return figure


def _bars(axis: Any, group: Sequence[Case], names: Sequence[str]) -> None:
    """Draw bars of every contender for each case and direction; whiskers from fastest to slowest."""
    bars, colours = [(case, direction) for case in group for direction in case.directions()], _colours(names)
    width = 0.84 / len(names)
    for place, (case, direction) in enumerate(bars):
        for number, name in enumerate(names):
            x = place + (number - (len(names) - 1) / 2) * width
            row, ratio = case.row(name, direction), case.ratio(name, direction)
            if row is None or ratio is None:
                if case.refusal(name):
                    axis.text(x, 0.05, "×", color=colours[name], ha="center", va="bottom", fontsize=9)
                continue
            axis.bar(x, ratio, width * 0.9, color=colours[name])
            ends = [row[key] / row["time_s"] * ratio for key in ("time_s_min", "time_s_max")]
            axis.plot([x, x], ends, color="0.25", linewidth=0.8)
            if number == 0:
                axis.text(x, ends[1], f" {ratio:.2f}", rotation=90, ha="center", va="bottom", fontsize=7.5)
    axis.axhline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=0.5)
    axis.set_xticks(range(len(bars)), [f"{direction}\n{case.kind}" for case, direction in bars], fontsize=8.5)
    axis.tick_params(axis="x", length=0)


def draw_attention(result: Result) -> Any:
    """Draw the share of the kernel's rate over the length; a line per contender, a panel per kind of case."""
    panels = cases(result, "ranks", "dtype", "causal", "q_heads", "kv_heads")
    names = contenders([case for group in panels for case in group])
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = _panels(rows, columns, 1.3 + 3.3 * rows, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, group in zip(axes.flat, panels, strict=False):
        _lines(axis, group, names)
        what = group[0].what
        mask = "causal" if what["causal"] else "full"
        title = f"{ranks(result, group[0])}, {what['dtype']}, {mask}, {group[0].heads} heads"
        axis.set_title(title, loc="left", fontsize=11)
    for line in axes:
        line[0].set_ylabel("share of the rate of\none rank's kernel")
    _finish(figure, result, "Attention, forward and backward: higher is better", [])
    return figure


def _lines(axis: Any, group: Sequence[Case], names: Sequence[str]) -> None:
    """Draw a panel, with the last share of every contender in its legend."""
    colours = _colours(names)
    for number, name in enumerate(names):
        found = [(case.what["seq"], case.row(name)) for case in group]
        points = [(seq, row["kernel_share"]) for seq, row in found if row and row.get("kernel_share") is not None]
        if points:
            lengths, shares = zip(*sorted(points), strict=True)
            style = {"marker": "o", "markersize": 4, "linewidth": 1.6 + (number == 0)}
            axis.plot(lengths, shares, color=colours[name], label=f"{name}, {shares[-1]:.0%}", **style)
    axis.axhline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=0.5)
    axis.set_xscale("log", base=2)
    lengths = sorted({case.what["seq"] for case in group})
    axis.set_xticks(lengths, [f"{seq // 1024}K" if seq % 1024 == 0 else str(seq) for seq in lengths])
    axis.minorticks_off()
    axis.set_ylim(0, max(1.12, axis.dataLim.ymax * 1.05))
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("tokens")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(frameon=False, fontsize=9)


def _panels(rows: int, columns: int, height: float, **shared: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, without frames at the top and on the right."""
    size = (_WIDTH, height)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finish(figure: Any, result: Result, title: str, names: Sequence[str]) -> None:
    """Write title and legend, and beneath all the machine, the commit, and what is missing or was disturbed."""
    size = min(13.0, 1150 / len(title))  # in one line
    room = "\n" * (1 + (size < 12)) if names else ""  # for the legend
    figure.suptitle(title + room, x=0.005, ha="left", fontsize=size, fontweight="bold")
    notes = [f"absent: {name} ({reason})" for name, reason in absent(result.rows).items()]
    refusing = dict.fromkeys(row["contender"] for row in result.rows if row.get("refused"))
    notes += [f"{'×' if names else 'no line'}: refused by {', '.join(refusing)}"] if refusing else []
    notes = [*notes, busy(result), machine(result)]
    figure.supxlabel("\n".join(filter(None, notes)), x=0.005, ha="left", fontsize=8, color="0.35")
    if names:
        handles = [Patch(color=colour, label=name) for name, colour in _colours(names).items()]
        place, size = (-0.003, 1 - 0.22 / figure.get_figheight()), min(10.0, 960 / len("".join(names)))  # in one line
        where = {"loc": "upper left", "bbox_to_anchor": place, "ncols": len(names), "fontsize": size}
        figure.legend(handles=handles, frameon=False, handlelength=1.2, columnspacing=1.6, **where)


_PAINTERS = {"cluster": draw_cluster, "attention": draw_attention}
