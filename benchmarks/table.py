"""Writes the tables of docs/performance.md, and those of docs/peers.md that sum them up, from the results.

bash benchmarks/bench table            # write them
bash benchmarks/bench table --check    # or only say whether they are up to date
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import Case, markdown
from benchmarks.limits import RefusedError
from benchmarks.results import RESULTS, ROOT, Result, load_all
from benchmarks.summary import summary

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md", help="the page of all tables")
    parser.add_argument("--readme", type=Path, default=ROOT / "docs" / "peers.md", help="the page that sums them up")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the directory of the results")


def run(options: argparse.Namespace) -> int:
    """0 if the pages are up to date, or have been brought there; 1 if --check finds that they are not."""
    results = load_all(options.results)
    pages = {options.page: tables(results, options.page.parent), options.readme: summary(results)}
    old = {page: page.read_text() for page in pages}
    new = {page: inserted(page.name, old[page], text) for page, text in pages.items()}
    for page in pages:
        if new[page] == old[page]:
            print(f"{page.name} is up to date")
        elif options.check:
            print(f"{page.name} is out of date: run `bash benchmarks/bench table`")
        else:
            page.write_text(new[page])
            print(f"wrote the tables of {page.name}")
    return 1 if options.check and new != old else 0


def inserted(name: str, page: str, text: str) -> str:
    """The page of that name with `text` between the markers.

    Raises:
        RefusedError: if it does not have each of them once, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise RefusedError(f"{name} has to have {BEGIN} and, behind it, {END}, each of them once")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def tables(results: Mapping[Path, Result], directory: Path) -> str:
    """All tables, by command and by the name of the file, each with its machine beneath.

    A picture is put before its table if `bench draw` has left it in `directory`, that of the page.
    """
    parts = []
    for benchmark in dict.fromkeys([*_WRITERS, *(result.benchmark for result in results.values())]):
        for path, result in results.items():
            if result.benchmark == benchmark:
                parts += _picture(path, result, directory)
                parts += [*_WRITERS.get(benchmark, _rows_as_they_are)(result), figures.beneath(result, figures.where)]
    return "\n\n".join(parts) or "Nothing has been measured yet."


def _picture(path: Path, result: Result, directory: Path) -> list[str]:
    picture = f"{path.stem}.png"
    return [f"![{result.benchmark} on {result.machine['cpu']}]({picture})"] if (directory / picture).exists() else []


# ---------------------------------------------------------------------------------------------------------- cluster


def _cluster(result: Result) -> list[str]:
    """Times over the bound, or over the first contender's, by topology, rate and heads."""
    parts = []
    for cases in figures.alike(figures.cluster_cases(result), "compute", "nic", "latency_ms"):
        rows = [row for case in cases for row in case.rows]
        names = figures.contenders(rows)
        directions = cases[0].directions()
        words, yardstick = " / ".join(directions), cases[0].yardstick()
        head = ["nodes×ranks", "link", "heads", f"{yardstick}, ms: {words}", *names]
        body = [
            [
                figures.topology(case),
                figures.rate(case),
                figures.heads(case),
                " / ".join(_milliseconds(case.yardstick_s(direction)) for direction in directions),
                *(_ratios(case, name) for name in names),
            ]
            for case in cases
        ]
        over = "the bound" if yardstick == "bound" else f"that of {yardstick}"
        meaning = f" The bound is the longer of computing and of sending all bytes of {names[0]} over the link."
        if cases[0].what["documents"]:
            meaning = " The bound is computing, if ranks have even work and wait for nobody."
        parts.append(
            f"Emulated cluster, {figures.kind(cases[0])}: time over {over}, {words}."
            f"{meaning if yardstick == 'bound' else ''}"
        )
        parts.append(markdown(head, body))
        parts += _missing(result, cases, lambda case: f"{figures.topology(case)}, {figures.heads(case)} heads")
    return parts


def _ratios(case: Case, contender: str) -> str:
    ratios = [case.ratio(contender, direction) for direction in case.directions()]
    if case.refusal(contender):
        return "refused"
    return " / ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)


# --------------------------------------------------------------------------------------------------------- attention


def _attention(result: Result) -> list[str]:
    """Time and share of the kernel's rate, by length; then what rate that is, and the memory."""
    parts = []
    for cases in figures.alike(figures.attention_cases(result), "ranks", "dtype", "causal"):
        what, rows = cases[0].what, [row for case in cases for row in case.rows]
        names = figures.contenders(rows)
        body = [
            [f"{case.what['seq']:,}", figures.heads(case), *(_time_and_share(case, name) for name in names)]
            for case in cases
        ]
        mask = "causal" if what["causal"] else "full"
        parts.append(
            f"Attention, forward and backward, {figures.ranks(result, cases[0])}, {what['dtype']}, {mask}, head dim "
            f"{what['head_dim']}: time, and the share of the rate at which each rank runs the kernel on the whole "
            "sequence, all at once; in brackets, of one that does so alone."
        )
        parts.append(markdown(["tokens", "heads", *names], body))
        body = [
            [f"{case.what['seq']:,}", figures.heads(case), *(_rate_and_memory(case, name) for name in names)]
            for case in cases
        ]
        parts.append("Operations a second of all ranks together, and the most memory that one of them held.")
        parts.append(markdown(["tokens", "heads", *names], body))
        parts += _missing(result, cases, lambda case: f"{case.what['seq']:,} tokens, {figures.heads(case)} heads")
    return parts


