"""What tables and pictures of results share: the rows of a result by case, and figures computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.files import Load, Result, Row

_PLACE = (
    *("compute", "nic", "latency_ms", "dilation"),
    *("nodes", "ranks_per_node", "rate_mbit", "q_heads", "kv_heads", "sigma"),
)
_ATTENTION = ("ranks", "dtype", "causal", "q_heads", "kv_heads", "head_dim", "seq")


@dataclass(frozen=True)
class Case:
    """The rows of one case, of all contenders; `what` has the fields that they share."""

    what: Mapping[str, Any]
    rows: Sequence[Row]

    def row(self, contender: str, direction: str | None = None) -> Row | None:
        """Return the row of a contender that has a time."""
        found = (row for row in self.rows if row["contender"] == contender and row.get("direction") == direction)
        return next(filter(measured, found), None)

    def refusal(self, contender: str) -> str | None:
        """Return why a contender cannot do this case."""
        found = (row["refused"] for row in self.rows if row["contender"] == contender and row.get("refused"))
        return next(found, None)

    def directions(self) -> list[str]:
        """Return those to look at: forward and backward; of packed documents, or without those, both together."""
        found = {row.get("direction") for row in filter(measured, self.rows)}
        return [way for way in ("forward", "backward", "both")[2 * self.packed :] if way in found][:2]

    def yardstick_s(self, direction: str) -> float | None:
        """Return what all times are compared with: the first bound that there is, else the first time."""
        row = self._yardstick(direction)
        return None if row is None else row.get("bound_s") or row["time_s"]

    def yardstick(self) -> str:
        """Return the same in words."""
        row = next(filter(None, map(self._yardstick, self.directions())), None)
        return "bound" if row is None or row.get("bound_s") else str(row["contender"])

    def ratio(self, contender: str, direction: str) -> float | None:
        """Return a contender's time over the yardstick, which is the same for all contenders."""
        row, yardstick_s = self.row(contender, direction), self.yardstick_s(direction)
        return row["time_s"] / yardstick_s if row is not None and yardstick_s else None

    def _yardstick(self, direction: str) -> Row | None:
        rows = [row for row in self.rows if row.get("direction") == direction and measured(row)]
        return next((row for row in rows if row.get("bound_s")), rows[0] if rows else None)

    @property
    def packed(self) -> bool:
        """Whether documents are packed, of lengths whose logarithms have a sigma."""
        return self.what.get("sigma") is not None

    @property
    def topology(self) -> str:
        return f"{self.what['nodes']}×{self.what['ranks_per_node']}"

    @property
    def rate(self) -> str:
        rate_mbit = self.what["rate_mbit"]
        return "no limit" if rate_mbit is None else f"{rate_mbit:g} mbit"

    @property
    def heads(self) -> str:
        return f"{self.what['q_heads']}/{self.what['kv_heads']}"

    @property
    def kind(self) -> str:
        """Heads or, of packed documents, their lengths."""
        return f"σ {self.what['sigma']:g}" if self.packed else self.heads

    @property
    def dilation(self) -> float:
        """By what links and computing were slowed down; older files do not have it."""
        return self.what["dilation"] or 1.0

    @property
    def cluster(self) -> str:
        """Kind of cluster, without its size and its links' rate."""
        latency_ms = self.what["latency_ms"]
        away = f", {latency_ms:g} ms away" if latency_ms else ""
        core = ", a core per rank" if self.dilation > 1.0 else ""
        packed = ", packed documents" if self.packed else ""
        return f"a NIC per {self.what['nic']}{away}{core}, compute {self.what['compute']}{packed}"


def measured(row: Row) -> bool:
    """Return whether a row has times, rather than the reason why it has none."""
    return not row.get("absent") and not row.get("refused")


def cases(result: Result, *fields: str) -> list[list[Case]]:
    """Return the measured cases of a result in the order of the file, in groups that share these fields."""
    names = _PLACE if result.benchmark == "cluster" else _ATTENTION
    rows: dict[tuple[Any, ...], list[Row]] = {}
    for row in result.rows:
        rows.setdefault(tuple(row.get(name) for name in names), []).append(row)
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for key, found in rows.items():
        case = Case(dict(zip(names, key, strict=True)), found)
        if any(map(measured, found)):
            groups.setdefault(tuple(case.what.get(name) for name in fields), []).append(case)
    return list(groups.values())


def contenders(cases: Sequence[Case]) -> list[str]:
    """Return those that were measured or refused, in the order of the file."""
    return list(dict.fromkeys(row["contender"] for case in cases for row in case.rows if not row.get("absent")))


def absent(rows: Sequence[Row]) -> dict[str, str]:
    """Return the contenders, or the examples, that were not available, and why."""
    return {row.get("contender") or row["example"]: row["absent"] for row in rows if row.get("absent")}


def ranks(result: Result, case: Case) -> str:
    """Return how many ranks attend together, and whether they take turns in one process."""
    return f"{case.what['ranks']} ranks{' in one process' if result.settings.get('on') == 'virtual' else ''}"


def machine(result: Result) -> str:
    """Return the machine, the commit and the day, in a line."""
    found, gpus = result.machine, result.machine["gpu"]
    parts = [f"{found['cpu']}, {found['cores']} cores, {found['memory_bytes'] / 1e9:.0f} GB, {found['os']}"]
    parts += [f"{len(gpus)} × {gpus[0]} (driver {found['gpu_driver']})"] if gpus else []
    commits = list(dict.fromkeys(row.get("commit", result.commit) for row in result.rows)) or [result.commit]
    return "; ".join([*parts, f"commit {', '.join(commits)}", result.date])


def busy(result: Result) -> str:
    """Return that the machine was busy; empty if it was not."""
    return Load(**result.load).in_words() if result.busy else ""
