"""Write the tables of the docs that follow from the package: kernels, options, published systems.

python -m tools.tables            # write them between the markers of each page
python -m tools.tables --check    # only say which page is out of date
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from burst_plugin.frameworks import all_frameworks
from burst_plugin.kernels import KERNELS
from burst_plugin.kernels.limits import LimitedKernel, Limits
from burst_plugin.kernels.protocol import FEATURES
from burst_plugin.strategy import Strategy
from tools.systems import page as systems

DOCS = Path(__file__).parents[1] / "docs"


def kernels() -> str:
    """Return the Markdown table of all kernels: a row per kernel, fastest first, and a column per feature."""
    head = ["kernel", "device", "types", "largest head dims", "needs", *FEATURES]
    marks = ["---"] * 5 + [":-:"] * len(FEATURES)
    return _markdown([head, marks, *(_kernel_row(kernel) for kernel in KERNELS.values())])


def _kernel_row(kernel: LimitedKernel) -> list[str]:
    limits = kernel.limits
    types = ", ".join(str(dtype).removeprefix("torch.") for dtype in limits.dtypes) or "any"
    dims = ", ".join(str(qk) if qk == v else f"{qk} with {v}" for qk, v in limits.dims) or "any"
    able = ["yes" if feature in kernel.features else "" for feature in FEATURES]
    return [f"`{kernel.name}`", _device(limits), types, dims, limits.library, *able]


def _device(limits: Limits) -> str:
    if limits.capability is None:
        return limits.device or "any"
    first, last = (f"{major}.{minor}" for major, minor in limits.capability)
    return f"{limits.device} {first}" + ("" if first == last else f" to {last}")


def options(strategy: type[Strategy] = Strategy) -> str:
    """Return the Markdown table of all options: a row per field of `Strategy`, and how frameworks write it."""
    by_name = [framework.title for framework in all_frameworks() if framework.written is None]
    other_ways = [(framework.title, framework.written) for framework in all_frameworks() if framework.written]
    head = [f"field and {' and '.join(by_name)} key", *(title for title, _ in other_ways), "default", "values"]
    rows = [head, ["---"] * len(head)]
    for option in fields(strategy):
        ways = [written(option.name) for _, written in other_ways]
        rows.append([f"`{option.name}`", *ways, f"`{_default(option.default)}`", option.metadata["help"]])
    return _markdown(rows)


def _default(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


TABLES: Mapping[str, Callable[[], str]] = {"kernels": kernels, "options": options, "systems": systems}
"""By the name of a page and of its markers, what returns its table."""


def update(check: bool = False) -> list[str]:
    """Write the tables, or with `check` write nothing; return the names of the pages that were out of date."""
    outdated = []
    for name, table in TABLES.items():
        path, begin, end = DOCS / f"{name}.md", f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
        text = path.read_text()
        before, rest = text.split(begin)
        old, after = rest.split(end)
        if old.strip() != table().strip():
            outdated.append(path.name)
            if not check:
                path.write_text(f"{before}{begin}\n{table()}\n{end}{after}")
    return outdated


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    only_checks = parser.parse_args().check
    changed = update(only_checks)
    print(f"{'out of date' if only_checks else 'written'}: {', '.join(changed) or 'none'}")
    raise SystemExit(bool(changed) and only_checks)
