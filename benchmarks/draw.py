"""Draws results as pictures, PNG, into docs/: bars, scaling lines, and timelines of profiles."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks import figures
from benchmarks.figures import Case
from benchmarks.limits import RefusedError
from benchmarks.results import RESULTS, ROOT, Result, load
from benchmarks.timeline import draw_timeline

# Okabe and Ito's, which colour-blind readers can tell apart; for contenders in the order of the file.
COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#999999", "#F0E442")
_DPI = 110
_WIDTH = 11.0  # inches; with _DPI as wide as a README is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="results (default: those in benchmarks/results), or Chrome traces of profiles, which become one "
        "picture, timeline.png",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs", metavar="DIR", help="where the pictures go")


def run(options: argparse.Namespace) -> int:
    """Draw every file, and say where."""
    files = options.files or sorted(RESULTS.glob("*.json"))
    if not files:
        raise RefusedError(
            f"there are no results in {os.path.relpath(RESULTS)} yet: measure something, or name files"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    traces = {path: events for path in files if (events := _trace_events(path)) is not None}
    for path in files:
        if path not in traces and (options.files or load(path).benchmark in _PAINTERS):  # of overhead there are none
            _save(_figure_of(path), options.out / f"{path.stem}.png")
    if traces:
        figure = draw_timeline([event for events in traces.values() for event in events])
        _save(figure, options.out / "timeline.png")
    return 0


def _trace_events(path: Path) -> list[dict[str, Any]] | None:
    """The events of a Chrome trace; None for other files."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read: {error}") from None
    return content.get("traceEvents") if isinstance(content, dict) else None


def _figure_of(path: Path) -> Any:
    try:
        result = load(path)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    if result.benchmark not in _PAINTERS:
        raise RefusedError(f"{path} is a result of {result.benchmark!r}; there are pictures of {sorted(_PAINTERS)}")
    return _PAINTERS[result.benchmark](result)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=_DPI, pil_kwargs={"optimize": True})
    plt.close(figure)
    print(f"Picture: {os.path.relpath(path)}")


# ----------------------------------------------------------------------------------------------------------- cluster


def draw_cluster(result: Result) -> Any:
    """Bars of time over the bound; a panel for each topology (rows) and rate (columns)."""
    cases = figures.cluster_cases(result)
    cases = [case for group in figures.alike(cases) for case in group]
    if not cases:
        raise RefusedError("the result has no case that was measured")
    topologies = list(dict.fromkeys(map(figures.topology, cases)))
    rates = list(dict.fromkeys(map(figures.rate, cases)))
    names = figures.contenders(result.rows)
    figure, axes = plt.subplots(
        len(topologies),
        len(rates),
        figsize=(_WIDTH, 1.5 + 2.35 * len(topologies)),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, topology in enumerate(topologies):
        for column, rate in enumerate(rates):
            here = [case for case in cases if (figures.topology(case), figures.rate(case)) == (topology, rate)]
            axis = axes[row][column]
            _bars(axis, here, names)
            axis.set_title(f"{topology} ranks, {rate}", loc="left", fontsize=11)
        axes[row][0].set_ylabel(f"time / {cases[0].yardstick()}")
        axes[row][0].set_ylim(bottom=0)  # when all are drawn: after that nothing makes room for a longer bar
    title = f"Emulated cluster (nodes × ranks per node), {figures.kind(cases[0])}"
    _finish(figure, result, title, names)
    return figure


def _bars(axis: Any, cases: Sequence[Case], names: Sequence[str]) -> None:
    """A group of bars for each case and direction, a bar for each contender; whiskers from fastest to slowest."""
    groups = [(case, direction) for case in cases for direction in case.directions()]
    width = 0.84 / len(names)
    for place, (case, direction) in enumerate(groups):
        for number, name in enumerate(names):
            x = place + (number - (len(names) - 1) / 2) * width
            ratio = case.ratio(name, direction)
            if ratio is None:
                if case.refusal(name):
                    axis.text(x, 0.05, "×", color=COLOURS[number], ha="center", va="bottom", fontsize=9)
                continue
            axis.bar(x, ratio, width * 0.9, color=COLOURS[number])
            row = case.row(name, direction)
            ends = [row[key] / row["time_s"] * ratio for key in ("time_s_min", "time_s_max")]
            axis.plot([x, x], ends, color="0.25", linewidth=0.8)
            if number == 0:
                axis.text(x, ends[1], f" {ratio:.2f}", rotation=90, ha="center", va="bottom", fontsize=7.5)
    axis.axhline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=0.5)
    labels = [f"{direction}\n{figures.heads(case)}" for case, direction in groups]
    axis.set_xticks(range(len(groups)), labels, fontsize=8.5)
    axis.tick_params(axis="x", length=0)
    _open_frame(axis)


