"""What pictures and tables show of the rows of a result: the rows by case, and figures computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Result

Row = Mapping[str, Any]
DIRECTIONS = ("forward", "backward", "both")
_CLUSTER_CASE = (
    *("compute", "nic", "latency_ms", "nodes", "ranks_per_node", "rate_mbit", "q_heads", "kv_heads"),
    "documents",
)
_ATTENTION_CASE = ("ranks", "dtype", "causal", "q_heads", "kv_heads", "head_dim", "seq")


@dataclass(frozen=True)
class Case:
    """The rows of one case, all contenders; `what` has the fields that they share."""

    what: Mapping[str, Any]
    rows: Sequence[Row]

    def row(self, contender: str, direction: str | None = None) -> Row | None:
        """The row of a contender that has a time."""
        for row in self.rows:
            if row["contender"] == contender and row.get("direction") == direction and measured(row):
                return row
        return None

    def refusal(self, contender: str) -> str | None:
        """Why a contender cannot do this case."""
        return next(
            (row["refused"] for row in self.rows if row["contender"] == contender and row.get("refused")), None
        )

    def directions(self) -> list[str]:
        """Those that were measured: forward and backward, or, if there is nothing else, both together."""
        found = {row.get("direction") for row in self.rows if measured(row)}
        return [direction for direction in DIRECTIONS if direction in found][:2]

    def yardstick_s(self, direction: str) -> float | None:
        """What all contenders' times are compared with: the bound of the first one that has one, or its time."""
        row = self._yardstick(direction)
        return None if row is None else row.get("bound_s") or row["time_s"]

    def yardstick(self) -> str:
        """The same in words."""
        row = next(filter(None, map(self._yardstick, self.directions())), None)
        return "bound" if row is None or row.get("bound_s") else str(row["contender"])

    def ratio(self, contender: str, direction: str) -> float | None:
        """A contender's time over the yardstick, which is the same for all contenders."""
        row, yardstick_s = self.row(contender, direction), self.yardstick_s(direction)
        return row["time_s"] / yardstick_s if row is not None and yardstick_s else None

    def _yardstick(self, direction: str) -> Row | None:
        rows = [row for row in self.rows if row.get("direction") == direction and measured(row)]
        return next((row for row in rows if row.get("bound_s")), rows[0] if rows else None)


def measured(row: Row) -> bool:
    """Whether a row has times, rather than why it has none."""
    return not row.get("absent") and not row.get("refused")


def cluster_cases(result: Result) -> list[Case]:
    """The cases of an emulated cluster, in the order of the file."""
    return _cases(result.rows, _CLUSTER_CASE)


def attention_cases(result: Result) -> list[Case]:
    """The cases of distributed attention, in the order of the file."""
    return _cases(result.rows, _ATTENTION_CASE)


def alike(cases: Sequence[Case], *fields: str) -> list[list[Case]]:
    """The cases in groups that share these fields, each with a measurement at least."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        if any(map(measured, case.rows)):
            groups.setdefault(tuple(case.what.get(field) for field in fields), []).append(case)
    return list(groups.values())


def contenders(rows: Sequence[Row]) -> list[str]:
    """Those that are there, measured or refused, in the order of the file."""
    gone = absent(rows)
    return [name for name in dict.fromkeys(row["contender"] for row in rows) if name not in gone]


def absent(rows: Sequence[Row]) -> dict[str, str]:
    """The contenders, or the examples, that could not be had, and why."""
    return {row.get("contender") or row["example"]: row["absent"] for row in rows if row.get("absent")}


def refused(cases: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
    """By contender and reason, the cases that it refused."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        for name in dict.fromkeys(row["contender"] for row in case.rows):
            reason = case.refusal(name)
            if reason:
                found.setdefault((name, reason), []).append(case)
    return found


def topology(case: Case) -> str:
    """Nodes × ranks per node."""
    return f"{case.what['nodes']}×{case.what['ranks_per_node']}"


def kind(case: Case) -> str:
    """What cluster it is, but for its size and its links' rate."""
    latency_ms = case.what["latency_ms"]
    away = f", {latency_ms:g} ms away" if latency_ms else ""
    packed = ", packed documents" if case.what["documents"] else ""
    return f"a NIC per {case.what['nic']}{away}, compute {case.what['compute']}{packed}"


def rate(case: Case) -> str:
    """What a NIC carries."""
    rate_mbit = case.what["rate_mbit"]
    return "no limit" if rate_mbit is None else f"{rate_mbit:g} mbit"


def ranks(result: Result, case: Case) -> str:
    """How many ranks attend together, and whether they take turns in one process."""
    virtual = " in one process" if result.settings.get("on") == "virtual" else ""
    return f"{case.what['ranks']} ranks{virtual}"


def heads(case: Case) -> str:
    """Query heads / key-value heads."""
    return f"{case.what['q_heads']}/{case.what['kv_heads']}"


def machine(result: Result) -> str:
    """The machine, the commit and the day, in a line."""
    found, gpus = result.machine, result.machine["gpu"]
    parts = [f"{found['cpu']}, {found['cores']} cores, {found['memory_bytes'] / 1e9:.0f} GB, {found['os']}"]
    if gpus:
        parts.append(f"{len(gpus)} × {gpus[0]} (driver {found['gpu_driver']})")
    commits = list(dict.fromkeys(row.get("commit", result.commit) for row in result.rows)) or [result.commit]
    return "; ".join([*parts, f"commit {', '.join(commits)}", result.date])


def where(result: Result) -> str:
    """The machine, the commit, the day and the packages, in a line."""
    packages = [
        f"{name} {version}" for name, version in result.versions.items() if version and name != "burst_plugin"
    ]
    return f"{machine(result)}; {', '.join(packages)}"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table, whose cells may not have bars of their own."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def beneath(result: Result, where: Callable[[Result], str]) -> str:
    """What stands under a table: where it was measured, and whether something else ran there."""
    said = busy(result)
    return f"{f'**{said[0].upper()}{said[1:]}.** ' if said else ''}<sub>{where(result)}</sub>"


def busy(result: Result) -> str | None:
    """That the machine was busy, if it was."""
    if not result.busy:
        return None
    load = result.load
    return (
        f"measured on a busy machine: {load['others']:.0%} of its CPUs' time went to other programs, "
        f"{load['stolen']:.0%} to other virtual machines"
    )


def _cases(rows: Sequence[Row], fields: Sequence[str]) -> list[Case]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    return [Case(dict(zip(fields, key, strict=True)), found) for key, found in groups.items()]
