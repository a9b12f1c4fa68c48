"""The table of docs/kernels.md, from the kernels themselves."""

from __future__ import annotations

from burst_plugin.kernels import KERNELS
from burst_plugin.kernels.limits import LimitedKernel, Limits
from burst_plugin.kernels.protocol import FEATURES

__all__ = ["table"]


def table() -> str:
    """Return a Markdown table: a row per kernel, fastest first, and a column per feature."""
    head = ["kernel", "device", "types", "largest head dims", "needs", *FEATURES]
    rows = [head, ["---"] * 5 + [":-:"] * len(FEATURES), *(_row(kernel) for kernel in KERNELS.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(kernel: LimitedKernel) -> list[str]:
    limits = kernel.limits
    types = ", ".join(str(dtype).removeprefix("torch.") for dtype in limits.dtypes) or "any"
    dims = ", ".join(str(qk) if qk == v else f"{qk} with {v}" for qk, v in limits.dims)
    dims = dims or "any"
    marks = ["yes" if feature in kernel.features else "" for feature in FEATURES]
    return [f"`{kernel.name}`", _device(limits), types, dims, limits.library, *marks]


def _device(limits: Limits) -> str:
    if limits.capability is None:
        return limits.device or "any"
    first, last = (f"{major}.{minor}" for major, minor in limits.capability)
    return f"{limits.device} {first}" + ("" if first == last else f" to {last}")