# --------------------------------------------------------------------------------------------------------- attention


def draw_attention(result: Result) -> Any:
    """Share of the kernel's rate over the length; a line for each contender, a panel for each kind of case."""
    panels = figures.alike(figures.attention_cases(result), "ranks", "dtype", "causal", "q_heads", "kv_heads")
    if not panels:
        raise RefusedError("the result has no case that was measured")
    names = figures.contenders(result.rows)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(_WIDTH, 1.3 + 3.3 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    flat = [axis for line in axes for axis in line]
    for axis in flat[len(panels) :]:
        axis.set_axis_off()
    for number, (axis, cases) in enumerate(zip(flat, panels, strict=False), 1):
        ends = _lines(axis, result, cases, names)
        if number % columns == 0 or number == len(panels):
            others = {name: COLOURS[place] for place, name in enumerate(names) if name not in ends}
            _name_lines(axis, ends, others)
    for line in axes:
        line[0].set_ylabel("share of the rate of\none rank's kernel")
    _finish(figure, result, "Attention, forward and backward", [])
    return figure


def _lines(axis: Any, result: Result, cases: Sequence[Case], names: Sequence[str]) -> dict[str, tuple[float, str]]:
    """Draw a panel; returns where each contender's line ends, and its colour."""
    what, ends = cases[0].what, {}
    for number, name in enumerate(names):
        found = [(case.what["seq"], case.row(name)) for case in cases]
        points = [(seq, row["kernel_share"]) for seq, row in found if row and row.get("kernel_share") is not None]
        if points:
            lengths, shares = zip(*sorted(points), strict=True)
            axis.plot(lengths, shares, color=COLOURS[number], marker="o", markersize=4, linewidth=1.6 + (number == 0))
            ends[name] = (shares[-1], COLOURS[number])
    axis.axhline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=0.5)
    axis.set_xscale("log", base=2)
    lengths = sorted({case.what["seq"] for case in cases})
    axis.set_xticks(lengths, [f"{seq // 1024}K" if seq % 1024 == 0 else str(seq) for seq in lengths])
    axis.minorticks_off()
    axis.set_ylim(0, max(1.12, axis.dataLim.ymax * 1.05))
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    mask, ranks = "causal" if what["causal"] else "full", figures.ranks(result, cases[0])
    title = f"{ranks}, {what['dtype']}, {mask}, {figures.heads(cases[0])} heads"
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel("tokens")
    axis.grid(axis="y", alpha=0.3)
    _open_frame(axis)
    return ends


def _name_lines(axis: Any, ends: dict[str, tuple[float, str]], others: dict[str, str]) -> None:
    """Contenders and their last shares, right of where their lines end, each at least a line of text apart.

    Beneath, the colours of `others`, who have no line here, and may have one in another panel.
    """
    place = axis.get_ylim()[1]
    names = [(share, f"{name}, {share:.0%}", colour) for name, (share, colour) in ends.items()]
    names += [(0.0, f"{name}: ×", colour) for name, colour in others.items()]
    for share, words, colour in sorted(names, key=lambda item: -item[0]):
        place = min(share, place - 0.07) if share else place - 0.07
        where = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 10}
        axis.text(1.03, place, "●", color=colour, **where)
        axis.text(1.065, place, words, **where)


