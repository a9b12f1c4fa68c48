"""`burst check`: whether a cluster is right, safe and fast, and which strategy suits it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import torch

from burst_plugin.check.findings import NOT_SHOWN, RECOMMENDATION, SECTIONS, Finding, failed, table
from burst_plugin.check.run import check, is_first
from burst_plugin.check.settings import Settings
from burst_plugin.cli.values import StatusLine, check_writable, heads, tokens, whole, write_json
from burst_plugin.profiling.cluster_profile import Model, device_name

_USUAL_FINDINGS = dict(zip(SECTIONS, (29, 4, 7, 1), strict=True))  # how many each section has
_DESCRIPTION = """\
Prove, measure and tune this machine, or the ranks that a launcher has started
(torchrun --nproc-per-node 8 ... -m burst_plugin.cli check).

  right   every kernel alone, then the ring in every way to run it, against the
          definition in float64; layers that carry a state, against one rank
  safe    a rank that raises, is killed or stops: all others end within 30 s,
          and name it
  fast    the kernel, the links and the ring, each by itself; slow links and
          GPUs by name
  tuned   the strategy that suits a model here, written to burst-profile.json

It runs on GPUs with NCCL where there are any, else on CPUs with gloo. The exit
status is 1 if any check fails.
"""
_EXAMPLE = """\
example: under a minute; what it wrote is then read by the planner and by Strategy.from_profile
  burst check --quick --heads 32/8 --head-dim 128 --seq 131072
  burst plan --profile burst-profile.json --seq 1000000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `burst check` to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller sizes and fewer steps, under a minute")
    add(
        "--sections",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        metavar="NAME",
        help=f"some of {', '.join(SECTIONS)} (default: all)",
    )
    add("--ranks", type=whole("ranks", 1024), metavar="N", help="ranks to spawn (default: a rank per GPU; 4 on CPUs)")
    add(
        "--ranks-per-node",
        type=whole("ranks", 1024),
        metavar="N",
        help="how many ranks count as a node (default: what the ranks say)",
    )
    add("--kernel", default="auto", help="a name, or module:attribute of your own, which is then checked, too")
    add("--heads", type=heads, default=(32, 8), metavar="Q/KV", help="of the model to tune for (default: 32/8)")
    add("--head-dim", type=whole("elements", 65_536), default=128, metavar="DIM", help="(default: %(default)s)")
    add("--seq", type=tokens, default=131072, metavar="TOKENS", help="(default: %(default)s)")
    add("--mask", choices=("causal", "full"), default="causal", help="(default: %(default)s)")
    add("--profile", default="burst-profile.json", metavar="FILE", help="to write (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all findings, with figures, as JSON")


def lines(options: argparse.Namespace) -> Generator[str, None, int]:
    """Run `burst check`: yield its output's lines on the first rank, and return the exit status on every rank.

    The status is 1 if a check has failed, else 0. Raises ValueError for ranks that do not fit, a kernel that cannot
    be loaded, and a file that cannot be written.

    options: the parsed options of `add_arguments`.
    """
    q_heads, kv_heads = options.heads
    settings = Settings(
        sections=tuple(section for section in SECTIONS if section in options.sections),
        quick=options.quick,
        kernel=options.kernel,
        ranks_per_node=options.ranks_per_node,
        model=Model(q_heads, kv_heads, options.head_dim, options.seq, options.mask),
        profile=options.profile,
    )
    start, findings = time.monotonic(), list[Finding]()
    for finding in _with_bar(check(settings, options.ranks, _problem_of_files(options)), settings.sections):
        findings.append(finding)
        if is_first():
            yield str(finding)
    if is_first():
        yield ""
        yield from _end(findings, time.monotonic() - start)
        if options.json is not None:
            content = {
                "passed": not failed(findings),
                "device": device_name(),
                "torch": torch.__version__,
                "findings": [finding.as_dict() for finding in findings],
            }
            write_json(options.json, content)
    return int(failed(findings))


def _problem_of_files(options: argparse.Namespace) -> str:
    """Return why a file cannot be written at the end by this rank; empty if it can, or another rank writes it."""
    if not is_first():
        return ""
    try:
        if options.json is not None:
            check_writable("--json", options.json)
        if options.profile and RECOMMENDATION in options.sections:
            check_writable("--profile", Path(options.profile))
    except ValueError as error:
        return str(error)
    return ""


def _end(findings: list[Finding], seconds: float) -> Iterator[str]:
    yield from table(findings)
    hidden = [
        finding for finding in findings if finding.verdict == NOT_SHOWN and not finding.what.startswith("kernel ")
    ]
    if hidden:
        yield f"not shown here: {'; '.join(f'{finding.what} ({finding.text})' for finding in hidden)}"
    verdict = "FAILED" if failed(findings) else "passed"
    yield f"{verdict} in {seconds:.0f} s, on {device_name()}, torch {torch.__version__}"


def _with_bar(findings: Iterable[Finding], sections: tuple[str, ...]) -> Iterator[Finding]:
    """Yield the findings; meanwhile draw a bar on standard error, if that is a terminal."""
    status, total = StatusLine(wanted=is_first()), sum(_USUAL_FINDINGS[section] for section in sections)
    for count, finding in enumerate(findings, start=1):
        status.erase()
        yield finding
        status.bar(count, total, finding.section, f"{count} findings")
    status.erase()
