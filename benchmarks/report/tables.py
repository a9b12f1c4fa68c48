"""Writes benchmarks/results/README.md from the results: a summary, and every table beneath its picture.

bash benchmarks/bench table            # write them
bash benchmarks/bench table --check    # or only say whether they are up to date
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks import RefusedError
from benchmarks.report import Case, absent, busy, cases, contenders, machine, measured, ranks
from benchmarks.report.files import PACKAGES, RESULTS, Result, Row, load

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
PICTURES = "../../docs"  # from the page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")


def run(options: argparse.Namespace) -> int:
    """Write the tables, or check them."""
    results = {path: load(path) for path in sorted(RESULTS.glob("*.json"))}
    return update(results, RESULTS / "README.md", check=options.check)


def update(results: Mapping[Path, Result], page: Path, *, check: bool) -> int:
    """Write the summary and the tables into `page`; return 1 if `check`, which writes nothing, finds other ones."""
    old = page.read_text()
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise RefusedError(f"{page.name} has to have {BEGIN} and, behind it, {END}, each of them once")
    text = f"## Summary\n\n{summary(results)}\n\n## Every result\n\n{tables(results, page.parent)}"
    new = f"{before}{BEGIN}\n{text}\n{END}{after}"
    if new == old:
        print(f"{page} is up to date")
        return 0
    if check:
        print(f"{page} is out of date: run `bash benchmarks/bench table`")
        return 1
    page.write_text(new)
    print(f"wrote the tables of {page}")
    return 0


def tables(results: Mapping[Path, Result], directory: Path) -> str:
    """Return all tables by benchmark and file, each between its picture, if any, and its machine.

    directory: the folder of the page, from which links to the pictures lead.
    """
    parts = []
    for name, write in {"cluster": _cluster, "attention": _attention, "train": _train}.items():
        for path, result in ((path, result) for path, result in results.items() if result.benchmark == name):
            picture = f"{PICTURES}/{path.stem}.png"
            if (directory / picture).exists():
                parts.append(f"![{name} on {[*result.machine['gpu'], result.machine['cpu']][0]}]({picture})")
            found = [(package, result.versions.get(package)) for package in ("python", *PACKAGES)]
            packages = "; " + ", ".join(f"{package} {version}" for package, version in found if version)
            parts += [*write(result), _beneath(result, packages)]
    return "\n\n".join(parts) or "Nothing has been measured yet."


def summary(results: Mapping[Path, Result]) -> str:
    """Return a table for each emulated cluster and each attention on one machine, with its machine beneath."""
    parts = []
    for name, write in {"cluster": _cluster_summary, "attention": _attention_summary}.items():
        for result in (result for result in results.values() if result.benchmark == name):
            parts += [write(result), _beneath(result)]
    return "\n\n".join(parts) or "Nothing has been measured yet."


def _cluster(result: Result) -> list[str]:
    parts = []
    for group in cases(result, "compute", "nic", "latency_ms"):
        names, first = contenders(group), group[0]
        if first.packed:
            parts += [*_packed(result, group, *names), *_missing(result, group, lambda case: case.topology)]
            continue
        words, bounded = " / ".join(first.directions()), first.yardstick() == "bound"
        head = ["nodes×ranks", "link", "heads", f"{first.yardstick()}, ms: {words}", *names]
        body = []
        for case in group:
            yardsticks = " / ".join(_milliseconds(case.yardstick_s(direction)) for direction in case.directions())
            body.append([case.topology, case.rate, case.heads, yardsticks])
            for name in names:
                ratios = [case.ratio(name, direction) for direction in case.directions()]
                cell = " / ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
                body[-1].append("refused" if case.refusal(name) else cell)
        meaning = f" The bound is the longer of computing and of sending all bytes of {names[0]} over the link."
        over = "the bound" if bounded else f"that of {first.yardstick()}"
        parts.append(f"Emulated cluster, {first.cluster}: time over {over}, {words}.{meaning if bounded else ''}")
        parts.append(_markdown(head, body))
        parts += _missing(result, group, lambda case: f"{case.topology}, {case.heads} heads")
    return parts


def _packed(result: Result, group: Sequence[Case], ours: str, *others: str) -> list[str]:
    able = [name for name in others if any(case.row(name, "both") for case in group)]
    head = ["nodes×ranks", "link", "lengths", f"{ours}, ms", f"{ours} / bound", *able]
    body = []
    for case in group:
        row, over = case.row(ours, "both"), [_both_over(case, name, ours) for name in able]
        cells = ("–" if ratio is None else f"{ratio:.2f}" for ratio in (case.ratio(ours, "both"), *over))
        body.append([case.topology, case.rate, case.kind, _milliseconds(row and row["time_s"]), *cells])
    beside = f", and time of the others over that of {ours}" if able else ""
    text = (
        f"Emulated cluster, {group[0].cluster}, forward and backward together: time of {ours}, the same over the "
        f"bound{beside}. The bound is the longer of computing, spread evenly, "
        f"and of sending the rows that have to cross a NIC as {ours} assigns them. σ: of the logarithms of lengths."
        f"{_visit(result, group)}"
    )
    return [text, _markdown(head, body)]


def _visit(result: Result, every: Sequence[Case]) -> str:
    """Return how long computing is, where that was chosen, and how much slower everything was."""
    if result.settings.get("compute") != "slept":
        return ""
    forward, backward = result.settings["visit_ms"]
    slower = max(case.dilation for case in every)
    text = f" All queries of one rank on all keys of another take {forward:g} and {backward:g} ms."
    if slower > 1:
        text += f" Links and computing were {slower:g} times slower, and times are divided by that."
    return text


def _cluster_summary(result: Result) -> str:
    groups = cases(result, "rate_mbit")
    every = [case for group in groups for case in group]
    ours, *others = contenders(every)
    bounded = every[0].yardstick() == "bound"
    body = []
    for group in groups:
        ratios = [case.ratio(ours, direction) for case in group for direction in case.directions()]
        cells = [_range([_both_over(case, name, ours) for case in group], "{:.2f}") for name in others]
        body.append([group[0].rate, *([_range(ratios, "{:.2f}")] if bounded else []), *cells])
    topologies, heads = (", ".join(dict.fromkeys(getattr(c, name) for c in every)) for name in ("topology", "heads"))
    passes = "both passes" if every[0].packed else "each pass by itself"
    figures = [f"time of {ours} over the bound, {passes}"] if bounded else []
    figures += [f"time of the others over that of {ours}, forward and backward together"] if others else []
    text = (
        f"Emulated cluster ({topologies} nodes×ranks; {heads} heads; {every[0].cluster}): "
        f"{'; '.join(figures)}. Least to most over all settings, with the median.{_visit(result, every)}"
    )
    return f"{text}\n\n{_markdown(['link', *([f'{ours} / bound'] if bounded else []), *others], body)}"


def _both_over(case: Case, contender: str, ours: str) -> float | None:
    theirs, own = ([case.row(name, direction) for direction in case.directions()] for name in (contender, ours))
    if None in theirs or None in own:
        return None
    theirs_s, own_s = (sum(row["time_s"] for row in rows if row is not None) for rows in (theirs, own))
    return float(theirs_s / own_s)


def _attention(result: Result) -> list[str]:
    parts = []
    for group in cases(result, "ranks", "dtype", "causal"):
        what, names = group[0].what, contenders(group)
        mask = "causal" if what["causal"] else "full"
        parts.append(
            f"Attention, forward and backward, {ranks(result, group[0])}, {what['dtype']}, {mask}, head dim "
            f"{what['head_dim']}: time, and the share of the rate at which each rank runs the kernel on the whole "
            "sequence, all at once; in brackets, of one that does so alone."
        )
        for cell in (_time_and_share, _rate_and_memory):
            body = []
            for case in group:
                body.append([f"{case.what['seq']:,}", case.heads])
                for name in names:
                    row = case.row(name)
                    body[-1].append(cell(row) if row else "refused" if case.refusal(name) else "–")
            parts.append(_markdown(["tokens", "heads", *names], body))
        parts.insert(-1, "Operations a second of all ranks together, and the most memory that one of them held.")
        parts += _missing(result, group, lambda case: f"{case.what['seq']:,} tokens, {case.heads} heads")
    return parts


def _time_and_share(row: Row) -> str:
    share, alone_s = row.get("kernel_share"), row.get("kernel_alone_s")
    text = f"{_milliseconds(row['both_s'])} ms" + ("" if share is None else f", {share:.0%}")
    if alone_s is None or row.get("virtual"):
        return text
    return f"{text} ({alone_s / row['ranks'] / row['both_s']:.0%})"


def _rate_and_memory(row: Row) -> str:
    rate, peak_bytes = row["flops_per_s"], row["peak_bytes"]
    text = f"{rate / 1e12:,.0f} TFLOP/s" if rate > 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"
    return text if peak_bytes is None else f"{text}, {peak_bytes / 1e6:,.0f} MB"


def _attention_summary(result: Result) -> str:
    groups = cases(result, "ranks", "dtype", "causal")
    ours, *others = contenders([case for group in groups for case in group])
    names = [ours, *(name for name in others if not name.startswith(ours))]
    body = []
    for group in groups:
        seqs = [f"{case.what['seq']:,}" for case in group]
        body.append([ranks(result, group[0]), group[0].what["dtype"], f"{seqs[0]} to {seqs[-1]}"])
        for name in names:
            rows = (case.row(name) for case in group)
            body[-1].append(_range([None if row is None else row.get("kernel_share") for row in rows], "{:.0%}"))
    text = (
        "Attention, forward and backward: share of the rate at which each rank runs the kernel on the whole "
        "sequence, all at once. Least to most over all lengths, with the median."
    )
    return f"{text}\n\n{_markdown(['ranks', 'type', 'tokens', *names], body)}"


def _train(result: Result) -> list[str]:
    sizes, body = ["ranks that share a sequence", "tokens in a sequence", "tokens in a step", "tokens/s"], []
    for row in filter(measured, result.rows):
        heads = f"{row['heads']}/{row['kv_heads']}" if "heads" in row else "–"
        numbers = ("ranks", "context_parallel_size", "seq", "tokens_per_step", "tokens_per_s")
        mfu = "–" if row["mfu"] is None else f"{row['mfu']:.1%}"
        cells = [row["example"], heads, *(f"{row[name]:,.0f}" for name in numbers), mfu]
        body.append([*cells, f"{row['peak_bytes'] / 1e6:,.0f} MB"])
    nodes = result.settings.get("nodes", 1)
    return [
        f"Training{'' if nodes == 1 else f' on {nodes} nodes'}: the examples of this repository, on the same ranks "
        "with and without context parallelism. Memory is the most that a rank needs beyond its libraries.",
        _markdown(["example", "heads", "ranks", *sizes, "MFU", "memory of a rank"], body),
        *_missing(result, [], str),
    ]


def _missing(result: Result, group: Sequence[Case], name: Callable[[Case], str]) -> list[str]:
    lines = [f"- absent, not measured: {contender} ({reason})" for contender, reason in absent(result.rows).items()]
    refused: dict[tuple[str, str], list[Case]] = {}
    for case in group:
        for contender in dict.fromkeys(row["contender"] for row in case.rows):
            if reason := case.refusal(contender):
                refused.setdefault((contender, reason), []).append(case)
    for (contender, reason), found in refused.items():
        lines.append(f"- refused by {contender}: {'; '.join(dict.fromkeys(map(name, found)))} ({reason})")
    return ["\n".join(lines)] if lines else []


def _beneath(result: Result, more: str = "") -> str:
    said = busy(result)
    return f"{f'**{said[0].upper()}{said[1:]}.** ' if said else ''}<sub>{machine(result)}{more}</sub>"


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _milliseconds(time_s: float | None) -> str:
    return "–" if time_s is None else f"{time_s * 1e3:,.0f}" if time_s >= 0.01 else f"{time_s * 1e3:.2g}"


def _range(numbers: Sequence[float | None], form: str) -> str:
    """Return least to most, with the median, of what there is; and how often there is nothing."""
    found = [number for number in numbers if number is not None]
    if not found:
        return "refused"
    least, middle, most = (form.format(number) for number in (min(found), median(found), max(found)))
    missing = len(numbers) - len(found)
    return (least if least == most else f"{least} to {most} ({middle})") + (f", {missing} refused" if missing else "")
