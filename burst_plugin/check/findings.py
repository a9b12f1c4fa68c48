"""Findings of checks: a line with a verdict, figures and the time it took; and the table of all lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

CORRECTNESS, FAULT_TOLERANCE, PERFORMANCE, RECOMMENDATION = SECTIONS = ("right", "safe", "fast", "tuned")
"""The names of sections in `--sections`, in what is printed, and in JSON files."""
OK, FAILED, NOT_SHOWN = "ok", "FAILED", "not shown"


@dataclass(frozen=True)
class Finding:
    """One result of a check, a line of its section.

    section: one of `SECTIONS`.
    verdict: `OK`, `FAILED`, or `NOT_SHOWN` for a check that this cluster, or this way of starting, cannot make.
    what: the kernel, schedule, link or rank that was looked at. text: figures and reasons, for people.
    figures: these figures for programs, times in seconds. seconds: how long the check took.
    """

    section: str
    verdict: str
    what: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.section:<6} {self.verdict:<9} {self.what:<34} {self.text}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the finding by name, as JSON files have them."""
        return asdict(self)


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is a failure."""
    return any(finding.verdict == FAILED for finding in findings)


def table(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the lines of a table: for each section its verdict, counts and time, and its failed findings."""
    all_findings = list(findings)
    yield f"{'section':<9}{'verdict':<11}{'checks':>7}{'failed':>8}{'not shown':>11}{'time':>9}"
    for section in SECTIONS:
        in_section = [finding for finding in all_findings if finding.section == section]
        if not in_section:
            continue
        failures = [finding for finding in in_section if finding.verdict == FAILED]
        hidden = sum(finding.verdict == NOT_SHOWN for finding in in_section)
        verdict = FAILED if failures else NOT_SHOWN if hidden == len(in_section) else OK
        counts = f"{len(in_section) - hidden:>7}{len(failures):>8}{hidden:>11}"
        yield f"{section:<9}{verdict:<11}{counts}{sum(finding.seconds for finding in in_section):>7.1f} s"
        yield from (f"{'':9}culprit: {failure.what}: {failure.text}" for failure in failures)


def shown_time(seconds: float) -> str:
    """Return a time as text, such as "12.3 ms": in s, ms or us, to three digits."""
    for unit, least in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}" if seconds < 1000 * least else f"{seconds / least:.0f} {unit}"
    return f"{1e6 * seconds:.3g} us"
