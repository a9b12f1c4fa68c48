"""A picture of what each rank did in a forward and a backward pass, from the Chrome trace of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks.limits import RefusedError

_WORK = {"forward": "#56B4E9", "backward": "#0072B2"}
_OTHER, _WAIT = "#999999", "#D55E00"
_LINK = {"intra": "#009E73", "inter": "#E69F00"}
_WORDS = {"intra": "in flight inside a node", "inter": "in flight between nodes"}
# Lanes of a rank, as (lowest edge, height) within its row of height 1.
_WORK_LANE = (0.42, 0.46)
_LINK_LANE = {"intra": (0.24, 0.13), "inter": (0.08, 0.13)}
_MS = 1e-3  # per microsecond
_MOST_RANKS = 16  # that are drawn

_SMALL = {"fontsize": 9, "handlelength": 1.4, "columnspacing": 1.4}

Event = dict[str, Any]


def draw_timeline(events: Sequence[Event]) -> Any:
    """The last two passes of every rank. `events` are in the Trace Event Format, as `Profile.save_chrome_trace` has
    them: a process per rank, times in microseconds, and what happened in "cat" and "args"."""
    spans = [
        event for event in events if event.get("ph") == "X" and event.get("cat") in ("kernel", "move", "wait", "post")
    ]
    if not spans:
        raise RefusedError("the trace has no kernel, move, wait or post: expected one written by `save_chrome_trace`")
    spans = last_passes(spans)
    every = sorted({span["pid"] for span in spans})
    ranks = every[:_MOST_RANKS]
    spans = [span for span in spans if span["pid"] in ranks]
    begin = min(span["ts"] for span in spans)
    figure, axis = plt.subplots(figsize=(11.0, 1.6 + 0.62 * len(ranks)), layout="constrained")
    for row, rank in enumerate(reversed(ranks)):
        mine = [span for span in spans if span["pid"] == rank]
        for kind in ("move", "kernel", "wait"):  # a wait is part of a move, and is drawn over it
            for span in (span for span in mine if span["cat"] == kind):
                colour = {"move": _OTHER, "wait": _WAIT}.get(kind) or _WORK[span["args"]["direction"]]
                _bar(axis, row, _WORK_LANE, span["ts"] - begin, span["dur"], colour)
        for link, start, stop in flights(mine):
            _bar(axis, row, _LINK_LANE[link], start - begin, stop - start, _LINK[link])
    _number_steps(axis, spans, ranks, begin)
    axis.set_yticks([row + 0.5 for row in range(len(ranks))], [f"rank {rank}" for rank in reversed(ranks)])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(0, len(ranks))
    axis.set_xlim(left=0)
    axis.set_xlabel("time (ms)")
    title = "What each rank does, step by step" + f" (the first {len(ranks)} of {len(every)})" * (ranks != every)
    axis.set_title(title, loc="left", fontsize=13, fontweight="bold")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    _legend(figure, spans)
    return figure


def last_passes(spans: Sequence[Event], count: int = 2) -> list[Event]:
    """The spans of the last passes, which every rank counts alike."""
    numbers = sorted({span["args"]["number"] for span in spans})[-count:]
    return [span for span in spans if span["args"]["number"] in numbers]


def flights(spans: Sequence[Event]) -> list[tuple[str, float, float]]:
    """(link, start, stop) of a rank's messages: from where they are posted to where they have been waited for."""
    arrived: dict[tuple[int, str], float] = {}
    for span in spans:
        if span["cat"] == "wait":
            key = (span["args"]["batch"], span["args"]["link"])
            arrived[key] = max(span["ts"] + span["dur"], arrived.get(key, 0.0))
    found: dict[tuple[int, str], float] = {}
    for span in spans:
        key = (span["args"]["batch"], span["args"]["link"])
        if span["cat"] == "post" and key in arrived:
            found[key] = min(span["ts"], found.get(key, span["ts"]))
    return [(link, start, arrived[batch, link]) for (batch, link), start in found.items()]


def _bar(axis: Any, row: int, lane: tuple[float, float], start: float, length: float, colour: str) -> None:
    """A bar with a gap to the next one: white edges."""
    where = [(start * _MS, length * _MS)]
    axis.broken_barh(where, (row + lane[0], lane[1]), facecolor=colour, edgecolor="white", linewidth=0.5)


def _number_steps(axis: Any, spans: Sequence[Event], ranks: Sequence[int], begin: float) -> None:
    """The number of the step, from 1, in each bar of work that has room for it."""
    room = 0.018 * (max(span["ts"] + span["dur"] for span in spans) - begin)
    for span in spans:
        if span["cat"] == "kernel" and span["dur"] > room:
            row = len(ranks) - 1 - ranks.index(span["pid"])
            axis.text(
                (span["ts"] + span["dur"] / 2 - begin) * _MS,
                row + _WORK_LANE[0] + _WORK_LANE[1] / 2,
                span["args"]["step"] + 1,
                color="black" if span["args"]["direction"] == "forward" else "white",
                ha="center",
                va="center",
                fontsize=9,
            )


def _legend(figure: Any, spans: Sequence[Event]) -> None:
    links = {link for link, _, _ in flights(spans)}
    entries = [(_WORK["forward"], "work, forward (number: step)"), (_WORK["backward"], "work, backward")]
    entries += [(_WAIT, "waiting"), (_OTHER, "sending off, adding up")]
    entries += [(_LINK[link], _WORDS[link]) for link in _LINK if link in links]
    handles = [Patch(color=colour, label=words) for colour, words in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(entries), frameon=False, **_SMALL)