def _time_and_share(case: Case, contender: str) -> str:
    row = case.row(contender)
    if row is None:
        return "refused" if case.refusal(contender) else "–"
    share, alone_s = row.get("kernel_share"), row.get("kernel_alone_s")
    text = f"{_milliseconds(row['both_s'])} ms" + ("" if share is None else f", {share:.0%}")
    if alone_s is None or row.get("virtual"):
        return text
    return f"{text} ({alone_s / row['ranks'] / row['both_s']:.0%})"


def _rate_and_memory(case: Case, contender: str) -> str:
    row = case.row(contender)
    if row is None:
        return "refused" if case.refusal(contender) else "–"
    rate, peak_bytes = row["flops_per_s"], row["peak_bytes"]
    text = f"{rate / 1e12:,.0f} TFLOP/s" if rate > 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"
    return text if peak_bytes is None else f"{text}, {peak_bytes / 1e6:,.0f} MB"


# ------------------------------------------------------------------------------------------------------------- train


def _train(result: Result) -> list[str]:
    """Tokens per second, MFU and memory of the examples."""
    head = ["example", "ranks", "ranks that share a sequence", "tokens in a sequence", "tokens in a step", "tokens/s"]
    body = [
        [
            row["example"],
            str(row["ranks"]),
            str(row["context_parallel_size"]),
            f"{row['seq']:,}",
            f"{row['tokens_per_step']:,}",
            f"{row['tokens_per_s']:,.0f}",
            "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f} MB",
        ]
        for row in filter(figures.measured, result.rows)
    ]
    nodes = result.settings.get("nodes", 1)
    where = "" if nodes == 1 else f" on {nodes} nodes"
    return [
        f"Training{where}: the examples of this repository, on the same ranks with and without context parallelism. "
        "Memory is the most that a rank needs beyond its libraries.",
        markdown([*head, "MFU", "memory of a rank"], body),
        *_missing(result, [], str),
    ]


# ---------------------------------------------------------------------------------------------------------- overhead


def _overhead(result: Result) -> list[str]:
    """What the package's own Python takes, by transport, ring and direction."""
    body = [
        [
            row["transport"],
            f"{row['nodes']}×{row['ranks_per_node']}",
            f"{row['direction']}, {row['moving']} travels",
            f"{row['own_s'] * 1e6:,.0f}",
            f"{row['last_tenth_s'] / row['first_tenth_s']:.2f}",
            f"{row['new_tensors']:.2g}",
        ]
        for row in result.rows
    ]
    head = [
        "ranks",
        "nodes×ranks",
        "direction",
        "µs per visit",
        "last / first tenth of steps",
        "new tensors per visit",
    ]
    return ["The package's own Python, without computing and sending:", markdown(head, body)]


# --------------------------------------------------------------------------------------------------- what all share


def _rows_as_they_are(result: Result) -> list[str]:
    """For benchmarks whose rows are figures already: a column for each field."""
    fields = list(dict.fromkeys(field for row in result.rows for field in row))
    body = [[_plain(row.get(field)) for field in fields] for row in result.rows]
    return [f"{result.benchmark.capitalize()}:", markdown([field.replace("_", " ") for field in fields], body)]


def _plain(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _missing(result: Result, cases: Sequence[Case], name: Callable[[Case], str]) -> list[str]:
    """A line for the contenders that were absent, and one for each reason to refuse a case."""
    absent = figures.absent(result.rows)
    lines = [f"- absent, not measured: {contender} ({reason})" for contender, reason in absent.items()]
    for (contender, reason), refused in figures.refused(cases).items():
        which = dict.fromkeys(map(name, refused))
        lines.append(f"- refused by {contender}: {'; '.join(which)} ({reason})")
    return ["\n".join(lines)] if lines else []


def _milliseconds(time_s: float | None) -> str:
    return "–" if time_s is None else f"{time_s * 1e3:,.0f}" if time_s >= 0.01 else f"{time_s * 1e3:.2g}"


_WRITERS: dict[str, Callable[[Result], list[str]]] = {
    "cluster": _cluster,
    "attention": _attention,
    "overhead": _overhead,
    "train": _train,
}
