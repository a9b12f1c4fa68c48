"""The quickstart's picture: the two loss curves, and what every rank did during one attention."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from quickstart_settings import Settings

__all__ = ["draw"]

# Colours that colour-blind readers can tell apart (Okabe and Ito), and apart in grey too.
_FORWARD, _BACKWARD, _WAIT, _POST = "#56B4E9", "#0072B2", "#D55E00", "#999999"
_LOSS = "#CC79A7"
_LINK = {"intra": "#009E73", "inter": "#E69F00"}
_LINK_WORDS = {"intra": "in flight inside a node", "inter": "in flight between nodes"}
_MS = 1e3
# Lanes of a rank, as (lowest edge, height) within its row of height 1.
_WORK_LANE = (0.42, 0.44)
_LINK_LANE = {"intra": (0.25, 0.12), "inter": (0.09, 0.12)}


def draw(settings: Settings, burst: list[dict[str, Any]], reference: dict[str, Any] | None) -> Path:
    """Write quickstart.png and return its path."""
    traces = _quickest([rank["traces"] for rank in burst])
    rows = len(traces)
    height = 3.4 + (1.1 + 0.75 * rows if traces else 0)
    figure, axes = plt.subplots(
        2 if traces else 1,
        1,
        figsize=(11, height),
        height_ratios=[3.0, 0.9 + 0.75 * rows] if traces else None,
        squeeze=False,
        layout="constrained",
    )
    _losses(axes[0][0], settings, burst[0], reference)
    if traces:
        _timeline(axes[1][0], settings, traces)
    path = settings.directory / "quickstart.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _losses(axis: Any, settings: Settings, burst: dict[str, Any], reference: dict[str, Any] | None) -> None:
    steps = range(1, len(burst["losses"]) + 1)
    words = f"{settings.ranks} ranks, burst attention"
    axis.plot(steps, burst["losses"], color=_LOSS, linewidth=5, label=words)
    if reference is not None:
        words = "1 rank, Megatron's own attention"
        axis.plot(steps, reference["losses"], color="black", linewidth=1.5, linestyle=(0, (4, 2)), label=words)
    axis.set_title(f"Loss on sequences of {settings.seq_length:,} bytes", loc="left")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats per byte)")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    _open_frame(axis)


def _timeline(axis: Any, settings: Settings, traces: list[list[dict[str, Any]]]) -> None:
    begin = min(event["start_s"] for trace in traces for event in trace)
    for rank, trace in enumerate(traces):
        row = len(traces) - 1 - rank
        for event in trace:
            colour = _work_colour(event)
            if colour:
                _bar(axis, row, _WORK_LANE, event["start_s"] - begin, event["stop_s"] - begin, colour)
        for link, start_s, stop_s in transfers(trace):
            _bar(axis, row, _LINK_LANE[link], start_s - begin, stop_s - begin, _LINK[link])
    _step_numbers(axis, traces, begin)
    axis.set_yticks(
        [len(traces) - 0.5 - rank for rank in range(len(traces))],
        [f"rank {rank}\nnode {rank // settings.ranks_per_node}" for rank in range(len(traces))],
    )
    axis.tick_params(axis="y", length=0)
    for node in range(1, settings.nodes):
        axis.axhline(len(traces) - node * settings.ranks_per_node, color="0.6", linewidth=0.8)
    axis.set_ylim(0, len(traces))
    axis.set_xlim(left=0)
    cores = os.cpu_count() or 1
    shared = settings.device == "cpu" and cores < settings.ranks
    axis.set_xlabel(f"time (ms); {settings.ranks} ranks share {cores} cores" if shared else "time (ms)")
    axis.set_title("One attention, forward and backward: what each rank does, step by step", loc="left")
    _legend(axis, traces)
    _open_frame(axis)


def transfers(trace: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(link, start, stop) of a rank's messages: from where they are posted to where they have been waited for."""
    arrivals: dict[int, float] = {}
    for event in trace:
        if event["kind"] == "wait":
            arrivals[event["batch"]] = max(event["stop_s"], arrivals.get(event["batch"], 0.0))
    return [(event["link"], event["start_s"], arrivals[event["batch"]]) for event in trace if event["kind"] == "post"]


def _quickest(by_rank: list[list[list[dict[str, Any]]]]) -> list[list[dict[str, Any]]]:
    """Of several recordings by all ranks, that with the shortest time from first to last; [] if there is none."""
    recordings = [list(one) for one in zip(*by_rank, strict=True) if all(one)]
    return min(recordings, key=_span_s, default=[])


def _span_s(traces: list[list[dict[str, Any]]]) -> float:
    events = [event for trace in traces for event in trace]
    return float(max(event["stop_s"] for event in events) - min(event["start_s"] for event in events))


def _bar(axis: Any, row: int, lane: tuple[float, float], start_s: float, stop_s: float, colour: str) -> None:
    """A bar with a gap to the next one: white edges."""
    axis.broken_barh(
        [(start_s * _MS, (stop_s - start_s) * _MS)],
        (row + lane[0], lane[1]),
        facecolor=colour,
        edgecolor="white",
        linewidth=0.5,
    )


def _work_colour(event: dict[str, Any]) -> str:
    kernel = _FORWARD if event["direction"] == "forward" else _BACKWARD
    return {"kernel": kernel, "wait": _WAIT, "post": _POST}.get(event["kind"], "")


def _step_numbers(axis: Any, traces: list[list[dict[str, Any]]], begin: float) -> None:
    """The number of the step in each bar of work that has room for it."""
    room_s = 0.018 * _span_s(traces)
    for rank, trace in enumerate(traces):
        for event in trace:
            if event["kind"] == "kernel" and event["stop_s"] - event["start_s"] > room_s:
                axis.text(
                    ((event["start_s"] + event["stop_s"]) / 2 - begin) * _MS,
                    len(traces) - 1 - rank + _WORK_LANE[0] + _WORK_LANE[1] / 2,
                    event["step"] + 1,
                    color="black" if event["direction"] == "forward" else "white",
                    ha="center",
                    va="center",
                    fontsize=9,
                )


def _legend(axis: Any, traces: list[list[dict[str, Any]]]) -> None:
    links = {event["link"] for trace in traces for event in trace}
    entries = [(_FORWARD, "work, forward (number: step)"), (_BACKWARD, "work, backward")]
    entries += [(_POST, "sending off"), (_WAIT, "waiting")]
    entries += [(_LINK[link], _LINK_WORDS[link]) for link in _LINK if link in links]
    axis.legend(
        handles=[Patch(color=colour, label=words) for colour, words in entries],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13 - 0.3 / len(traces)),
        ncols=len(entries),
        frameon=False,
        fontsize=9,
        handlelength=1.5,
        columnspacing=1.4,
    )


def _open_frame(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
