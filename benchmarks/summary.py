"""What the results come to: the few lines of them that docs/peers.md has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks import figures
from benchmarks.figures import Case
from benchmarks.results import Result


def summary(results: Mapping[Path, Result]) -> str:
    """A table for each emulated cluster, and one for attention on one machine, each with its machine beneath."""
    parts = [
        part
        for benchmark, write in _WRITERS.items()
        for result in results.values()
        if result.benchmark == benchmark
        for part in (write(result), figures.beneath(result, figures.machine))
    ]
    return "\n\n".join(parts) or "Nothing has been measured yet."


def _cluster(result: Result) -> str:
    """By link: the first contender's time over the bound, and the others' over its own."""
    groups = figures.alike(figures.cluster_cases(result), "rate_mbit")
    ours, *others = figures.contenders(result.rows)
    bounded = groups[0][0].yardstick() == "bound"
    body = []
    for cases in groups:
        ratios = [case.ratio(ours, direction) for case in cases for direction in case.directions()]
        cells = [_range([_both_s(case, name, ours) for case in cases], "{:.2f}") for name in others]
        body.append([figures.rate(cases[0]), *([_range(ratios, "{:.2f}")] if bounded else []), *cells])
    cases = [case for group in groups for case in group]
    topologies, heads = (", ".join(dict.fromkeys(map(name, cases))) for name in (figures.topology, figures.heads))
    over_bound = f"time of {ours} over the bound, each pass by itself; " if bounded else ""
    text = (
        f"Emulated cluster ({topologies} nodes×ranks; {heads} heads; {figures.kind(cases[0])}): "
        f"{over_bound}time of the others over that of {ours}, forward and backward together. "
        "Least to most over all settings, with the median."
    )
    head = ["link", *([f"{ours} / bound"] if bounded else []), *others]
    return f"{text}\n\n{figures.markdown(head, body)}"


def _attention(result: Result) -> str:
    """By type: shares of the rate that the kernel has on one rank. Variants of ours are on the page of all tables."""
    groups = figures.alike(figures.attention_cases(result), "ranks", "dtype", "causal")
    ours, *others = figures.contenders(result.rows)
    names = [ours, *(name for name in others if not name.startswith(ours))]
    body = [
        [
            figures.ranks(result, cases[0]),
            cases[0].what["dtype"],
            f"{cases[0].what['seq']:,} to {cases[-1].what['seq']:,}",
            *(_range([_kernel_share(case, name) for case in cases], "{:.0%}") for name in names),
        ]
        for cases in groups
    ]
    text = (
        "Attention, forward and backward: share of the rate at which each rank runs the kernel on the whole "
        "sequence, all at once. Least to most over all lengths, with the median."
    )
    return f"{text}\n\n{figures.markdown(['ranks', 'type', 'tokens', *names], body)}"


def _both_s(case: Case, contender: str, ours: str) -> float | None:
    """Time of all directions over that of `ours`."""
    theirs, own = ([case.row(name, direction) for direction in case.directions()] for name in (contender, ours))
    if None in theirs or None in own:
        return None
    theirs_s, own_s = (sum(row["time_s"] for row in rows if row is not None) for rows in (theirs, own))
    return float(theirs_s / own_s)


def _kernel_share(case: Case, contender: str) -> float | None:
    row = case.row(contender)
    return None if row is None else row.get("kernel_share")


def _range(numbers: Sequence[float | None], form: str) -> str:
    """Least to most, with the median, of what there is; and how often there is nothing."""
    found = [number for number in numbers if number is not None]
    if not found:
        return "refused"
    least, middle, most = (form.format(number) for number in (min(found), median(found), max(found)))
    missing = len(numbers) - len(found)
    return (least if least == most else f"{least} to {most} ({middle})") + (f", {missing} refused" if missing else "")


_WRITERS: Mapping[str, Callable[[Result], str]] = {"cluster": _cluster, "attention": _attention}