# ------------------------------------------------------------------------------------------------------------- train


def draw_train(result: Result) -> Any:
    """Bars of tokens per second, with MFU and memory written beside them; a panel for each example."""
    rows = list(filter(figures.measured, result.rows))
    if not rows:
        raise RefusedError("the result has no training that was measured")
    examples = list(dict.fromkeys(row["example"] for row in rows))
    figure, axes = plt.subplots(
        len(examples),
        1,
        figsize=(_WIDTH, 1.1 + 1.75 * len(examples)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, example in zip(axes[:, 0], examples, strict=True):
        mine = [row for row in rows if row["example"] == example]
        for place, row in enumerate(mine):
            parallel = row["context_parallel_size"] > 1
            axis.barh(place, row["tokens_per_s"], 0.66, color=COLOURS[0] if parallel else COLOURS[6])
            ends = [row["tokens_per_s_min"], row["tokens_per_s_max"]]
            axis.plot(ends, [place, place], color="0.2", linewidth=1)
            mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.0%}"
            memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 1e6:,.0f} MB per rank"
            words = f"  {row['tokens_per_s']:,.0f} tokens/s{mfu}{memory}"
            axis.text(max(ends), place, words, va="center", fontsize=9.5)
        axis.set_yticks(range(len(mine)), list(map(_training, mine)), fontsize=9.5)
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
        axis.set_title(
            f"{example}, {mine[0]['ranks']} ranks, {mine[0]['tokens_per_step']:,} tokens in a step",
            loc="left",
            fontsize=11,
        )
        _open_frame(axis)
    most = max(row["tokens_per_s_max"] for row in rows)
    axes[0, 0].set_xlim(0, 1.55 * most)
    axes[-1, 0].set_xlabel("tokens/s, all ranks")
    _finish(figure, result, "Training with and without context parallelism", [])
    return figure


def _training(row: figures.Row) -> str:
    count = row["tokens_per_step"] // row["seq"]
    sequences = f"{count} sequences of {row['seq']:,}" if count > 1 else f"1 sequence of {row['seq']:,}"
    size = row["context_parallel_size"]
    return f"{sequences},\n{f'each on {size} ranks' if size > 1 else 'one per rank'}"


# --------------------------------------------------------------------------------------------------- what all share


def _finish(figure: Any, result: Result, title: str, names: Sequence[str]) -> None:
    """Title, legend, and beneath all the machine, the commit, who was absent or refused, and whether it was busy."""
    figure.suptitle(title + "\n" * bool(names), x=0.005, ha="left", fontsize=13, fontweight="bold")
    notes = [f"absent: {name} ({reason})" for name, reason in figures.absent(result.rows).items()]
    shunned = dict.fromkeys(row["contender"] for row in result.rows if row.get("refused"))
    notes += [f"×: refused by {', '.join(shunned)}"] if shunned else []
    notes += [figures.busy(result)] if result.busy else []
    figure.supxlabel("\n".join([*notes, figures.machine(result)]), x=0.005, ha="left", fontsize=8, color="0.35")
    if names:
        handles = [Patch(color=COLOURS[number], label=name) for number, name in enumerate(names)]
        below_title = 1 - 0.22 / figure.get_figheight()
        where = {"loc": "upper left", "bbox_to_anchor": (-0.003, below_title), "ncols": len(names)}
        figure.legend(handles=handles, frameon=False, fontsize=10, handlelength=1.2, columnspacing=1.6, **where)


def _open_frame(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


_PAINTERS: dict[str, Callable[[Result], Any]] = {
    "cluster": draw_cluster,
    "attention": draw_attention,
    "train": draw_train,
}
